// Keys and values of one token into its slot. Bound: 2·kv_heads·head_dim numbers moved.
#pragma once

#include "../native/rows_of.h"

namespace kvrelay {

/// Where (block, k|v, head, slot) begins, in elements.
KVR_INLINE int64_t cache_at(const Cache& cache, int64_t block, int64_t part, int64_t head, int64_t slot) {
  return block * cache.block_stride + ((part * cache.kv_heads + head) * cache.block_size + slot) * cache.head_dim;
}

/// `kv`: key heads, then value heads, from element `begin` on.
KVR_INLINE void write_token(const Cache& cache, int64_t block, int64_t slot, const void* kv, int32_t type, int64_t begin) {
  for (int64_t head = 0; head < 2 * cache.kv_heads; head++) {
    const int64_t to = cache_at(cache, block, head / cache.kv_heads, head % cache.kv_heads, slot);
    const int64_t from = begin + head * cache.head_dim;
    each(cache.head_dim, [&](int64_t i, int lanes) KVR_HOT {
      store_at(cache.data, cache.type, to + i, load_at(kv, type, from + i, lanes), lanes);
    });
  }
}

}  // namespace kvrelay
