// The order in which weights lie: tiles of 1 KiB, read one after the other.
//
//   W [n, k]  →  [n / 32 groups][k / depth][2 halves] tiles, padded with zeros
//   tile         16 lines of 64 bytes; a line holds one k of 16 columns (float32), or two k's (bfloat16 pairs)
//   depth        16 in float32, 32 in bfloat16
//
// A bfloat16 tile is at once what AMX loads as its right-hand tile and 16 operands of a vector dot product.
#pragma once

#include "../native/abi.h"
#include "../native/team.h"
#include "../native/vector.h"

namespace kvrelay {

constexpr int kLanes = 16;      // columns of a tile
constexpr int kLines = 16;      // lines of a tile
constexpr int kGroup = 32;      // columns of a group: two tiles side by side
constexpr int kTileBytes = 1024;

struct Panels {
  const char* data;
  int64_t groups, tiles;  // tiles along k
  int64_t n;

  const char* tile(int64_t group, int64_t along, int half) const {
    return data + ((group * tiles + along) * 2 + half) * kTileBytes;
  }
};

inline int64_t depth(int32_t type) { return type == kBfloat16 ? 32 : 16; }

inline Panels panels(const Matrix& m) {
  return {(const char*)m.data, round_up(m.n, kGroup) / kGroup, round_up(m.k, depth(m.type)) / depth(m.type), m.n};
}

template <class T>
void pack_panels(const T* weight, int64_t n, int64_t k, T* packed) {
  constexpr int per_line = 4 / sizeof(T);  // k's in a line
  const int64_t step = kLines * per_line, groups = round_up(n, kGroup) / kGroup, tiles = round_up(k, step) / step;
  for (int64_t group = 0; group < groups; group++)
    for (int64_t along = 0; along < tiles; along++)
      for (int64_t at = 0; at < 2 * kTileBytes / (int64_t)sizeof(T); at++) {
        const int64_t line = at / (kLanes * per_line), lane = at / per_line % kLanes;
        const int64_t row = group * kGroup + line / kLines * kLanes + lane;
        const int64_t column = along * step + line % kLines * per_line + at % per_line;
        *packed++ = row < n && column < k ? weight[row * k + column] : T{};
      }
}

}  // namespace kvrelay
