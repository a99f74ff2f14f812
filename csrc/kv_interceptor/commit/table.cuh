#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/stage/row_copy.cuh"

// A commit as its kernel takes it: by value, distances in bytes, divisions prepared. Layers come in
// two table sizes, so that a usual model's commit stays within the 4 KB of parameters that launch
// fastest.

namespace nwor {

struct GroupTable {
  RowsSide staged[2];  // layer 0
  int64_t staged_layer[2];
  CacheStrides cache[2];
  const int64_t* slots;
  const int64_t* row_slots;
  Pages pages;
  RowShape shape;
  RowOp op;
  int8_t vector_shift;  // log2 of the vectors of a head; -1: they are no power of two, or over 32
  int8_t slice_shift;   // log2 of the slices of a row; -1: they are no power of two

  // Whether rows move without a division, and without a question of how. REQUIRES: they are copied.
  bool easy() const { return vector_shift >= 0 && slice_shift >= 0 && pages.page_shift >= 0; }
};

// What validation reads, and where its result goes.
struct BatchTable {
  const int32_t* path;
  const int32_t* counts;
  const int32_t* row_base;
  const int32_t* row_map;
  const int32_t* request_rows;
  const int32_t* parents;
  int32_t* tips;
  int64_t* round_status;
  const int64_t* agreement;
  int64_t* status;
  int64_t* counters;
  uint32_t* ticket;  // null: block 0 publishes, whatever the verdict
  int64_t bytes_per_token;
  int64_t closing_tokens;
  int32_t depth;
  int32_t positions_per_request;  // max(depth, 1): a request without room still has a count
  int32_t num_positions;
  int32_t num_staging_rows;
  int32_t num_map_rows;
  int32_t num_groups;
  int32_t num_cells;
  SmallDivisor by_positions;
  bool plain_path;  // its entries are staging rows
  GroupTable groups[kMaxCommitGroups];
};

struct LayerTable {
  char* cache[2];
  const float* scales[2];
  int16_t staged_layer;
  int8_t group;
  int8_t scale_stride[2];  // 0: one scale for the tensor
};

inline constexpr int kUsualLayers = 64;
inline constexpr int kUsualViewLayers = 56;  // in commits that serve partial views

template <int kLayers>
struct CommitTable {
  BatchTable batch;
  LayerTable layers[kLayers];
};
static_assert(sizeof(CommitTable<kUsualLayers>) <= 4096);
static_assert(sizeof(CommitTable<kMaxCommitLayers>) <= 32764);  // CUDA 12.1, sm_70 and later

// One entry of the batch: position = request * positions_per_request + index.
struct Entry {
  int32_t request;
  int32_t index;
  int32_t count;        // as given, possibly out of range
  int32_t path_entry;   // only of accepted entries
  int32_t path_before;  // of the entry before it in its request, if there is one
  int64_t slot;         // its destination in a group, when destinations were given

  __device__ bool count_valid(const BatchTable& batch) const {
    return count >= 0 && count <= batch.depth;
  }
};

// Loads depend on nothing but the position, so several entries can be on their way at once.
__device__ inline Entry LoadEntry(const BatchTable& batch, const GroupTable& group,
                                  int32_t position) {
  Entry entry{0, 0, 0, -1, -1, -1};
  if (position >= batch.num_positions) return entry;
  entry.request = static_cast<int32_t>(Divide(position, batch.by_positions));
  entry.index = position - entry.request * batch.positions_per_request;
  entry.count = batch.counts[entry.request];
  if (batch.depth > 0) {
    entry.path_entry = batch.path[position];
    if (entry.index > 0) entry.path_before = batch.path[position - 1];
    if (group.slots != nullptr) entry.slot = group.slots[position];
  }
  return entry;
}
__device__ inline Entry LoadEntry(const BatchTable& batch, int32_t position) {
  return LoadEntry(batch, batch.groups[0], position);
}

__device__ inline int32_t NumRequests(const BatchTable& batch) {
  return static_cast<int32_t>(Divide(batch.num_positions, batch.by_positions));
}

// The staging rows that path entries name, less than 0 where they name none. Each step is one for
// all of them, so that what they load is on its way at once.
template <int kCount>
__device__ inline void FindStagingRows(const BatchTable& batch, const int32_t (&requests)[kCount],
                                       const int32_t (&path_entries)[kCount],
                                       int32_t (&rows)[kCount]) {
  if (batch.plain_path) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      rows[i] = path_entries[i] < batch.num_staging_rows ? path_entries[i] : -1;
    }
    return;
  }
  int64_t named[kCount];
  bool known[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    named[i] = path_entries[i];
    known[i] = path_entries[i] >= 0;
  }
  if (batch.row_base != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (known[i]) named[i] += batch.row_base[requests[i]];
    }
  }
  if (batch.row_map != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      known[i] = known[i] && named[i] >= 0 && named[i] < batch.num_map_rows;
      if (known[i]) named[i] = batch.row_map[named[i]];
    }
  }
  if (batch.request_rows != nullptr) {
    int32_t begin[kCount], end[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      begin[i] = known[i] ? batch.request_rows[requests[i]] : 0;  // else none is within
      end[i] = known[i] ? batch.request_rows[requests[i] + 1] : 0;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) known[i] = named[i] >= begin[i] && named[i] < end[i];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    known[i] = known[i] && named[i] >= 0 && named[i] < batch.num_staging_rows;
    rows[i] = known[i] ? static_cast<int32_t>(named[i]) : -1;
  }
}

__device__ inline int32_t StagingRow(const BatchTable& batch, int32_t request, int32_t path_entry) {
  const int32_t requests[] = {request}, path_entries[] = {path_entry};
  int32_t rows[1];
  FindStagingRows(batch, requests, path_entries, rows);
  return rows[0];
}

__device__ inline int64_t DestinationSlot(const GroupTable& group, int32_t position,
                                          int32_t staging_row) {
  return group.slots != nullptr ? group.slots[position] : group.row_slots[staging_row];
}

inline void CheckCommitParams(const CommitParams& params) {
  NWOR_CHECK(params.num_layers > 0 && params.num_layers <= kMaxCommitLayers, "key_caches: got ",
             params.num_layers, " layers, expected 1 to ", kMaxCommitLayers);
  NWOR_CHECK(params.num_groups > 0 && params.num_groups <= kMaxCommitGroups, "groups: got ",
             params.num_groups, ", expected 1 to ", kMaxCommitGroups);
  NWOR_CHECK(params.num_requests >= 0 && params.depth >= 0 &&
                 int64_t{params.num_requests} * std::max(params.depth, 1) <= kMaxCommitRows,
             "path: got ", params.num_requests, " requests of depth ", params.depth,
             ", expected at most ", kMaxCommitRows, " entries");
  for (int g = 0; g < params.num_groups; ++g) {
    const CommitGroup& group = params.groups[g];
    NWOR_CHECK(group.dtype != DType::kFloat8E4M3 && (group.geometry.dtype == group.dtype ||
                                                     group.geometry.dtype == DType::kFloat8E4M3),
               "staged_key: got ", Name(group.dtype), " rows for a cache of ",
               Name(group.geometry.dtype), ", expected one dtype, or a float8_e4m3fn cache");
    NWOR_CHECK(group.slots != nullptr || group.row_slots != nullptr ||
                   params.num_requests * params.depth == 0,
               "slots: got none for group ", g, ", expected slots or row_slots");
  }
  for (int layer = 0; layer < params.num_layers; ++layer) {
    const CommitLayer& from = params.layers[layer];
    NWOR_CHECK(from.group >= 0 && from.group < params.num_groups, "group: got ", from.group,
               " for layer ", layer, ", expected 0 to ", params.num_groups - 1);
    NWOR_CHECK(from.staged_layer >= 0 && from.staged_layer < INT16_MAX, "staged_layer: got ",
               from.staged_layer, " for layer ", layer, ", expected 0 to ", INT16_MAX - 1);
  }
}

inline GroupTable MakeGroupTable(const CommitParams& params, int group) {
  const CommitGroup& from = params.groups[group];
  GroupTable to{};
  for (int side = 0; side < 2; ++side) {
    to.staged[side] = MakeRowsSide(from.staged, side, from.dtype);
    to.cache[side] = MakeCacheStrides(from.geometry, side);
  }
  to.staged_layer[0] = from.staged_key_layer * ElementBytes(from.dtype);
  to.staged_layer[1] = from.staged_value_layer * ElementBytes(from.dtype);
  to.slots = from.slots;
  to.row_slots = from.row_slots;
  to.pages = MakePages(from.geometry);

  Alignment rows, cache;
  AddRows(rows, from.staged, from.geometry.head_dim, from.dtype);
  rows.AddElements({from.staged_key_layer, from.staged_value_layer}, from.dtype);
  if (const CommitTail& tail = params.tail; tail.keys != nullptr) {
    rows.Add(tail.keys);
    rows.Add(tail.values);
    rows.AddElements({tail.layer_stride, tail.request_stride, tail.head_stride, tail.token_stride},
                     from.dtype);
  }
  AddCache(cache, from.geometry);
  for (int layer = 0; layer < params.num_layers; ++layer) {
    if (params.layers[layer].group != group) continue;
    cache.Add(params.layers[layer].key);
    cache.Add(params.layers[layer].value);
  }
  to.op = ChooseRowOp(from.dtype, from.geometry.dtype, rows, cache);
  to.shape = ShapeOf(to.op, from.geometry.num_heads, from.geometry.head_dim, from.dtype);
  const int32_t vector_shift = ExactLog2(to.shape.vectors_per_head);
  to.vector_shift = static_cast<int8_t>(vector_shift <= 5 ? vector_shift : -1);
  to.slice_shift = static_cast<int8_t>(ExactLog2(NumCommitSlices(to.shape.vectors_per_row)));
  return to;
}

// Whether publishing may have to wait for all blocks: if it changes what others still have to read.
inline bool PublishesLast(const CommitParams& params) {
  return params.tips != nullptr ||
         (params.round_status != nullptr &&
          (params.status == params.round_status || params.closing_tokens >= 0));
}

inline BatchTable MakeBatchTable(const CommitParams& params) {
  const int32_t positions = std::max(params.depth, 1);
  BatchTable batch = {.path = params.path,
                      .counts = params.counts,
                      .row_base = params.row_base,
                      .row_map = params.row_map,
                      .request_rows = params.request_rows,
                      .parents = params.parents,
                      .tips = params.tips,
                      .round_status = params.round_status,
                      .agreement = params.agreement,
                      .status = params.status,
                      .counters = params.counters,
                      .ticket = PublishesLast(params) ? params.ticket : nullptr,
                      .bytes_per_token = params.bytes_per_token,
                      .closing_tokens = params.closing_tokens,
                      .depth = params.depth,
                      .positions_per_request = positions,
                      .num_positions = params.num_requests * positions,
                      .num_staging_rows = params.num_staging_rows,
                      .num_map_rows = params.num_map_rows,
                      .num_groups = params.num_groups,
                      .num_cells = ChooseCommitCells(params.num_requests * positions),
                      .by_positions = SmallDivisor::By(static_cast<uint32_t>(positions)),
                      .plain_path = params.row_base == nullptr && params.row_map == nullptr &&
                                    params.request_rows == nullptr,
                      .groups = {}};
  for (int group = 0; group < params.num_groups; ++group) {
    batch.groups[group] = MakeGroupTable(params, group);
  }
  return batch;
}

template <int kLayers>
CommitTable<kLayers> MakeCommitTable(const CommitParams& params) {
  CommitTable<kLayers> table{MakeBatchTable(params), {}};
  for (int layer = 0; layer < params.num_layers; ++layer) {
    const CommitLayer& from = params.layers[layer];
    table.layers[layer] = {.cache = {static_cast<char*>(from.key), static_cast<char*>(from.value)},
                           .scales = {from.scales.key, from.scales.value},
                           .staged_layer = static_cast<int16_t>(from.staged_layer),
                           .group = static_cast<int8_t>(from.group),
                           .scale_stride = {static_cast<int8_t>(from.scales.key_count > 1),
                                            static_cast<int8_t>(from.scales.value_count > 1)}};
  }
  return table;
}

}  // namespace nwor
