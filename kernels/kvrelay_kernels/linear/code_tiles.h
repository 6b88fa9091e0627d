// y = x · Wᵀ over codes with AMX: whole numbers as bfloat16, exactly, times bfloat16 activations, 32 k at a time; what a
// cell has given is then scaled, and the sum of its activations moved by the offset, in float32.
//
//   y[row, column] = Σ over cells, ascending:  scale · Σ code · x  +  offset · Σ x
//
// No weight is rounded, and unpacking is one lookup per 32 weights, so that one row costs no more than reading the codes.
// Bound: bandwidth for few rows; with many, 4 products of 16 cycles and 64 vectors scaled per 32 × 32 × 32.
//
//   tiles   0 1   C of the first 16 rows, both halves of a group      4 5   A of these rows
//           2 3   C of the second 16 rows                             6 7   B, both halves
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)

namespace kvrelay {

/// Two tiles of pairs from the codes of a cell.
template <int kBits>
KVR_INLINE void widen(const char* codes, char* tiles) {
  if constexpr (kBits == 4) {
    alignas(64) static constexpr uint16_t kNumbers[32] = {  // twice, because a lookup sees a fifth bit
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i numbers = _mm512_load_si512(kNumbers);
#pragma GCC unroll 32
    for (int line = 0; line < 32; line++) {
      const __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(codes + line / 4 * 64), line % 4 * 4);
      _mm512_store_si512(tiles + line * 64, _mm512_permutexvar_epi16(words, numbers));
    }
  } else {
#pragma GCC unroll 32
    for (int line = 0; line < 32; line++) {
      const __m512 low = (__m512)codes_of<8>(codes, 2 * line, 0), high = (__m512)codes_of<8>(codes, 2 * line + 1, 0);
      _mm512_store_si512(tiles + line * 64, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

/// `rows` of A and C, whose lines have `columns` numbers; B has 16 lines of as many.
inline void configure_tiles(int rows, int columns) {
  struct alignas(64) {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? 64 : 4 * columns);
    config.rows[tile] = (uint8_t)(tile < 6 ? rows : 16);
  }
  _tile_loadconfig(&config);
}

/// Σ x of every row and cell, [rows / 16][cells][16]: the product with ones.
class CellSums {
 public:
  CellSums(const bf16* x, int64_t x_stride, int64_t rows, int64_t cells) : cells_(cells), sums_(memory(round_up(rows, kTileRows) * cells)) {
    alignas(64) bf16 ones[32];
    for (bf16& one : ones) one = bf16{0x3f80};
    configure_tiles(kTileRows, 1);
    _tile_loadd(6, ones, 4);
    for (int64_t row = 0; row < rows; row += kTileRows)
      for (int64_t along = 0; along < cells; along++) {
        _tile_loadd(4, x + row * x_stride + along * kCellDepth, x_stride * 2);
        _tile_zero(0);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stored(0, sums_ + row * cells + along * kTileRows, 4);
      }
  }

  /// Of 16 rows from `row` on, a multiple of 16.
  KVR_INLINE const float* at(int64_t row, int64_t along) const { return sums_ + row * cells_ + along * kTileRows; }

 private:
  static float* memory(int64_t size) {
    static thread_local Aligned<float> kept;
    if ((int64_t)kept.size() < size) kept.resize((size_t)size);
    return kept.data();
  }

  const int64_t cells_;
  float* const sums_;
};

/// Σ of 32 rows × 32 columns, and what the unit has stored of the last cell, by tile of C.
struct alignas(64) BlockSums {
  float total[4][kTileRows * kLanes];
  float cell[4][kTileRows * kLanes];

  /// total += scale · cell + offset · Σ x, in rows of one tile.
  KVR_INLINE void add(int tile, const Scaling& of, const float* moved, int64_t rows) {
    float* at = total[tile];
    const float* from = cell[tile];
    if (moved) {
      for (int64_t r = 0; r < rows; r++, at += kLanes, from += kLanes)
        store(at, fma(splat(moved[r]), of.offset, fma(load(from), of.scale, load(at))));
    } else {
      for (int64_t r = 0; r < rows; r++, at += kLanes, from += kLanes) store(at, fma(load(from), of.scale, load(at)));
    }
  }
};

/// Columns of a group for up to 32 rows after the other.
template <int kBits>
class CodeTiles {
 public:
  CodeTiles(const Codes& w, const bf16* x, int64_t x_stride, int64_t rows, const Output& out)
      : w_(w), x_(x), x_stride_(x_stride), rows_(rows), out_(out), sums_(x, x_stride, w.has_offsets ? rows : 0, w.cells),
        mask_(rows <= 2 * kTileRows ? kRing - 1 : -1), memory_(unpacked((w.cells + kRing) * 2 * kTileBytes)) {}

  void multiply(int64_t group) const {
    for (int64_t row = 0; row < rows_; row += 2 * kTileRows) {
      const int64_t rows = rows_ - row < 2 * kTileRows ? rows_ - row : 2 * kTileRows;
      if (rows > kTileRows) block<true>(group, row, rows);
      else block<false>(group, row, rows);
    }
  }

 private:
  static constexpr int64_t kRing = 4;
  KVR_INLINE char* tiles(int64_t along) const { return memory_ + (along & mask_) * 2 * kTileBytes; }

  KVR_INLINE void unpack_cell(int64_t group, int64_t along) const {
    const char* cell = w_.data + w_.cell(group, along);
    prefetch_ahead(w_, cell);
    widen<kBits>(cell, tiles(along));
  }

  /// The cell before is scaled tile by tile between the products of this one: each hides the other's wait.
  template <bool kTwo>
  void block(int64_t group, int64_t row, int64_t rows) const {
    BlockSums c;
    const int64_t count[2] = {kTwo ? kTileRows : rows, rows - kTileRows};
    for (int tile = 0; tile < (kTwo ? 4 : 2); tile++)
      for (int64_t r = 0; r < count[tile / 2]; r++) store(c.total[tile] + r * kLanes, V{});
    if (row == 0) unpack_cell(group, 0);
    for (int64_t along = 0; along < w_.cells; along++) {
      if (row == 0 && along + 1 < w_.cells) unpack_cell(group, along + 1);
      product<kTwo>(c, group, along, row, count);
    }
    for (int tile = 0; tile < (kTwo ? 4 : 2); tile++) add(c, tile, group, w_.cells - 1, row, count);
    for (int tile = 0; tile < (kTwo ? 4 : 2); tile++)
      for (int64_t r = 0; r < count[tile / 2]; r++) {
        const int64_t column = group * kGroup + tile % 2 * kLanes;
        out_.put(row + tile / 2 * kTileRows + r, column, load(c.total[tile] + r * kLanes));
      }
  }

  template <bool kTwo>
  KVR_INLINE void product(BlockSums& c, int64_t group, int64_t along, int64_t row, const int64_t (&count)[2]) const {
    const bf16* a = x_ + row * x_stride_ + along * kCellDepth;
    const char* b = tiles(along);
    _tile_zero(0);
    _tile_loadd(4, a, x_stride_ * 2);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (along) add(c, 0, group, along - 1, row, count);
    _tile_zero(1);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (along) add(c, 1, group, along - 1, row, count);
    _tile_stored(0, c.cell[0], 64);
    if (kTwo) {
      _tile_zero(2);
      _tile_loadd(5, a + kTileRows * x_stride_, x_stride_ * 2);
      _tile_dpbf16ps(2, 5, 6);
      if (along) add(c, 2, group, along - 1, row, count);
    }
    _tile_stored(1, c.cell[1], 64);
    if (!kTwo) return;
    _tile_zero(3);
    _tile_dpbf16ps(3, 5, 7);
    if (along) add(c, 3, group, along - 1, row, count);
    _tile_stored(2, c.cell[2], 64);
    _tile_stored(3, c.cell[3], 64);
  }

  KVR_INLINE void add(BlockSums& c, int tile, int64_t group, int64_t along, int64_t row, const int64_t (&count)[2]) const {
    const float* sums = w_.has_offsets ? sums_.at(row + tile / 2 * kTileRows, along) : nullptr;
    c.add(tile, Scaling(w_, group, along, tile % 2 * kLanes), sums, count[tile / 2]);
  }

  const Codes w_;
  const bf16* const x_;
  const int64_t x_stride_, rows_;
  const Output& out_;
  const CellSums sums_;
  const int64_t mask_;
  char* const memory_;
};

/// Like multiply_groups_in_tiles.
template <int kBits>
void multiply_codes_in_tiles(
    const Codes& w, Share share, const bf16* x, int64_t x_stride, int64_t rows, const Output& out) {
  const CodeTiles<kBits> tiles(w, x, x_stride, rows, out);
  configure_tiles(rows < kTileRows ? (int)rows : kTileRows, kLanes);
  for (int64_t group = share.begin; group < share.end; group++) tiles.multiply(group);
  _tile_release();
}

}  // namespace kvrelay

#endif
