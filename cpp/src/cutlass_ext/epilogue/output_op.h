// The output operator of each kind of product, and where sums go that a later kernel adds.
#pragma once

#include <type_traits>

#include "cutlass_ext/epilogue/blockwise_output.h"
#include "cutlass_ext/epilogue/scaled_sums.h"
#include "plan/footprint.h"

namespace cutlass::epilogue::thread {

/// The output operator for each scale mode. An operator's Params are made from OutputArguments.
template <class Element, class Sum, qcutlass::ScaleMode kMode>
using OutputOpOf =
    std::conditional_t<qcutlass::is_blockwise(kMode), BlockwiseOutput,
                       std::conditional_t<kMode == qcutlass::ScaleMode::kNone || qcutlass::is_promoted(kMode),
                                          ScaledSums<Sum>, BiasActivation<Element>>>;

/// Where blocks that share k leave their sums for a later kernel to add: [share][token][stride], from a first channel
/// and token of the product on. `data` is null if they do not.
template <class Sum_>
struct PartialSums {
  using Sum = Sum_;
  Sum* data;
  int64_t stride;
  int channel, token;

  /// The sums of one share.
  CUTLASS_HOST_DEVICE PartialSums of(int share, int tokens) const {
    return {data + int64_t(share) * (tokens - token) * stride, stride, channel, token};
  }
};

}  // namespace cutlass::epilogue::thread
