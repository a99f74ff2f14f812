#include "kv_interceptor/kv_ops.h"

#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "base/profiling.h"
#include "base/tensor_layout.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/stage/slot_set.h"

namespace nwor {
namespace {

template <typename T>
const T* Data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

// The op of a CPU-only build has no CUDA kernel behind it, so other devices do not get this far.
void RunStage(const StageParams& params, at::Device device) {
  const c10::DeviceGuard guard(device);
  const ScopedProfileRange range(ProfileRange::kStage);
  if (device.is_cpu()) {
    CheckStageOnCpu(params);
    StageCpu(params);
    return;
  }
#ifdef NWOR_WITH_CUDA
  LaunchStage(params);
#endif
}

void RunCommit(const CommitParams& params, at::Device device) {
  const c10::DeviceGuard guard(device);
  const ScopedProfileRange range(ProfileRange::kCommit);
  if (device.is_cpu()) {
    thread_local CommitUndoLog log;
    CommitCpu(params, log);
    return;
  }
#ifdef NWOR_WITH_CUDA
  LaunchCommit(params);
#endif
}

std::optional<at::Tensor> ScaleOf(const std::vector<at::Tensor>& scales, size_t layer) {
  return scales.empty() ? std::nullopt : std::optional(scales[layer]);
}

}  // namespace

void CheckStageOnCpu(const StageParams& params) {
  thread_local SlotSet slots, rows;
  slots.Reset(params.num_rows);
  rows.Reset(params.num_rows);
  const int64_t num_slots = params.cache.geometry.num_slots();
  for (int32_t i = 0; i < params.num_rows; ++i) {
    const int64_t slot = params.slot_mapping[i];
    const int32_t row = params.StageRowOf(i);
    NWOR_CHECK(slot >= -1 && slot < num_slots, "slot_mapping: got ", slot, " at ", i,
               ", expected -1 to ", num_slots - 1);
    NWOR_CHECK(row >= -1 && row < params.num_staging_rows, "stage_rows: got ", row, " at ", i,
               ", expected -1 to ", params.num_staging_rows - 1);
    NWOR_CHECK(row < 0 || rows.Insert(row), "stage_rows: got row ", row, " twice, at ", i,
               ", expected each staging row once");
    const bool to_cache = slot >= 0 && (row < 0 || !params.exclusive);
    NWOR_CHECK(!to_cache || slots.Insert(slot), "slot_mapping: got slot ", slot, " twice, at ", i,
               ", expected each slot once");
  }
}

void WriteKv(const at::Tensor& key_in, const at::Tensor& value_in, at::Tensor key_cache,
             at::Tensor value_cache, const at::Tensor& slot_mapping,
             const std::optional<at::Tensor>& stage_rows,
             const std::optional<at::Tensor>& staged_key,
             const std::optional<at::Tensor>& staged_value,
             const std::optional<at::Tensor>& k_scale, const std::optional<at::Tensor>& v_scale,
             bool exclusive, const std::optional<at::Tensor>& status) {
  StageParams params;
  params.cache = DescribeCache(key_cache, value_cache, k_scale, v_scale);
  const CacheGeometry& geometry = params.cache.geometry;
  const at::Device device = key_cache.device();
  const at::Tensor key = ContiguousChannels(key_in), value = ContiguousChannels(value_in);

  params.dtype = RowDType(key, "key");
  NWOR_CHECK(geometry.dtype == params.dtype || geometry.dtype == DType::kFloat8E4M3,
             "key: got dtype ", Name(params.dtype), ", expected ", Name(geometry.dtype),
             " as key_cache");
  params.rows = DescribeRows(key, value, "key", "value", geometry.num_heads, geometry.head_dim);
  CheckDevice(key, "key", device);
  const bool stages = stage_rows.has_value();
  NWOR_CHECK(staged_key.has_value() == stages && staged_value.has_value() == stages,
             "stage_rows, staged_key, staged_value: got some of them, expected all or none");
  if (stages) {
    params.staged = DescribeRows(*staged_key, *staged_value, "staged_key", "staged_value",
                                 geometry.num_heads, geometry.head_dim);
    NWOR_CHECK(RowDType(*staged_key, "staged_key") == params.dtype, "staged_key: got dtype ",
               c10::toString(staged_key->scalar_type()), ", expected ", Name(params.dtype),
               " as key");
    CheckDevice(*staged_key, "staged_key", device);
  }
  const int64_t num_rows = key.size(0);
  CheckIndex(slot_mapping, "slot_mapping", at::kLong, {num_rows}, device);
  if (stages) CheckIndex(*stage_rows, "stage_rows", at::kInt, {num_rows}, device);
  if (status.has_value()) {
    CheckIndex(*status, "status", at::kLong, {kNumStatusWords}, device);
  }
  const bool fake = IsFake(key) || IsFake(key_cache) || (stages && IsFake(*staged_key));
  if (fake || num_rows == 0) return;

  params.slot_mapping = Data<int64_t>(slot_mapping);
  params.num_rows = static_cast<int32_t>(num_rows);
  if (stages) {
    params.stage_rows = Data<int32_t>(*stage_rows);
    params.num_staging_rows = static_cast<int32_t>(staged_key->size(0));
  }
  params.exclusive = exclusive;
  if (status.has_value()) params.status = static_cast<int64_t*>(status->mutable_data_ptr());
  params.stream = CurrentStream(device);
  RunStage(params, device);
}

void CommitStaged(const at::Tensor& staged_key, const at::Tensor& staged_value,
                  const std::vector<at::Tensor>& key_caches,
                  const std::vector<at::Tensor>& value_caches, const at::Tensor& path,
                  const at::Tensor& counts, const at::Tensor& slots, at::Tensor status,
                  const std::optional<at::Tensor>& parents, const std::vector<at::Tensor>& k_scales,
                  const std::vector<at::Tensor>& v_scales, const TailTensors& tail) {
  const auto num_layers = static_cast<int64_t>(key_caches.size());
  NWOR_CHECK(num_layers >= 1 && num_layers <= kMaxCommitLayers, "key_caches: got ", num_layers,
             " layers, expected 1 to ", kMaxCommitLayers);
  NWOR_CHECK(value_caches.size() == key_caches.size(), "value_caches: got ", value_caches.size(),
             " layers, expected ", num_layers, " as key_caches");
  for (const auto& [scales, name] :
       {std::pair{&k_scales, "k_scales"}, std::pair{&v_scales, "v_scales"}}) {
    NWOR_CHECK(scales->empty() || scales->size() == key_caches.size(), name, ": got ",
               scales->size(), " layers, expected ", num_layers, " as key_caches, or none");
  }
  for (const auto& [staged, name] :
       {std::pair{&staged_key, "staged_key"}, std::pair{&staged_value, "staged_value"}}) {
    NWOR_CHECK(staged->dim() == 4 && staged->size(0) == num_layers, name, ": got sizes ",
               staged->sizes(), ", expected [", num_layers, ", rows, KV heads, channels]");
  }

  CommitParams params;
  params.num_groups = 1;
  params.num_layers = static_cast<int32_t>(num_layers);
  CommitGroup& group = params.groups[0];
  const at::Device device = key_caches[0].device();
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const CacheLayout cache = DescribeCache(key_caches[layer], value_caches[layer],
                                            ScaleOf(k_scales, layer), ScaleOf(v_scales, layer));
    if (layer == 0) group.geometry = cache.geometry;
    NWOR_CHECK(cache.geometry == group.geometry, "key_caches: got ", Describe(key_caches[layer]),
               " strides ", key_caches[layer].strides(), " for layer ", layer, ", expected ",
               Describe(key_caches[0]), " strides ", key_caches[0].strides(), " as layer 0");
    CheckDevice(key_caches[layer], "key_caches", device);
    params.layers[layer] = {cache.key, cache.value, cache.scales, 0, static_cast<int32_t>(layer)};
  }

  group.dtype = RowDType(staged_key, "staged_key");
  NWOR_CHECK(group.geometry.dtype == group.dtype || group.geometry.dtype == DType::kFloat8E4M3,
             "staged_key: got dtype ", Name(group.dtype), ", expected ", Name(group.geometry.dtype),
             " as key_caches");
  group.staged = DescribeRows(staged_key.select(0, 0), staged_value.select(0, 0), "staged_key",
                              "staged_value", group.geometry.num_heads, group.geometry.head_dim);
  CheckDevice(staged_key, "staged_key", device);
  group.staged_key_layer = staged_key.stride(0);
  group.staged_value_layer = staged_value.stride(0);

  NWOR_CHECK(path.dim() == 2, "path: got sizes ", path.sizes(), ", expected [requests, depth]");
  CheckIndex(path, "path", at::kInt, {-1, -1}, device);
  const int64_t num_requests = path.size(0), depth = path.size(1);
  NWOR_CHECK(num_requests * depth <= kMaxCommitRows, "path: got ", num_requests * depth,
             " entries, expected at most ", kMaxCommitRows, ": commit in chunks");
  CheckIndex(counts, "counts", at::kInt, {num_requests}, device);
  CheckIndex(slots, "slots", at::kLong, {num_requests, depth}, device);
  CheckIndex(status, "status", at::kLong, {kNumStatusWords}, device);
  const int64_t num_staging_rows = staged_key.size(1);
  if (parents.has_value()) CheckIndex(*parents, "parents", at::kInt, {num_staging_rows}, device);
  params.tail = DescribeTail(tail, params, num_requests, device);
  if (IsFake(staged_key) || IsFake(key_caches[0]) || IsFake(path)) return;

  params.path = Data<int32_t>(path);
  params.counts = Data<int32_t>(counts);
  group.slots = Data<int64_t>(slots);
  params.num_requests = static_cast<int32_t>(num_requests);
  params.depth = static_cast<int32_t>(depth);
  params.num_staging_rows = static_cast<int32_t>(num_staging_rows);
  if (parents.has_value()) params.parents = Data<int32_t>(*parents);
  params.status = static_cast<int64_t*>(status.mutable_data_ptr());
  params.stream = CurrentStream(device);
  RunCommit(params, device);
}

}  // namespace nwor
