#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "base/export.h"
#include "kv_interceptor/commit/tail_tensors.h"
#include "kv_interceptor/stage/stage.h"

// write_kv and commit as functions of tensors, for hosts that keep their own books (an engine
// inside a CUDA graph); the Interceptor is the same flow with the books kept. bindings/ops.cpp
// registers them.
//
// Each checks every argument before it touches data. Shape-only (fake) tensors are checked and
// answered without touching anything.

namespace nwor {

// Row t of key and value [T, H, D] goes to cache slot slot_mapping[t] if that is >= 0, and to
// staging row stage_rows[t] if that is >= 0; with `exclusive` a staged row does not go to the
// cache. Without stage_rows, staged_key and staged_value no row is staged. On the CPU a slot or row
// out of range, or named twice, throws; on CUDA that row is not written and `status` (int64[8],
// optional) says which was the first.
NWOR_EXPORT void WriteKv(const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache,
                         at::Tensor value_cache, const at::Tensor& slot_mapping,
                         const std::optional<at::Tensor>& stage_rows,
                         const std::optional<at::Tensor>& staged_key,
                         const std::optional<at::Tensor>& staged_value,
                         const std::optional<at::Tensor>& k_scale,
                         const std::optional<at::Tensor>& v_scale, bool exclusive,
                         const std::optional<at::Tensor>& status);

// Commits rows of staged_key, staged_value [L, M, H, D] to the caches of L layers, all or nothing.
// status[0] is 0 or a CommitError on either device. `parents` [M]: staging row of each row's
// parent, -1 = the root; without it a path must only ascend.
NWOR_EXPORT void CommitStaged(const at::Tensor& staged_key, const at::Tensor& staged_value,
                              const std::vector<at::Tensor>& key_caches,
                              const std::vector<at::Tensor>& value_caches, const at::Tensor& path,
                              const at::Tensor& counts, const at::Tensor& slots, at::Tensor status,
                              const std::optional<at::Tensor>& parents,
                              const std::vector<at::Tensor>& k_scales,
                              const std::vector<at::Tensor>& v_scales,
                              const TailTensors& tail = {});

// Throws Error for a slot or staging row of host memory that is out of range or named twice.
void CheckStageOnCpu(const StageParams& params);

}  // namespace nwor
