// Launches of the quantisers of one type of input: one translation unit a type.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/cuda_check.h"
#include "cuda/launch_grid.cuh"
#include "cuda/quantize/block_kernels.cuh"
#include "cuda/quantize/grid.h"
#include "cuda/quantize/kernels.cuh"
#include "qcutlass/error.h"
#include "qcutlass/layout.h"

namespace qcutlass::cuda {
inline constexpr int kBlock = 256, kLargeBlock = 1024;
inline constexpr int kVectors = 4;  // of a row, in the registers of a thread

/// Launches a kernel that calls begin_beside_next().
inline void launch_early(void (*kernel)(QuantizeTask), dim3 blocks, dim3 threads, cudaStream_t stream,
                         QuantizeTask const& task) {
  GridShape shape{blocks, threads};
  shape.early = runs_sm90_code();
  launch_grid(kernel, shape, stream, task);
}

template <class In>
QuantizeTask make_task(QuantizeArguments const& arguments) {
  QuantizeTask task{arguments};
  bool const has_gaps = arguments.a_stride != arguments.columns;
  bool const whole_blocks = arguments.block != 0 && !arguments.square && arguments.columns % arguments.block == 0;
  bool const rows_join = (arguments.per_tensor || whole_blocks) && !arguments.gated;
  if (rows_join && arguments.smooth == nullptr && !has_gaps) {  // one long row is as good
    task.columns *= task.rows;
    task.rows = task.rows > 0;
    task.a_stride = task.columns;
  }
  constexpr int kCount = Raw<In>::kCount;
  task.a_aligned = is_aligned<Raw<In>, kCount>(task.a, task.rows, task.columns, task.a_stride);
  task.codes_aligned =
      is_aligned<Vector<uint32_t, kCount / 4>, kCount>(task.codes, task.rows, task.columns, task.columns);
  task.smooth_aligned = is_aligned<Vector<float, kCount>, kCount>(task.smooth, 1, task.columns, 0);
  return task;
}

template <class In, class Codes, bool kSmooth>
void quantize_each_row(QuantizeTask const& task, cudaStream_t stream) {
  int64_t const vectors = layout::ceil_div(task.columns, Raw<In>::kCount);
  auto const launch = [&](auto* kernel, int rows, int threads) {
    auto const blocks = unsigned(std::min(layout::ceil_div(task.rows, rows), kMostBlocks));
    launch_early(kernel, dim3(blocks), dim3(unsigned(threads)), stream, task);
  };
  if (vectors <= kWarp * kVectors) {
    launch(quantize_rows<In, Codes, kSmooth, kBlock, kWarp, kVectors>, kBlock / kWarp, kBlock);
  } else if (vectors <= kBlock * kVectors) {
    launch(quantize_rows<In, Codes, kSmooth, kBlock, kBlock, kVectors>, 1, kBlock);
  } else if (vectors <= kLargeBlock * kVectors) {
    launch(quantize_rows<In, Codes, kSmooth, kLargeBlock, kLargeBlock, kVectors>, 1, kLargeBlock);
  } else {
    launch(quantize_long_rows<In, Codes, kSmooth, kLargeBlock, kVectors>, 1, kLargeBlock);
  }
}

template <class In, class Codes, bool kSmooth>
void quantize_whole(QuantizeTask const& task, cudaStream_t stream) {
  Grid grid = grid_of(task.rows, layout::ceil_div(task.columns, kTensorVectors * Raw<In>::kCount), kTensorThreads);
  auto const most = unsigned(blocks_in_turn(kTensorBlocksPerSm));
  grid.blocks.x = std::min(grid.blocks.x, most);
  grid.blocks.y = std::min(grid.blocks.y, std::max(most / grid.blocks.x, 1u));
  if (task.given_scale != nullptr) {
    // A block that finds NaN writes it there, whenever the others begin.
    if constexpr (Codes::kInteger)
      QCUTLASS_CUDA_CHECK(
          cudaMemcpyAsync(task.scale, task.given_scale, sizeof(float), cudaMemcpyDeviceToDevice, stream));
  } else {
    QCUTLASS_CUDA_CHECK(cudaMemsetAsync(task.workspace, 0, kQuantizeWorkspaceBytes, stream));
    find_range<In, Codes::kAsymmetric, kSmooth><<<grid.blocks, grid.threads, 0, stream>>>(task);
    QCUTLASS_CUDA_CHECK(cudaGetLastError());
  }
  launch_early(quantize_tensor<In, Codes, kSmooth>, grid.blocks, grid.threads, stream, task);
}

template <class In, class Codes>
void quantize_as(QuantizeArguments const& arguments, cudaStream_t stream) {
  QuantizeTask const task = make_task<In>(arguments);
  auto const run = [&](auto smooth) {
    constexpr bool kSmooth = smooth;
    task.per_tensor ? quantize_whole<In, Codes, kSmooth>(task, stream)
                    : quantize_each_row<In, Codes, kSmooth>(task, stream);
  };
  task.smooth != nullptr ? run(std::true_type{}) : run(std::false_type{});
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

template <class In, class Codes, bool kGated>
void quantize_each_block(QuantizeArguments const& arguments, cudaStream_t stream) {
  QuantizeTask const task = make_task<In>(arguments);
  with_block_size(task.block, [&](auto constant) {
    constexpr int kSize = constant;
    if (task.square) {
      auto const blocks = [&](int64_t extent, int64_t most) {
        return unsigned(std::min(layout::ceil_div(extent, kSize), most));
      };
      dim3 const grid(blocks(task.columns, kMostBlocks), blocks(task.rows, kMostBlocksDown));
      if constexpr (!kGated) quantize_squares<In, Codes, kSize><<<grid, kBlockThreads, 0, stream>>>(task);
    } else {
      constexpr int kElements = kBlockVectors * Raw<In>::kCount;  // of a thread
      int64_t const threads = layout::ceil_div(task.columns, kSize) * (kSize / kElements);
      Grid const grid = grid_of(task.rows, threads, kBlockThreads, kSize / kElements);
      launch_early(quantize_blocks<In, Codes, kGated, kSize>, grid.blocks, grid.threads, stream, task);
    }
  });
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

template <class In>
void quantize_in_blocks(QuantizeArguments const& arguments, cudaStream_t stream) {
  using Float8 = Codes<DType::kFloat8E4M3>;
  if (arguments.code_type == DType::kInt8 && !arguments.gated)
    return quantize_each_block<In, Codes<DType::kInt8>, false>(arguments, stream);
  if (arguments.code_type != DType::kFloat8E4M3)
    throw Unsupported(
        "code_type: on a GPU blocks are int8 or float8_e4m3fn codes, and those of gated inputs the latter");
  if (arguments.gated && arguments.square) throw InvalidArgument("gated needs blocks of one row");
  arguments.gated ? quantize_each_block<In, Float8, true>(arguments, stream)
                  : quantize_each_block<In, Float8, false>(arguments, stream);
}

template <class In>
void quantize_from(QuantizeArguments const& arguments, cudaStream_t stream) {
  if (arguments.block != 0) return quantize_in_blocks<In>(arguments, stream);
  switch (arguments.code_type) {
    case DType::kInt8:
      return arguments.asymmetric ? quantize_as<In, Codes<DType::kInt8, true>>(arguments, stream)
                                  : quantize_as<In, Codes<DType::kInt8>>(arguments, stream);
    case DType::kFloat8E4M3: return quantize_as<In, Codes<DType::kFloat8E4M3>>(arguments, stream);
    case DType::kFloat8E5M2: return quantize_as<In, Codes<DType::kFloat8E5M2>>(arguments, stream);
    default: throw InvalidArgument("code_type must be int8, float8_e4m3fn or float8_e5m2");
  }
}

}  // namespace qcutlass::cuda
