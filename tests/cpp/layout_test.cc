#include "qcutlass/layout.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "reference.h"

namespace qcutlass {
namespace {

class LayoutTest : public testing::TestWithParam<Packing> {};

TEST_P(LayoutTest, EveryBitOfTheTensorBelongsToExactlyOneCode) {
  Packing const packing = GetParam();
  int const bits = bits_of(packing);
  int64_t const n_extent = 2 * layout::kTileN, k_extent = 3 * layout::tile_k(packing);
  std::set<std::pair<int64_t, int>> places;
  for (int64_t n = 0; n < n_extent; ++n) {
    for (int64_t k = 0; k < k_extent; ++k) {
      layout::Position const p = layout::position(packing, k_extent, n, k);
      ASSERT_GE(p.byte, 0);
      ASSERT_LT(p.byte, layout::packed_bytes(packing, n_extent, k_extent));
      ASSERT_TRUE(p.bit == 0 || (bits == 4 && p.bit == 4)) << p.bit;
      ASSERT_TRUE(places.emplace(p.byte, p.bit).second) << n << ", " << k;
    }
  }
  EXPECT_EQ(static_cast<int64_t>(places.size()) * bits, layout::packed_bytes(packing, n_extent, k_extent) * 8);
}

TEST_P(LayoutTest, PartialTilesAreWholeInThePackedTensor) {
  Packing const packing = GetParam();
  int const tile_k = layout::tile_k(packing);
  EXPECT_EQ(layout::packed_bytes(packing, 1, 1), 512);
  EXPECT_EQ(layout::packed_bytes(packing, 16, tile_k), 512);
  EXPECT_EQ(layout::packed_bytes(packing, 17, tile_k), 1024);
  EXPECT_EQ(layout::packed_bytes(packing, 16, tile_k + 1), 1024);
  EXPECT_EQ(layout::packed_bytes(packing, 0, tile_k), 0);
  // 2^20 x 2^20 codes: offsets beyond 32 bits.
  int64_t const big = int64_t{1} << 20;
  layout::Position const last = layout::position(packing, big, big - 1, big - 1);
  int const after = packing == Packing::kW8A8 ? 16 : 0;  // the last row's halves are swapped
  EXPECT_EQ(last.byte, (big / 8) * (big * bits_of(packing)) - 1 - after);
}

// The other packings lie as kW4A16 or kW8A16.
INSTANTIATE_TEST_SUITE_P(EachByteOrder, LayoutTest, testing::Values(Packing::kW4A16, Packing::kW8A16, Packing::kW8A8),
                         [](auto const& info) { return test::name_of(info.param); });

}  // namespace
}  // namespace qcutlass
