// Scratch memory of a product on the GPU: copies of operands that lack the alignment the kernels rely on, and partial
// sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/tactics.h"
#include "qcutlass/gemm.h"

namespace qcutlass {

/// Bytes of one vector access; rows of every operand of the kernels start at multiples of it.
inline constexpr int kAlignment = 16;

/// Largest k, and largest row stride of the activations, in elements.
inline constexpr int64_t kMaxStride = int64_t(1) << 24;

/// Largest row stride of scales and zeros, bytes: the kernels keep it in 32 bits.
inline constexpr int64_t kMaxRowBytes = (int64_t(1) << 31) - 1;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Whether rows of `columns` elements can be read in whole vectors.
inline bool rows_aligned(void const* data, int64_t stride, int64_t columns, int64_t rows, DType type) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && columns * size_of(type) % kAlignment == 0 &&
         (rows <= 1 || stride * size_of(type) % kAlignment == 0);
}

/// Whether rows of `columns` outputs can be written 8 at a time, in whole vectors.
inline bool stores_vectors(void const* data, int64_t stride, int64_t columns, int64_t rows, DType type) {
  return columns % 8 == 0 && rows_aligned(data, stride, columns, rows, type);
}

/// Offsets of the parts of the workspace; a part that is not needed is empty.
struct Workspace {
  bool copy_activations, copy_scales, copy_zeros;
  size_t activations, scales, zeros, partials, bytes;
  size_t partial_bytes;
  int64_t activation_stride;  // elements
  int64_t scale_stride, zero_stride;
  int64_t partial_stride;

  Workspace(GemmArguments const& a, Plan const& plan) {
    WeightArguments const& w = a.weights;
    auto const padded = [](int64_t columns, DType type) {
      return round_up(columns * size_of(type), kAlignment) / size_of(type);
    };
    // The same pass gathers columns and applies act_scale. The kernels' offsets within a tile of rows are 32-bit.
    // Rows that overlap are copied too: tensor maps do not take them.
    bool const overlap = a.m > 1 && a.a_stride < w.k;
    copy_activations = a.perm != nullptr || a.act_scale != nullptr || a.a_stride > kMaxStride || overlap ||
                       !rows_aligned(a.a, a.a_stride, w.k, a.m, a.a_type);
    auto const far = [&w](int64_t stride, DType type) {
      return w.groups() > 1 && stride * size_of(type) > kMaxRowBytes;
    };
    copy_scales =
        far(w.scale_stride, w.scale_type) || !rows_aligned(w.scales, w.scale_stride, w.n, w.groups(), w.scale_type);
    copy_zeros = w.zero_type != DType::kNone && (far(w.zero_stride, w.zero_type) ||
                                                 !rows_aligned(w.zeros, w.zero_stride, w.n, w.groups(), w.zero_type));
    activation_stride = copy_activations ? padded(w.k, a.a_type) : a.a_stride;
    scale_stride = copy_scales ? padded(w.n, w.scale_type) : w.scale_stride;
    zero_stride = copy_zeros ? padded(w.n, w.zero_type) : w.zero_stride;
    // Every share's sums. Plans of wider products begin beyond this one; launches refuse them.
    int64_t const shared_channels = std::max<int64_t>(0, w.n - plan.shared_channel);
    partial_stride = round_up(shared_channels, a.quantized.size != 0 ? a.quantized.size : 8);
    int64_t const shared_rows = plan.split_k > 1 && !plan.cluster ? plan.split_k * (a.m - plan.shared_token) : 0;
    partial_bytes = static_cast<size_t>(shared_rows * partial_stride) * sizeof(float);

    bytes = 0;
    auto const part = [this](bool needed, int64_t size) {
      size_t const offset = bytes;
      if (needed) bytes += static_cast<size_t>(round_up(size, 256));
      return offset;
    };
    activations = part(copy_activations, a.m * activation_stride * size_of(a.a_type));
    scales = part(copy_scales, w.groups() * scale_stride * size_of(w.scale_type));
    zeros = part(copy_zeros, w.groups() * zero_stride * size_of(w.zero_type));
    partials = part(partial_bytes > 0, static_cast<int64_t>(partial_bytes));
  }
};

}  // namespace qcutlass
