// The CUDA backend's functions in a build without it: each says so, and how to get it.
#include "qcutlass/decoder.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "qcutlass/moe.h"
#include "qcutlass/pack.h"
#include "qcutlass/quantize.h"

namespace qcutlass::cuda {

namespace {

[[noreturn]] void throw_not_built() {
  throw Unsupported(
      "qcutlass was built without CUDA: CPU tensors work, CUDA tensors do not. For the CUDA backend reinstall qcutlass "
      "from source where the GPU is, or with QCUTLASS_CUDA=ON in the environment");
}

}  // namespace

bool is_built() { return false; }
std::vector<std::string> built_architectures() { return {}; }
std::string toolkit_version() { return "none"; }
std::string cutlass_version() { return "none"; }

DeviceTraits const& device_traits(int) { throw_not_built(); }
void gemm(GemmArguments const&, Plan const&, void*) { throw_not_built(); }
void prepare_activations(GemmArguments const&, void*, int64_t, void*) { throw_not_built(); }
void finish(GemmArguments const&, float const*, int64_t, int64_t, int64_t, void*) { throw_not_built(); }
void add_rms_norm(NormArguments const&, void*) { throw_not_built(); }
void gate(GateArguments const&, void*) { throw_not_built(); }
void rotate(RotaryArguments const&, void*) { throw_not_built(); }
void pack(PackArguments const&, void*) { throw_not_built(); }
void unpack(PackArguments const&, void*) { throw_not_built(); }
void dequantize(DequantizeArguments const&, void*) { throw_not_built(); }
void quantize(QuantizeArguments const&, void*) { throw_not_built(); }
void dequantize_blocks(BlockArguments const&, void*) { throw_not_built(); }
void gelu_blocks(BlockArguments const&, void*) { throw_not_built(); }
void route(RouteArguments const&, void*) { throw_not_built(); }
void gate_rows(GateRowsArguments const&, void*) { throw_not_built(); }
void sum_slots(SumSlotsArguments const&, void*) { throw_not_built(); }

}  // namespace qcutlass::cuda
