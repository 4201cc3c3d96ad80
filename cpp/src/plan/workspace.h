// Scratch memory of a product on the GPU: copies of operands that lack the alignment the kernels rely on, and partial
// sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/tactics.h"

namespace qcutlass {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Whether rows of `columns` outputs can be written 8 at a time, in whole vectors.
inline bool stores_vectors(void const* data, int64_t stride, int64_t columns, int64_t rows, DType type) {
  return columns % 8 == 0 && rows_aligned(data, stride, columns, rows, type);
}

/// The same of a product's output, of `type`, and of its residual if it has one.
inline bool stores_vectors(GemmArguments const& a, DType type) {
  auto const in_vectors = [&](void const* data, int64_t stride) {
    return stores_vectors(data, stride, a.out_columns(), a.m, type);
  };
  return in_vectors(a.out, a.out_stride) && (a.residual == nullptr || in_vectors(a.residual, a.residual_stride));
}

/// Offsets of the parts of the workspace; a part that is not needed is empty. Strides are those of the copies.
struct Workspace {
  size_t activations, rows, scales, zeros, super_scales, super_minimums, partials, bytes;
  size_t partial_bytes, row_bytes;
  int64_t activation_stride, scale_stride, zero_stride, super_stride;  // elements
  int64_t partial_stride;

  Workspace(Problem const& p, Plan const& plan) {
    auto const padded = [](int64_t columns, DType type) {
      return type == DType::kNone ? 0 : round_up(columns * size_of(type), kAlignment) / size_of(type);
    };
    Operand const& w = p.weights;
    activation_stride = padded(p.k, p.activations.type);
    scale_stride = padded(p.n, w.scale_type);
    zero_stride = padded(p.n, w.zero_type);
    super_stride = padded(p.n, DType::kFloat16);
    // Every share's sums. Plans of wider products begin beyond this one; launches refuse them.
    int64_t const shared_channels = std::max<int64_t>(0, p.n - plan.shared_channel);
    partial_stride = round_up(shared_channels, p.output.granularity == Granularity::kBlock ? p.output.group : 8);
    int64_t const shared_rows = plan.split_k > 1 && !plan.cluster ? plan.split_k * (p.m - plan.shared_token) : 0;
    partial_bytes = static_cast<size_t>(shared_rows * partial_stride) * sizeof(float);

    bytes = 0;
    auto const part = [this](bool needed, int64_t size) {
      size_t const offset = bytes;
      if (needed) bytes += static_cast<size_t>(round_up(size, 256));
      return offset;
    };
    activations = part(p.activations.copied, p.activation_rows * activation_stride * size_of(p.activations.type));
    row_bytes = gathers_rows(p, plan) ? static_cast<size_t>(p.m * activation_stride * size_of(p.activations.type)) : 0;
    rows = part(row_bytes > 0, static_cast<int64_t>(row_bytes));
    scales = part(w.copied_scales, p.scale_rows() * scale_stride * size_of(w.scale_type));
    zeros = part(w.copied_zeros, p.scale_rows() * zero_stride * size_of(w.zero_type));
    int64_t const super_bytes = p.super_rows() * super_stride * size_of(DType::kFloat16);
    super_scales = part(w.copied_supers, super_bytes);
    super_minimums = part(w.copied_supers && w.zero_type != DType::kNone, super_bytes);
    partials = part(partial_bytes > 0, static_cast<int64_t>(partial_bytes));
  }

 private:
  /// Rows of experts that are anywhere are brought into order before: TMA reads neighbours.
  static bool gathers_rows(Problem const& p, Plan const& plan) {
    return p.gathers_rows && is_wgmma(kTactics[plan.row].mainloop);
  }
};

}  // namespace qcutlass
