#include <algorithm>
#include <atomic>

#include "base/parallel.h"
#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/stage/row_copy.h"
#include "kv_interceptor/stage/stage.h"

namespace nwor {
namespace {

// Below this, a second thread costs more than it copies.
constexpr int64_t kBytesPerTask = 256 * 1024;

struct RowFault {
  CommitError error = CommitError::kOk;
  int64_t value = 0;
};

// Pure: decides about one row without touching data.
RowFault CheckRow(const StageParams& params, int32_t row) {
  const int64_t slot = params.slot_mapping[row];
  const int32_t stage_row = params.StageRowOf(row);
  if (slot < -1 || slot >= params.cache.geometry.num_slots()) {
    return {CommitError::kSlotRange, slot};
  }
  if (stage_row < -1 || stage_row >= params.num_staging_rows) {
    return {CommitError::kPathRange, stage_row};
  }
  if (params.group_slots != nullptr && !params.records && stage_row >= 0) {
    const int64_t recorded = params.group_slots[stage_row];
    if (recorded != kNoSlot && recorded != slot) return {CommitError::kSlotMismatch, slot};
  }
  return {};
}

void StageRow(const StageParams& params, int32_t row) {
  const int64_t slot = params.slot_mapping[row];
  const int32_t stage_row = params.StageRowOf(row);
  if (stage_row >= 0) {
    const CacheGeometry& geometry = params.cache.geometry;
    const int64_t head_bytes = int64_t{geometry.head_dim} * ElementBytes(params.dtype);
    const KvRowsView &rows = params.rows, &staged = params.staged;
    CopyHeads(RowRun(staged.key, staged.key_row, staged.key_head, stage_row, params.dtype),
              RowRun(rows.key, rows.key_row, rows.key_head, row, params.dtype), geometry.num_heads,
              head_bytes);
    CopyHeads(RowRun(staged.value, staged.value_row, staged.value_head, stage_row, params.dtype),
              RowRun(rows.value, rows.value_row, rows.value_head, row, params.dtype),
              geometry.num_heads, head_bytes);
    if (params.group_slots != nullptr) params.group_slots[stage_row] = slot;
    if (params.exclusive) return;
  }
  if (slot >= 0) StoreRow(params.cache, slot, params.rows, row, params.dtype);
}

}  // namespace

void StageCpu(const StageParams& params) {
  int32_t first_fault = params.num_rows;
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const RowFault fault = CheckRow(params, row);
    if (fault.error == CommitError::kOk) continue;
    first_fault = std::min(first_fault, row);
    if (row == first_fault && params.status != nullptr && params.status[kStatusCode] == 0) {
      params.status[kStatusCode] = static_cast<int64_t>(fault.error);
      params.status[kStatusRequest] = row;
      params.status[kStatusIndex] = 0;
      params.status[kStatusValue] = fault.value;
    }
  }
  const CacheGeometry& geometry = params.cache.geometry;
  const int64_t row_bytes =
      int64_t{2} * geometry.num_heads * geometry.head_dim * ElementBytes(params.dtype);
  const auto rows_per_take =
      static_cast<int32_t>(std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes)));
  std::atomic<int32_t> next{0};
  RunOnTorchThreads((params.num_rows + rows_per_take - 1) / rows_per_take, [&] {
    for (int32_t first = next.fetch_add(rows_per_take); first < params.num_rows;
         first = next.fetch_add(rows_per_take)) {
      const int32_t end = std::min(first + rows_per_take, params.num_rows);
      for (int32_t row = first; row < end; ++row) {
        // Rows before the first fault were all found good.
        if (row < first_fault || CheckRow(params, row).error == CommitError::kOk) {
          StageRow(params, row);
        }
      }
    }
  });
}

}  // namespace nwor
