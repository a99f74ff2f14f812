#pragma once

#include <cstdint>

#include "base/cache_layout.h"
#include "base/export.h"
#include "base/types.h"

// The write of one layer: each row of this step's K/V goes to its cache slot, to its staging row,
// to both or to neither. This is what replaces the engine's reshape_and_cache.

namespace nwor {

// What stands in group_slots for a staging row that no layer has brought yet.
inline constexpr int64_t kNoSlot = INT64_MIN;

struct StageParams {
  KvRowsView rows;                        // [T, H, D] of the model's dtype; read only
  CacheLayout cache;                      // destination of direct rows; dtype may be float8
  KvRowsView staged;                      // [M, H, D] of the model's dtype
  const int64_t* slot_mapping = nullptr;  // [T]: cache slot, -1 = not to the cache
  const int32_t* stage_rows = nullptr;    // [T]: staging row, -1 = not staged; null: none is
  int32_t num_rows = 0;                   // T
  int32_t num_staging_rows = 0;           // M
  DType dtype = DType::kBFloat16;         // of rows and staged
  bool exclusive = false;  // a staged row is not written to the cache whatever its slot

  // [M] one slot buffer for all layers of the group, or null: the first layer that brings a staging
  // row records its slot where kNoSlot stood, a later one must bring the same (kSlotMismatch).
  int64_t* group_slots = nullptr;
  bool records = false;       // what stands in group_slots is of an earlier round: overwrite it
  int64_t* status = nullptr;  // int64[8] (commit/error.h) or null: the first fault of the round

  StreamHandle stream = nullptr;

  int32_t StageRowOf(int32_t row) const { return stage_rows == nullptr ? -1 : stage_rows[row]; }
};

// Rows with a slot or staging row out of range are not written; the first one is reported in status
// (kSlotRange, kPathRange, kSlotMismatch; request = row, value = what was got). A caller that wants
// all or nothing checks the ranges first (CPU ops do). REQUIRES: pointers valid on the right
// device.
NWOR_EXPORT void StageCpu(const StageParams& params);
NWOR_EXPORT void LaunchStage(const StageParams& params);  // one launch; CUDA builds only

}  // namespace nwor
