// Attention of the last token of each sequence, for grouped heads.
#pragma once

#include "qcutlass/decoder_block.h"

namespace qcutlass::host {

/// softmax(scaling * queries . keys) . values over all tokens of the sequence, in fp32 and rounded once; queries and
/// out are [rows, heads, size] without gaps.
void attend_to_all(DecoderBlock const& block, BlockToken const& token, void const* queries, void* out, int threads);

}  // namespace qcutlass::host
