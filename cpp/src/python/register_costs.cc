// The cost model with constants of the caller's: what `python -m bench fit` fits.
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>

#include "plan/cost_model.h"
#include "plan/dense.h"
#include "qcutlass/error.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

using Costs = std::map<std::string, double>;

Costs costs_of(std::string const& name) {
  for (size_t i = 0; i < std::size(kProductCosts); ++i) {
    if (name != kCostClassNames[i]) continue;
    Costs result;
    ProductCosts costs = kProductCosts[i];
    for_each_cost(costs, [&](std::string const& field, double value) { result[field] = value; });
    return result;
  }
  throw InvalidArgument("cost class: expected one of those that cost_class returns, got '" + name + "'");
}

Cost predict_with(GemmArguments const& arguments, DeviceTraits const& device, Plan const& plan, Costs values) {
  bool const is_dense = plan.dense && plan.slice > 0;
  if (!is_dense && (plan.row < 0 || plan.row >= kTacticCount))
    throw InvalidArgument("plan: expected one that select makes");
  auto const take = [&](std::string const& field, double& value) {
    auto const found = values.find(field);
    if (found == values.end()) throw InvalidArgument("costs: '" + field + "' is missing");
    value = found->second;
    values.erase(found);
  };
  ProductCosts costs;
  for_each_cost(costs, take);
  GpuClass gpu = gpu_class(device);
  for_each_rate(gpu, take);
  gpu = gpu.of_sms(device.sm_count);
  if (!values.empty()) throw InvalidArgument("costs: no such field: '" + values.begin()->first + "'");
  Problem const problem = make_problem(arguments);
  if (is_dense) return dense::predict(problem, device, gpu, plan.slice);
  return predict(problem, device, kTactics[plan.row], plan.split_k, plan.cluster, costs, gpu);
}

}  // namespace

void register_costs(py::module_& module) {
  module.def(
      "cost_class",
      [](GemmArguments const& arguments) {
        return kCostClassNames[static_cast<int>(cost_class(make_problem(arguments)))];
      },
      "arguments"_a);
  module.def("costs", &costs_of, "cost_class"_a);
  module.def(
      "gpu_class",
      [](DeviceTraits const& device) {
        GpuClass const& gpu = gpu_class(device);
        return std::tuple(gpu.compute_capability, gpu.sm_count, gpu.is_fitted && gpu.sm_count == device.sm_count);
      },
      "device"_a);
  module.def("predict", &predict_with, "arguments"_a, "device"_a, "plan"_a, "costs"_a);
}

}  // namespace qcutlass::python
