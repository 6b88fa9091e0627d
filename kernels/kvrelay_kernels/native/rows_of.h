// Rows of either type, seen as vectors of float32.
#pragma once

#include "abi.h"
#include "vector.h"

namespace kvrelay {

KVR_INLINE V load_at(const void* data, int32_t type, int64_t at, int lanes) {
  return type == kBfloat16 ? load_n((const bf16*)data + at, lanes) : load_n((const float*)data + at, lanes);
}

KVR_INLINE void store_at(void* data, int32_t type, int64_t at, V v, int lanes) {
  if (type == kBfloat16) store_n((bf16*)data + at, v, lanes);
  else store_n((float*)data + at, v, lanes);
}

/// What a number becomes when it is stored as `type`.
KVR_INLINE V rounded(int32_t type, V v) {
  if (type != kBfloat16) return v;
  bf16 half[W];
  store(half, v);
  return load(half);
}

}  // namespace kvrelay
