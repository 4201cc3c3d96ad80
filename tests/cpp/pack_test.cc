#include "qcutlass/pack.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "qcutlass/error.h"
#include "reference.h"

namespace qcutlass {
namespace {

constexpr uint8_t kPoison = 0xa5;

std::vector<uint8_t> pack(Packing packing, int64_t n, int64_t k, std::vector<uint8_t> codes, int threads = 1) {
  std::vector<uint8_t> packed(layout::packed_bytes(packing, n, k), kPoison);
  host::pack({packing, n, k, codes.data(), k, packed.data()}, threads);
  return packed;
}

// The expected bytes below are written from the description of the layout (PTX fragment order, PTX swizzle), not with
// layout.h.

struct SingleCode {
  int64_t n, k, byte;
  bool high_nibble;
};

TEST(PackGolden, W4A16PlacesSingleCodes) {
  // 17 x 65: tiles (0, 0), (0, 1), (1, 0), (1, 1) of 512 bytes; lane 4g + t is 16 bytes, a k16 step 4 bytes of it.
  SingleCode const cases[] = {
      {0, 0, 0, false},       // lane 0, pair 0, first element
      {8, 0, 0, true},        // row g + 8: pair 1
      {0, 8, 1, false},       // k + 8: pair 2
      {8, 8, 1, true},        // pair 3
      {0, 1, 2, false},       // second elements sit four nibbles up
      {8, 1, 2, true},        //
      {0, 9, 3, false},       //
      {8, 9, 3, true},        //
      {0, 2, 16, false},      // t = 1
      {3, 0, 192, false},     // g = 3
      {0, 16, 4, false},      // step 1
      {5, 26, 341, false},    // lane 21, step 1, k16 = 10: pair 2
      {13, 27, 343, true},    // lane 21, step 1, k16 = 11: pair 3, second element
      {0, 63, 63, false},     // lane 3, step 3, k16 = 15
      {15, 63, 511, true},    // lane 31: the last nibble of the tile
      {0, 64, 512, false},    // next tile along k
      {16, 0, 1024, false},   // next tile along n
      {16, 64, 1536, false},  //
  };
  for (SingleCode const& c : cases) {
    SCOPED_TRACE("n = " + std::to_string(c.n) + ", k = " + std::to_string(c.k));
    std::vector<uint8_t> codes(17 * 65);
    codes[c.n * 65 + c.k] = 9;
    std::vector<uint8_t> expected(4 * 512);
    expected[c.byte] = c.high_nibble ? 0x90 : 0x09;
    EXPECT_EQ(pack(Packing::kW4A16, 17, 65, codes), expected);
  }
}

TEST(PackGolden, W4A16WholeTile) {
  // Rows 0-7 hold k % 16, rows 8-15 hold 15 - k % 16: all k16 steps and all g look alike, the four t differ.
  std::vector<uint8_t> codes(16 * 64);
  for (int n = 0; n < 16; ++n) {
    for (int k = 0; k < 64; ++k) codes[n * 64 + k] = static_cast<uint8_t>(n < 8 ? k % 16 : 15 - k % 16);
  }
  uint8_t const words[4][4] = {
      {0xf0, 0x78, 0xe1, 0x69}, {0xd2, 0x5a, 0xc3, 0x4b}, {0xb4, 0x3c, 0xa5, 0x2d}, {0x96, 0x1e, 0x87, 0x0f}};
  std::vector<uint8_t> expected;
  for (int lane = 0; lane < 32; ++lane) {
    for (int step = 0; step < 4; ++step) expected.insert(expected.end(), words[lane % 4], words[lane % 4] + 4);
  }
  EXPECT_EQ(pack(Packing::kW4A16, 16, 64, codes), expected);
}

/// 16 x 32 codes: 16 n + k in the first k16 step, their complements in the second.
std::vector<uint8_t> eight_bit_tile() {
  std::vector<uint8_t> codes(16 * 32);
  for (int n = 0; n < 16; ++n) {
    for (int k = 0; k < 32; ++k)
      codes[n * 32 + k] = static_cast<uint8_t>(k < 16 ? 16 * n + k : 255 - (16 * n + k - 16));
  }
  return codes;
}

std::vector<uint8_t> lane_bytes(std::vector<uint8_t> const& packed, int lane) {
  return {packed.begin() + 16 * lane, packed.begin() + 16 * (lane + 1)};
}

TEST(PackGolden, W8A16Lanes) {
  std::vector<uint8_t> const packed = pack(Packing::kW8A16, 16, 32, eight_bit_tile());
  using Bytes = std::vector<uint8_t>;
  EXPECT_EQ(lane_bytes(packed, 0), (Bytes{0x00, 0x01, 0x80, 0x81, 0x08, 0x09, 0x88, 0x89,  //
                                          0xff, 0xfe, 0x7f, 0x7e, 0xf7, 0xf6, 0x77, 0x76}));
  EXPECT_EQ(lane_bytes(packed, 1), (Bytes{0x02, 0x03, 0x82, 0x83, 0x0a, 0x0b, 0x8a, 0x8b,  //
                                          0xfd, 0xfc, 0x7d, 0x7c, 0xf5, 0xf4, 0x75, 0x74}));
  EXPECT_EQ(lane_bytes(packed, 31), (Bytes{0x76, 0x77, 0xf6, 0xf7, 0x7e, 0x7f, 0xfe, 0xff,  //
                                           0x89, 0x88, 0x09, 0x08, 0x81, 0x80, 0x01, 0x00}));
}

std::vector<uint8_t> counting(int first, int step) {
  std::vector<uint8_t> bytes;
  for (int i = 0; i < 16; ++i) bytes.push_back(static_cast<uint8_t>(first + i * step));
  return bytes;
}

TEST(PackGolden, W8A8Rows) {
  std::vector<uint8_t> const packed = pack(Packing::kW8A8, 16, 32, eight_bit_tile());
  EXPECT_EQ(lane_bytes(packed, 0), counting(0x00, 1));    // row 0: in order
  EXPECT_EQ(lane_bytes(packed, 1), counting(0xff, -1));   //
  EXPECT_EQ(lane_bytes(packed, 6), counting(0x30, 1));    // row 3
  EXPECT_EQ(lane_bytes(packed, 8), counting(0xbf, -1));   // row 4: its second half first
  EXPECT_EQ(lane_bytes(packed, 9), counting(0x40, 1));    //
  EXPECT_EQ(lane_bytes(packed, 15), counting(0x70, 1));   // row 7
  EXPECT_EQ(lane_bytes(packed, 16), counting(0x80, 1));   // row 8
  EXPECT_EQ(lane_bytes(packed, 24), counting(0x3f, -1));  // row 12
  EXPECT_EQ(lane_bytes(packed, 31), counting(0xf0, 1));   // row 15
}

TEST(PackGolden, PaddingIsZero) {
  std::vector<uint8_t> expected(512);
  expected[0] = 7;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16, Packing::kW8A8})
    EXPECT_EQ(pack(packing, 1, 1, {7}), expected);
}

struct RoundTripCase {
  Packing packing;
  int64_t n, k;
};

class RoundTripTest : public testing::TestWithParam<RoundTripCase> {};

TEST_P(RoundTripTest, UnpackInvertsPack) {
  auto const [packing, n, k] = GetParam();
  int64_t const codes_stride = k + 5;
  std::mt19937 random(static_cast<unsigned>(n * 1000 + k));
  std::uniform_int_distribution<int> code(0, (1 << bits_of(packing)) - 1);
  // Codes beyond a row's end are out of range for 4 bits: reading them would be seen.
  std::vector<uint8_t> codes(n * codes_stride, 0xff);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < k; ++i) codes[row * codes_stride + i] = static_cast<uint8_t>(code(random));
  }

  for (int threads : {1, 3}) {
    std::vector<uint8_t> packed(layout::packed_bytes(packing, n, k) + 16, kPoison);
    host::pack({packing, n, k, codes.data(), codes_stride, packed.data()}, threads);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        layout::Position const p = layout::position(packing, k, row, i);
        ASSERT_EQ(packed[p.byte] >> p.bit & ((1 << bits_of(packing)) - 1), codes[row * codes_stride + i]);
      }
    }
    for (int i = 0; i < 16; ++i) ASSERT_EQ(packed[layout::packed_bytes(packing, n, k) + i], kPoison);

    std::vector<uint8_t> unpacked(n * codes_stride, 0xff);
    host::unpack({packing, n, k, unpacked.data(), codes_stride, packed.data()}, threads);
    EXPECT_EQ(unpacked, codes);  // the gaps between rows included: nothing is written there
  }
}

std::vector<RoundTripCase> round_trips() {
  std::vector<RoundTripCase> result;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16, Packing::kW8A8}) {
    for (auto const& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {16, 64}, {7, 31}, {8, 32}, {9, 33}, {15, 63}, {17, 65}, {33, 129}, {2048, 1100}}) {
      result.push_back({packing, n, k});
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Shapes, RoundTripTest, testing::ValuesIn(round_trips()), [](auto const& info) {
  RoundTripCase const& c = info.param;
  return test::name_of(c.packing) + "_n" + std::to_string(c.n) + "_k" + std::to_string(c.k);
});

TEST(Pack, RejectsCodesOutOfRangeBeforeWriting) {
  std::vector<uint8_t> codes(40 * 70, 15);
  codes[33 * 70 + 69] = 16;
  codes[35 * 70 + 2] = 200;
  std::vector<uint8_t> packed(layout::packed_bytes(Packing::kW4A16, 40, 70), kPoison);
  try {
    host::pack({Packing::kW4A16, 40, 70, codes.data(), 70, packed.data()}, 1);
    FAIL() << "no exception";
  } catch (InvalidArgument const& error) {
    EXPECT_STREQ(error.what(), "codes: 4-bit codes must be below 16, got 16 at [33, 69]");
  }
  EXPECT_EQ(packed, std::vector<uint8_t>(packed.size(), kPoison));
}

TEST(Pack, ChecksArguments) {
  std::vector<uint8_t> codes(64), packed(512);
  PackArguments const good{Packing::kW4A16, 1, 64, codes.data(), 64, packed.data()};
  host::pack(good, 1);
  auto const rejects = [&](auto change) {
    PackArguments bad = good;
    change(bad);
    EXPECT_THROW(host::pack(bad, 1), InvalidArgument);
    EXPECT_THROW(host::unpack(bad, 1), InvalidArgument);
  };
  rejects([](PackArguments& a) { a.n = -1; });
  rejects([](PackArguments& a) { a.k = 0; });
  rejects([](PackArguments& a) { a.codes = nullptr; });
  rejects([](PackArguments& a) { a.packed = nullptr; });
  rejects([](PackArguments& a) { a.n = 2, a.codes_stride = 63; });
  EXPECT_THROW(host::pack(good, 0), InvalidArgument);
  host::pack({Packing::kW4A16, 0, 64, nullptr, 64, nullptr}, 1);  // no rows: nothing to read or write
}

}  // namespace
}  // namespace qcutlass
