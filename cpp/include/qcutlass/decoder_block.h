// Takes one token of each sequence through a decoder block of Llama's kind, on the host. There, calling every product
// and norm from Python would take as long as computing the small ones.
#pragma once

#include <cstdint>
#include <vector>

#include "qcutlass/gemm.h"
#include "qcutlass/types.h"

namespace qcutlass {

/// An RMS norm.
struct Norm {
  void const* weight = nullptr;  ///< nullptr: there is none
  DType type = DType::kNone;
  float eps = 0.0f;
};

/// Products of the same activations, whose channels follow one another. They are several where weights are stored in
/// several ways, as queries, keys and values of K-quants are.
using JoinedProducts = std::vector<GemmArguments>;

/// The block. Weights are not owned. K: columns of the residual stream.
struct DecoderBlock {
  DType type = DType::kNone;  ///< of all activations: fp16, bf16, fp32
  int64_t heads = 0;          ///< of queries
  int64_t kv_heads = 0;
  int64_t size = 0;  ///< of a head, even
  Activation activation = Activation::kSilu;
  // Weights and what belongs to them; m, a and out are the calls'.
  JoinedProducts qkv;      ///< channels of queries, of keys, of values
  JoinedProducts gate_up;  ///< of the gate, then of what it multiplies
  GemmArguments output, down;
  Norm query_norm, key_norm;  ///< [size] each, of every head before it is rotated
  Norm mlp_norm;              ///< [K], between attention and MLP
  Norm next_norm;             ///< [K], of what reads the block's output
};

/// Keys or values of all sequences, [rows, kv_heads, tokens, size]; strides in elements, unit stride along a head.
struct CachedHeads {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

/// One more token of each sequence.
struct BlockToken {
  int64_t rows = 0;
  void const* x = nullptr;         ///< [rows, K], no gaps: the norm of the residual stream
  void const* residual = nullptr;  ///< [rows, K], no gaps: the stream
  void const* cos = nullptr;       ///< [rows or 1, size], no gaps
  void const* sin = nullptr;
  bool shared_angles = true;  ///< one row of cos and sin serves all
  CachedHeads keys, values;   ///< with a place for this token, which is written
  int64_t length = 0;         ///< tokens of a sequence, this one among them, which is the last; it attends to all
  float scaling = 1.0f;       ///< of the products of queries and keys
  void* sum = nullptr;        ///< written: [rows, K], no gaps: the stream behind the block
  void* out = nullptr;        ///< written: likewise, its next_norm
};

namespace host {

/// Throws InvalidArgument where products, heads and norms do not fit each other.
void check_block(DecoderBlock const& block);
/// Of a checked block. `threads` >= 1.
void run_block(DecoderBlock const& block, BlockToken const& token, int threads);

}  // namespace host

}  // namespace qcutlass
