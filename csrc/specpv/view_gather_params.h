#pragma once

#include <array>
#include <cstdint>

#include "base/cache_layout.h"
#include "base/export.h"
#include "base/types.h"

namespace nwor {

inline constexpr int kMaxGatherLayers = 64;  // of one launch: their addresses travel with it

struct GatherLayer {
  const void* key = nullptr;
  const void* value = nullptr;
};

// Distances in elements. Layers are counted from the first of this call.
struct GatherParams {
  std::array<GatherLayer, kMaxGatherLayers> layers;
  CacheGeometry geometry;           // of every layer; the views have its dtype
  const int32_t* blocks = nullptr;  // [L, B, Hkv, max_blocks]
  int32_t* lens = nullptr;          // [B]
  int32_t* held = nullptr;          // [B]
  void* keys = nullptr;             // [L, B, Hkv, N, D]
  void* values = nullptr;
  int64_t layer_stride = 0, request_stride = 0, head_stride = 0, token_stride = 0;
  int32_t first_layer = 0;  // of all layers, for messages
  int32_t num_layers = 0;
  int32_t num_requests = 0;
  int32_t max_blocks = 0;
  int32_t capacity = 0;  // N
  int32_t block_size = 0;
  bool last = true;  // the call that moves `held`
  StreamHandle stream = nullptr;
};

// Throws Error for a length or block out of range.
void CheckGatherCpu(const GatherParams& params);
// REQUIRES: CheckGatherCpu passes.
void GatherViewCpu(const GatherParams& params);
void LaunchGatherView(const GatherParams& params);  // CUDA builds only

}  // namespace nwor
