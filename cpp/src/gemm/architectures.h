// Which GPUs a set of compiled architectures serves.
#pragma once

#include <string>
#include <vector>

namespace qcutlass {

/// Splits CMake's list form, "80-real,90-virtual".
std::vector<std::string> split_architectures(std::string const& list);

/// Whether code for `built` runs on a GPU of this compute capability (10 * major + minor): machine code runs on the
/// same major version from its minor version up, PTX on everything from its version up.
bool architecture_serves(std::vector<std::string> const& built, int compute_capability);

}  // namespace qcutlass
