// A cell of codes becomes tiles: w = scale · code + offset in float32, rounded to bfloat16 where pairs are multiplied.
//
// Bound: 1,024 weights take about 290 instructions with AVX-512, 4.5 per 16 weights. What follows is the product of
// panels.h, to the bit. With AMX codes go another way: code_tiles.h.
#pragma once

#include "../native/aligned.h"
#include "codes.h"

namespace kvrelay {

constexpr int64_t kUnpackedBytes = kGroup * kCellDepth * (kPairs ? 2 : 4);
constexpr int kPrefetchCells = 6;

/// Numbers [part · W, W more) of a run of codes.
template <int kBits>
KVR_INLINE V codes_of(const char* cell, int run, int part) {
  if constexpr (kBits == 8) {
    const char* at = cell + run * kLanes + part * W;
#if defined(__AVX512F__)
    return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#elif defined(__AVX2__)
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    V v;
    for (int i = 0; i < W; i++) v[i] = (float)(int8_t)at[i];
    return v;
#endif
  } else {
    const Nibble nibble(run);
    VU words;
    std::memcpy(&words, cell + (nibble.words * kLanes + part * W) * 4, sizeof words);
#if defined(__AVX512F__)
    const V numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};  // looked up by the lowest four bits
    return (V)_mm512_permutexvar_ps((__m512i)(words >> nibble.shift), (__m512)numbers);
#else
    return __builtin_convertvector((VI)((words >> nibble.shift) & 15u), V);
#endif
  }
}

KVR_INLINE V load_scales(const char* at, bool wide, int first) {
  return wide ? load((const float*)at + first) : load_float16((const uint16_t*)at + first);
}

/// What columns [first, W more) of a cell are scaled with and moved by.
struct Scaling {
  V scale, offset;
  KVR_INLINE Scaling(const Codes& w, int64_t group, int64_t along, int first)
      : scale(load_scales(w.data + w.scales(group, along), w.wide_scales, first)),
        offset(w.has_offsets ? load_scales(w.data + w.offsets(group, along), w.wide_scales, first) : V{}) {}
};

KVR_INLINE void prefetch_ahead(const Codes& w, const char* cell) {
  const char* ahead = cell + kPrefetchCells * w.cell_bytes();
  for (int64_t at = 0; at < w.cell_bytes(); at += 64) __builtin_prefetch(ahead + at);
}

#if defined(__AMX_BF16__)  // scales what it has multiplied: code_tiles.h
#elif defined(__AVX512BF16__)

/// → two tiles of pairs.
template <int kBits>
KVR_INLINE void unpack(const Codes& w, int64_t group, int64_t along, char* tiles) {
  const char* cell = w.data + w.cell(group, along);
  const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  prefetch_ahead(w, cell);
  for (int half = 0; half < 2; half++, cell += w.code_bytes / 2, tiles += kTileBytes) {
    const Scaling of(w, group, along, half * kLanes);
    const V scales[2] = {
        (V)_mm512_permutexvar_ps(first, (__m512)of.scale), (V)_mm512_permutexvar_ps(second, (__m512)of.scale)};
    const V offsets[2] = {
        (V)_mm512_permutexvar_ps(first, (__m512)of.offset), (V)_mm512_permutexvar_ps(second, (__m512)of.offset)};
#pragma GCC unroll 16
    for (int line = 0; line < kLines; line++) {
      const V low = fma(codes_of<kBits>(cell, 2 * line, 0), scales[0], offsets[0]);
      const V high = fma(codes_of<kBits>(cell, 2 * line + 1, 0), scales[1], offsets[1]);
      _mm512_storeu_si512(tiles + line * 64, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
  }
}

#else

/// → two times two tiles of float32.
template <int kBits>
KVR_INLINE void unpack(const Codes& w, int64_t group, int64_t along, char* tiles) {
  const char* cell = w.data + w.cell(group, along);
  prefetch_ahead(w, cell);
  for (int half = 0; half < 2; half++, cell += w.code_bytes / 2, tiles += kTileBytes)
    for (int part = 0; part < kLanes / W; part++) {
      const Scaling of(w, group, along, half * kLanes + part * W);
#pragma GCC unroll 32
      for (int k = 0; k < kCellDepth; k++) {
        float* line = (float*)(tiles + k / kLines * 2 * kTileBytes) + k % kLines * kLanes;
        store(line + part * W, fma(codes_of<kBits>(cell, k, part), of.scale, of.offset));
      }
    }
}

#endif

/// Memory of this thread for a group that is unpacked.
inline char* unpacked(int64_t bytes) {
  static thread_local Aligned<char> memory;
  if ((int64_t)memory.size() < bytes) memory = Aligned<char>((size_t)bytes);
  return memory.data();
}

}  // namespace kvrelay
