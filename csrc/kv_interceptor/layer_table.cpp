#include "kv_interceptor/layer_table.h"

#include <algorithm>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "kv_interceptor/commit/commit.h"

namespace nwor {
namespace {

// Whether we can write such a cache at all: a question of support, not of wrong use.
std::string LayoutProblem(const at::Tensor& cache) {
  switch (cache.scalar_type()) {
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::ScalarType::Float8_e4m3fn:
      break;
    default:
      return Concat("got dtype ", c10::toString(cache.scalar_type()),
                    ", supported are float32, float16, bfloat16 and float8_e4m3fn");
  }
  if (cache.dim() == 4 && cache.size(3) > 1 && cache.stride(3) != 1) {
    return Concat("got a stride of ", cache.stride(3), " between channels, supported is 1");
  }
  return {};
}

}  // namespace

int64_t BoundLayer::bytes_per_token() const {
  const CacheGeometry& geometry = layout.geometry;
  return int64_t{2} * geometry.num_heads * geometry.head_dim * ElementBytes(geometry.dtype);
}

const BoundLayer& LayerTable::Bind(const std::string& name, const at::Tensor& key_cache,
                                   const at::Tensor& value_cache, int group,
                                   const std::optional<at::Tensor>& k_scale,
                                   const std::optional<at::Tensor>& v_scale,
                                   std::optional<at::ScalarType> dtype) {
  NWOR_CHECK(group >= 0 && group < kMaxCommitGroups, "group: got ", group, ", expected 0 to ",
             kMaxCommitGroups - 1);
  NWOR_CHECK(key_cache.defined() && value_cache.defined(),
             "key_cache, value_cache: got nothing, expected tensors");
  BoundLayer* old = Find(name);
  NWOR_CHECK(old != nullptr || static_cast<int>(layers_.size()) < kMaxCommitLayers, "layer '", name,
             "': got ", layers_.size() + 1, " layers, expected at most ", kMaxCommitLayers);
  NWOR_CHECK(old == nullptr || old->group == group, "group: got ", group, " for layer '", name,
             "', expected ", old == nullptr ? 0 : old->group, " as when it was first bound");

  BoundLayer layer;
  layer.name = name;
  layer.group = group;
  layer.staged_layer = old == nullptr ? -1 : old->staged_layer;
  layer.key_cache = key_cache;
  layer.value_cache = value_cache;
  layer.k_scale = k_scale;
  layer.v_scale = v_scale;
  if (!IsFake(key_cache) && HasStorage(key_cache) && HasStorage(value_cache)) {
    layer.unsupported = LayoutProblem(key_cache);
    if (layer.unsupported.empty()) layer.unsupported = LayoutProblem(value_cache);
    if (layer.unsupported.empty()) {
      layer.layout = DescribeCache(key_cache, value_cache, k_scale, v_scale);
      CheckApart(key_cache, value_cache);
      layer.ready = true;
      JoinGroup(layer, dtype);
    }
  }

  changed_ = true;
  if (layer.ready) ++groups_[group].num_ready;
  if (old != nullptr && old->ready) --groups_[group].num_ready;
  if (old != nullptr) {
    *old = std::move(layer);
    return *old;
  }
  index_.emplace(name, layers_.size());
  layers_.push_back(std::move(layer));
  return layers_.back();
}

// Gives a ready layer its place in the staging of its group, which its first ready layer makes.
void LayerTable::JoinGroup(BoundLayer& layer, std::optional<at::ScalarType> dtype) {
  const CacheGeometry& geometry = layer.layout.geometry;
  at::ScalarType row_type = ToScalarType(geometry.dtype);
  if (geometry.dtype == DType::kFloat8E4M3) {
    NWOR_CHECK(dtype.has_value(),
               "dtype: got none, expected the model's dtype, because the cache of layer '",
               layer.name, "' is float8_e4m3fn");
    row_type = *dtype;
    NWOR_CHECK(row_type == at::kFloat || row_type == at::kHalf || row_type == at::kBFloat16,
               "dtype: got ", c10::toString(row_type), ", expected float32, float16 or bfloat16");
  } else {
    NWOR_CHECK(dtype.value_or(row_type) == row_type, "dtype: got ",
               c10::toString(dtype.value_or(row_type)), ", expected ", c10::toString(row_type),
               " as the cache of layer '", layer.name, "'");
  }
  if (static_cast<int>(groups_.size()) <= layer.group) groups_.resize(layer.group + 1);
  CacheGroup& group = groups_[layer.group];
  if (group.staging == nullptr) {
    group.dtype = row_type;
    group.geometry = geometry;
    group.staging = std::make_unique<StagingBuffer>(geometry.num_heads, geometry.head_dim, row_type,
                                                    layer.key_cache.device());
  }
  NWOR_CHECK(geometry.num_heads == group.geometry.num_heads &&
                 geometry.head_dim == group.geometry.head_dim && row_type == group.dtype &&
                 layer.key_cache.device() == group.staging->device(),
             "key_cache: got ", Describe(layer.key_cache), " for layer '", layer.name,
             "' of group ", layer.group, ", expected ", group.geometry.num_heads, " KV heads of ",
             group.geometry.head_dim, " channels and ", c10::toString(group.dtype), " rows on ",
             group.staging->device().str(), " as the group's other layers");
  if (layer.staged_layer < 0) layer.staged_layer = group.staging->AddLayer();
}

void LayerTable::CheckConsistent() {
  if (!changed_) return;
  std::vector<const BoundLayer*> first_of_group(groups_.size(), nullptr);
  const BoundLayer* first = nullptr;
  for (const BoundLayer& layer : layers_) {
    if (!layer.ready) continue;
    if (first == nullptr) first = &layer;
    NWOR_CHECK(layer.key_cache.device() == first->key_cache.device(), "layer '", layer.name,
               "': got a cache on ", layer.key_cache.device().str(), ", expected ",
               first->key_cache.device().str(), " as layer '", first->name, "'");
    const BoundLayer*& reference = first_of_group[layer.group];
    if (reference == nullptr) reference = &layer;
    NWOR_CHECK(layer.layout.geometry == reference->layout.geometry, "layer '", layer.name,
               "': got cache ", Describe(layer.key_cache), " strides ", layer.key_cache.strides(),
               ", expected sizes and strides of layer '", reference->name, "' ",
               Describe(reference->key_cache), " strides ", reference->key_cache.strides(),
               ": bind it in a group of its own");
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (first_of_group[g] != nullptr) groups_[g].geometry = first_of_group[g]->layout.geometry;
  }
  device_ = first == nullptr ? at::Device(at::kCPU) : first->key_cache.device();
  changed_ = false;
}

bool LayerTable::HasRoom(int64_t num_rows) const {
  return std::all_of(groups_.begin(), groups_.end(), [&](const CacheGroup& group) {
    return group.staging == nullptr || group.staging->capacity_rows() >= num_rows;
  });
}

BypassReason LayerTable::Reserve(int64_t num_rows, int64_t preferred_rows, int64_t max_bytes) {
  // The preferred size when there is room for it, else exactly what the round needs.
  if (preferred_rows > num_rows && ReserveAll(preferred_rows, max_bytes) == BypassReason::kNone) {
    return BypassReason::kNone;
  }
  return ReserveAll(num_rows, max_bytes);
}

BypassReason LayerTable::ReserveAll(int64_t rows, int64_t max_bytes) {
  // What a group has, or will have at least.
  const auto bytes_of = [rows](const StagingBuffer& staging) {
    return staging.capacity_rows() >= rows ? staging.memory_bytes() : staging.BytesFor(rows);
  };
  int64_t spare = max_bytes;
  for (const CacheGroup& group : groups_) {
    if (group.staging != nullptr) spare -= bytes_of(*group.staging);
  }
  if (spare < 0) return BypassReason::kCapacity;
  for (const CacheGroup& group : groups_) {
    if (group.staging == nullptr) continue;
    // A group may take more than it needs of what no group needs.
    const int64_t own = bytes_of(*group.staging);
    const BypassReason reason = group.staging->Reserve(rows, own + spare);
    if (reason != BypassReason::kNone) return reason;
    spare -= group.staging->memory_bytes() - own;
  }
  return BypassReason::kNone;
}

BoundLayer* LayerTable::Find(const std::string& name) {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &layers_[found->second];
}

bool LayerTable::any_ready() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer.ready; });
}

int LayerTable::num_staging_groups() const {
  return static_cast<int>(std::count_if(groups_.begin(), groups_.end(),
                                        [](const auto& group) { return group.num_ready > 0; }));
}

int64_t LayerTable::staging_bytes() const {
  int64_t bytes = 0;
  for (const CacheGroup& group : groups_) {
    if (group.staging != nullptr) bytes += group.staging->memory_bytes();
  }
  return bytes;
}

int64_t LayerTable::staged_bytes_per_token() const {
  int64_t bytes = 0;
  for (const BoundLayer& layer : layers_) {
    if (layer.round == LayerRound::kStaged) bytes += layer.bytes_per_token();
  }
  return bytes;
}

}  // namespace nwor
