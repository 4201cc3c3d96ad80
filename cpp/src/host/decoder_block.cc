// The steps of a decoder block in the order of transformers' Llama, each the one that stands alone in decoder.h or
// gemm.h.
#include "qcutlass/decoder_block.h"

#include <memory>

#include "host/check.h"
#include "host/token_attention.h"
#include "qcutlass/decoder.h"

namespace qcutlass::host {

namespace {

/// Memory for rows of activations between two steps.
class Rows {
 public:
  Rows(DecoderBlock const& block, int64_t rows, int64_t columns)
      : columns_(columns), memory_(new char[size_t(rows * columns * size_of(block.type))]) {}

  void* get() const { return memory_.get(); }
  int64_t columns() const { return columns_; }

 private:
  int64_t columns_;
  std::unique_ptr<char[]> memory_;  // not initialised
};

void check_products(char const* name, DecoderBlock const& block, JoinedProducts const& products, int64_t n, int64_t k) {
  int64_t channels = 0;
  for (GemmArguments const& product : products) {
    check(product.weights.k == k, name, ": expected ", k, " columns, got ", product.weights.k);
    check(product.a_type == block.type, name, ": expected activations of the block's type");
    channels += product.weights.n;
  }
  check(channels == n, name, ": expected ", n, " channels, got ", channels);
}

/// Writes the channels of a product from `channel` on.
void multiply(GemmArguments product, void const* a, int64_t rows, Rows const& out, int threads, int64_t channel = 0) {
  product.m = rows;
  product.a = a;
  product.a_stride = product.weights.k;
  product.out = static_cast<char*>(out.get()) + channel * size_of(product.a_type);
  product.out_stride = out.columns();
  gemm(product, threads);
}

void multiply(JoinedProducts const& products, void const* a, int64_t rows, Rows const& out, int threads) {
  int64_t channel = 0;
  for (GemmArguments const& product : products) {
    multiply(product, a, rows, out, threads, channel);
    channel += product.weights.n;
  }
}

void add_norm(DecoderBlock const& block, Norm const& norm, Rows const& x, void const* residual, int64_t rows, void* sum,
              void* out, int threads) {
  NormArguments arguments;
  arguments.rows = rows;
  arguments.columns = x.columns();
  arguments.type = block.type;
  arguments.x = x.get();
  arguments.x_stride = x.columns();
  arguments.residual = residual;
  arguments.residual_stride = x.columns();
  arguments.weight_type = norm.type;
  arguments.weight = norm.weight;
  arguments.eps = norm.eps;
  arguments.sum = sum;
  arguments.out = out;
  add_rms_norm(arguments, threads);
}

/// Heads of one token of each row, side by side from `x` on, which go to the last token's place of others.
RotaryHeads appended(DecoderBlock const& block, BlockToken const& token, char const* x, int64_t channels,
                     void const* norm, CachedHeads const& to) {
  char* const out = static_cast<char*>(to.data) + (token.length - 1) * to.token_stride * size_of(block.type);
  return {block.kv_heads, x, channels, channels, block.size, norm, out, to.row_stride, to.token_stride, to.head_stride};
}

/// Queries, rotated, into `queries`; keys and values to the others.
void project(DecoderBlock const& block, BlockToken const& token, Rows const& queries, int threads) {
  int64_t const rows = token.rows, element = size_of(block.type);
  int64_t const channels = (block.heads + 2 * block.kv_heads) * block.size;
  Rows const qkv(block, rows, channels);
  multiply(block.qkv, token.x, rows, qkv, threads);
  auto const* const first = static_cast<char const*>(qkv.get());
  char const* const keys = first + block.heads * block.size * element;
  char const* const values = keys + block.kv_heads * block.size * element;
  RotaryArguments rotary;
  rotary.batch = rows;
  rotary.tokens = 1;
  rotary.size = block.size;
  rotary.type = block.type;
  rotary.queries = {block.heads,       first, channels,  channels, block.size, block.query_norm.weight, queries.get(),
                    queries.columns(), 0,     block.size};
  rotary.keys = appended(block, token, keys, channels, block.key_norm.weight, token.keys);
  rotary.values = appended(block, token, values, channels, nullptr, token.values);
  rotary.cos = token.cos;
  rotary.sin = token.sin;
  rotary.angle_batch_stride = token.shared_angles ? 0 : block.size;
  rotary.norm_type = block.query_norm.type;
  rotary.eps = block.query_norm.eps;
  rotate(rotary, threads);
}

/// The gated MLP of `x`, into `out`.
void multiply_mlp(DecoderBlock const& block, void const* x, int64_t rows, Rows const& out, int threads) {
  int64_t const inner = block.down.weights.k;
  Rows const both(block, rows, 2 * inner), gated(block, rows, inner);
  multiply(block.gate_up, x, rows, both, threads);
  GateArguments arguments;
  arguments.rows = rows;
  arguments.columns = inner;
  arguments.type = block.type;
  arguments.activation = block.activation;
  arguments.gate = both.get();
  arguments.gate_stride = both.columns();
  arguments.up = static_cast<char const*>(both.get()) + inner * size_of(block.type);
  arguments.up_stride = both.columns();
  arguments.out = gated.get();
  gate(arguments, threads);
  multiply(block.down, gated.get(), rows, out, threads);
}

}  // namespace

void check_block(DecoderBlock const& block) {
  check_floating("type", block.type);
  check_at_least("heads", block.heads, 1);
  check_at_least("kv_heads", block.kv_heads, 1);
  check_at_least("size", block.size, 2);
  check(block.heads % block.kv_heads == 0, "heads: expected a multiple of kv_heads, ", block.kv_heads, ", got ",
        block.heads);
  check(block.size % 2 == 0, "size must be even, got ", block.size);
  int64_t const columns = block.output.weights.n, inner = block.down.weights.k;
  check_products("qkv", block, block.qkv, (block.heads + 2 * block.kv_heads) * block.size, columns);
  check_products("output", block, {block.output}, columns, block.heads * block.size);
  check_products("gate_up", block, block.gate_up, 2 * inner, columns);
  check_products("down", block, {block.down}, columns, inner);
  check((block.query_norm.weight == nullptr) == (block.key_norm.weight == nullptr),
        "query_norm, key_norm: expected both or neither");
  check(block.query_norm.type == block.key_norm.type && block.query_norm.eps == block.key_norm.eps,
        "query_norm, key_norm: expected one type and one eps");
  check_not_null("mlp_norm", block.mlp_norm.weight);
  check_not_null("next_norm", block.next_norm.weight);
}

void run_block(DecoderBlock const& block, BlockToken const& token, int threads) {
  check_threads(threads);
  check_at_least("length", token.length, 1);
  int64_t const rows = token.rows, columns = block.output.weights.n;
  Rows const queries(block, rows, block.heads * block.size), attended(block, rows, block.heads * block.size);
  Rows const product(block, rows, columns), stream(block, rows, columns), normed(block, rows, columns);
  project(block, token, queries, threads);
  attend_to_all(block, token, queries.get(), attended.get(), threads);
  multiply(block.output, attended.get(), rows, product, threads);
  add_norm(block, block.mlp_norm, product, token.residual, rows, stream.get(), normed.get(), threads);
  multiply_mlp(block, normed.get(), rows, product, threads);
  add_norm(block, block.next_norm, product, stream.get(), rows, token.sum, token.out, threads);
}

}  // namespace qcutlass::host
