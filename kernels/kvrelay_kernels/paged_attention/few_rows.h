// A few query rows over a bfloat16 chunk with vectors, to the bit as `tiles.h` does it with AMX: for decoding, where packing
// values for the unit, and waiting for what it stores, cost more than the products themselves.
//
// The unit sums the even and the odd elements of 32 apart, each in order with fused multiply-adds from 0, then adds the
// two, then adds that to what there was; denormal numbers count as 0 (Intel's description of TDPBF16PS, and tested).
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)

namespace kvrelay {

constexpr int kFewRows = 3;  // rows × 4 vectors × even and odd: 24 of 32 registers

/// Denormal numbers are 0 while this lives, as inside the unit.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

/// Even and odd sums of R rows × 64 columns.
template <int R>
struct PairSums {
  V even[R][4], odd[R][4];

  KVR_INLINE void clear() {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) even[r][v] = odd[r][v] = V{};
  }

  /// sums [R][64] += even + odd.
  KVR_INLINE void add_to(float* sums) const {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        float* at = sums + r * kChunk + v * W;
        store(at, load(at) + (even[r][v] + odd[r][v]));
      }
  }
};

/// scores [R][64] = q · Kᵀ; q [R][head_dim], rounded.
template <int R>
KVR_INLINE void score_few(const float* q, int64_t head_dim, const Chunk<bf16>& chunk, float* scores) {
  const FlushDenormals flush;
  std::memset(scores, 0, R * kChunk * sizeof(float));
  for (int64_t first = 0; first < head_dim; first += 32) {
    const int64_t end = first + 32 < head_dim ? first + 32 : head_dim;
    PairSums<R> pairs;
    pairs.clear();
    for (int64_t d = first; d < end; d += 2) {
      if (d < kChunk) prefetch_row(chunk.next_keys[d], head_dim), prefetch_row(chunk.next_keys[d + 1], head_dim);
      const float* line = chunk.keys + d / 2 * kChunk;
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        const V key = load(line + v * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          pairs.even[r][v] = fma(even_of(key), splat(q[r * head_dim + d]), pairs.even[r][v]);
          pairs.odd[r][v] = fma(odd_of(key), splat(q[r * head_dim + d + 1]), pairs.odd[r][v]);
        }
      }
    }
    pairs.add_to(scores);
  }
}

/// mixed [R][64] = weights · V for dimensions [d, d + 64); weights [R][64], rounded.
template <int R, bool kWhole>
KVR_INLINE void mix_few(const float* weights, const Chunk<bf16>& chunk, int64_t d, int64_t head_dim, float* mixed) {
  const FlushDenormals flush;
  std::memset(mixed, 0, R * kChunk * sizeof(float));
  for (int first = 0; first < kChunk; first += 32) {
    PairSums<R> pairs;
    pairs.clear();
    for (int key = first; key < first + 32; key += 2) {
      for (int next = key; next < key + 2; next++) {
        __builtin_prefetch(chunk.next_values[next] + d, 0, 2);
        if (kWhole) __builtin_prefetch(chunk.next_values[next] + d + 32, 0, 2);
      }
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        const int64_t at = d + v * W, left = head_dim - at;
        if (!kWhole && left <= 0) break;
        const bool whole = kWhole || left >= W;
        const V even = whole ? load(chunk.values[key] + at) : load_some(chunk.values[key] + at, (int)left);
        const V odd = whole ? load(chunk.values[key + 1] + at) : load_some(chunk.values[key + 1] + at, (int)left);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          pairs.even[r][v] = fma(even, splat(weights[r * kChunk + key]), pairs.even[r][v]);
          pairs.odd[r][v] = fma(odd, splat(weights[r * kChunk + key + 1]), pairs.odd[r][v]);
        }
      }
    }
    pairs.add_to(mixed);
  }
}

/// Rows [row, row + R). Of `tile` what the unit would have stored.
template <int R>
__attribute__((noinline)) void attend_few(
    const Queries& q, int64_t row, const Chunk<bf16>& chunk, int64_t head_dim, float scale, const Softmax& state, TileRows& tile) {
  score_few<R>(q.data + row * q.stride, head_dim, chunk, tile.scores);
  weigh_tile(q.visible + row, R, scale, state.maxima + row, state.totals + row, tile);
  for (int i = 0; i < R * kChunk; i += W) store(tile.scores + i, load(tile.weights + i));
  for (int64_t d = 0; d < head_dim; d += kChunk) {
    if (d + kChunk <= head_dim) mix_few<R, true>(tile.scores, chunk, d, head_dim, tile.mixed);
    else mix_few<R, false>(tile.scores, chunk, d, head_dim, tile.mixed);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < kChunk; i += W) {
        float* at = state.values + (row + r) * state.stride + d + i;
        store(at, fma(load(at), splat(tile.shrink[r]), load(tile.mixed + r * kChunk + i)));
      }
  }
}

/// For at most 2 · kFewRows rows: keys and values are read once or twice.
inline void attend_few_rows(
    const Queries& q, int64_t rows, const Chunk<bf16>& chunk, int64_t head_dim, float scale, const Softmax& state, TileRows& tile) {
  int64_t row = 0;
  for (; row + 3 <= rows; row += 3) attend_few<3>(q, row, chunk, head_dim, scale, state, tile);
  if (rows - row == 2) attend_few<2>(q, row, chunk, head_dim, scale, state, tile);
  if (rows - row == 1) attend_few<1>(q, row, chunk, head_dim, scale, state, tile);
}

}  // namespace kvrelay

#endif
