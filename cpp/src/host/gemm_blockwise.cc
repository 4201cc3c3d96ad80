// Blockwise products on the CPU: the sums of one block of columns at a time, scaled and added in fp32. Sums of int8 are
// exact. Those of fp8, whose products are, are fp32 sums of every 32 columns, each added to its block's in order.
#include "host/gemm_blockwise.h"

#include <algorithm>
#include <vector>

#include "host/check.h"
#include "host/eight_bit_rows.h"
#include "host/epilogue.h"
#include "host/float8_tile.h"
#include "host/int8_codes.h"
#include "host/int8_tiles.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"
#include "plan/problem.h"

namespace qcutlass::host {

namespace {

constexpr int kTileK = layout::tile_k(Packing::kW8A8);

void check_types(GemmArguments const& arguments) {
  bool const is_int8 = arguments.a_type == DType::kInt8;
  check(arguments.weights.packing == Packing::kW8A8 && (is_int8 || arguments.a_type == DType::kFloat8E4M3),
        "blockwise products take int8 or float8_e4m3 activations and W8A8 weights");
  check(is_floating(arguments.out_type) || (is_int8 && arguments.out_type == DType::kInt8),
        "out_type must be float16, bfloat16, float32 or, from int8, int8 for blockwise products");
  check(arguments.bias_type == DType::kNone || is_floating(arguments.bias_type),
        "bias_type must be float16, bfloat16, float32 or none");
  check(arguments.act_scale_type == DType::kNone && arguments.perm == nullptr,
        "act_scale and perm are not taken by blockwise products");
  SumScales const& sums = arguments.sums;
  check(sums.a_scale == nullptr && sums.w_scale == nullptr && sums.azp == nullptr,
        "scales and zero points of sums are not taken by blockwise products");
  if (arguments.out_type == DType::kInt8) {
    check_block_size("quantized.size", arguments.quantized.size);
  } else {
    check(arguments.quantized.size == 0 && arguments.quantized.scales == nullptr,
          "quantized is for outputs of type int8");
  }
}

void check_gemm(GemmArguments const& arguments, int threads) {
  WeightArguments const& weights = arguments.weights;
  BlockScales const& blocks = arguments.blocks;
  QuantizedOutput const& quantized = arguments.quantized;
  check_threads(threads);
  check_at_least("n", weights.n, 0);
  check_at_least("k", weights.k, 1);
  check_at_least("m", arguments.m, 0);
  check_block_size("blocks.size", blocks.size);
  check_types(arguments);
  check_epilogue(arguments);
  check_turns(arguments);
  if (arguments.m == 0 || weights.n == 0) return;
  check_not_null("packed", weights.packed);
  check_not_null("a", arguments.a);
  check_not_null("out", arguments.out);
  check_not_null("blocks.a", blocks.a);
  check_not_null("blocks.w", blocks.w);
  if (arguments.out_type == DType::kInt8) check_not_null("quantized.scales", quantized.scales);
  if (arguments.bias_type != DType::kNone) check_not_null("bias", arguments.bias);
  if (weights.n > blocks.channels())
    check_at_least("blocks.w_stride", blocks.w_stride, layout::ceil_div(weights.k, blocks.size));
  if (arguments.m == 1) return;
  check_at_least("blocks.a_stride", blocks.a_stride, 0);
  if (arguments.out_type == DType::kInt8)
    check_at_least("quantized.stride", quantized.stride, layout::ceil_div(weights.n, quantized.size));
}

/// Adds the products of one strip of 16 channels to `out`, a row of which has `width` elements: calls sum(first tile,
/// tiles, block) for each block of columns, which leaves its sums [rows][16] in `sums`, and scales these.
template <class Rows, class Number, class Sum>
QCUTLASS_INLINE void add_blocks(GemmArguments const& arguments, Rows const& rows, int64_t strip, int64_t width,
                                Number const* __restrict sums, float* __restrict out, Sum const& sum) {
  BlockScales const& blocks = arguments.blocks;
  float const* const w_scale =
      blocks.w + strip * layout::kTileN / blocks.channels() * blocks.w_stride + strip % 2 * blocks.up_offset;
  int64_t const tiles = rows.stride / kTileK, tiles_of_block = blocks.size / kTileK;
  for (int64_t tile = 0, block = 0; tile < tiles; tile += tiles_of_block, ++block) {
    sum(tile, std::min(tiles_of_block, tiles - tile), block);
    for (int64_t row = 0; row < rows.count; ++row) {
      float const scale = blocks.a[(rows.begin + row) * blocks.a_stride + block] * w_scale[block];
      Number const* const from = sums + row * layout::kTileN;
      float* const to = out + row * width;
      for (int i = 0; i < layout::kTileN; ++i) to[i] += static_cast<float>(from[i]) * scale;
    }
  }
}

struct Int8Kernel {
  template <class Bytes>
  static QCUTLASS_INLINE void multiply(GemmArguments const& arguments, Int8Rows const& rows, int64_t strip,
                                       int64_t width, int32_t* sums, float* out) {
    uint8_t const* const packed = strip_of(arguments.weights, strip);
    Int8Tiles<Bytes> weights;
    add_blocks(arguments, rows, strip, width, sums, out, [&](int64_t tile, int64_t count, int64_t block) {
      weights.decode(packed + tile * layout::kTileBytes, count);
      rows.start(block, sums);
      weights.multiply(rows, tile * kTileK, count * kTileK, sums);
    });
  }
};

template <int kLanes>
QCUTLASS_INLINE void multiply(GemmArguments const& arguments, Float8Rows const& rows, int64_t strip, int64_t width,
                              float* sums, float* out) {
  uint8_t const* const packed = strip_of(arguments.weights, strip);
  Float8Tile<kLanes> weights;
  add_blocks(arguments, rows, strip, width, sums, out, [&](int64_t first, int64_t count, int64_t) {
    std::fill_n(sums, rows.count * layout::kTileN, 0.0f);
    for (int64_t tile = first; tile < first + count; ++tile) {
      int64_t const k = tile * kTileK;
      weights.decode(packed + tile * layout::kTileBytes);
      weights.multiply(rows.elements.data() + k, rows.stride, rows.count,
                       static_cast<int>(std::min<int64_t>(kTileK, arguments.weights.k - k)), sums);
    }
  });
}

// Eight lanes are an AVX register; other instruction sets than AVX-512 split them.
QCUTLASS_MULTIVERSION void multiply_strip(GemmArguments const& arguments, Float8Rows const& rows, int64_t strip,
                                          int64_t width, float* sums, float* out) {
  multiply<8>(arguments, rows, strip, width, sums, out);
}
QCUTLASS_AVX512 void multiply_strip_avx512(GemmArguments const& arguments, Float8Rows const& rows, int64_t strip,
                                           int64_t width, float* sums, float* out) {
  multiply<16>(arguments, rows, strip, width, sums, out);
}

/// Adds products to `out`, with `sums` as its scratch memory.
template <class Rows, class Sum>
using MultiplyStrip = void (*)(GemmArguments const& arguments, Rows const& rows, int64_t strip, int64_t width,
                               Sum* sums, float* out);

MultiplyStrip<Int8Rows, int32_t> choose_multiply_int8(ByteKernels kernels) {
  using Functions =
      ByteFunctions<Int8Kernel, GemmArguments const&, Int8Rows const&, int64_t, int64_t, int32_t*, float*>;
  return Functions::choose(kernels);
}

MultiplyStrip<Float8Rows, float> choose_multiply_float8() {
  if (has_avx512()) return multiply_strip_avx512;
  return multiply_strip;
}

/// Finishes and writes values [rows][width] of a part, quantised or not.
QCUTLASS_MULTIVERSION void store(GemmArguments const& arguments, Parts const& parts, int64_t part, int64_t first_row,
                                 int64_t rows, int64_t width, float* values) {
  QuantizedOutput const& quantized = arguments.quantized;
  Epilogue const epilogue(arguments, parts, part);
  for (int64_t row = 0; row < rows; ++row, values += width) {
    int64_t const m = first_row + row;
    if (arguments.out_type != DType::kInt8) {
      epilogue.store(m, values);
      continue;
    }
    epilogue.finish(m, values);
    quantized.scales[m * quantized.stride + part] = quantize_block(
        values, epilogue.count(), static_cast<int8_t*>(arguments.out) + m * arguments.out_stride + epilogue.first());
  }
}

template <class Rows, class Sum, class Load>
void run(GemmArguments const& arguments, int threads, Load const& load, MultiplyStrip<Rows, Sum> multiply) {
  int64_t const k = arguments.weights.k, block = rows_of_a_block(k);
  Parts const parts(arguments, arguments.out_type == DType::kInt8 ? arguments.quantized.size : layout::kTileN);
  int64_t const width = parts.strips() * layout::kTileN;
  for (int64_t begin = 0; begin < arguments.m; begin += block) {
    int64_t const count = std::min(block, arguments.m - begin);
    Rows const rows = load(begin, count);
    int64_t const grain = strips_of_a_grain(k, count) / parts.strips();
    parallel_for(parts.count(), grain, threads, [&](int64_t first, int64_t last) {
      std::vector<Sum> sums(count * layout::kTileN);
      std::vector<float> values(count * width);
      for (int64_t part = first; part < last; ++part) {
        std::fill(values.begin(), values.end(), 0.0f);
        for (int64_t i = 0; i < parts.strips(part); ++i)
          multiply(arguments, rows, parts.strip(part, i), width, sums.data(), values.data() + i * layout::kTileN);
        store(arguments, parts, part, begin, count, width, values.data());
      }
    });
  }
}

}  // namespace

void gemm_blockwise(GemmArguments const& arguments, int threads, ByteKernels kernels) {
  check_gemm(arguments, threads);
  if (arguments.m == 0 || arguments.weights.n == 0) return;
  if (arguments.a_type == DType::kInt8) {
    auto const load = [&](int64_t begin, int64_t count) {
      return load_int8_rows(arguments, begin, count, arguments.blocks.size, threads);
    };
    return run(arguments, threads, load, choose_multiply_int8(kernels));
  }
  auto const load = [&](int64_t begin, int64_t count) { return load_float8_rows(arguments, begin, count, threads); };
  run(arguments, threads, load, choose_multiply_float8());
}

}  // namespace qcutlass::host
