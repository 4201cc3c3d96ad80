// What a decoder block computes between its products: norms, gates, rotations. Each result is computed in fp32 and
// rounded once.
#pragma once

#include <cstdint>

#include "qcutlass/types.h"

namespace qcutlass {

/// x [rows, columns] + residual, rounded to `type`, and its RMS norm: sum * weight / sqrt(mean(sum^2) + eps). Plain
/// data: pointers, sizes and strides in elements; nothing is owned.
struct NormArguments {
  int64_t rows = 0;
  int64_t columns = 0;
  DType type = DType::kNone;  ///< of x, residual, sum and out: fp16, bf16, fp32
  void const* x = nullptr;    ///< unit stride along columns, as all of them
  int64_t x_stride = 0;
  void const* residual = nullptr;  ///< nullptr: the norm of x alone, and no sum is written
  int64_t residual_stride = 0;
  DType weight_type = DType::kNone;
  void const* weight = nullptr;  ///< [columns]
  float eps = 0.0f;
  void* sum = nullptr;  ///< written: [rows, columns], no gaps
  void* out = nullptr;  ///< written: likewise
  /// int8, symmetric, or float8_e4m3: `out` is quantised too, once it is rounded, as quantize.h has it; kNone: it is
  /// not.
  DType code_type = DType::kNone;
  void* codes = nullptr;               ///< written: [rows, columns], no gaps
  float const* given_scale = nullptr;  ///< [1]: this one, instead of one a row
  float* scale = nullptr;              ///< written: [rows], or [1] beside given_scale, which it may not overlap
};

/// activation(gate) * up, [rows, columns] each.
struct GateArguments {
  int64_t rows = 0;
  int64_t columns = 0;
  DType type = DType::kNone;  ///< of gate, up and out: fp16, bf16, fp32
  Activation activation = Activation::kSilu;
  void const* gate = nullptr;  ///< unit stride along columns
  int64_t gate_stride = 0;
  void const* up = nullptr;
  int64_t up_stride = 0;
  void* out = nullptr;  ///< written: [rows, columns], no gaps
};

/// Heads of tokens, [batch, tokens, heads, size]: the input x and its output, each with unit stride along a head.
struct RotaryHeads {
  int64_t heads = 0;
  void const* x = nullptr;
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  void const* norm = nullptr;  ///< [size]: each head is normalised first; nullptr: no norm
  void* out = nullptr;         ///< written, at strides of its own
  int64_t out_batch_stride = 0;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
};

/// Rotary embedding of queries and keys: with halves of a head, out = [first * cos - second * sin, second * cos +
/// first * sin]; cos and sin are [batch or 1, tokens, size]. Values are copied.
struct RotaryArguments {
  int64_t batch = 0;
  int64_t tokens = 0;
  int64_t size = 0;           ///< of a head, even
  DType type = DType::kNone;  ///< of all but the norms' weights: fp16, bf16, fp32
  RotaryHeads queries;
  RotaryHeads keys;
  RotaryHeads values;         ///< of no heads: there are none
  void const* cos = nullptr;  ///< unit stride along a head
  void const* sin = nullptr;  ///< with the strides of cos
  int64_t angle_batch_stride = 0;
  int64_t angle_token_stride = 0;
  DType norm_type = DType::kNone;
  float eps = 0.0f;  ///< of the norms
  /// [1]: where keys and values of the first token are written, as an index of tokens in their outputs; nullptr: 0.
  /// Later tokens follow. Tokens whose index is negative, or `room` or more, are not written.
  int64_t const* place = nullptr;
  int64_t room = 0;
};

namespace host {

/// Throw InvalidArgument before anything is written. `threads` >= 1.
void add_rms_norm(NormArguments const& arguments, int threads);
/// The activation is kSilu or kGeluTanh.
void gate(GateArguments const& arguments, int threads);
void rotate(RotaryArguments const& arguments, int threads);

}  // namespace host

namespace cuda {

/// Launch on `stream` of the current device, for arguments that were checked. The next kernel in the stream may start
/// as soon as one of these has started, and so run beside this kernel's predecessors, too: for products see
/// GemmArguments::settled. Safe under graph capture.
void add_rms_norm(NormArguments const& arguments, void* stream);
void gate(GateArguments const& arguments, void* stream);
void rotate(RotaryArguments const& arguments, void* stream);

}  // namespace cuda

}  // namespace qcutlass
