#include "plan/architectures.h"

#include <algorithm>
#include <sstream>

namespace qcutlass {

std::vector<std::string> split_architectures(std::string const& list) {
  std::vector<std::string> result;
  std::istringstream stream(list);
  for (std::string item; std::getline(stream, item, ',');)
    if (!item.empty()) result.push_back(item);
  return result;
}

int serving_architecture(std::vector<std::string> const& built, int compute_capability) {
  int machine_code = 0, ptx = 0;
  for (std::string const& item : built) {
    size_t const dash = item.find('-');
    std::string const kind = dash == std::string::npos ? "" : item.substr(dash + 1);  // none: both forms
    int const version = std::stoi(item);
    if (version > compute_capability) continue;
    if (kind != "virtual" && version / 10 == compute_capability / 10) machine_code = std::max(machine_code, version);
    if (kind != "real") ptx = std::max(ptx, version);
  }
  return machine_code > 0 ? machine_code : ptx;
}

bool serves_wgmma(std::vector<std::string> const& built, int compute_capability) {
  return compute_capability == 90 && std::any_of(built.begin(), built.end(), [](std::string const& item) {
           return item == "90a" || item == "90a-real";
         });
}

}  // namespace qcutlass
