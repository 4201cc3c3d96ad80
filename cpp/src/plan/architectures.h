// Which GPUs a set of compiled architectures serves.
#pragma once

#include <string>
#include <vector>

namespace qcutlass {

/// Splits CMake's list form, "80-real,90-virtual".
std::vector<std::string> split_architectures(std::string const& list);

/// The architecture of those `built` whose code a GPU of this compute capability (10 * major + minor) runs; 0: none.
/// Machine code runs on the same major version from its minor version up; failing that, PTX on everything from its
/// version up.
int serving_architecture(std::vector<std::string> const& built, int compute_capability);

/// Whether such a GPU runs the kernels whose instructions, warpgroup MMAs, belong to sm_90a: it is one of compute
/// capability 9.0, and they were built.
bool serves_wgmma(std::vector<std::string> const& built, int compute_capability);

}  // namespace qcutlass
