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

namespace qcutlass::host {

namespace {

constexpr int kTileK = layout::tile_k(Packing::kW8A8);

void check_stride(char const* name, int stride) {
  check(stride == 0 || stride == 1, std::string(name) + " must be 0 or 1, got " + std::to_string(stride));
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
  check(!is_int8 || weights.k <= kMaxInt8K,
        "k must be at most " + std::to_string(kMaxInt8K) + " for int8, got " + std::to_string(weights.k));
}

void check_gemm(GemmArguments const& arguments, int threads) {
  WeightArguments const& weights = arguments.weights;
  SumScales const& sums = arguments.sums;
  check_threads(threads);
  check_at_least("n", weights.n, 0);
  check_at_least("k", weights.k, 1);
  check_at_least("m", arguments.m, 0);
  check_types(arguments);
  if (arguments.m == 0 || weights.n == 0) return;
  check_not_null("packed", weights.packed);
  check_not_null("a", arguments.a);
  check_not_null("out", arguments.out);
  if (arguments.m > 1) check_at_least("out_stride", arguments.out_stride, weights.n);
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

void multiply_strip(uint8_t const* packed, Int8Rows const& rows, int64_t, int32_t* sums) {
  multiply_int8<PlainBytes>(packed, rows, sums);
}
QCUTLASS_AVX2 void multiply_strip_avx2(uint8_t const* packed, Int8Rows const& rows, int64_t, int32_t* sums) {
  multiply_int8<Avx2Bytes>(packed, rows, sums);
}
QCUTLASS_AVX2 void multiply_strip_avx_vnni(uint8_t const* packed, Int8Rows const& rows, int64_t, int32_t* sums) {
  multiply_int8<AvxVnniBytes>(packed, rows, sums);
}
QCUTLASS_AVX512_VNNI void multiply_strip_avx512_vnni(uint8_t const* packed, Int8Rows const& rows, int64_t,
                                                     int32_t* sums) {
  multiply_int8<Avx512VnniBytes>(packed, rows, sums);
}
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
  switch (kernels) {
    case ByteKernels::kAvx2: return multiply_strip_avx2;
    case ByteKernels::kAvxVnni: return multiply_strip_avx_vnni;
    case ByteKernels::kAvx512Vnni: return multiply_strip_avx512_vnni;
    case ByteKernels::kPlain: break;
  }
  return multiply_strip;
}
MultiplyStrip<Float8Rows, float> choose_multiply_float8() {
  if (has_avx512()) return multiply_strip_avx512;
  return multiply_strip;
}

/// Scales, bias and activation of the strip's channels.
template <class Sum>
QCUTLASS_INLINE void store_scaled(GemmArguments const& arguments, int64_t first_row, int64_t rows, int64_t strip,
                                  Sum const* sums) {
  SumScales const& scales = arguments.sums;
  int64_t const n = strip * layout::kTileN;
  int64_t const count = std::min<int64_t>(layout::kTileN, arguments.weights.n - n);
  float bias[layout::kTileN] = {}, w_scale[layout::kTileN] = {};
  load_floats(arguments.bias_type, arguments.bias, n, count, bias);
  for (int64_t i = 0; i < count; ++i) w_scale[i] = scales.w_scale[(n + i) * scales.w_scale_stride];
  for (int64_t row = 0; row < rows; ++row, sums += layout::kTileN) {
    int64_t const m = first_row + row;
    float const a_scale = scales.a_scale[m * scales.a_scale_stride];
    float values[layout::kTileN];
    for (int i = 0; i < layout::kTileN; ++i) values[i] = static_cast<float>(sums[i]) * a_scale * w_scale[i] + bias[i];
    activate(arguments.activation, count, values);
    store_floats(arguments.out_type, values, count, arguments.out, m * arguments.out_stride + n);
  }
}

QCUTLASS_MULTIVERSION void store_strip(GemmArguments const& arguments, int64_t first_row, int64_t rows, int64_t strip,
                                       float* sums) {
  store_scaled(arguments, first_row, rows, strip, sums);
}

/// Integer sums: subtracts zero points exactly, in 64 bits, before anything is rounded.
QCUTLASS_MULTIVERSION void store_strip(GemmArguments const& arguments, int64_t first_row, int64_t rows, int64_t strip,
                                       int32_t* sums) {
  SumScales const& scales = arguments.sums;
  bool const sums_only = arguments.out_type == DType::kInt32;
  if (scales.azp == nullptr && !sums_only) return store_scaled(arguments, first_row, rows, strip, sums);
  int64_t const n = strip * layout::kTileN;
  int64_t const count = std::min<int64_t>(layout::kTileN, arguments.weights.n - n);
  for (int64_t row = 0; row < rows; ++row, sums += layout::kTileN) {
    int64_t const m = first_row + row;
    int64_t const azp = scales.azp == nullptr ? 0 : scales.azp[m * scales.azp_stride];
    int64_t exact[layout::kTileN] = {};
    for (int64_t i = 0; i < count; ++i) {
      exact[i] = sums[i] - (azp == 0 ? 0 : azp * scales.channel_sums[n + i]);
    }
    if (sums_only) {
      int32_t* const out = static_cast<int32_t*>(arguments.out) + m * arguments.out_stride + n;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(static_cast<uint32_t>(exact[i]));
    } else {
      store_scaled(arguments, m, 1, strip, exact);
    }
  }
}

template <class Rows, class Sum, class Load>
void run(GemmArguments const& arguments, int threads, Load const& load, MultiplyStrip<Rows, Sum> multiply) {
  int64_t const n = arguments.weights.n, k = arguments.weights.k;
  int64_t const block = rows_of_a_block(k);
  for (int64_t begin = 0; begin < arguments.m; begin += block) {
    int64_t const count = std::min(block, arguments.m - begin);
    Rows const rows = load(begin, count);
    parallel_for(layout::tiles_n(n), strips_of_a_grain(k, count), threads, [&](int64_t first, int64_t last) {
      std::vector<Sum> sums(rows.padded() * layout::kTileN);
      for (int64_t strip = first; strip < last; ++strip) {
        multiply(strip_of(arguments.weights, strip), rows, k, sums.data());
        store_strip(arguments, begin, count, strip, sums.data());
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
