// The largest of a row and where it stands, the first of equals. Bound: reads 4·n bytes per row; bandwidth.
#pragma once

#include <limits>

#include "../native/vector.h"

namespace kvrelay {

/// NaN anywhere gives NaN, as torch.max does.
inline void largest_of_row(const float* row, int64_t n, float* value, int64_t* id) {
  const V lowest = splat(-std::numeric_limits<float>::infinity());
  V best = lowest, poison = V{};
  each(n, [&](int64_t i, int lanes) KVR_HOT {
    V v = load_n(row + i, lanes);
    poison = poison + v * V{};  // 0, or NaN for NaN and infinities
    if (lanes < W)
      for (int lane = lanes; lane < W; lane++) v[lane] = lowest[0];
    best = larger(v, best);
  });
  *value = largest(best);
  *id = 0;
  if (sum(poison) != 0.f) {  // true for NaN too
    for (int64_t i = 0; i < n; i++)
      if (std::isnan(row[i])) *value = row[i], *id = i, i = n;
  }
  if (std::isnan(*value)) return;
  while (*id < n - 1 && row[*id] != *value) ++*id;
}

}  // namespace kvrelay
