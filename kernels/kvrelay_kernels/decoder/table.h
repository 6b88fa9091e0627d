// A row of a table as vectors of float32, whatever it is kept in. Bound: one read of the row.
#pragma once

#include "../native/rows_of.h"

namespace kvrelay {

/// Numbers [i, i + lanes) of a row. A vector never lies in two groups: groups are of 32, or whole rows.
KVR_INLINE V look_up(const Table& table, int64_t row, int64_t i, int lanes) {
  if (!table.scales) return load_at(table.data, table.type, row * table.size + i, lanes);
  const int8_t* codes = (const int8_t*)table.data + row * table.size + i;
  const int64_t group = row * (table.size / table.group) + i / table.group;
  V v = {};
  for (int lane = 0; lane < lanes; lane++) v[lane] = (float)codes[lane];
  v = v * splat(table.scales[group]);
  return table.offsets ? v + splat(table.offsets[group]) : v;
}

}  // namespace kvrelay
