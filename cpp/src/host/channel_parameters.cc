#include "host/channel_parameters.h"

namespace qcutlass::host {

namespace {

void load_groups_anywhere(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                          ChannelParameters* groups) {
  ChannelParameters::load<PlainHalves>(weights, strip, first, count, groups);
}
QCUTLASS_AVX2 void load_groups_avx2(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                                    ChannelParameters* groups) {
  ChannelParameters::load<F16cHalves>(weights, strip, first, count, groups);
}

}  // namespace

void load_groups(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                 ChannelParameters* groups) {
  bool const has_instructions = vector_level() != VectorLevel::kBaseline;
  (has_instructions ? load_groups_avx2 : load_groups_anywhere)(weights, strip, first, count, groups);
}

}  // namespace qcutlass::host
