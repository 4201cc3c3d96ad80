// Stock CUTLASS 2.x int8 products with CUTLASS's own visitor epilogue, the yardstick for the 8-by-8-bit kernels:
// out[m, n] = (sum_k a[m, k] * w[n, k]) * a_scale[m] * w_scale[n] + bias[n], bf16, multistage mma.sync, in a handful of
// tile shapes. Reached from Python through ctypes: plain C functions.
#include <cstdint>

#include "cutlass/functional.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass_tiles.cuh"

// After cutlass/gemm, whose types it uses without including them.
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"

namespace {

namespace visitor = cutlass::epilogue::threadblock;
using cute::_0;
using cute::_1;
using cute::Stride;
using Out = cutlass::bfloat16_t;

constexpr int kOperandAlignment = 16;  // 16-byte accesses: K is a multiple of this
constexpr int kOutAlignment = 8;       // and N of this
constexpr int kEpilogueStages = 1;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

/// Device pointers of one product, row-major: a [m, k], w [n, k], out [m, n].
struct Product {
  int8_t const* a;
  int8_t const* w;
  float const* a_scale;  ///< [m]
  float const* w_scale;  ///< [n]
  Out const* bias;       ///< [n]
  Out* out;
  int m, n, k;
};

template <int M, int N, int K, int WarpM, int WarpN, int Stages>
struct Tile {
  using Block = cutlass::gemm::GemmShape<M, N, K>;
  using Warp = cutlass::gemm::GemmShape<WarpM, WarpN, K>;
  using Map = visitor::OutputTileThreadLayout<Block, Warp, Out, kOutAlignment, kEpilogueStages>;

  using Sum = visitor::VisitorAccFetch;
  using TokenScale = visitor::VisitorColBroadcast<Map, float, Stride<_1, _0, _0>>;
  using ChannelScale = visitor::VisitorRowBroadcast<Map, float, Stride<_0, _1, _0>>;
  using Bias = visitor::VisitorRowBroadcast<Map, Out, Stride<_0, _1, _0>>;
  using Multiply = visitor::VisitorCompute<cutlass::multiplies, float, float, kRound>;
  using MultiplyAdd = visitor::VisitorCompute<cutlass::homogeneous_multiply_add, Out, float, kRound>;
  using Store = visitor::VisitorAuxStore<Map, Out, kRound, Stride<int64_t, _1, _0>>;
  using Scaled = visitor::Sm80EVT<Multiply, Sum, TokenScale>;
  using Biased = visitor::Sm80EVT<MultiplyAdd, Scaled, ChannelScale, Bias>;
  using Tree = visitor::Sm80EVT<Store, Biased>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      int8_t, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kOperandAlignment, int8_t,
      cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, kOperandAlignment, Out, cutlass::layout::RowMajor,
      kOutAlignment, int32_t, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Block, Warp,
      cutlass::gemm::GemmShape<16, 8, 32>, Tree, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, Stages,
      cutlass::arch::OpMultiplyAddSaturate, kEpilogueStages>::GemmKernel;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(Product const& p, cudaStream_t stream) {
    // Operands in the order of the tree's nodes: children first, then the node itself.
    typename Scaled::Arguments const scaled{{}, {p.a_scale, {}}, {}};
    typename Biased::Arguments const biased{scaled, {p.w_scale, {}}, {p.bias, {}}, {}};
    typename Tree::Arguments const tree{biased, {p.out, {p.n, _1{}, _0{}}}};
    typename Gemm::Arguments const arguments(cutlass::gemm::GemmUniversalMode::kGemm, {p.m, p.n, p.k}, 1, tree, p.a,
                                             p.w, nullptr, nullptr, 0, 0, 0, 0, p.k, p.k, 0, 0);
    return launch<Gemm>(arguments, stream);
  }
};

struct Entry {
  char const* name;
  int (*run)(Product const&, cudaStream_t);
};

constexpr Entry kEntries[] = {
    {"128x128x64_s4", Tile<128, 128, 64, 64, 64, 4>::run}, {"128x256x64_s3", Tile<128, 256, 64, 64, 64, 3>::run},
    {"256x128x64_s3", Tile<256, 128, 64, 64, 64, 3>::run}, {"128x128x128_s3", Tile<128, 128, 128, 64, 64, 3>::run},
    {"64x128x128_s4", Tile<64, 128, 128, 32, 64, 4>::run}, {"64x64x128_s5", Tile<64, 64, 128, 32, 32, 5>::run},
};
constexpr int kEntryCount = static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]));

}  // namespace

QCUTLASS_BENCH_EXPORT int qcutlass_bench_int8_count() { return kEntryCount; }

QCUTLASS_BENCH_EXPORT char const* qcutlass_bench_int8_name(int index) { return kEntries[index].name; }

/// Launches tile `index`; device pointers as in `Product`. Returns a cutlass::Status: 0 on success.
QCUTLASS_BENCH_EXPORT int qcutlass_bench_int8_run(int index, void const* a, void const* w, void const* a_scale,
                                                  void const* w_scale, void const* bias, void* out, int m, int n, int k,
                                                  void* stream) {
  if (index < 0 || index >= kEntryCount) return static_cast<int>(cutlass::Status::kErrorInvalidProblem);
  Product const product{static_cast<int8_t const*>(a),
                        static_cast<int8_t const*>(w),
                        static_cast<float const*>(a_scale),
                        static_cast<float const*>(w_scale),
                        static_cast<Out const*>(bias),
                        static_cast<Out*>(out),
                        m,
                        n,
                        k};
  return kEntries[index].run(product, static_cast<cudaStream_t>(stream));
}
