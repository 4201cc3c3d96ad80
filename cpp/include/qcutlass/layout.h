// THE packed-weight layout: where the code of weight (n, k) lies in a packed tensor.
//
// Everything that packs, unpacks, reads or checks packed weights derives from this file.
//
// The product is computed as C^T[N, M] = W[N, K] . A^T[K, M], with the weights as operand A of the tensor-core
// instruction. (8-by-8-bit products on sm_90a have them as operand B.)
//
//   packed tensor   bytes [tiles_n][tiles_k][32][16] (torch: uint8; kW8A8: int8 or float8_e4m3fn),
//                   tiles_n = ceil(N / 16), tiles_k = ceil(K / kTileK)
//   tile            16 channels x kTileK k: 512 bytes (kTileK = 64 for 4-bit codes, 32 for 8-bit codes)
//
// With 16-bit activations weights are converted in registers, so a tile is the instruction's A fragment, register for
// register: each of 32 lanes has 16 bytes of its own, and a warp reads a tile with one coalesced load. The same bytes
// serve mma.sync and, warp by warp, wgmma with operand A in registers.
//
//   lane            4g + t, as in the PTX fragment tables: g = row % 8, t picks a pair of k
//
// With 8-bit weights and activations weights are multiplied as they are, so a tile is what instructions read from
// shared memory: 16 rows of 32 bytes in the 32-byte swizzle of wgmma's descriptors and of TMA. wgmma reads it as either
// operand, mma.sync through ldmatrix, without bank conflicts.
//
// Padding codes (n >= N or k >= K inside a tile) are zero; no result depends on them where scales are finite.
#pragma once

#include <cstdint>

#include "qcutlass/types.h"

namespace qcutlass::layout {

/// Version of the byte order below. A change of any byte's meaning is a new version.
constexpr int kVersion = 2;

constexpr int kLanes = 32;
constexpr int kLaneBytes = 16;
constexpr int kTileBytes = kLanes * kLaneBytes;
constexpr int kTileN = 16;

/// k extent of a tile: the 512 bytes hold 16 channels.
constexpr int tile_k(Packing packing) { return kTileBytes * 8 / bits_of(packing) / kTileN; }

/// Whether a tile is the instruction's A fragment, to be converted in registers; otherwise it is rows in shared memory.
constexpr bool in_fragment_order(Packing packing) { return packing != Packing::kW8A8; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t tiles_n(int64_t n) { return ceil_div(n, kTileN); }
constexpr int64_t tiles_k(Packing packing, int64_t k) { return ceil_div(k, tile_k(packing)); }
constexpr int64_t packed_bytes(Packing packing, int64_t n, int64_t k) {
  return tiles_n(n) * tiles_k(packing, k) * kTileBytes;
}

/// Place of a code: its byte, and the bit of that byte where it starts.
struct Position {
  int64_t byte;
  int bit;
};

/// Place of the code of (row, k) inside a tile; 0 <= row < kTileN, 0 <= k < tile_k(packing).
constexpr Position position_in_tile(Packing packing, int row, int k) {
  if (!in_fragment_order(packing)) {
    // The swizzle (PTX ISA, "Swizzling modes"): bit 4 of an address, the 16-byte chunk of a row, ^= bit 7.
    int const chunk = k / 16 ^ row / 4 % 2;
    return {row * 32 + chunk * 16 + k % 16, 0};
  }
  int const g = row % 8, second = row / 8;  // mma: a lane has rows g (second = 0) and g + 8 (second = 1)
  // m16n8k16 A fragment: register `pair` = 2 * k_half + second holds k = 8 * k_half + 2t and the next one.
  int const t = k % 8 / 2, step = k / 16, k_half = k % 16 / 8, pair = 2 * k_half + second, odd = k % 2;
  int const lane_byte = (4 * g + t) * kLaneBytes;
  if (bits_of(packing) == 8) {
    // Natural byte order: PRMT with 0x64 (or 0x43) interleaves bytes (2 * pair, 2 * pair + 1) into a pair of 16-bit
    // values.
    return {lane_byte + step * 8 + pair * 2 + odd, 0};
  }
  // One 32-bit word a k16 step; pair p in nibbles p and p + 4, so that one LOP3 with mask 0x000f000f or 0x00f000f0 on
  // the word and on the word >> 8 yields the four registers: row g always from the low form, row g + 8 always from the
  // high form.
  int const nibble = pair + 4 * odd;
  return {lane_byte + step * 4 + nibble / 2, nibble % 2 * 4};
}

/// Place of the code of weight (n, k) in the packed tensor of a matrix with `k_extent` columns.
constexpr Position position(Packing packing, int64_t k_extent, int64_t n, int64_t k) {
  int const tile_width = tile_k(packing);
  int64_t const tile = n / kTileN * tiles_k(packing, k_extent) + k / tile_width;
  Position const p = position_in_tile(packing, static_cast<int>(n % kTileN), static_cast<int>(k % tile_width));
  return {tile * kTileBytes + p.byte, p.bit};
}

static_assert(tile_k(Packing::kW4A16) == 64 && tile_k(Packing::kW8A16) == 32 && tile_k(Packing::kW8A8) == 32);

}  // namespace qcutlass::layout
