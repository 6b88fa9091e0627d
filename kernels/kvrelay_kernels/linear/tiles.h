// y = x · Wᵀ with AMX: C[16 rows][16 columns] += A[16][32] · B[32][16], bfloat16 in, float32 sums.
//
// Bound: one product of 16·16·32 multiply-adds per 16 cycles, about 1 TFLOP/s on a core; with few rows the tiles of B
// arrive slower than that and it is bandwidth, so that one row costs no more here than with vectors.
// Rows never mix inside the unit and k runs in ascending order: a row's bits do not depend on its neighbours.
//
//   tiles   0 1   C of the first 16 rows, both halves of a group      4 5   A of these rows
//           2 3   C of the second 16 rows                             6 7   B, both halves
#pragma once

#include "rows.h"

#if defined(__AMX_BF16__)

namespace kvrelay {

constexpr int kTileRows = 16;
constexpr int kPrefetchBytes = 8 * kTileBytes;

/// `rows` of A and C; B is always 16 lines of 64 bytes.
inline void configure_tiles(int rows) {
  struct alignas(64) {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = (uint8_t)(tile < 6 ? rows : 16);
  }
  _tile_loadconfig(&config);
}

/// What the unit stored of one tile of C: rows of 16 sums.
struct alignas(64) TileSums {
  float sums[kTileRows * kLanes];

  KVR_INLINE void put(const Output& out, int64_t row, int64_t rows, int64_t column) const {
    for (int64_t r = 0; r < rows; r++) out.put(row + r, column, load(sums + r * kLanes));
  }
};

/// Two tiles of B after the other from panels. `first`: this pass over the group is the first; later ones find it cached.
class PanelTiles {
 public:
  explicit PanelTiles(const Panels& w) : count(w.tiles), w_(w) {}
  const int64_t count;  // along k

  KVR_INLINE const char* at(int64_t group, int64_t along, bool first) const {
    const char* b = w_.tile(group, along, 0);
    if (first)
      for (int line = 0; line < 32; line++) __builtin_prefetch(b + kPrefetchBytes + line * 64);
    return b;
  }

 private:
  const Panels w_;
};

/// … from codes, unpacked by the first pass one cell ahead of the product. A group read once goes through a ring that
/// stays in the first cache; one that is read again is kept whole.
template <int kBits>
class CodeTiles {
 public:
  CodeTiles(const Codes& w, int64_t rows)
      : count(w.cells), w_(w), mask_(rows <= 2 * kTileRows ? kRing - 1 : -1),
        memory_(unpacked((w.cells + kRing) * kUnpackedBytes)) {}
  const int64_t count;

  KVR_INLINE const char* at(int64_t group, int64_t along, bool first) const {
    if (first) {
      if (along == 0) unpack<kBits>(w_, group, 0, tiles(0));
      if (along + 1 < count) unpack<kBits>(w_, group, along + 1, tiles(along + 1));
    }
    return tiles(along);
  }

 private:
  static constexpr int64_t kRing = 4;
  KVR_INLINE char* tiles(int64_t along) const { return memory_ + (along & mask_) * kUnpackedBytes; }

  const Codes w_;
  const int64_t mask_;
  char* const memory_;
};

/// Up to 16 rows × 32 columns.
template <class Tiles>
void one_by_two(
    const Tiles& w, int64_t group, const bf16* x, int64_t x_stride, int64_t row, int64_t rows, const Output& out) {
  const bf16* a = x + row * x_stride;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t along = 0; along < w.count; along++, a += 32) {
    const char* b = w.at(group, along, row == 0);
    _tile_loadd(4, a, x_stride * 2);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  TileSums c[2];
  _tile_stored(0, c[0].sums, 64);
  _tile_stored(1, c[1].sums, 64);
  for (int half = 0; half < 2; half++) c[half].put(out, row, rows, group * kGroup + half * kLanes);
}

/// 32 rows × 32 columns: each tile that is loaded is used twice.
template <class Tiles>
void two_by_two(
    const Tiles& w, int64_t group, const bf16* x, int64_t x_stride, int64_t row, int64_t rows, const Output& out) {
  const bf16* a = x + row * x_stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t along = 0; along < w.count; along++, a += 32) {
    const char* b = w.at(group, along, row == 0);
    _tile_loadd(4, a, x_stride * 2);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTileRows * x_stride, x_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  TileSums c[4];
  _tile_stored(0, c[0].sums, 64);
  _tile_stored(1, c[1].sums, 64);
  _tile_stored(2, c[2].sums, 64);
  _tile_stored(3, c[3].sums, 64);
  for (int half = 0; half < 2; half++) {
    c[half].put(out, row, kTileRows, group * kGroup + half * kLanes);
    c[2 + half].put(out, row + kTileRows, rows - kTileRows, group * kGroup + half * kLanes);
  }
}

/// Like multiply_groups. x must have memory for `rows` rounded up to 16: rows past the last are read and thrown away.
template <class Tiles>
void multiply_groups_in_tiles(
    const Tiles& w, Share share, const bf16* x, int64_t x_stride, int64_t rows, const Output& out) {
  configure_tiles(rows < kTileRows ? (int)rows : kTileRows);
  for (int64_t group = share.begin; group < share.end; group++) {
    int64_t row = 0;
    for (; rows - row > kTileRows; row += 2 * kTileRows)
      two_by_two(w, group, x, x_stride, row, rows - row < 2 * kTileRows ? rows - row : 2 * kTileRows, out);
    if (row < rows) one_by_two(w, group, x, x_stride, row, rows - row, out);
  }
  _tile_release();
}

}  // namespace kvrelay

#endif
