// Selection for few rows of int4 in groups of 128, and for formats that are scaled in fp32 or have minimums.
#include "selection.h"

namespace qcutlass::selection {
namespace {

/// Fp8 weights in groups of 128 with fp32 scales.
GemmArguments e4m3_problem(int64_t m, int64_t n, int64_t k) {
  GemmArguments a = weight_only_problem(m, n, k, 128, DType::kFloat16, Packing::kE4M3A16);
  a.weights.scale_type = DType::kFloat32;
  return a;
}

/// Groups of 16 in super-blocks of 256.
GemmArguments q3_k_problem(int64_t m, int64_t n, int64_t k) {
  GemmArguments a = weight_only_problem(m, n, k, 16);
  a.weights.scale_type = DType::kInt8;
  a.weights.super_groups = 16;
  return a;
}

/// The same with minimums.
GemmArguments q2_k_problem(int64_t m, int64_t n, int64_t k) {
  GemmArguments a = q3_k_problem(m, n, k);
  a.weights.scale_type = a.weights.minimum_type = DType::kUInt8;
  a.weights.minimum_stride = n;
  return a;
}

// Times on an H200, microseconds, each row of one run.

TEST(Formats, FewRowsOfInt4StreamAsMeasured) {
  expect_choices_among_the_best(
      [](int64_t m, int64_t n, int64_t k) { return weight_only_problem(m, n, k); },
      {{28672, 4096, 1, {{"n224m8k512w8", 1, 17.2}, {"n128m8k512w8", 1, 18.0}, {"n64m8k512w4", 1, 18.3}}},
       {28672, 4096, 8, {{"n224m8k512w8", 1, 17.8}, {"n128m8k512w8", 1, 18.5}, {"n64m8k512w4", 1, 20.6}}},
       {4096, 14336, 1, {{"n32m8k2048w16", 1, 9.1}, {"n32m8k1024w8", 1, 9.5}, {"n64m8k1024w8", 2, 10.3}}},
       {8192, 8192, 8, {{"n64m8k1024w8", 1, 11.1}, {"n64m8k512w4", 2, 12.0}, {"n32m8k1024w8", 1, 12.7}}},
       {4096, 4096, 16, {{"n32m16k1024w8", 1, 5.7}, {"n64m16k1024w8", 2, 6.1}, {"n48m16k1024w8", 1, 6.2}}},
       {28672, 4096, 16, {{"n224m16k512w8", 1, 20.2}, {"n64m16k512w4", 1, 24.8}, {"n80m16k1024w8", 1, 26.7}}},
       {4096, 14336, 16, {{"n64m16k1024w8", 2, 12.0}, {"n32m16k1024w8", 1, 12.8}, {"n64m16k512w4", 2, 13.3}}},
       {8192, 8192, 16, {{"n64m16k1024w8", 1, 12.4}, {"n64m16k512w4", 2, 14.2}, {"n80m16k1024w8", 1, 15.8}}},
       {4096, 4096, 32, {{"n64m16k1024w8", 1, 7.3}, {"n64m16k512w4", 1, 7.6}, {"n64m32k512w8", 2, 8.5}}}});
}

/// Of random layers, where blocks pile up unless launches are spread, some would start when others end, or four share
/// k.
TEST(Formats, RandomLayersOfInt4StreamAsMeasured) {
  expect_choices_among_the_best(
      [](int64_t m, int64_t n, int64_t k) { return weight_only_problem(m, n, k); },
      {{14464, 3328, 4, {{"n64m8k512w4", 1, 9.2}, {"n128m8k512w8", 1, 9.6}, {"n224m8k512w8", 2, 10.5}}},
       {15808, 8256, 4, {{"n64m8k512w4", 1, 19.3}, {"n128m8k512w8", 2, 21.1}, {"n32m8k1024w8", 1, 21.9}}},
       {11200, 2048, 16, {{"n64m16k512w4", 1, 7.0}, {"n224m8k512w8", 1, 8.5}, {"n48m16k1024w8", 1, 9.5}}},
       {1664, 11840, 16, {{"n64m16k1024w8", 4, 7.1}, {"n64m16k512w4", 4, 7.4}, {"n32m16k1024w8", 2, 7.8}}},
       // short ones: streams take less than the loop with one ring, though a block has one stage or two
       {4160, 576, 64, {{"n64m32k512w8", 1, 3.9}, {"n64m16k512w4", 1, 4.0}, {"n64m16k128", 1, 4.7}}},
       {15232, 768, 16, {{"n128m8k512w8", 1, 4.8}, {"n64m16k512w4", 1, 4.8}, {"n64m16k128", 1, 5.5}}},
       // tiles of 80 channels with two stages, whose next launch finds room
       {9600, 1600, 4, {{"n80m8k1024w8", 1, 4.4}, {"n48m8k1024w8", 1, 4.7}}},
       {10048, 2560, 8, {{"n80m8k1024w8", 1, 6.3}, {"n64m8k512w4", 1, 6.7}}}});
}

TEST(Formats, ChoicesOfFp8WeightsAreAsMeasured) {
  expect_choices_among_the_best(
      e4m3_problem,
      {{28672, 4096, 1, {{"n64m8k512w4", 1, 35.8}, {"n32m8k1024w8", 1, 36.0}, {"n64m16k512w4", 1, 40.1}}},
       {28672, 4096, 16, {{"n64m16k512w4", 1, 43.8}, {"n256m32k128", 1, 45.9}, {"n128m128k128", 1, 70.2}}},
       {28672, 4096, 64, {{"n256m64k64", 1, 50.9}, {"n128m64k128", 1, 56.1}, {"n128m128k128", 1, 70.6}}},
       {8192, 8192, 1, {{"n64m8k512w4", 1, 18.1}, {"n32m8k1024w8", 1, 18.8}, {"n64m16k512w4", 1, 19.1}}},
       {8192, 8192, 16, {{"n64m16k512w4", 1, 20.5}, {"n64m8k512w4", 1, 27.6}, {"n256m32k128", 4, 29.4}}},
       {8192, 8192, 64, {{"n128m64k128", 2, 31.5}, {"n256m64k64", 4, 32.0}, {"n128m128k128", 2, 40.4}}}});
}

TEST(Formats, ChoicesOfGroupsOf16AreAsMeasured) {
  expect_choices_among_the_best(
      q2_k_problem, {{28672, 4096, 1, {{"n32m8k1024w8", 1, 36.2}, {"n64m8k512w4", 1, 38.8}, {"n128m8k512w8", 1, 39.8}}},
                     {28672, 4096, 16, {{"n256m64k64", 1, 63.4}, {"n128m8k512w8", 1, 79.2}, {"n128m128k128", 1, 85.2}}},
                     {28672, 4096, 64, {{"n256m64k64", 1, 64.6}, {"n128m128k128", 1, 86.3}, {"n128m256k64", 1, 109.4}}},
                     {8192, 8192, 1, {{"n32m8k1024w8", 1, 19.4}, {"n64m8k512w4", 2, 21.6}, {"n128m8k512w8", 2, 21.9}}},
                     {8192, 8192, 16, {{"n256m64k64", 4, 37.0}, {"n128m8k512w8", 1, 38.2}, {"n32m8k1024w8", 1, 46.2}}},
                     {8192, 8192, 64, {{"n256m64k64", 4, 38.5}, {"n128m128k128", 2, 47.4}, {"n128m256k64", 2, 60.6}}}});
  expect_choices_among_the_best(
      q3_k_problem,
      {{28672, 4096, 1, {{"n32m8k1024w8", 1, 29.4}, {"n64m8k512w4", 1, 31.1}, {"n128m8k512w8", 1, 31.1}}},
       {28672, 4096, 16, {{"n256m64k64", 1, 56.1}, {"n128m8k512w8", 1, 60.7}, {"n128m128k128", 1, 76.2}}},
       {28672, 4096, 64, {{"n256m64k64", 1, 57.5}, {"n128m128k128", 1, 77.4}, {"n128m256k64", 1, 103.3}}},
       {8192, 8192, 1, {{"n32m8k1024w8", 1, 14.9}, {"n128m8k512w8", 2, 17.2}, {"n64m8k512w4", 2, 17.2}}},
       {8192, 8192, 16, {{"n128m8k512w8", 1, 28.9}, {"n256m64k64", 4, 32.9}, {"n32m8k1024w8", 1, 36.9}}},
       {8192, 8192, 64, {{"n256m64k64", 4, 34.8}, {"n128m128k128", 2, 42.5}, {"n128m256k64", 2, 57.6}}}},
      1.1);  // 6 and 8 % are lost with 1 and 16 rows of 28672 x 4096
}

}  // namespace
}  // namespace qcutlass::selection
