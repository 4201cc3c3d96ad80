#include "host/quantized_rows.h"

#include <algorithm>
#include <cstring>

#include "host/byte_product.h"
#include "host/int8_codes.h"
#include "host/multiversion.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

/// The 16 codes of a step, in the order of a packing.
template <Packing kPacking>
QCUTLASS_INLINE void store_step(int8_t const* natural, int64_t rows, int8_t* codes) {
  typedef int8_t Step __attribute__((vector_size(kStepK)));
  constexpr auto k = step_order(kPacking);
  Step step;
  std::memcpy(&step, natural, sizeof(step));
  step = __builtin_shufflevector(step, step, k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8], k[9], k[10], k[11],
                                 k[12], k[13], k[14], k[15]);
  int32_t words[kStepK / 4];
  std::memcpy(words, &step, sizeof(words));
  for (int i = 0; i < kStepK / 4; ++i) std::memcpy(codes + i * 4 * rows, words + i, 4);
}

/// `rows`: of the block of which `codes` and `parameters` are this row's first ones.
template <Packing kPacking>
QCUTLASS_INLINE void quantize_row(float const* a, int64_t k, int run, int64_t rows, int8_t* codes,
                                  QuantizedRows::Run* parameters) {
  for (int64_t begin = 0; begin < k; begin += kActivationBlock) {
    int64_t const count = std::min<int64_t>(kActivationBlock, k - begin);
    float block[kActivationBlock];
    if (count == kActivationBlock) {
      std::memcpy(block, a + begin, sizeof(block));
    } else {
      std::fill(std::copy_n(a + begin, count, block), block + kActivationBlock, 0.0f);
    }
    int8_t natural[kActivationBlock];
    float const scale = quantize_block(block, kActivationBlock, natural);
    for (int64_t first = 0; first < count; first += kStepK, codes += kStepK * rows) {
      store_step<kPacking>(natural + first, rows, codes);
    }
    static_assert(kActivationBlock == 2 * kStepK);
    int32_t lower = 0, upper = 0;
#pragma GCC unroll 1  // a loop becomes vectors, a chain of additions does not
    for (int i = 0; i < kStepK; ++i) lower += natural[i];
#pragma GCC unroll 1
    for (int i = 0; i < kStepK; ++i) upper += natural[kStepK + i];
    if (run == kActivationBlock) {
      parameters[0] = {scale, static_cast<float>(lower + upper)};
      parameters += rows;
    } else {
      parameters[0] = {scale, static_cast<float>(lower)};
      if (count > kStepK) parameters[rows] = {scale, static_cast<float>(upper)};
      parameters += 2 * rows;
    }
  }
}

QCUTLASS_MULTIVERSION void quantize_row_w4(float const* a, int64_t k, int run, int64_t rows, int8_t* codes,
                                           QuantizedRows::Run* parameters) {
  quantize_row<Packing::kW4A16>(a, k, run, rows, codes, parameters);
}
QCUTLASS_MULTIVERSION void quantize_row_w8(float const* a, int64_t k, int run, int64_t rows, int8_t* codes,
                                           QuantizedRows::Run* parameters) {
  quantize_row<Packing::kW8A16>(a, k, run, rows, codes, parameters);
}

QCUTLASS_MULTIVERSION void arrange_row(int8_t const* a, int64_t k, int run, int64_t rows, int8_t* codes,
                                       QuantizedRows::Run* parameters) {
  for (int64_t begin = 0; begin < k; begin += run, parameters += rows) {
    int64_t const end = std::min<int64_t>(begin + run, k);
    int32_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += a[i];
    *parameters = {1.0f, static_cast<float>(sum)};
  }
  for (; k >= kStepK; k -= kStepK, a += kStepK, codes += kStepK * rows) store_step<Packing::kW4A16>(a, rows, codes);
  if (k == 0) return;
  int8_t last[kStepK] = {};
  std::memcpy(last, a, k);
  store_step<Packing::kW4A16>(last, rows, codes);
}

/// Rows without values. `run`: columns of a Run.
QuantizedRows empty_rows(Packing packing, int64_t m, int64_t k, int run) {
  QuantizedRows rows;
  rows.run = run;
  rows.count = m;
  rows.stride = layout::tiles_k(packing, k) * layout::tile_k(packing);
  rows.runs = layout::ceil_div(k, run);
  rows.codes.resize(m * rows.stride);
  rows.parameters.resize(m * rows.runs);
  return rows;
}

/// Calls load(row, rows of its block, codes, parameters) for each of the rows.
template <class Load>
void load_rows(QuantizedRows& rows, int64_t k, int threads, Load const& load) {
  constexpr int64_t kGrainElements = int64_t{1} << 14;  // some 10 microseconds
  parallel_for(rows.count, kGrainElements / k, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      auto const [first, block] = block_of(row, rows.count);
      load(row, block, rows.codes.data() + first * rows.stride + (row - first) * 4,
           rows.parameters.data() + first * rows.runs + (row - first));
    }
  });
}

}  // namespace

QuantizedRows quantize_rows(Packing packing, float const* activations, int64_t m, int64_t k, int run, int threads) {
  QuantizedRows rows = empty_rows(packing, m, k, run);
  auto const quantize_row = packing == Packing::kW4A16 ? quantize_row_w4 : quantize_row_w8;
  load_rows(rows, k, threads, [&](int64_t row, int64_t block, int8_t* codes, QuantizedRows::Run* parameters) {
    quantize_row(activations + row * k, k, run, block, codes, parameters);
  });
  return rows;
}

QuantizedRows arrange_rows(int8_t const* codes, int64_t stride, int64_t m, int64_t k, int run, int threads) {
  QuantizedRows rows = empty_rows(Packing::kW4A16, m, k, run);
  load_rows(rows, k, threads, [&](int64_t row, int64_t block, int8_t* out, QuantizedRows::Run* parameters) {
    arrange_row(codes + row * stride, k, run, block, out, parameters);
  });
  return rows;
}

}  // namespace qcutlass::host
