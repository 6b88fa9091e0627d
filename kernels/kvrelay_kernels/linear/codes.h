// The order in which quantised weights lie: cells, read one after the other.
//
//   W [n, k]  →  [n / 32 groups][k / 32 cells], padded with zeros        w = scale · code + offset
//   cell         codes    32 columns × 32 k, 512 bytes (4 bits) or 1,024 (8 bits), as 64 runs
//                scales   32 float16, or float32 where float16 would not hold them exactly
//                offsets  likewise, where the format has them
//   one scale per row: scales and offsets stand once, before the group's first cell
//
//   run          16 numbers as they lie in the tiles of panels.h, so that unpacking never moves a number sideways
//                pairs of bfloat16   run = [half][line][8 columns each]   number i: column i / 2, k = 2·line + i % 2
//                float32             run = [half][k]                      number i: column i
//   8 bits       run after run, a byte per number
//   4 bits       8 runs share 16 words: a word holds number i of each, the first in its lowest bits
//                with AMX 4 lines share 32 half words: one holds the number of a column and k of each
#pragma once

#include "panels.h"

namespace kvrelay {

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;  // bfloat16 weights meet bfloat16 activations
#else
constexpr bool kPairs = false;  // … are widened and meet float32
#endif

constexpr int kCellDepth = 32;

struct Codes {
  const char* data;
  int64_t groups, cells;  // cells along k
  int64_t code_bytes, scale_bytes;
  int32_t bits;
  bool per_row, has_offsets, wide_scales;

  int64_t cell_bytes() const { return code_bytes + (per_row ? 0 : scale_bytes); }
  int64_t group_bytes() const { return cells * cell_bytes() + (per_row ? scale_bytes : 0); }
  int64_t cell(int64_t group, int64_t along) const {
    return group * group_bytes() + (per_row ? scale_bytes : 0) + along * cell_bytes();
  }
  /// Where the scales of a cell begin, and where its offsets do.
  int64_t scales(int64_t group, int64_t along) const {
    return per_row ? group * group_bytes() : cell(group, along) + code_bytes;
  }
  int64_t offsets(int64_t group, int64_t along) const { return scales(group, along) + kGroup * scale_size(); }
  int64_t scale_size() const { return wide_scales ? 4 : 2; }
};

inline Codes codes(const Matrix& m) {
  Codes c = {};
  c.data = (const char*)m.data;
  c.groups = round_up(m.n, kGroup) / kGroup;
  c.cells = round_up(m.k, kCellDepth) / kCellDepth;
  c.bits = m.code_bits;
  c.per_row = m.per_row, c.has_offsets = m.has_offsets, c.wide_scales = m.wide_scales;
  c.code_bytes = kGroup * kCellDepth * c.bits / 8;
  c.scale_bytes = kGroup * c.scale_size() * (c.has_offsets ? 2 : 1);
  return c;
}

/// Where a run of 4-bit codes is: which 16 words, and how far up in each.
struct Nibble {
  int words, shift;
  constexpr explicit Nibble(int run)
      : words(kPairs ? run / 16 * 2 + run % 2 : run / 8), shift(4 * (kPairs ? run % 16 / 2 : run % 8)) {}
};

/// Where the code of a column and a k of a cell lies: number `i` of a run; with 4 bits so far up in a word of 32 bits.
struct Place {
  int run, i;
  int word, shift;

  Place(int column, int k) {
    const int half = column / kLanes, lane = column % kLanes;
    i = kPairs ? lane % 8 * 2 + k % 2 : lane;
    run = half * 32 + (kPairs ? k / 2 * 2 + lane / 8 : k);
#if defined(__AMX_BF16__)
    word = (half * 4 + k / 8) * kLanes + lane, shift = k % 2 * 16 + k / 2 % 4 * 4;
#else
    const Nibble nibble(run);
    word = nibble.words * kLanes + i, shift = nibble.shift;
#endif
  }
};

inline void put_code(char* cell, int32_t bits, const Place& place, int8_t code) {
  if (bits == 8) {
    cell[place.run * kLanes + place.i] = (char)code;
    return;
  }
  uint32_t word;
  std::memcpy(&word, cell + place.word * 4, 4);
  word |= (uint32_t)(code & 15) << place.shift;
  std::memcpy(cell + place.word * 4, &word, 4);
}

/// codes [n, k]; scales, offsets [n, k / 32 or 1] as the format holds them (offsets may be null). `packed` is zeroed.
inline void pack_codes(const Matrix& format, const int8_t* source, const char* scales, const char* offsets, char* packed) {
  const Codes w = codes(format);
  const int64_t size = w.scale_size(), per_row = w.per_row ? 1 : w.cells;
  for (int64_t group = 0; group < w.groups; group++)
    for (int64_t along = 0; along < w.cells; along++) {
      char* cell = packed + w.cell(group, along);
      for (int column = 0; column < kGroup; column++)
        for (int k = 0; k < kCellDepth; k++) {
          const int64_t row = group * kGroup + column, at = along * kCellDepth + k;
          if (row < format.n && at < format.k) put_code(cell, w.bits, Place(column, k), source[row * format.k + at]);
        }
      if (along >= per_row) continue;
      for (int64_t i = 0; i < kGroup && group * kGroup + i < format.n; i++) {
        const int64_t from = ((group * kGroup + i) * per_row + along) * size;
        std::memcpy(packed + w.scales(group, along) + i * size, scales + from, (size_t)size);
        if (offsets) std::memcpy(packed + w.offsets(group, along) + i * size, offsets + from, (size_t)size);
      }
    }
}

}  // namespace kvrelay
