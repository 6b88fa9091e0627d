// Softmax attention over bfloat16 chunks of 64 keys with AMX; what softmax.h does with vectors.
//
//   scores   S[16 rows][64 keys] = Q · Kᵀ     Q in bfloat16; Kᵀ as lines of pairs of dimensions (chunk.h), which is B
//   weights  P = e^(scale·S − m)              rounded to bfloat16 for the product, summed before that
//   values   O = O·e^(m' − m) + P · V         V as lines of pairs of keys
//
// A row meets the same products of the unit, over the same 64 keys, alone and among any others: rows never mix inside
// it. Dimensions are padded with zeros to whole tiles, on both sides.
//
// Bound: 2·64·head_dim/32 products of up to 16 cycles per chunk and 16 rows, and 16·64 exponentials.
#pragma once

#include "../linear/tiles.h"
#include "softmax.h"

#if defined(__AMX_BF16__)

namespace kvrelay {

constexpr int kTileDims = 32;  // of a product

/// Query rows and one chunk as the unit reads them. Padding is zero and stays so.
class TileOperands {
 public:
  void fit(int64_t rows, int64_t head_dim) {
    head_dim_ = head_dim;
    depth_ = round_up(head_dim, kTileDims);
    q_.assign((size_t)(round_up(rows, kTileRows) * depth_), bf16{0});
    keys_.assign((size_t)(depth_ / 2 * kChunk), 0.f);
    values_.assign((size_t)(kChunk * depth_), bf16{0});
  }

  int64_t depth() const { return depth_; }
  bf16* q(int64_t row) { return q_.data() + row * depth_; }
  const bf16* q(int64_t row) const { return q_.data() + row * depth_; }

  /// 16 lines of [16 keys][2 dimensions], lines 64 dwords apart.
  const float* keys(int64_t along, int group) const { return keys_.data() + along * kTileRows * kChunk + group * kTileRows; }

  /// 16 lines of [16 dimensions][2 keys]; `half`: of the 64 keys.
  const bf16* values(int64_t tile, int half) const { return values_.data() + (tile * 2 + half) * kTileRows * kTileDims; }

  /// Packs `here` while `next` is fetched.
  void pack(const TokenRows<bf16>& here, const TokenRows<bf16>& next) {
    for (int key = 0; key < kChunk; key += W) {
      for (int i = 0; i < W; i++) prefetch_row(next.keys[key + i], head_dim_);
      transpose_rows<bf16>(here.keys + key, head_dim_, keys_.data() + key);
    }
    for (int key = 0; key < kChunk; key += 2) {
      prefetch_row(next.values[key], head_dim_);
      prefetch_row(next.values[key + 1], head_dim_);
      pair_values(here.values[key], here.values[key + 1], values_.data() + key / 2 * kTileDims);
    }
  }

 private:
  /// Two rows of values into one line of every tile.
  KVR_INLINE void pair_values(const bf16* even, const bf16* odd, bf16* to) const {
    alignas(64) static const uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                  8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t d = 0; d < depth_; d += kTileDims, to += 4 * kTileRows * kTileDims) {
      const int64_t left = head_dim_ - d;
      const __mmask32 mask = left >= kTileDims ? ~0u : (1u << left) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, even + d), b = _mm512_maskz_loadu_epi16(mask, odd + d);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(to + 2 * kTileRows * kTileDims, _mm512_permutex2var_epi16(a, high, b));
    }
  }

  int64_t head_dim_ = 0, depth_ = 0;
  Aligned<bf16> q_, values_;
  Aligned<float> keys_;
};

/// 16 rows on their way through one chunk.
struct alignas(64) TileRows {
  float scores[kTileRows * kChunk];
  float mixed[kTileRows * kChunk];
  bf16 weights[kTileRows * kChunk];
  float shrink[kTileRows];
};

inline void score_tile(const TileOperands& chunk, int64_t row, TileRows& to) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t depth = chunk.depth();
  for (int64_t along = 0; along < depth / kTileDims; along++) {
    _tile_loadd(4, chunk.q(row) + along * kTileDims, depth * 2);
    _tile_loadd(6, chunk.keys(along, 0), kChunk * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, chunk.keys(along, 1), kChunk * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, chunk.keys(along, 2), kChunk * 4);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, chunk.keys(along, 3), kChunk * 4);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, to.scores, kChunk * 4);
  _tile_stored(1, to.scores + 16, kChunk * 4);
  _tile_stored(2, to.scores + 32, kChunk * 4);
  _tile_stored(3, to.scores + 48, kChunk * 4);
}

/// Bit i: key i is seen.
KVR_INLINE uint64_t seen(Visible see) {
  if (see.begin >= see.end) return 0;
  return ~0ull >> (kChunk - see.end) & ~0ull << see.begin;
}

/// Scores of up to 16 rows become weights.
inline void weigh_tile(const Visible* see, int rows, float scale, float* maxima, float* totals, TileRows& tile) {
  alignas(64) float best[kTileRows] = {}, sums[kTileRows] = {}, now[kTileRows];
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), factor = _mm512_set1_ps(scale);
  for (int r = 0; r < rows; r++) {
    const uint64_t mask = seen(see[r]);
    float* scores = tile.scores + r * kChunk;
    V top = (V)hidden;
#pragma GCC unroll 4
    for (int v = 0; v < kChunk / W; v++) {
      const __mmask16 some = (__mmask16)(mask >> (v * W));
      const __m512 s = _mm512_mask_mul_ps(hidden, some, _mm512_load_ps(scores + v * W), factor);
      _mm512_store_ps(scores + v * W, s);
      top = larger((V)s, top);
    }
    best[r] = largest(top);
  }
  const V before = load_n(maxima, rows), after = larger(load(best), before);
  const V shrink = before == after ? splat(1.f) : exp(before - after);
  store(now, after);
  store(tile.shrink, shrink);
  for (int r = 0; r < rows; r++) {
    const uint64_t mask = seen(see[r]);
    V total = V{};
#pragma GCC unroll 4
    for (int v = 0; v < kChunk / W; v++) {
      const __mmask16 some = (__mmask16)(mask >> (v * W));
      const V p = exp(load(tile.scores + r * kChunk + v * W) - splat(now[r]));
      const V weight = (V)_mm512_maskz_mov_ps(some, (__m512)p);
      total = total + weight;
      store(tile.weights + r * kChunk + v * W, weight);
    }
    sums[r] = sum(total);
  }
  store_n(totals, fma(load_n(totals, rows), shrink, load(sums)), rows);
  store_n(maxima, after, rows);
}

/// Dimensions [32·pair, 32·pair + 32) of the rows' values.
inline void mix_tile(const TileOperands& chunk, int64_t pair, int rows, float* values, int64_t stride, TileRows& tile) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, tile.weights, kChunk * 2);
  _tile_loadd(5, tile.weights + kTileDims, kChunk * 2);
  _tile_loadd(6, chunk.values(2 * pair, 0), 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, chunk.values(2 * pair + 1, 0), 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(6, chunk.values(2 * pair, 1), 64);
  _tile_dpbf16ps(0, 5, 6);
  _tile_loadd(7, chunk.values(2 * pair + 1, 1), 64);
  _tile_dpbf16ps(1, 5, 7);
  float* mixed = tile.mixed + pair % 2 * kTileDims;
  _tile_stored(0, mixed, kChunk * 4);
  _tile_stored(1, mixed + 16, kChunk * 4);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < kTileDims; i += W) {
      float* at = values + r * stride + pair * kTileDims + i;
      store(at, fma(load(at), splat(tile.shrink[r]), load(mixed + r * kChunk + i)));
    }
}

/// All rows over one packed chunk. Tiles are configured for at most 16 rows.
inline void attend_in_tiles(
    const TileOperands& chunk, const Visible* see, int64_t rows, float scale, const Softmax& state, TileRows& tile) {
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int some = rows - row < kTileRows ? (int)(rows - row) : kTileRows;
    score_tile(chunk, row, tile);
    weigh_tile(see + row, some, scale, state.maxima + row, state.totals + row, tile);
    for (int64_t pair = 0; pair < chunk.depth() / kTileDims; pair++)
      mix_tile(chunk, pair, some, state.values + row * state.stride, state.stride, tile);
  }
}

}  // namespace kvrelay

#endif
