#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/bypass_reason.h"
#include "base/cache_layout.h"
#include "kv_interceptor/staging_buffer.h"

// The layers an interceptor knows: their caches, their groups, and each group's staging.
//
// Thread-safety: none; the Interceptor that owns it serialises.

namespace nwor {

// What a layer has done in the open round.
enum class LayerRound : uint8_t { kSilent, kStaged, kDirect, kBypassed };

struct BoundLayer {
  std::string name;
  int group = 0;
  int staged_layer = -1;  // index in the group's staging; -1 until the cache has memory
  at::Tensor key_cache, value_cache;
  std::optional<at::Tensor> k_scale, v_scale;  // kept alive: the layout points into them
  CacheLayout layout;
  bool ready = false;       // memory stands behind the cache and its layout is supported
  std::string unsupported;  // why the layout is not, empty: it is or is not known yet
  LayerRound round = LayerRound::kSilent;

  // K and V of one token in this cache.
  int64_t bytes_per_token() const;
};

struct CacheGroup {
  std::unique_ptr<StagingBuffer> staging;  // null until a layer of the group is ready
  int num_ready = 0;                       // layers; a group without any takes no part in commits
  CacheGeometry geometry;                  // of all its ready layers
  at::ScalarType dtype = at::kBFloat16;    // of the model's rows
};

class LayerTable {
 public:
  // See Interceptor::BindLayer. Returns the layer; nothing changes when it throws.
  const BoundLayer& Bind(const std::string& name, const at::Tensor& key_cache,
                         const at::Tensor& value_cache, int group,
                         const std::optional<at::Tensor>& k_scale,
                         const std::optional<at::Tensor>& v_scale,
                         std::optional<at::ScalarType> dtype);

  // Throws Error unless all ready layers are on one device and those of one group share geometry.
  void CheckConsistent();

  // Whether every group has staging for num_rows rows.
  bool HasRoom(int64_t num_rows) const;
  // Makes room in every group, within max_bytes. Anything but kNone: some group has none.
  BypassReason Reserve(int64_t num_rows, int64_t preferred_rows, int64_t max_bytes);

  BoundLayer* Find(const std::string& name);
  std::vector<BoundLayer>& layers() { return layers_; }
  const std::vector<BoundLayer>& layers() const { return layers_; }
  const std::vector<CacheGroup>& groups() const { return groups_; }
  bool any_ready() const;
  at::Device device() const { return device_; }  // of the ready layers; the CPU when there is none
  int num_staging_groups() const;                // those with a ready layer
  int64_t staging_bytes() const;
  // What one committed token puts into the caches of the layers that staged in this round.
  int64_t staged_bytes_per_token() const;

 private:
  BypassReason ReserveAll(int64_t rows, int64_t max_bytes);
  void JoinGroup(BoundLayer& layer, std::optional<at::ScalarType> dtype);

  std::vector<BoundLayer> layers_;
  std::vector<CacheGroup> groups_;
  std::unordered_map<std::string, size_t> index_;
  at::Device device_{at::kCPU};
  bool changed_ = true;
};

}  // namespace nwor
