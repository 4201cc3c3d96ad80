#include "host/eight_bit_rows.h"

#include <cstring>

#include "host/byte_product.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

constexpr int kTileK = layout::tile_k(Packing::kW8A8);

QCUTLASS_MULTIVERSION void load_row(GemmArguments const& arguments, int64_t m, float* __restrict out) {
  load_floats(arguments.a_type, arguments.a, m * arguments.a_stride, arguments.weights.k, out);
}

/// `rows`: of the block of which `codes` are this row's first ones.
QCUTLASS_MULTIVERSION void load_row(int8_t const* __restrict row, int64_t k, int64_t run, int64_t rows,
                                    int8_t* __restrict codes, int32_t* __restrict offsets) {
  int64_t const words = k / 4;
  for (int64_t word = 0; word < words; ++word) std::memcpy(codes + word * 4 * rows, row + word * 4, 4);
  std::memcpy(codes + words * 4 * rows, row + words * 4, k % 4);
  for (int64_t begin = 0; begin < k; begin += run) {
    int32_t sum = 0;
    for (int64_t i = begin; i < std::min(begin + run, k); ++i) sum += row[i];
    *offsets++ = -128 * sum;
  }
}

/// Calls load(row) for each of the rows.
template <class Load>
void load_rows(int64_t count, int64_t k, int threads, Load const& load) {
  parallel_for(count, kGrainOperations / k, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) load(row);
  });
}

}  // namespace

Float8Rows load_float8_rows(GemmArguments const& arguments, int64_t begin, int64_t count, int threads) {
  int64_t const k = arguments.weights.k, stride = layout::tiles_k(Packing::kW8A8, k) * kTileK;
  int64_t const padded = arguments.batch_invariant ? layout::ceil_div(count, kMostRows) * kMostRows : count;
  Float8Rows rows{begin, count, stride, std::vector<float>(padded * stride)};
  load_rows(count, k, threads,
            [&](int64_t row) { load_row(arguments, begin + row, rows.elements.data() + row * stride); });
  return rows;
}

Int8Rows load_int8_rows(GemmArguments const& arguments, int64_t begin, int64_t count, int64_t run, int threads) {
  int64_t const k = arguments.weights.k, stride = layout::tiles_k(Packing::kW8A8, k) * kTileK;
  int64_t const runs = layout::ceil_div(k, run);
  Int8Rows rows{begin, count, stride, runs, std::vector<int8_t>(count * stride), std::vector<int32_t>(count * runs)};
  load_rows(count, k, threads, [&](int64_t row) {
    RowBlock const block = block_of(row, count);
    load_row(static_cast<int8_t const*>(arguments.a) + (begin + row) * arguments.a_stride, k, run, block.rows,
             rows.codes.data() + block.first * stride + (row - block.first) * 4, rows.offsets.data() + row * runs);
  });
  return rows;
}

}  // namespace qcutlass::host
