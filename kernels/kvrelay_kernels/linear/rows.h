// y = x · Wᵀ for a few rows at a time with vector instructions: weights stream through once per block of rows.
//
// Bound: reads n·k·b bytes of weights (bandwidth below about ten rows), 2·rows·n·k FLOPs above.
// Every sum runs over k in ascending order in one accumulator, so a row's bits do not depend on its neighbours.
#pragma once

#include "unpack.h"

namespace kvrelay {

constexpr int kVectors = kLanes / W;  // vectors per line

/// float32 weights and activations: one multiply-add per line.
struct Float32Dot {
  using X = float;
  static constexpr int kPerLine = 1;
  static KVR_INLINE V multiply(V sum, const char* line, const float* x) { return fma(load((const float*)line), splat(*x), sum); }
};

/// bfloat16 weights widened, float32 activations: two multiply-adds per line.
struct WideDot {
  using X = float;
  static constexpr int kPerLine = 2;
  static KVR_INLINE V multiply(V sum, const char* line, const float* x) {
    VU pairs;
    std::memcpy(&pairs, line, sizeof pairs);
    sum = fma((V)(pairs << 16), splat(x[0]), sum);
    return fma((V)(pairs & 0xffff0000u), splat(x[1]), sum);
  }
};

#if defined(__AVX512BF16__)
/// bfloat16 weights and activations: a dot product of pairs.
struct PairDot {
  using X = bf16;
  static constexpr int kPerLine = 2;
  static KVR_INLINE V multiply(V sum, const char* line, const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(line), (__m512bh)_mm512_set1_epi32(pair));
  }
};
#endif

#if defined(__AVX512F__)
constexpr int kRowBlock = 12, kHalves = 2;  // 12 rows × 2 vectors of accumulators, 2 of weights, 1 broadcast
#elif defined(__AVX2__)
constexpr int kRowBlock = 4, kHalves = 1;   // 4 × 2, of 16 registers
#else
constexpr int kRowBlock = 2, kHalves = 1;
#endif

/// Columns of the tiles from `half` on, rows [0, R) of x → sums [R][kHalves · 16].
template <class Dot, int R>
KVR_INLINE void multiply_rows(
    const Panels& w, int64_t group, int half, const typename Dot::X* x, int64_t x_stride, V (&sums)[R][kHalves * kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kHalves * kVectors; v++) sums[r][v] = V{};
  const char* tile = w.tile(group, 0, half);
  for (int64_t along = 0; along < w.tiles; along++, tile += 2 * kTileBytes) {
    for (int line = 0; line < kLines; line++) {
      const char* at = tile + line * 64;
      if (R <= 4) __builtin_prefetch(at + 4 * kTileBytes), __builtin_prefetch(at + 5 * kTileBytes);
      const typename Dot::X* xs = x + (along * kLines + line) * Dot::kPerLine;
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < kHalves * kVectors; v++)
          sums[r][v] = Dot::multiply(
              sums[r][v], at + v / kVectors * kTileBytes + v % kVectors * W * 4, xs + r * x_stride);
    }
  }
}

/// Where sums go: y = sum + bias, or y += sum + bias.
struct Output {
  float* y;
  int64_t stride;
  const float* bias;  // null without
  int64_t n;
  bool add;

  KVR_INLINE void put(int64_t row, int64_t column, V v, int lanes) const {
    float* at = y + row * stride + column;
    if (bias) v = v + load_n(bias + column, lanes);
    if (add) v = v + load_n(at, lanes);
    store_n(at, v, lanes);
  }

  /// The columns from `column` on.
  Output from(int64_t column) const { return {y + column, stride, bias ? bias + column : nullptr, n - column, add}; }

  KVR_INLINE void put(int64_t row, int64_t column, V v) const {
    const int64_t lanes = n - column < W ? n - column : W;
    if (lanes > 0) put(row, column, v, (int)lanes);
  }
};

template <class Dot, int R>
__attribute__((noinline)) void block_of_rows(
    const Panels& w, int64_t group, const typename Dot::X* x, int64_t x_stride, int64_t row, const Output& out) {
  for (int half = 0; half < 2; half += kHalves) {
    V sums[R][kHalves * kVectors];
    multiply_rows<Dot, R>(w, group, half, x + row * x_stride, x_stride, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < kHalves * kVectors; v++) out.put(row + r, group * kGroup + half * kLanes + v * W, sums[r][v]);
  }
}

/// The last R < kRowBlock rows: whichever R it is.
template <class Dot, int R>
void rest_of_rows(
    const Panels& w, int64_t group, const typename Dot::X* x, int64_t x_stride, int64_t row, int64_t rows, const Output& out) {
  if (rows == R) block_of_rows<Dot, R>(w, group, x, x_stride, row, out);
  else if constexpr (R > 1) rest_of_rows<Dot, R - 1>(w, group, x, x_stride, row, rows, out);
}

template <class Dot>
void multiply_group(
    const Panels& w, int64_t group, const typename Dot::X* x, int64_t x_stride, int64_t rows, const Output& out) {
  int64_t row = 0;
  for (; row + kRowBlock <= rows; row += kRowBlock) block_of_rows<Dot, kRowBlock>(w, group, x, x_stride, row, out);
  rest_of_rows<Dot, kRowBlock - 1>(w, group, x, x_stride, row, rows - row, out);
}

/// Groups [share) of the product of `rows` rows.
template <class Dot>
void multiply_groups(
    const Panels& w, Share share, const typename Dot::X* x, int64_t x_stride, int64_t rows, const Output& out) {
  for (int64_t group = share.begin; group < share.end; group++) multiply_group<Dot>(w, group, x, x_stride, rows, out);
}

#if !defined(__AMX_BF16__)
#if defined(__AVX512BF16__)
using UnpackedDot = PairDot;
#else
using UnpackedDot = Float32Dot;
#endif

/// The same for codes: a group is unpacked, then multiplied with all rows.
template <int kBits>
void multiply_codes(
    const Codes& w, Share share, const UnpackedDot::X* x, int64_t x_stride, int64_t rows, const Output& out) {
  char* memory = unpacked(w.cells * kUnpackedBytes);
  const Panels panel = {memory, 1, w.cells * kUnpackedBytes / (2 * kTileBytes), kGroup};
  for (int64_t group = share.begin; group < share.end; group++) {
    for (int64_t along = 0; along < w.cells; along++) unpack<kBits>(w, group, along, memory + along * kUnpackedBytes);
    multiply_group<UnpackedDot>(panel, 0, x, x_stride, rows, out.from(group * kGroup));
  }
}
#endif

}  // namespace kvrelay
