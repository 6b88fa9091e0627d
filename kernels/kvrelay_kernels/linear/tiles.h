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

/// Up to 16 rows × 32 columns.
inline void one_by_two(
    const Panels& w, int64_t group, const bf16* x, int64_t x_stride, int64_t row, int64_t rows, const Output& out) {
  const char* b = w.tile(group, 0, 0);
  const bf16* a = x + row * x_stride;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t along = 0; along < w.tiles; along++, b += 2 * kTileBytes, a += 32) {
    for (int line = 0; line < 32; line++) __builtin_prefetch(b + kPrefetchBytes + line * 64);
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
inline void two_by_two(
    const Panels& w, int64_t group, const bf16* x, int64_t x_stride, int64_t row, int64_t rows, const Output& out) {
  const char* b = w.tile(group, 0, 0);
  const bf16* a = x + row * x_stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t along = 0; along < w.tiles; along++, b += 2 * kTileBytes, a += 32) {
    if (row == 0)  // later rows find the group in the cache
      for (int line = 0; line < 32; line++) __builtin_prefetch(b + kPrefetchBytes + line * 64);
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
inline void multiply_groups_in_tiles(
    const Panels& w, Share share, const bf16* x, int64_t x_stride, int64_t rows, const Output& out) {
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
