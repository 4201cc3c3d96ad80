// The 8-by-8-bit product on the CPU. int8: dot products of bytes, exact. fp8: both sides are decoded to fp32, exactly,
// and multiplied as the weight-only product multiplies.
#include "host/gemm_w8a8.h"

#include <algorithm>
#include <vector>

#include "host/check.h"
#include "host/eight_bit_rows.h"
#include "host/epilogue.h"
#include "host/float8_tile.h"
#include "host/int8_tiles.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"
#include "plan/problem.h"

namespace qcutlass::host {

namespace {

constexpr int kTileK = layout::tile_k(Packing::kW8A8);

void check_stride(char const* name, int stride) {
  check(stride == 0 || stride == 1, name, " must be 0 or 1, got ", stride);
}

void check_scales(SumScales const& sums) {
  check_not_null("a_scale", sums.a_scale);
  check_not_null("w_scale", sums.w_scale);
  check_stride("a_scale_stride", sums.a_scale_stride);
  check_stride("w_scale_stride", sums.w_scale_stride);
}

void check_types(GemmArguments const& arguments) {
  WeightArguments const& weights = arguments.weights;
  bool const is_int8 = arguments.a_type == DType::kInt8, sums_only = arguments.out_type == DType::kInt32;
  check(is_int8 || is_float8(arguments.a_type), "a_type must be int8, float8_e4m3 or float8_e5m2 for W8A8 weights");
  check(is_floating(arguments.out_type) || (is_int8 && sums_only),
        "out_type must be float16, bfloat16, float32 or, for int8 activations, int32");
  check(weights.scale_type == DType::kNone && weights.zero_type == DType::kNone,
        "scale_type and zero_type must be none: scales of W8A8 products are those of their sums");
  check(arguments.bias_type == DType::kNone || is_floating(arguments.bias_type),
        "bias_type must be float16, bfloat16, float32 or none");
  check(!sums_only || (arguments.bias_type == DType::kNone && arguments.activation == Activation::kNone),
        "out_type int32 takes neither bias nor activation");
  check(arguments.act_scale_type == DType::kNone && arguments.perm == nullptr,
        "act_scale and perm are not taken by W8A8 products");
  check(is_int8 || arguments.sums.azp == nullptr, "azp is for int8 activations");
  check(!is_int8 || weights.k <= kMaxInt8K, "k must be at most ", kMaxInt8K, " for int8, got ", weights.k);
}

void check_gemm(GemmArguments const& arguments, int threads) {
  WeightArguments const& weights = arguments.weights;
  SumScales const& sums = arguments.sums;
  check_threads(threads);
  check_at_least("n", weights.n, 0);
  check_at_least("k", weights.k, 1);
  check_at_least("m", arguments.m, 0);
  check_types(arguments);
  check_epilogue(arguments);
  if (arguments.m == 0 || weights.n == 0) return;
  check_not_null("packed", weights.packed);
  check_not_null("a", arguments.a);
  check_not_null("out", arguments.out);
  if (arguments.bias_type != DType::kNone) check_not_null("bias", arguments.bias);
  if (arguments.out_type != DType::kInt32) check_scales(sums);
  if (sums.azp == nullptr) return;
  check_not_null("channel_sums", sums.channel_sums);
  check_stride("azp_stride", sums.azp_stride);
}

// Sums of one strip of 16 channels, [rows][16].

template <class Bytes>
QCUTLASS_INLINE void multiply_int8(uint8_t const* packed, Int8Rows const& rows, int32_t* sums) {
  Int8Tiles<Bytes> weights;
  int64_t const tiles = rows.stride / kTileK;
  rows.start(0, sums);
  if (rows.count == 1) return weights.multiply_row(packed, rows, sums);
  for (int64_t tile = 0; tile < tiles; tile += weights.kTiles) {
    int64_t const count = std::min<int64_t>(weights.kTiles, tiles - tile);
    weights.decode(packed + tile * layout::kTileBytes, count);
    weights.multiply(rows, tile * kTileK, count * kTileK, sums);
  }
}

template <int kLanes>
QCUTLASS_INLINE void multiply_float8(uint8_t const* packed, Float8Rows const& rows, int64_t k_extent, float* sums) {
  std::fill_n(sums, rows.padded() * layout::kTileN, 0.0f);
  Float8Tile<kLanes> weights;
  for (int64_t k = 0; k < k_extent; k += kTileK, packed += layout::kTileBytes) {
    weights.decode(packed);
    weights.multiply(rows.elements.data() + k, rows.stride, rows.padded(),
                     static_cast<int>(std::min<int64_t>(kTileK, k_extent - k)), sums);
  }
}

struct Int8Kernel {
  template <class Bytes>
  static QCUTLASS_INLINE void multiply(uint8_t const* packed, Int8Rows const& rows, int64_t, int32_t* sums) {
    multiply_int8<Bytes>(packed, rows, sums);
  }
};
// Eight lanes are an AVX register; other instruction sets than AVX-512 split them.
QCUTLASS_MULTIVERSION void multiply_strip(uint8_t const* packed, Float8Rows const& rows, int64_t k, float* sums) {
  multiply_float8<8>(packed, rows, k, sums);
}
QCUTLASS_AVX512 void multiply_strip_avx512(uint8_t const* packed, Float8Rows const& rows, int64_t k, float* sums) {
  multiply_float8<16>(packed, rows, k, sums);
}

/// Writes sums [rows][16].
template <class Rows, class Sum>
using MultiplyStrip = void (*)(uint8_t const* packed, Rows const& rows, int64_t k, Sum* sums);

MultiplyStrip<Int8Rows, int32_t> choose_multiply_int8(ByteKernels kernels) {
  return ByteFunctions<Int8Kernel, uint8_t const*, Int8Rows const&, int64_t, int32_t*>::choose(kernels);
}
MultiplyStrip<Float8Rows, float> choose_multiply_float8() {
  if (has_avx512()) return multiply_strip_avx512;
  return multiply_strip;
}

/// How the sums of a part become outputs.
struct PartOfSums {
  Epilogue epilogue;
  int64_t strips;
  int64_t first[2];                        ///< channel of each strip
  float w_scale[2 * layout::kTileN] = {};  ///< of those that there are

  QCUTLASS_INLINE PartOfSums(GemmArguments const& arguments, Parts const& parts, int64_t part)
      : epilogue(arguments, parts, part), strips(parts.strips(part)) {
    SumScales const& scales = arguments.sums;
    for (int64_t i = 0; i < strips; ++i) {
      first[i] = parts.strip(part, i) * layout::kTileN;
      for (int64_t j = 0; j < count(arguments, i); ++j)
        w_scale[i * layout::kTileN + j] = scales.w_scale[(first[i] + j) * scales.w_scale_stride];
    }
  }

  /// Channels of a strip.
  QCUTLASS_INLINE int64_t count(GemmArguments const& arguments, int64_t strip) const {
    return std::min<int64_t>(layout::kTileN, arguments.weights.n - first[strip]);
  }

  /// Scales the sums of row m, of which those of strip i are number(i, [0, 16)), and finishes them.
  template <class Number>
  QCUTLASS_INLINE void store(GemmArguments const& arguments, int64_t m, Number const& number) const {
    SumScales const& scales = arguments.sums;
    float const a_scale = scales.a_scale[m * scales.a_scale_stride];
    float values[2 * layout::kTileN] = {};
    for (int64_t i = 0; i < strips; ++i) {
      for (int j = 0; j < layout::kTileN; ++j) {
        int64_t const channel = i * layout::kTileN + j;
        values[channel] = static_cast<float>(number(i, j)) * a_scale * w_scale[channel];
      }
    }
    epilogue.store(m, values);
  }
};

template <class Sum>
QCUTLASS_INLINE void store_scaled(GemmArguments const& arguments, Parts const& parts, int64_t part, int64_t first_row,
                                  int64_t rows, int64_t pitch, Sum const* sums) {
  PartOfSums const all(arguments, parts, part);
  for (int64_t row = 0; row < rows; ++row) {
    all.store(arguments, first_row + row,
              [&](int64_t i, int j) { return sums[(i * pitch + row) * layout::kTileN + j]; });
  }
}

QCUTLASS_MULTIVERSION void store_part(GemmArguments const& arguments, Parts const& parts, int64_t part,
                                      int64_t first_row, int64_t rows, int64_t pitch, float const* sums) {
  store_scaled(arguments, parts, part, first_row, rows, pitch, sums);
}

/// Integer sums less what zero points take off, exactly, in 64 bits, before anything is rounded.
QCUTLASS_INLINE void subtract_zeros(GemmArguments const& arguments, int64_t m, int64_t n, int64_t count,
                                    int32_t const* sums, int64_t* exact) {
  SumScales const& scales = arguments.sums;
  int64_t const azp = scales.azp == nullptr ? 0 : scales.azp[m * scales.azp_stride];
  for (int64_t i = 0; i < count; ++i) exact[i] = sums[i] - (azp == 0 ? 0 : azp * scales.channel_sums[n + i]);
}

/// The sums themselves, modulo 2^32.
QCUTLASS_INLINE void store_sums(GemmArguments const& arguments, int64_t strip, int64_t first_row, int64_t rows,
                                int32_t const* sums) {
  int64_t const n = strip * layout::kTileN;
  int64_t const count = std::min<int64_t>(layout::kTileN, arguments.weights.n - n);
  for (int64_t row = 0; row < rows; ++row, sums += layout::kTileN) {
    int64_t const m = first_row + row;
    int64_t exact[layout::kTileN];
    subtract_zeros(arguments, m, n, count, sums, exact);
    int32_t* const out = static_cast<int32_t*>(arguments.out) + m * arguments.out_stride + n;
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(static_cast<uint32_t>(exact[i]));
  }
}

QCUTLASS_MULTIVERSION void store_part(GemmArguments const& arguments, Parts const& parts, int64_t part,
                                      int64_t first_row, int64_t rows, int64_t pitch, int32_t const* sums) {
  if (arguments.out_type == DType::kInt32) return store_sums(arguments, parts.strip(part, 0), first_row, rows, sums);
  if (arguments.sums.azp == nullptr) return store_scaled(arguments, parts, part, first_row, rows, pitch, sums);
  PartOfSums const all(arguments, parts, part);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t exact[2][layout::kTileN] = {};
    for (int64_t i = 0; i < all.strips; ++i)
      subtract_zeros(arguments, first_row + row, all.first[i], all.count(arguments, i),
                     sums + (i * pitch + row) * layout::kTileN, exact[i]);
    all.store(arguments, first_row + row, [&](int64_t i, int j) { return exact[i][j]; });
  }
}

template <class Rows, class Sum, class Load>
void run(GemmArguments const& arguments, int threads, Load const& load, MultiplyStrip<Rows, Sum> multiply) {
  int64_t const k = arguments.weights.k, block = rows_of_a_block(k);
  Parts const parts(arguments);
  for (int64_t begin = 0; begin < arguments.m; begin += block) {
    int64_t const count = std::min(block, arguments.m - begin);
    Rows const rows = load(begin, count);
    int64_t const grain = strips_of_a_grain(k, count) / parts.strips(), pitch = rows.padded();
    parallel_for(parts.count(), grain, threads, [&](int64_t first, int64_t last) {
      std::vector<Sum> sums(parts.strips() * pitch * layout::kTileN);
      for (int64_t part = first; part < last; ++part) {
        for (int64_t i = 0; i < parts.strips(part); ++i) {
          uint8_t const* const packed = strip_of(arguments.weights, parts.strip(part, i));
          multiply(packed, rows, k, sums.data() + i * pitch * layout::kTileN);
        }
        store_part(arguments, parts, part, begin, count, pitch, sums.data());
      }
    });
  }
}

}  // namespace

void gemm_w8a8(GemmArguments const& arguments, int threads, ByteKernels kernels) {
  check_gemm(arguments, threads);
  if (arguments.m == 0 || arguments.weights.n == 0) return;
  if (arguments.a_type == DType::kInt8) {
    auto const load = [&](int64_t begin, int64_t count) {
      return load_int8_rows(arguments, begin, count, arguments.weights.k, threads);
    };
    return run(arguments, threads, load, choose_multiply_int8(kernels));
  }
  auto const load = [&](int64_t begin, int64_t count) { return load_float8_rows(arguments, begin, count, threads); };
  run(arguments, threads, load, choose_multiply_float8());
}

}  // namespace qcutlass::host
