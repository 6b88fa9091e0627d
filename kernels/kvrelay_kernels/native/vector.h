// One vector of W floats: 16 with AVX-512, 8 with AVX2, 4 elsewhere. Everything above is written against these names.
//
// Lanes never mix except in `sum` and `largest`, whose order is fixed, and nothing is contracted behind our back
// (-ffp-contract=off): a fused multiply-add happens where `fma` is written, on every call alike.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVR_INLINE inline __attribute__((always_inline))
/// After the parameters of a lambda: a call per vector costs more than the vector.
#define KVR_HOT __attribute__((always_inline))

namespace kvrelay {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));

/// The upper half of a float32.
struct bf16 {
  uint16_t bits;
};

KVR_INLINE V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

KVR_INLINE void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }

KVR_INLINE V splat(float x) {
#if defined(__AVX512F__)
  return (V)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (V)_mm256_set1_ps(x);
#else
  return V{x, x, x, x};
#endif
}

KVR_INLINE V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

/// NaN in `a` is passed over, as in "the larger of what can be compared".
KVR_INLINE V larger(V a, V b) { return a > b ? a : b; }

KVR_INLINE float sum(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[W];
  store(lanes, v);
  for (int step = W / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
#endif
}

KVR_INLINE float largest(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

KVR_INLINE V load(const bf16* p) {
  VH half;
  std::memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
  return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#elif defined(__AVX2__)
  return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
#else
  return (V)(__builtin_convertvector(half, VU) << 16);
#endif
}

/// Finite float16.
KVR_INLINE V load_float16(const uint16_t* p) {
  VH half;
  std::memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX2__)
  return (V)_mm256_cvtph_ps((__m128i)half);
#else
  const VU bits = __builtin_convertvector(half, VU);
  const V magnitude = (V)((bits & 0x7fffu) << 13) * splat(0x1p112f);
  return (V)((VU)magnitude | (bits & 0x8000u) << 16);
#endif
}

/// To the nearest, ties to even; NaN stays NaN.
KVR_INLINE void store(bf16* p, V v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  VU bits = (VU)v;
  VU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = (VI)(v != v) ? VU{} + 0x7fc0u : rounded;
  VH half = __builtin_convertvector(rounded, VH);
  std::memcpy(p, &half, sizeof half);
#endif
}

/// The first n < W elements; the rest 0.
template <class T>
KVR_INLINE V load_some(const T* p, int n) {
  T padded[W] = {};
  for (int i = 0; i < n; i++) padded[i] = p[i];
  return load(padded);
}

template <class T>
KVR_INLINE void store_some(T* p, V v, int n) {
  T padded[W];
  store(padded, v);
  for (int i = 0; i < n; i++) p[i] = padded[i];
}

/// Calls f(i, lanes) over [0, n) in steps of W lanes, the last one shortened.
template <class F>
KVR_INLINE void each(int64_t n, F f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, (int)(n - i));
}

template <class T>
KVR_INLINE V load_n(const T* p, int n) {
  return n == W ? load(p) : load_some(p, n);
}

template <class T>
KVR_INLINE void store_n(T* p, V v, int n) {
  if (n == W) store(p, v);
  else store_some(p, v, n);
}

/// e^x to 2 ulp within [-87, 88], clamped outside; NaN stays NaN. Cephes' polynomial after x = n·ln2 + r.
KVR_INLINE V exp(V x) {
  const V magic = splat(12582912.f);  // 1.5·2^23: adding it rounds to an integer that sits in the low bits
  const V low = splat(-87.f), high = splat(88.f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const V shifted = fma(x, splat(1.44269504f), magic);
  const V n = shifted - magic;
  V r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  V p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.f));
  const VI power = ((VI)shifted - (VI)magic + 127) << 23;
  return p * (V)power;
}

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace kvrelay
