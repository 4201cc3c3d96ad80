// A random packed weight matrix and what it means.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "qcutlass/pack.h"
#include "reference.h"

namespace qcutlass::test {

struct WeightCase {
  Packing packing;
  int64_t n, k, group_size;
  DType scale_type;
  DType zero_type;           ///< or of the minimums
  bool minimums = false;     ///< and scales of either sign, and of 0
  int64_t super_groups = 0;  ///< groups of a super-block, beside types of integers; 0: one level
};

class RandomWeights {
 public:
  RandomWeights(WeightCase const& c, unsigned seed) : codes_(c.n * c.k) {
    std::mt19937 random(seed);
    int const levels = 1 << bits_of(c.packing);
    for (uint8_t& code : codes_) code = static_cast<uint8_t>(random() % levels);
    packed_.resize(layout::packed_bytes(c.packing, c.n, c.k));
    host::pack({c.packing, c.n, c.k, codes_.data(), c.k, packed_.data()}, 1);

    arguments_.packing = c.packing;
    arguments_.n = c.n;
    arguments_.k = c.k;
    arguments_.group_size = c.group_size;
    arguments_.packed = packed_.data();
    arguments_.scale_type = c.scale_type;
    arguments_.scale_stride = c.n + 3;
    scales_ = Array(c.scale_type, arguments_.groups() * arguments_.scale_stride);
    arguments_.scales = scales_.data();
    int64_t const offset_stride = c.n + 1, offsets = arguments_.groups() * offset_stride;
    offsets_ = Array(c.zero_type, offsets);
    if (c.minimums) {
      arguments_.minimum_type = c.zero_type;
      arguments_.minimum_stride = offset_stride;
      arguments_.minimums = offsets_.data();
    } else {
      arguments_.zero_type = c.zero_type;
      arguments_.zero_stride = offset_stride;
      arguments_.zeros = c.zero_type == DType::kNone ? nullptr : offsets_.data();
    }

    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    if (c.super_groups != 0) {
      fill_super_blocks(c, random, uniform);
      return;
    }
    for (int64_t i = 0; i < arguments_.groups() * arguments_.scale_stride; ++i)
      scales_.set(i, (0.001 + 0.01 * uniform(random)) * (c.minimums ? std::min(int(random() % 5) - 1, 1) : 1));
    if (c.zero_type == DType::kNone) return;
    for (int64_t i = 0; i < offsets; ++i) {
      double const zero = uniform(random) * (c.zero_type == DType::kInt8 ? 127 : levels - 1);
      if (c.minimums)
        offsets_.set(i, zero * 0.01);
      else
        offsets_.set(i, is_floating(c.zero_type) ? zero : std::floor(zero) - (c.zero_type == DType::kInt32 ? 3 : 0));
    }
  }
  RandomWeights(RandomWeights const&) = delete;

  WeightArguments const& arguments() const { return arguments_; }

  /// The weight as scheme.h defines it: fp32 operations, done here as double operations rounded to fp32 (exact: a
  /// difference or product of two floats, rounded to double and then to float, is the correctly rounded float).
  double weight(int64_t n, int64_t k) const {
    int64_t const group = k / arguments_.group_size;
    double const code = codes_[n * arguments_.k + k];
    double const scale = scales_[group * arguments_.scale_stride + n] * super(super_scales_, group, n);
    if (arguments_.has_minimums())
      return static_cast<float>(code * scale -
                                offsets_[group * arguments_.minimum_stride + n] * super(super_minimums_, group, n));
    double const zero = arguments_.zero_type == DType::kNone ? symmetric_zero(arguments_.packing)
                                                             : offsets_[group * arguments_.zero_stride + n];
    double const difference = static_cast<float>(code - zero);
    return static_cast<float>(difference * scale);
  }

 private:
  /// Integers of all their types, and numbers of super-blocks of either sign.
  void fill_super_blocks(WeightCase const& c, std::mt19937& random, std::uniform_real_distribution<double>& uniform) {
    arguments_.super_groups = c.super_groups;
    int64_t const stride = c.n + 2, count = arguments_.super_blocks() * stride;
    super_scales_ = super_minimums_ = Array(DType::kFloat16, count);
    for (int64_t i = 0; i < count; ++i) {
      super_scales_.set(i, (uniform(random) - 0.5) * 1e-4);
      super_minimums_.set(i, uniform(random) * 1e-3);
    }
    arguments_.super_scales = super_scales_.data();
    arguments_.super_scale_stride = stride;
    if (c.minimums) {
      arguments_.super_minimums = super_minimums_.data();
      arguments_.super_minimum_stride = stride;
    }
    auto const integer = [&](DType type) { return int(random() % 256) - (type == DType::kInt8 ? 128 : 0); };
    for (int64_t i = 0; i < arguments_.groups() * arguments_.scale_stride; ++i) scales_.set(i, integer(c.scale_type));
    if (!c.minimums) return;
    for (int64_t i = 0; i < arguments_.groups() * arguments_.minimum_stride; ++i) offsets_.set(i, integer(c.zero_type));
  }

  double super(Array const& supers, int64_t group, int64_t n) const {
    if (!arguments_.has_super_blocks()) return 1;
    return supers[group / arguments_.super_groups * arguments_.super_scale_stride + n];
  }

  std::vector<uint8_t> codes_, packed_;
  Array scales_, offsets_, super_scales_, super_minimums_;
  WeightArguments arguments_;
};

inline std::string name_of(WeightCase const& c) {
  return name_of(c.packing) + "_n" + std::to_string(c.n) + "_k" + std::to_string(c.k) + "_g" +
         std::to_string(c.group_size) + "_s_" + name_of(c.scale_type) + (c.minimums ? "_m_" : "_z_") +
         name_of(c.zero_type) + (c.super_groups == 0 ? "" : "_of_" + std::to_string(c.super_groups));
}

inline std::vector<DType> zero_types() {
  return {DType::kNone, DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kUInt8, DType::kInt8, DType::kInt32};
}

}  // namespace qcutlass::test
