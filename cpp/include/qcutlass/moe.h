// Mixtures of experts: what a block computes around its two grouped products, on the host and on a GPU.
//
// Token t has `slots` slots, each with the id of an expert and a weight. A slot whose id is in [0, experts) is a routed
// row; the routed rows of an expert lie next to each other, in the order of (token, slot). Each result of the other
// steps is computed in fp32 and rounded once.
#pragma once

#include <cstdint>

#include "qcutlass/types.h"

namespace qcutlass {

/// Experts that the GPU's routing has counters for.
inline constexpr int64_t kMostExperts = 2048;

/// Where each slot's row goes. Plain data, as all of these: pointers, sizes and strides in elements; nothing is owned.
struct RouteArguments {
  int64_t tokens = 0;
  int64_t slots = 0;  ///< of a token; tokens * slots < 2^31
  int64_t experts = 0;
  int id_bytes = 4;                ///< 4 or 8: int32 or int64
  void const* ids = nullptr;       ///< [tokens, slots], no gaps
  float const* weights = nullptr;  ///< likewise; nullptr: there is no row_scale
  int32_t* rows = nullptr;         ///< written: [tokens * slots], the token of each row; 0 past the last one
  int32_t* offsets = nullptr;      ///< written: [experts + 1], the first row of each expert, and past the last one
  int32_t* order = nullptr;        ///< written: [tokens, slots], the row of each slot; -1 if its id is out of range
  float* row_scale = nullptr;      ///< written: [tokens * slots], the weight of each row; 0 past the last one
};

/// A gated activation: gate * sigmoid(z) * (up + up_offset), with gate at most `limit`, up in [-limit, limit] and
///
///   kSilu      z = alpha * gate
///   kGeluTanh  z = 2 sqrt(2 / pi) * (gate + 0.044715 gate^3), the tanh form of GELU
struct GateRowsArguments {
  int64_t rows = 0;
  int64_t columns = 0;            ///< of out; x has twice as many
  int32_t const* live = nullptr;  ///< [1]: rows from this one on are neither read nor written; nullptr: all are
  DType type = DType::kNone;      ///< of x and out: fp16, bf16, on the host also fp32
  void const* x = nullptr;        ///< [rows, 2 * columns], unit stride along columns
  int64_t x_stride = 0;
  bool interleaved = false;  ///< gate and up take turns; if not, all of gate comes first
  Activation activation = Activation::kSilu;
  float alpha = 1.0f;
  float limit = 0.0f;  ///< infinity: none
  float up_offset = 0.0f;
  void* out = nullptr;  ///< written: [rows, columns], no gaps
};

/// out[t] = sum over slots j, in their order, of y[order[t, j]]; entries of -1 add nothing.
struct SumSlotsArguments {
  int64_t tokens = 0;
  int64_t slots = 0;
  int64_t columns = 0;
  DType type = DType::kNone;  ///< of y and out: fp16, bf16, on the host also fp32
  void const* y = nullptr;    ///< [rows, columns], unit stride along columns
  int64_t y_stride = 0;
  int32_t const* order = nullptr;  ///< [tokens, slots], no gaps
  void* out = nullptr;             ///< written: [tokens, columns], unit stride along columns
  int64_t out_stride = 0;
};

namespace host {

/// Throw InvalidArgument before anything is written. `threads` >= 1.
void route(RouteArguments const& arguments);
void gate_rows(GateRowsArguments const& arguments, int threads);
void sum_slots(SumSlotsArguments const& arguments, int threads);

}  // namespace host

namespace cuda {

/// One launch each on `stream`, to whose device, which must be current, all pointers belong. No allocation and no
/// synchronisation; they may start while the kernel before them in the stream ends, and let the next one start so.
void route(RouteArguments const& arguments, void* stream);
void gate_rows(GateRowsArguments const& arguments, void* stream);
void sum_slots(SumSlotsArguments const& arguments, void* stream);

}  // namespace cuda

}  // namespace qcutlass
