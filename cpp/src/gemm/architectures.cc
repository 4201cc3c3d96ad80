#include "gemm/architectures.h"

#include <sstream>

namespace qcutlass {

std::vector<std::string> split_architectures(std::string const& list) {
  std::vector<std::string> result;
  std::istringstream stream(list);
  for (std::string item; std::getline(stream, item, ',');)
    if (!item.empty()) result.push_back(item);
  return result;
}

bool architecture_serves(std::vector<std::string> const& built, int compute_capability) {
  for (std::string const& item : built) {
    size_t const dash = item.find('-');
    std::string const kind = dash == std::string::npos ? "" : item.substr(dash + 1);  // none: both forms
    int const version = std::stoi(item);
    bool const machine_code =
        kind != "virtual" && version / 10 == compute_capability / 10 && version % 10 <= compute_capability % 10;
    bool const ptx = kind != "real" && version <= compute_capability;
    if (machine_code || ptx) return true;
  }
  return false;
}

}  // namespace qcutlass
