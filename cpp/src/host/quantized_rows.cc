#include "host/quantized_rows.h"

#include <algorithm>

#include "host/byte_product.h"
#include "host/int8_codes.h"
#include "host/multiversion.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

using Order = std::array<uint8_t, kStepK>;

/// `rows`: of the block of which `codes` and `parameters` are this row's first ones.
QCUTLASS_MULTIVERSION void quantize_row(Order const& order, float const* a, int64_t k, int run, int64_t rows,
                                        int8_t* codes, QuantizedRows::Run* parameters) {
  for (int64_t begin = 0; begin < k; begin += kActivationBlock) {
    int64_t const count = std::min<int64_t>(kActivationBlock, k - begin);
    float block[kActivationBlock] = {};
    int8_t natural[kActivationBlock];
    std::copy_n(a + begin, count, block);
    float const scale = quantize_block(block, kActivationBlock, natural);
    for (int64_t first = 0; first < count; first += kStepK) {
      for (int i = 0; i < kStepK; ++i) codes[i / 4 * 4 * rows + i % 4] = natural[first + order[i]];
      codes += kStepK * rows;
    }
    for (int64_t first = 0; first < count; first += run, parameters += rows) {
      int32_t sum = 0;
      for (int i = 0; i < run; ++i) sum += natural[first + i];
      *parameters = {scale, static_cast<float>(sum)};
    }
  }
}

}  // namespace

QuantizedRows quantize_rows(Packing packing, float const* activations, int64_t m, int64_t k, int run, int threads) {
  constexpr int64_t kGrainElements = int64_t{1} << 14;  // some 10 microseconds
  QuantizedRows rows;
  rows.run = run;
  rows.count = m;
  rows.stride = layout::tiles_k(packing, k) * layout::tile_k(packing);
  rows.runs = layout::ceil_div(k, run);
  rows.codes.resize(m * rows.stride);
  rows.parameters.resize(m * rows.runs);
  Order const order = step_order(packing);
  parallel_for(m, kGrainElements / k, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      auto const [first, block] = block_of(row, m);
      quantize_row(order, activations + row * k, k, run, block,
                   rows.codes.data() + first * rows.stride + (row - first) * 4,
                   rows.parameters.data() + first * rows.runs + (row - first));
    }
  });
  return rows;
}

}  // namespace qcutlass::host
