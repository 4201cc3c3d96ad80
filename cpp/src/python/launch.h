// Running products again: a call of a signature that was run before is neither checked nor planned anew.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "operands.h"
#include "qcutlass/gemm.h"
#include "qcutlass/quantize.h"
#include "signature.h"

namespace qcutlass::python {

/// How a kernel meets an operand.
enum class Access {
  kRead,       ///< after the kernels before it in the stream
  kReadEarly,  ///< weights and what belongs to them: possibly while the kernel before it ends
  kReadAgain,  ///< which rows are whose expert's: the same, if a product since their routing has read them
  kWritten
};

/// Bytes in memory.
struct Span {
  uintptr_t begin = 0, end = 0;

  bool meets(Span const& other) const { return begin < other.end && other.begin < end; }
};

/// What kernels of ours wrote that the next one in a stream may run beside (arch/grid_dependency.h). Weights that are
/// written there are not read early.
///
/// Of kernels that wait before they let their successor start, that is the last one; those of decoder.h and quantize.h,
/// which start it at once, add to it. What was before stays known for as long as there is room, as several threads may
/// launch into one stream in another order than they come here. Where more are added than there is room for, anything
/// may be written. Kernels of others are taken to let no successor start before they have ended, as torch's own do.
/// Held under Python's lock.
class LastOutputs {
 public:
  static LastOutputs& of(int device, uintptr_t stream);

  /// A kernel comes that waits before it lets its successor start: of what was added before, all will have ended then.
  void wait() { since_wait_ = 0; }
  void add(Span const& output);
  void add(void const* output, int64_t bytes) {
    auto const begin = reinterpret_cast<uintptr_t>(output);
    if (bytes > 0) add({begin, begin + static_cast<uintptr_t>(bytes)});
  }
  /// Those of a quantiser.
  void add_of(QuantizeArguments const& quantizer);
  bool meet(Span const& operand) const;

  /// A kernel comes that routes rows to experts: it writes both. A product that reads them waits for it, so that the
  /// next one need not. What others write there is not known, so this is only until the block's end.
  void begin_experts(Span const& offsets, Span const& rows) { routed_ = {{{offsets}, {rows}}}; }
  void end_experts() { routed_ = {}; }
  /// A product comes that reads this after it has waited.
  void read(Span const& operand);
  bool have_read(Span const& operand) const;

 private:
  struct Routed {
    Span span;
    bool was_read = false;

    bool holds(Span const& other) const { return span.begin <= other.begin && other.end <= span.end; }
  };

  std::array<Span, 8> spans_;
  size_t next_ = 0, since_wait_ = 0;  ///< spans since wait()
  std::array<Routed, 2> routed_;
};

/// What quantises the activations of a product, just before it and in the same stream.
struct Before {
  QuantizeArguments quantizer;
  void* workspace = nullptr;  ///< of the product
};

/// A checked and planned product, which runs wherever its operands lie. It keeps none of them alive.
class Launch {
 public:
  /// `plan`: on GPU `device`; none on the CPU, in blocks of `host_rows` rows. `extents`: bytes of each operand, and of
  /// the output last. `new_out`, `new_workspace`: make tensors. `run_dense`: runs a dense plan, given the arguments,
  /// the plan, the activations and the output; `dense_is_ready`: whether it can be run now.
  Launch(GemmArguments const& product, std::vector<Operand> const& operands, std::vector<Access> accesses,
         std::vector<size_t> extents, int element_size, std::optional<Plan> plan, int device, int64_t host_rows,
         pybind11::object new_out, pybind11::object new_workspace, pybind11::object run_dense,
         pybind11::object dense_is_ready);

  /// Where the operands are that it was made of.
  std::vector<uintptr_t> addresses() const { return rebinding_.addresses(); }

  /// Whether this thread can run it now.
  bool is_ready() const;

  /// Whether a product of torch's is a part of it.
  bool is_dense() const { return plan_ && plan_->dense; }

  size_t workspace_bytes() const { return plan_ ? plan_->workspace_bytes : 0; }

  /// Whether an output at `out` reaches into an operand.
  bool may_overlap(std::vector<uintptr_t> const& addresses, uintptr_t out) const;

  /// Whether no operand that is read early may still be written by what comes before in the stream.
  bool is_settled(std::vector<uintptr_t> const& addresses, LastOutputs const& last) const;

  /// Writes `out`, or a new tensor, from operands at `addresses`, of which `a` is the first; returns it. On the CPU
  /// with torch's number of threads, on a GPU in the current stream. `before`: runs first; none where it is_dense().
  pybind11::object run(std::vector<uintptr_t> const& addresses, pybind11::handle a, pybind11::object out,
                       Before const* before = nullptr) const;

 private:
  void run_host(GemmArguments arguments, Before const* before) const;
  void run_cuda(GemmArguments arguments, std::vector<uintptr_t> const& addresses, pybind11::handle a,
                pybind11::handle out, Before const* before) const;

  Rebinding rebinding_;
  std::vector<Access> accesses_;
  std::vector<size_t> extents_;
  int element_size_;
  std::optional<Plan> plan_;
  int device_;
  int64_t host_rows_;
  pybind11::object new_out_, new_workspace_, run_dense_, dense_is_ready_;
};

/// The launches of one kind of product by the signatures of their calls.
class Launches {
 public:
  Launches(std::vector<int> operands, std::vector<int> options, size_t most)
      : fields_{std::move(operands), std::move(options)}, most_(most) {}

  /// The product of a call, where one of its signature is remembered and nothing watches this thread's calls; None
  /// where it has to be checked first.
  pybind11::object repeat(pybind11::handle call, pybind11::object out);

  /// Remembers a launch that was made for this call since forget_all() was called `generation` times. It is dropped
  /// where the launch read or wrote other memory than the tensors of the call.
  void remember(pybind11::handle call, pybind11::handle out, std::shared_ptr<Launch> launch, int64_t generation,
                uintptr_t written);

  /// The launch of a call without `out`, and where its operands are; none where it has to be checked first.
  std::shared_ptr<Launch> find(pybind11::handle call, std::vector<uintptr_t>& addresses);

  /// The signature and the addresses of a call; None where it has to be checked first.
  pybind11::object signature(pybind11::handle call, pybind11::handle out) const;

  size_t size();

  static void forget_all() { ++generation_of_all; }
  static int64_t generation() { return generation_of_all; }

 private:
  void drop_forgotten();

  static int64_t generation_of_all;

  Fields fields_;
  size_t most_;
  int64_t generation_ = 0;
  std::unordered_map<Signature, std::shared_ptr<Launch>, SignatureHash> launches_;
};

}  // namespace qcutlass::python
