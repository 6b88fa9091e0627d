// Softmax attention of a block of query rows over chunks of keys, kept as (maximum, total, weighted values) per row.
//
//   scores   s = q·K              sums over head_dim in ascending order, q already scaled
//   weights  p = e^(s − m)        m: largest score of the row so far; what was summed before is scaled down
//   values   o = o·e^(m' − m) + p·V    over keys in ascending order
//
// Chunks begin at multiples of 64 keys and splits at multiples of 512 whatever the batch: a row meets the same numbers
// in the same order alone, in a batch, in a chunk of prefill and while decoding. Hidden keys have weight 0.
//
// Bound: per chunk and row 4·64·head_dim FLOPs; the chunk's 2·64·head_dim numbers are read once for all rows.
#pragma once

#include <limits>

#include "chunk.h"

namespace kvrelay {

constexpr int kSplit = 512;
constexpr int kSpan = 4 * W < kChunk ? 4 * W : kChunk;  // keys or dimensions that one pass keeps in registers
constexpr int kSpanVectors = kSpan / W;
#if defined(__AVX512F__)
constexpr int kAttendRows = 6;
#else
constexpr int kAttendRows = 2;
#endif

/// State of `rows` query rows. `values` rows are `stride` apart, a whole number of spans.
struct Softmax {
  float* maxima;
  float* totals;
  float* values;
  int64_t stride;

  void clear(int64_t row) const {
    maxima[row] = -std::numeric_limits<float>::infinity();
    totals[row] = 0.f;
    std::memset(values + row * stride, 0, stride * sizeof(float));
  }

  /// Adds what `other` knows of row `from` to row `to`.
  void merge(int64_t to, const Softmax& other, int64_t from) const {
    if (other.totals[from] == 0.f) return;
    const float top = maxima[to] > other.maxima[from] ? maxima[to] : other.maxima[from];
    const float mine = totals[to] == 0.f ? 0.f : std::exp(maxima[to] - top), theirs = std::exp(other.maxima[from] - top);
    for (int64_t i = 0; i < stride; i += W) {
      const V sum = fma(load(other.values + from * stride + i), splat(theirs), load(values + to * stride + i) * splat(mine));
      store(values + to * stride + i, sum);
    }
    totals[to] = totals[to] * mine + other.totals[from] * theirs;
    maxima[to] = top;
  }
};

/// Keys of a chunk that one row sees.
struct Visible {
  int begin, end;
};

template <int R, class T>
KVR_INLINE void score_rows(const float* q, int64_t q_stride, const Chunk<T>& chunk, int64_t head_dim, float* scores) {
  constexpr int kPerLine = 4 / sizeof(T);
  for (int span = 0; span < kChunk; span += kSpan) {
    V sums[R][kSpanVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kSpanVectors; v++) sums[r][v] = V{};
    for (int64_t d = 0; d < head_dim; d += kPerLine) {
      for (int64_t key = d; key < d + kPerLine && key < kChunk && span == 0; key++)
        prefetch_row(chunk.next_keys[key], head_dim);
      const float* line = chunk.keys + d / kPerLine * kChunk + span;
#pragma GCC unroll 4
      for (int v = 0; v < kSpanVectors; v++) {
        const V key = load(line + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const float* x = q + r * q_stride + d;
          if constexpr (kPerLine == 1) {
            sums[r][v] = fma(key, splat(x[0]), sums[r][v]);
          } else {
            sums[r][v] = fma(even_of(key), splat(x[0]), sums[r][v]);
            sums[r][v] = fma(odd_of(key), splat(x[1]), sums[r][v]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kSpanVectors; v++) store(scores + r * kChunk + span + v * W, sums[r][v]);
  }
}

/// Scores become weights in place. Returns what the row's earlier values are scaled with.
KVR_INLINE float weigh_row(float* scores, Visible see, float* maximum, float* total) {
  if (see.begin >= see.end) {
    std::memset(scores, 0, kChunk * sizeof(float));
    return 1.f;
  }
  for (int i = 0; i < see.begin; i++) scores[i] = -std::numeric_limits<float>::infinity();
  for (int i = see.end; i < kChunk; i++) scores[i] = -std::numeric_limits<float>::infinity();
  V top = load(scores);
  for (int i = W; i < kChunk; i += W) top = larger(load(scores + i), top);
  const float best = largest(top), now = *maximum > best ? *maximum : best;
  const float shrink = now == *maximum ? 1.f : *total == 0.f ? 0.f : std::exp(*maximum - now);
  V sums = V{};
  for (int i = 0; i < kChunk; i += W) {
    const V s = load(scores + i);
    const V p = exp(s - splat(now));
    const V weight = s == splat(-std::numeric_limits<float>::infinity()) ? V{} : p;
    sums = sums + weight;
    store(scores + i, weight);
  }
  *total = *total * shrink + sum(sums);
  *maximum = now;
  return shrink;
}

/// Dimensions [begin, head_dim) of up to kSpan, whole or the last few.
template <int R, class T, bool kWhole>
KVR_INLINE void add_span(
    const float* weights, const float* shrink, const Chunk<T>& chunk, int num_keys, int64_t begin, int64_t head_dim,
    const Softmax& state, int64_t row) {
  V sums[R][kSpanVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kSpanVectors; v++)
      sums[r][v] = load(state.values + (row + r) * state.stride + begin + v * W) * splat(shrink[r]);
  for (int key = 0; key < num_keys; key++) {
    __builtin_prefetch(chunk.next_values[key] + begin, 0, 2);
    if (sizeof(T) * kSpan > 64) __builtin_prefetch(chunk.next_values[key] + begin + 64 / sizeof(T), 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < kSpanVectors; v++) {
      const int64_t at = begin + v * W, left = head_dim - at;
      if (!kWhole && left <= 0) break;
      const V value = kWhole || left >= W ? load(chunk.values[key] + at) : load_some(chunk.values[key] + at, (int)left);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r][v] = fma(value, splat(weights[r * kChunk + key]), sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kSpanVectors; v++) store(state.values + (row + r) * state.stride + begin + v * W, sums[r][v]);
}

template <int R, class T>
KVR_INLINE void add_values(
    const float* weights, const float* shrink, const Chunk<T>& chunk, int num_keys, int64_t head_dim,
    const Softmax& state, int64_t row) {
  int64_t begin = 0;
  for (; begin + kSpan <= head_dim; begin += kSpan)
    add_span<R, T, true>(weights, shrink, chunk, num_keys, begin, head_dim, state, row);
  if (begin < head_dim) add_span<R, T, false>(weights, shrink, chunk, num_keys, begin, head_dim, state, row);
}

/// Query rows of one KV head and what each sees of a chunk.
struct Queries {
  const float* data;
  int64_t stride;
  const Visible* visible;
};

template <int R, class T>
__attribute__((noinline)) void attend_rows(
    const Queries& q, int64_t row, const Chunk<T>& chunk, int num_keys, int64_t head_dim, const Softmax& state) {
  alignas(64) float scores[R * kChunk];
  float shrink[R];
  score_rows<R, T>(q.data + row * q.stride, q.stride, chunk, head_dim, scores);
  for (int r = 0; r < R; r++)
    shrink[r] = weigh_row(scores + r * kChunk, q.visible[row + r], state.maxima + row + r, state.totals + row + r);
  add_values<R, T>(scores, shrink, chunk, num_keys, head_dim, state, row);
}

template <int R, class T>
void attend_rest(
    const Queries& q, int64_t row, int64_t rows, const Chunk<T>& chunk, int num_keys, int64_t head_dim, const Softmax& state) {
  if (rows == R) attend_rows<R, T>(q, row, chunk, num_keys, head_dim, state);
  else if constexpr (R > 1) attend_rest<R - 1, T>(q, row, rows, chunk, num_keys, head_dim, state);
}

/// All rows over the first `num_keys` keys of a chunk.
template <class T>
void attend_chunk(
    const Queries& q, int64_t rows, const Chunk<T>& chunk, int num_keys, int64_t head_dim, const Softmax& state) {
  int64_t row = 0;
  for (; row + kAttendRows <= rows; row += kAttendRows)
    attend_rows<kAttendRows, T>(q, row, chunk, num_keys, head_dim, state);
  attend_rest<kAttendRows - 1, T>(q, row, rows - row, chunk, num_keys, head_dim, state);
}

}  // namespace kvrelay
