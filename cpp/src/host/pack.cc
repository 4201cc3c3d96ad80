// Packing and unpacking: a byte permutation of each lane group (lane_group.h), or chunk by chunk (tile_rows.h).
#include "qcutlass/pack.h"

#include <algorithm>
#include <cstring>

#include "host/check.h"
#include "host/lane_group.h"
#include "host/multiversion.h"
#include "host/parallel.h"
#include "host/tile_rows.h"

namespace qcutlass::host {

namespace {

/// Codes that one range of a parallel loop should at least hold.
constexpr int64_t kGrainCodes = int64_t{1} << 20;

void check_pack(PackArguments const& arguments, int threads) {
  check_threads(threads);
  check_at_least("n", arguments.n, 0);
  check_at_least("k", arguments.k, 1);
  if (arguments.n == 0) return;
  check_not_null("codes", arguments.codes);
  check_not_null("packed", arguments.packed);
  check_at_least("codes_stride", arguments.codes_stride, arguments.n > 1 ? arguments.k : 0);
}

QCUTLASS_MULTIVERSION uint8_t bitwise_or(uint8_t const* values, int64_t count) {
  uint8_t result = 0;
  for (int64_t i = 0; i < count; ++i) result |= values[i];
  return result;
}

void check_codes(PackArguments const& arguments, int threads) {
  int const limit = 1 << bits_of(arguments.packing);
  parallel_for(arguments.n, kGrainCodes / arguments.k, threads, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      uint8_t const* row = arguments.codes + n * arguments.codes_stride;
      if (bitwise_or(row, arguments.k) < limit) continue;
      int64_t const k = std::find_if(row, row + arguments.k, [&](uint8_t code) { return code >= limit; }) - row;
      throw InvalidArgument("codes: 4-bit codes must be below " + std::to_string(limit) + ", got " +
                            std::to_string(row[k]) + " at [" + std::to_string(n) + ", " + std::to_string(k) + "]");
    }
  });
}

/// Calls visit(lower, upper, count, packed) for each lane group of a strip of 16 rows: pointers to `count` codes of
/// rows g and g + 8, null where the matrix ends before the row, and to the packed bytes.
template <Packing kPacking, class Visit>
void for_each_lane_group(PackArguments const& arguments, int64_t strip, Visit const& visit) {
  using Group = LaneGroup<kPacking>;
  int64_t const tiles_k = layout::tiles_k(kPacking, arguments.k);
  uint8_t* const packed = arguments.packed + strip * tiles_k * layout::kTileBytes;
  auto codes = [&](int64_t n, int64_t k) {
    return n < arguments.n ? arguments.codes + n * arguments.codes_stride + k : nullptr;
  };
  for (int g = 0; g < Group::kGroups; ++g) {
    int64_t const n = strip * layout::kTileN + g;
    for (int64_t tile = 0; tile < tiles_k; ++tile) {
      int64_t const k = tile * Group::kTileK;
      auto const count = static_cast<size_t>(std::min<int64_t>(Group::kTileK, arguments.k - k));
      visit(codes(n, k), codes(n + 8, k), count, packed + tile * layout::kTileBytes + g * Group::kBytes);
    }
  }
}

template <Packing kPacking>
void pack_strip(PackArguments const& arguments, int64_t strip) {
  using Group = LaneGroup<kPacking>;
  auto const visit = [](uint8_t const* lower, uint8_t const* upper, size_t count, uint8_t* packed) {
    typename Group::Codes codes{};
    if (lower != nullptr) std::memcpy(codes.lower, lower, count);
    if (upper != nullptr) std::memcpy(codes.upper, upper, count);
    Group::pack(codes, packed);
  };
  for_each_lane_group<kPacking>(arguments, strip, visit);
}

template <Packing kPacking>
void unpack_strip(PackArguments const& arguments, int64_t strip) {
  using Group = LaneGroup<kPacking>;
  auto const visit = [](uint8_t* lower, uint8_t* upper, size_t count, uint8_t const* packed) {
    typename Group::Codes codes;
    Group::unpack(packed, codes);
    if (lower != nullptr) std::memcpy(lower, codes.lower, count);
    if (upper != nullptr) std::memcpy(upper, codes.upper, count);
  };
  for_each_lane_group<kPacking>(arguments, strip, visit);
}

/// Calls visit(codes, count, packed) for each chunk of a strip of 16 rows: a pointer to its `count` codes, null where
/// there are none, and to the packed bytes. Two rows at a time: they share cache lines.
template <class Visit>
void for_each_chunk(PackArguments const& arguments, int64_t strip, Visit const& visit) {
  int64_t const tiles_k = layout::tiles_k(Packing::kW8A8, arguments.k);
  for (int first = 0; first < layout::kTileN; first += 2) {
    uint8_t* packed = arguments.packed + strip * tiles_k * layout::kTileBytes;
    for (int64_t tile = 0; tile < tiles_k; ++tile, packed += layout::kTileBytes) {
      for (int i = 0; i < 2 * TileRows::kChunks; ++i) {
        int const row = first + i / TileRows::kChunks, chunk = i % TileRows::kChunks;
        int64_t const n = strip * layout::kTileN + row, k = tile * TileRows::kTileK + chunk * TileRows::kChunk;
        bool const exists = n < arguments.n && k < arguments.k;
        visit(exists ? arguments.codes + n * arguments.codes_stride + k : nullptr,
              static_cast<size_t>(std::min<int64_t>(arguments.k - k, TileRows::kChunk)),
              packed + TileRows::byte(row, chunk));
      }
    }
  }
}

inline void copy_chunk(uint8_t* to, uint8_t const* from, size_t count) {
  if (count == TileRows::kChunk) {
    std::memcpy(to, from, TileRows::kChunk);  // without a call
  } else {
    std::memcpy(to, from, count);
  }
}

template <>
void pack_strip<Packing::kW8A8>(PackArguments const& arguments, int64_t strip) {
  for_each_chunk(arguments, strip, [](uint8_t const* codes, size_t count, uint8_t* packed) {
    uint8_t chunk[TileRows::kChunk] = {};
    if (codes != nullptr) copy_chunk(chunk, codes, count);
    std::memcpy(packed, chunk, sizeof(chunk));
  });
}

template <>
void unpack_strip<Packing::kW8A8>(PackArguments const& arguments, int64_t strip) {
  for_each_chunk(arguments, strip, [](uint8_t* codes, size_t count, uint8_t const* packed) {
    if (codes != nullptr) copy_chunk(codes, packed, count);
  });
}

template <class Strip>
void for_each_strip(PackArguments const& arguments, int threads, Strip const& strip) {
  int64_t const grain = kGrainCodes / layout::kTileN / arguments.k;
  parallel_for(layout::tiles_n(arguments.n), grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) strip(arguments, i);
  });
}

}  // namespace

void pack(PackArguments const& arguments, int threads) {
  check_pack(arguments, threads);
  switch (arguments.packing) {
    case Packing::kW4A8:
    case Packing::kW4A16:
    case Packing::kE2M1A16:
      check_codes(arguments, threads);
      return for_each_strip(arguments, threads, pack_strip<Packing::kW4A16>);
    case Packing::kW8A16:
    case Packing::kE4M3A16: return for_each_strip(arguments, threads, pack_strip<Packing::kW8A16>);
    case Packing::kW8A8: return for_each_strip(arguments, threads, pack_strip<Packing::kW8A8>);
  }
}

void unpack(PackArguments const& arguments, int threads) {
  check_pack(arguments, threads);
  switch (arguments.packing) {
    case Packing::kW4A8:
    case Packing::kW4A16:
    case Packing::kE2M1A16: return for_each_strip(arguments, threads, unpack_strip<Packing::kW4A16>);
    case Packing::kW8A16:
    case Packing::kE4M3A16: return for_each_strip(arguments, threads, unpack_strip<Packing::kW8A16>);
    case Packing::kW8A8: return for_each_strip(arguments, threads, unpack_strip<Packing::kW8A8>);
  }
}

}  // namespace qcutlass::host
