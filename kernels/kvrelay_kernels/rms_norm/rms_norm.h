// RMSNorm of one row: y = x / sqrt(mean(x²) + eps) · w. Bound: reads and writes the row once; bandwidth.
#pragma once

#include "../native/rows_of.h"

namespace kvrelay {

/// What the row is multiplied with: 1 / sqrt(mean(x²) + eps). `x(i, lanes)` gives its vectors.
template <class X>
KVR_INLINE float norm_factor(int64_t size, float eps, X x) {
  V squares = V{};
  each(size, [&](int64_t i, int lanes) KVR_HOT {
    const V v = x(i, lanes);
    squares = fma(v, v, squares);
  });
  return 1.f / std::sqrt(sum(squares) / (float)size + eps);
}

/// `put(i, vector, lanes)` receives the normalised row.
template <class X, class Put>
KVR_INLINE void norm_row(int64_t size, const float* weight, float eps, X x, Put put) {
  const V factor = splat(norm_factor(size, eps, x));
  each(size, [&](int64_t i, int lanes) KVR_HOT { put(i, x(i, lanes) * factor * load_n(weight + i, lanes), lanes); });
}

}  // namespace kvrelay
