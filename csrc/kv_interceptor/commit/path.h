#pragma once

#include <cstdint>

#include "kv_interceptor/commit/commit.h"

// How an entry of a commit's path becomes a staging row and a destination, on the host.

namespace nwor {

// The staging row that path[request][index] names, or -1 when it names none.
inline int32_t StagingRow(const CommitParams& params, int32_t request, int32_t index) {
  int64_t row = params.path[int64_t{request} * params.depth + index];
  if (row < 0) return -1;
  if (params.row_base != nullptr) row += params.row_base[request];
  if (params.row_map != nullptr) {
    if (row < 0 || row >= params.num_map_rows) return -1;
    row = params.row_map[row];
  }
  if (row < 0 || row >= params.num_staging_rows) return -1;
  if (params.request_rows != nullptr &&
      (row < params.request_rows[request] || row >= params.request_rows[request + 1])) {
    return -1;
  }
  return static_cast<int32_t>(row);
}

inline int64_t DestinationSlot(const CommitParams& params, int group, int32_t request,
                               int32_t index, int32_t staging_row) {
  const CommitGroup& g = params.groups[group];
  return g.slots != nullptr ? g.slots[int64_t{request} * params.depth + index]
                            : g.row_slots[staging_row];
}

}  // namespace nwor
