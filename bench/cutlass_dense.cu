// Stock CUTLASS 2.x dense fp16 products, the yardstick for the fused kernels: out[M, N] = a[M, K] . w[N, K]^T with fp32
// accumulation, multistage mma.sync, in a handful of tile shapes. Reached from Python through ctypes: plain C
// functions.
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm_universal.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass_tiles.cuh"

namespace {

using Half = cutlass::half_t;
constexpr int kAlignment = 8;  // 16-byte accesses: N and K are multiples of this

template <int M, int N, int K, int WarpM, int WarpN, int Stages>
struct Tile {
  using Gemm = cutlass::gemm::device::GemmUniversal<
      Half, cutlass::layout::RowMajor, Half, cutlass::layout::ColumnMajor, Half, cutlass::layout::RowMajor, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<M, N, K>,
      cutlass::gemm::GemmShape<WarpM, WarpN, K>, cutlass::gemm::GemmShape<16, 8, 16>,
      cutlass::epilogue::thread::LinearCombination<Half, kAlignment, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, Stages, kAlignment, kAlignment>;

  static int run(void const* a, void const* w, void* out, int m, int n, int k, cudaStream_t stream) {
    typename Gemm::Arguments const arguments(cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k}, 1, {1.f, 0.f}, a, w,
                                             out, out, 0, 0, 0, 0, k, k, n, n);
    return launch<Gemm>(arguments, stream);
  }
};

struct Entry {
  char const* name;
  int (*run)(void const*, void const*, void*, int, int, int, cudaStream_t);
};

constexpr Entry kEntries[] = {
    {"256x128x32_s3", Tile<256, 128, 32, 64, 64, 3>::run}, {"256x128x32_s4", Tile<256, 128, 32, 64, 64, 4>::run},
    {"128x256x32_s3", Tile<128, 256, 32, 64, 64, 3>::run}, {"128x256x32_s4", Tile<128, 256, 32, 64, 64, 4>::run},
    {"128x128x32_s4", Tile<128, 128, 32, 64, 64, 4>::run}, {"128x128x64_s3", Tile<128, 128, 64, 64, 64, 3>::run},
    {"64x256x32_s4", Tile<64, 256, 32, 64, 64, 4>::run},   {"64x64x64_s4", Tile<64, 64, 64, 32, 32, 4>::run},
};
constexpr int kEntryCount = static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]));

}  // namespace

QCUTLASS_BENCH_EXPORT int qcutlass_bench_dense_count() { return kEntryCount; }

QCUTLASS_BENCH_EXPORT char const* qcutlass_bench_dense_name(int index) { return kEntries[index].name; }

/// Launches tile `index`; device pointers to fp16 matrices. Returns a cutlass::Status: 0 on success.
QCUTLASS_BENCH_EXPORT int qcutlass_bench_dense_run(int index, void const* a, void const* w, void* out, int m, int n,
                                                   int k, void* stream) {
  if (index < 0 || index >= kEntryCount) return static_cast<int>(cutlass::Status::kErrorInvalidProblem);
  return kEntries[index].run(a, w, out, m, n, k, static_cast<cudaStream_t>(stream));
}
