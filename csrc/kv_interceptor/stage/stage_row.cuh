#pragma once

#include <cstdint>

#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/stage/row_copy.cuh"
#include "kv_interceptor/stage/stage.h"

// The write of one row on the device, for kernels that write: the plain one, and those that do it
// beside other work.

namespace nwor {

struct StageTable {
  RowsSide rows[2];
  RowsSide staged[2];
  char* cache[2];
  CacheStrides strides[2];
  const float* scales[2];
  int32_t scale_stride[2];  // 0: one scale for the tensor
  Pages pages;
  RowShape shape;
  const int64_t* slot_mapping;
  const int32_t* stage_rows;
  int64_t* group_slots;
  bool records;
  int64_t* status;
  int32_t num_rows;
  int32_t num_staging_rows;
  bool exclusive;

  __device__ int32_t StageRowOf(int32_t row) const {
    return stage_rows == nullptr ? -1 : stage_rows[row];
  }
};

struct RowFault {
  CommitError error;
  int64_t value;
};

// Ranges depend on inputs only, so every thread of every block agrees about a row.
__device__ inline RowFault CheckRanges(const StageTable& table, int64_t slot, int32_t stage_row) {
  if (slot < -1 || slot >= table.pages.num_slots) return {CommitError::kSlotRange, slot};
  if (stage_row < -1 || stage_row >= table.num_staging_rows) {
    return {CommitError::kPathRange, stage_row};
  }
  return {CommitError::kOk, 0};
}

// True when another layer brought this staging row with another slot. Whether the row's own thread
// has recorded the slot yet makes no difference.
__device__ inline bool Mismatch(const StageTable& table, int64_t slot, int32_t stage_row) {
  if (table.group_slots == nullptr || table.records || stage_row < 0) return false;
  const int64_t recorded = table.group_slots[stage_row];
  return recorded != kNoSlot && recorded != slot;
}

__device__ inline RowFault CheckRow(const StageTable& table, int64_t slot, int32_t stage_row) {
  const RowFault fault = CheckRanges(table, slot, stage_row);
  if (fault.error == CommitError::kOk && Mismatch(table, slot, stage_row)) {
    return {CommitError::kSlotMismatch, slot};
  }
  return fault;
}

// One thread per faulty row comes here; only the first such row of the launch finds none before
// it, so there is one writer and no race.
__device__ inline void ReportFirst(const StageTable& table, int32_t row, const RowFault& fault) {
  if (table.status == nullptr || table.status[kStatusCode] != 0) return;
  for (int32_t before = 0; before < row; ++before) {
    const RowFault other = CheckRow(table, table.slot_mapping[before], table.StageRowOf(before));
    if (other.error != CommitError::kOk) return;
  }
  table.status[kStatusRequest] = row;
  table.status[kStatusIndex] = 0;
  table.status[kStatusValue] = fault.value;
  table.status[kStatusCode] = static_cast<int64_t>(fault.error);
}

// One thread per row: records the row's slot, or reports what is wrong with it.
__device__ inline void SettleRow(const StageTable& table, int32_t row, int64_t slot,
                                 int32_t stage_row) {
  const RowFault fault = CheckRow(table, slot, stage_row);
  if (fault.error != CommitError::kOk) {
    ReportFirst(table, row, fault);
  } else if (table.group_slots != nullptr && stage_row >= 0) {
    table.group_slots[stage_row] = slot;
  }
}

// One thread's part of one side (0: K, 1: V) of a row: its vectors `first`, `first + step`, ... go
// where the row goes. The thread of the first K vector settles the row.
template <RowOp op>
__device__ inline void StageRow(const StageTable& table, int32_t row, int side, int32_t first,
                                int32_t step) {
  constexpr RowVectorBytes kBytes = VectorBytes(op);
  // The row is on its way before anyone knows where it goes.
  int32_t index = first;
  const RowsSide& source = table.rows[side];
  const char* from = source.data + row * source.row;
  RowVector<op> vector;
  vector.Load(from + VectorPlace(table.shape, index).Offset(source.head, kBytes.row));

  const int64_t slot = table.slot_mapping[row];
  const int32_t stage_row = table.StageRowOf(row);
  const bool settles = index == 0 && side == 0;
  if (CheckRanges(table, slot, stage_row).error != CommitError::kOk) {
    if (settles) SettleRow(table, row, slot, stage_row);
    return;
  }
  // A row whose slot differs from another layer's never reaches the cache. Only rows that go both
  // ways have to wait for that answer here.
  const bool to_staging = stage_row >= 0;
  const bool to_cache =
      slot >= 0 && !(to_staging && (table.exclusive || Mismatch(table, slot, stage_row)));
  const RowsSide& staging = table.staged[side];
  char* staged = staging.data + (to_staging ? stage_row * staging.row : 0);
  char* cached = table.cache[side] +
                 (to_cache ? SlotOffset(table.strides[side], table.pages, slot) : int64_t{0});

  while (true) {
    const VectorPlace place(table.shape, index);
    if (to_staging) vector.StoreRow(staged + place.Offset(staging.head, kBytes.row));
    if (to_cache) {
      const float* scales = table.scales[side];
      const float scale = scales == nullptr ? 1.0f : scales[place.head * table.scale_stride[side]];
      vector.StoreCache(cached + place.Offset(table.strides[side].head, kBytes.cache), scale);
    }
    index += step;
    if (index >= table.shape.vectors_per_row) break;
    vector.Load(from + VectorPlace(table.shape, index).Offset(source.head, kBytes.row));
  }
  if (settles) SettleRow(table, row, slot, stage_row);
}

inline RowOp ChooseStageOp(const StageParams& params) {
  const CacheGeometry& geometry = params.cache.geometry;
  Alignment rows, cache;
  AddRows(rows, params.rows, geometry.head_dim, params.dtype);
  AddRows(rows, params.staged, geometry.head_dim, params.dtype);
  cache.Add(params.cache.key);
  cache.Add(params.cache.value);
  AddCache(cache, geometry);
  return ChooseRowOp(params.dtype, geometry.dtype, rows, cache);
}

inline StageTable MakeStageTable(const StageParams& params, RowOp op) {
  const CacheGeometry& geometry = params.cache.geometry;
  StageTable table{};
  for (int side = 0; side < 2; ++side) {
    table.rows[side] = MakeRowsSide(params.rows, side, params.dtype);
    table.staged[side] = MakeRowsSide(params.staged, side, params.dtype);
    table.strides[side] = MakeCacheStrides(geometry, side);
  }
  const KvScales& scales = params.cache.scales;
  table.cache[0] = static_cast<char*>(params.cache.key);
  table.cache[1] = static_cast<char*>(params.cache.value);
  table.scales[0] = scales.key;
  table.scales[1] = scales.value;
  table.scale_stride[0] = scales.key_count > 1;
  table.scale_stride[1] = scales.value_count > 1;
  table.pages = MakePages(geometry);
  table.shape = ShapeOf(op, geometry.num_heads, geometry.head_dim, params.dtype);
  table.slot_mapping = params.slot_mapping;
  table.stage_rows = params.stage_rows;
  table.group_slots = params.group_slots;
  table.records = params.records;
  table.status = params.status;
  table.num_rows = params.num_rows;
  table.num_staging_rows = params.num_staging_rows;
  table.exclusive = params.exclusive;
  return table;
}

}  // namespace nwor
