#include "host/eight_bit_rows.h"

#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

QCUTLASS_MULTIVERSION void load_row(GemmArguments const& arguments, int64_t m, int16_t* __restrict out) {
  int8_t const* const row = static_cast<int8_t const*>(arguments.a) + m * arguments.a_stride;
  for (int64_t k = 0; k < arguments.weights.k; ++k) out[k] = row[k];
}
QCUTLASS_MULTIVERSION void load_row(GemmArguments const& arguments, int64_t m, float* __restrict out) {
  load_floats(arguments.a_type, arguments.a, m * arguments.a_stride, arguments.weights.k, out);
}

}  // namespace

template <class Element>
Rows<Element> load_rows(GemmArguments const& arguments, int64_t begin, int64_t count, int threads) {
  constexpr int kTileK = layout::tile_k(Packing::kW8A8);
  int64_t const k = arguments.weights.k, stride = layout::tiles_k(Packing::kW8A8, k) * kTileK;
  Rows<Element> rows{begin, count, stride, std::vector<Element>(count * stride)};
  parallel_for(count, kGrainOperations / k, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      load_row(arguments, begin + row, rows.elements.data() + row * stride);
    }
  });
  return rows;
}

template Rows<int16_t> load_rows<int16_t>(GemmArguments const&, int64_t, int64_t, int);
template Rows<float> load_rows<float>(GemmArguments const&, int64_t, int64_t, int);

}  // namespace qcutlass::host
