#include "launch.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <utility>

#include "register.h"
#include "torch_calls.h"

namespace py = pybind11;

namespace qcutlass::python {

namespace {

/// Makes a GPU the current one; another one is again when it ends.
class CurrentDevice {
 public:
  CurrentDevice(TorchCalls const& torch, int device) {
    if (to_integer(call(torch.current_device).ptr()) == device) return;
    guard_ = torch.device(device);
    guard_.attr("__enter__")();
  }
  ~CurrentDevice() {
    if (!guard_) return;
    py::error_scope const raised;
    py::none const none;
    try {
      guard_.attr("__exit__")(none, none, none);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("qcutlass: leaving a device");
    }
  }
  CurrentDevice(CurrentDevice const&) = delete;
  CurrentDevice& operator=(CurrentDevice const&) = delete;

 private:
  py::object guard_;
};

}  // namespace

LastOutputs& LastOutputs::of(int device, uintptr_t stream) {
  static std::map<std::pair<int, uintptr_t>, LastOutputs> streams;
  return streams[{device, stream}];
}

void LastOutputs::add(Span const& output) {
  spans_[next_] = output;
  next_ = (next_ + 1) % spans_.size();
  ++since_wait_;
  for (Routed& routed : routed_) {
    if (routed.span.meets(output)) routed = {};
  }
}

void LastOutputs::add_of(QuantizeArguments const& quantizer) {
  int64_t const scales = scales_of(quantizer);
  add(quantizer.codes, quantizer.rows * quantizer.columns);
  add(quantizer.scale, scales * int64_t{sizeof(float)});
  if (quantizer.azp != nullptr) add(quantizer.azp, scales * int64_t{sizeof(int32_t)});
}

bool LastOutputs::meet(Span const& operand) const {
  return since_wait_ > spans_.size() ||
         std::any_of(spans_.begin(), spans_.end(), [&](Span const& span) { return span.meets(operand); });
}

void LastOutputs::read(Span const& operand) {
  for (Routed& routed : routed_) routed.was_read |= routed.holds(operand);
}

bool LastOutputs::have_read(Span const& operand) const {
  return std::any_of(routed_.begin(), routed_.end(),
                     [&](Routed const& routed) { return routed.was_read && routed.holds(operand); });
}

Launch::Launch(GemmArguments const& product, std::vector<Operand> const& operands, std::vector<Access> accesses,
               std::vector<size_t> extents, int element_size, std::optional<Plan> plan, int device, int64_t host_rows,
               py::object new_out, py::object new_workspace, py::object run_dense, py::object dense_is_ready)
    : rebinding_(product, operands),
      accesses_(std::move(accesses)),
      extents_(std::move(extents)),
      element_size_(element_size),
      plan_(std::move(plan)),
      device_(device),
      host_rows_(host_rows),
      new_out_(std::move(new_out)),
      new_workspace_(std::move(new_workspace)),
      run_dense_(std::move(run_dense)),
      dense_is_ready_(std::move(dense_is_ready)) {}

bool Launch::is_ready() const { return !plan_ || !plan_->dense || py::cast<bool>(dense_is_ready_(device_)); }

bool Launch::may_overlap(std::vector<uintptr_t> const& addresses, uintptr_t out) const {
  Span const output{out, out + extents_.back()};
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (output.meets({addresses[i], addresses[i] + extents_[i]})) return true;
  }
  return false;
}

bool Launch::is_settled(std::vector<uintptr_t> const& addresses, LastOutputs const& last) const {
  for (size_t i = 0; i < addresses.size(); ++i) {
    Span const operand{addresses[i], addresses[i] + extents_[i]};
    if (accesses_[i] == Access::kReadEarly && last.meet(operand)) return false;
    if (accesses_[i] == Access::kReadAgain && addresses[i] != 0 && !last.have_read(operand)) return false;
  }
  return true;
}

py::object Launch::run(std::vector<uintptr_t> const& addresses, py::handle a, py::object out,
                       Before const* before) const {
  if (out.is_none()) out = call(new_out_);
  GemmArguments const arguments = rebinding_.at(addresses, data_ptr(out.ptr()));
  if (!plan_) {
    run_host(arguments, before);
  } else {
    CurrentDevice const device(TorchCalls::instance(), device_);
    run_cuda(arguments, addresses, a, out, before);
  }
  return out;
}

void Launch::run_host(GemmArguments arguments, Before const* before) const {
  auto const threads = static_cast<int>(to_integer(call(TorchCalls::instance().get_num_threads).ptr()));
  py::gil_scoped_release const released;
  if (before != nullptr) host::quantize(before->quantizer, threads);
  int64_t const rows = arguments.m;
  auto const* a = static_cast<char const*>(arguments.a);
  auto* out = static_cast<char*>(arguments.out);
  // Products that are cut into blocks give the type of their activations.
  int64_t const a_pitch = arguments.a_stride * element_size_, out_pitch = arguments.out_stride * element_size_;
  auto const* residual = static_cast<char const*>(arguments.residual);
  int64_t const residual_pitch = arguments.residual_stride * element_size_;
  for (int64_t row = 0; row < rows; row += host_rows_) {
    arguments.m = std::min(host_rows_, rows - row);
    arguments.a = a + row * a_pitch;
    arguments.out = out + row * out_pitch;
    if (residual != nullptr) arguments.residual = residual + row * residual_pitch;
    host::gemm(arguments, threads);
  }
}

void Launch::run_cuda(GemmArguments arguments, std::vector<uintptr_t> const& addresses, py::handle a, py::handle out,
                      Before const* before) const {
  uintptr_t const stream = py::cast<uintptr_t>(TorchCalls::instance().current_stream(device_));
  LastOutputs& last = LastOutputs::of(device_, stream);
  if (before != nullptr) last.add_of(before->quantizer);
  arguments.settled = is_settled(addresses, last);
  last.wait();
  auto const written = reinterpret_cast<uintptr_t>(arguments.out);
  last.add({written, written + extents_.back()});
  for (size_t i = 0; i < addresses.size(); ++i) {
    Span const operand{addresses[i], addresses[i] + extents_[i]};
    if (accesses_[i] == Access::kWritten) last.add(operand);
    if (accesses_[i] == Access::kReadAgain && addresses[i] != 0) last.read(operand);
  }
  if (plan_->dense) {
    run_dense_(arguments, *plan_, a, out);
    return;
  }
  py::object workspace;  // torch's allocator hands its memory out again in the order of the stream
  if (plan_->workspace_bytes > 0) {
    if (before == nullptr) workspace = call(new_workspace_);
    arguments.workspace = before == nullptr ? to_pointer(data_ptr(workspace.ptr())) : before->workspace;
    arguments.workspace_bytes = plan_->workspace_bytes;
  }
  py::gil_scoped_release const released;
  if (before != nullptr) cuda::quantize(before->quantizer, to_pointer(stream));
  cuda::gemm(arguments, *plan_, to_pointer(stream));
}

int64_t Launches::generation_of_all = 0;

void Launches::drop_forgotten() {
  if (generation_ == generation_of_all) return;
  launches_.clear();
  generation_ = generation_of_all;
}

py::object Launches::repeat(py::handle call, py::object out) {
  drop_forgotten();
  if (launches_.empty()) return py::none();
  TorchCalls const& torch = TorchCalls::instance();
  if (torch.calls_are_watched()) return py::none();
  Signature signature;
  std::vector<uintptr_t> addresses;
  if (!write_signature(fields_, call.ptr(), out.ptr(), torch.records_gradients(), signature, addresses)) {
    return py::none();
  }
  auto const found = launches_.find(signature);
  if (found == launches_.end()) return py::none();
  std::shared_ptr<Launch> const launch = found->second;  // another thread may forget it meanwhile
  if (!launch->is_ready()) return py::none();
  uintptr_t const target = addresses.back();
  addresses.pop_back();
  py::handle const a = PyTuple_GET_ITEM(call.ptr(), fields_.operands.front());
  if (out.is_none()) return launch->run(addresses, a, out);
  if (launch->may_overlap(addresses, target)) return py::none();
  launch->run(addresses, a, out);
  static Name const kIsInference("is_inference");
  if (python::call(out.ptr(), kIsInference).ptr() != Py_True) torch.increment_version(out);
  return out;
}

void Launches::remember(py::handle call, py::handle out, std::shared_ptr<Launch> launch, int64_t generation,
                        uintptr_t written) {
  drop_forgotten();
  if (generation != generation_) return;
  Signature signature;
  std::vector<uintptr_t> addresses;
  bool const gradients = TorchCalls::instance().records_gradients();
  if (!write_signature(fields_, call.ptr(), out.ptr(), gradients, signature, addresses)) return;
  if (!out.is_none() && addresses.back() != written) return;
  addresses.pop_back();
  if (addresses != launch->addresses()) return;
  if (launches_.size() >= most_) launches_.clear();
  launches_.insert_or_assign(std::move(signature), std::move(launch));
}

std::shared_ptr<Launch> Launches::find(py::handle call, std::vector<uintptr_t>& addresses) {
  drop_forgotten();
  Signature signature;
  bool const gradients = TorchCalls::instance().records_gradients();
  if (!write_signature(fields_, call.ptr(), Py_None, gradients, signature, addresses)) return nullptr;
  addresses.pop_back();
  auto const found = launches_.find(signature);
  return found == launches_.end() ? nullptr : found->second;
}

py::object Launches::signature(py::handle call, py::handle out) const {
  Signature signature;
  std::vector<uintptr_t> addresses;
  bool const gradients = TorchCalls::instance().records_gradients();
  if (!write_signature(fields_, call.ptr(), out.ptr(), gradients, signature, addresses)) return py::none();
  return py::make_tuple(py::tuple(py::cast(signature)), addresses);
}

size_t Launches::size() {
  drop_forgotten();
  return launches_.size();
}

}  // namespace qcutlass::python
