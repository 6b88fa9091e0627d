// Rotary embedding of one head, half-split: [a, b] → [a·c − b·s, b·c + a·s]. Bound: one pass over the head.
#pragma once

#include "../native/rows_of.h"

namespace kvrelay {

/// In place. cos, sin: rows of head_dim numbers, both halves written out, the first half of sin negated.
KVR_INLINE void rotate_head(void* head, int32_t type, int64_t begin, int64_t head_dim, const float* cos, const float* sin) {
  const int64_t half = head_dim / 2;
  each(half, [&](int64_t i, int lanes) KVR_HOT {
    const V a = load_at(head, type, begin + i, lanes), b = load_at(head, type, begin + half + i, lanes);
    const V turned_a = fma(a, load_n(cos + i, lanes), b * load_n(sin + i, lanes));
    const V turned_b = fma(b, load_n(cos + half + i, lanes), a * load_n(sin + half + i, lanes));
    store_at(head, type, begin + i, turned_a, lanes);
    store_at(head, type, begin + half + i, turned_b, lanes);
  });
}

}  // namespace kvrelay
