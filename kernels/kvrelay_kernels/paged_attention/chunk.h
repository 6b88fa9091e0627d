// 64 keys of one KV head, found through a block table.
//
//   keys    lines of 64: one line per dimension (float32) or per pair of dimensions (bfloat16), so that one vector
//           holds the same dimension of W keys and scores need no horizontal sums
//   values  row by row, where they lie in the cache
//
// Tokens past the sequence's end read as zeros: their slots may hold anything, NaN included, and are not looked at.
#pragma once

#include "../write_kv/write_kv.h"

namespace kvrelay {

constexpr int kChunk = 64;

constexpr int64_t kMaxHeadDim = 1024;

/// What a dimension of 64 keys lies in: 4 bytes each, one float32 or a pair of bfloat16 (the even one below).
template <class T>
struct Chunk {
  const float* keys;
  const T* const* values;
  const T* const* next_keys;  // of the chunk after this one, to be fetched meanwhile
  const T* const* next_values;
};

/// Where 64 tokens from `first` on lie; those at `end` and later lie in zeros.
template <class T>
struct TokenRows {
  const T* keys[kChunk];
  const T* values[kChunk];

  void find(const Cache& cache, const int32_t* table, int64_t head, int64_t first, int64_t end) {
    static const T nothing[kMaxHeadDim] = {};
    const int64_t size = cache.block_size, values_at = cache.kv_heads * size * cache.head_dim;
    int64_t block = first / size, slot = first % size;
    const T* row = nullptr;
    for (int i = 0; i < kChunk; i++) {
      if (first + i >= end) {
        keys[i] = values[i] = nothing;
        continue;
      }
      if (slot == size) slot = 0, block++, row = nullptr;
      if (!row) row = (const T*)cache.data + cache_at(cache, table[block], 0, head, slot);
      keys[i] = row;
      values[i] = row + values_at;
      row += cache.head_dim;
      slot++;
    }
  }
};

/// Dwords `rows[i][d]` of W rows → lines[d][i].
template <class T>
KVR_INLINE void transpose_rows(const T* const* rows, int64_t head_dim, float* lines) {
  constexpr int kPerDword = 4 / sizeof(T);
  for (int64_t line = 0; line < head_dim / kPerDword; line++)
    for (int i = 0; i < W; i++) std::memcpy(lines + line * kChunk + i, rows[i] + line * kPerDword, 4);
}

#if defined(__AVX512F__)
/// 16 lines of 16 dwords, transposed in registers.
KVR_INLINE void transpose_lines(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

KVR_INLINE void transpose_dwords(const int32_t* const* rows, int64_t count, float* lines) {
  for (int64_t at = 0; at < count; at += 16) {
    const int lanes = count - at < 16 ? (int)(count - at) : 16;
    const __mmask16 mask = (__mmask16)((1u << lanes) - 1);
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + at);
    transpose_lines(r);
    for (int j = 0; j < lanes; j++) _mm512_storeu_si512(lines + (at + j) * kChunk, r[j]);
  }
}

template <>
KVR_INLINE void transpose_rows<float>(const float* const* rows, int64_t head_dim, float* lines) {
  transpose_dwords((const int32_t* const*)rows, head_dim, lines);
}

template <>
KVR_INLINE void transpose_rows<bf16>(const bf16* const* rows, int64_t head_dim, float* lines) {
  transpose_dwords((const int32_t* const*)rows, head_dim / 2, lines);
}
#endif

/// Into the second-level cache: the first has fewer lines in flight, and a burst of them stalls what computes.
template <class T>
KVR_INLINE void prefetch_row(const T* row, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

template <class T>
void transpose_keys(const TokenRows<T>& rows, int64_t head_dim, float* lines) {
  for (int i = 0; i < kChunk; i += W) transpose_rows<T>(rows.keys + i, head_dim, lines + i);
}

/// The two dimensions in dwords of pairs.
KVR_INLINE V even_of(V pairs) { return (V)((VU)pairs << 16); }
KVR_INLINE V odd_of(V pairs) { return (V)((VU)pairs & 0xffff0000u); }

/// A chunk in float32 for many rows to share: pays from the second block of rows on. `values` rows `stride` apart.
inline void widen_keys(const float* pairs, int64_t head_dim, float* lines) {
  for (int64_t pair = 0; pair < head_dim / 2; pair++)
    for (int i = 0; i < kChunk; i += W) {
      const V both = load(pairs + pair * kChunk + i);
      store(lines + 2 * pair * kChunk + i, even_of(both));
      store(lines + (2 * pair + 1) * kChunk + i, odd_of(both));
    }
}

inline void widen_values(const bf16* const* rows, int64_t head_dim, int64_t stride, float* values) {
  for (int i = 0; i < kChunk; i++)
    each(head_dim, [&](int64_t d, int lanes) KVR_HOT { store_n(values + i * stride + d, load_n(rows[i] + d, lanes), lanes); });
}

}  // namespace kvrelay
