#include "host/channel_parameters.h"

namespace qcutlass::host {

namespace {

void load_anywhere(WeightArguments const& weights, StripRange strips, int64_t first, int64_t count, bool implied,
                   ChannelParameters* groups) {
  ChannelParameters::load<PlainNumbers>(weights, strips, first, count, implied, groups);
}
QCUTLASS_AVX2 void load_avx2(WeightArguments const& weights, StripRange strips, int64_t first, int64_t count,
                             bool implied, ChannelParameters* groups) {
  ChannelParameters::load<Avx2Numbers>(weights, strips, first, count, implied, groups);
}
QCUTLASS_AVX512 void load_avx512(WeightArguments const& weights, StripRange strips, int64_t first, int64_t count,
                                 bool implied, ChannelParameters* groups) {
  ChannelParameters::load<Avx512Numbers>(weights, strips, first, count, implied, groups);
}

}  // namespace

void load_groups(WeightArguments const& weights, StripRange strips, int64_t first, int64_t count, bool implied,
                 ChannelParameters* groups) {
  switch (vector_level()) {
    case VectorLevel::kAvx512: return load_avx512(weights, strips, first, count, implied, groups);
    case VectorLevel::kAvx2: return load_avx2(weights, strips, first, count, implied, groups);
    case VectorLevel::kBaseline: return load_anywhere(weights, strips, first, count, implied, groups);
  }
}

}  // namespace qcutlass::host
