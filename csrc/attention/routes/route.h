#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "base/types.h"

// Which implementation serves a verification step: a pure function of what the host knows.
// attention/verify.cpp calls it for every step. Thread-safe; needs neither torch nor a device.

namespace nwor {

enum class Route : uint8_t {
  kCpu,         // cpu/verify.h
  kCuda,        // cuda/verify.h
  kTorchFlash,  // FlashAttention-2 inside LibTorch (aten::_flash_attention_forward)
  kFlash2,      // FlashAttention-2 with pages: the installed package, or that of vLLM
  kFlash3,      // FlashAttention-3: the installed package, or that of vLLM
};
inline constexpr int kNumRoutes = 5;

// "cpu", "cuda", "torch_flash", "flash_attn_2", "flash_attn_3".
NWOR_EXPORT const char* Name(Route route);

// What a request may require of a route.
enum class RouteFeature : uint8_t {
  kCpuDevice,
  kCudaDevice,
  kFloat32Rows,
  kFloat8Cache,
  kHeadDim,
  kPageSize,
  kPages,
  kPartialView,
  kCompactView,
  kTreeMask,
  kWindow,
  kSoftcap,
  kAlignedMemory,
};
inline constexpr int kNumRouteFeatures = 13;

// "tree mask", "float8 cache", ...
NWOR_EXPORT const char* Name(RouteFeature feature);

struct RouteRequest {
  bool cuda = false;
  DType dtype = DType::kBFloat16;
  DType cache_dtype = DType::kBFloat16;
  int32_t head_dim = 128;
  int32_t page_size = 16;
  int32_t block_size = 0;  // of a partial view; 0: none
  bool compact_view = false;
  bool tree_mask = false;
  bool window = false;
  bool softcap = false;
  bool aligned = true;  // pointers and strides are multiples of 16 bytes
  int32_t num_requests = 1;
  int32_t max_rows = 1;  // rows of the longest request, as far as the host knows
  // K and V of the whole block table: what a kernel without pages would have to copy.
  int64_t table_bytes = 0;
};

// Larger copies are not made implicitly.
inline constexpr int64_t kMaxGatheredBytes = int64_t{1} << 30;

// The routes of this build and process: compiled in, or registered with torch.
struct RouteAvailability {
  bool present[kNumRoutes] = {};
  int32_t page_multiple[kNumRoutes] = {16, 16, 16, 16, 16};  // a CUDA route takes multiples of it

  void Set(Route route, bool here) { present[static_cast<int>(route)] = here; }
  bool Has(Route route) const { return present[static_cast<int>(route)]; }
};

struct RouteChoice {
  bool ok = false;
  Route route = Route::kCpu;
  // The route serves only requests with more than kPrefillRows rows; Route::kCuda serves the
  // others, so that their bits do not depend on the prefills.
  bool only_prefill = false;
  // Why this route was chosen; if not ok, the table of required, supported and missing features.
  std::string reason;
};

// Requests with more rows than this are prefills: compute-bound, what FlashAttention is built for.
inline constexpr int32_t kPrefillRows = 256;

// FlashAttention-3 reads a page to its end if it holds at least one of its KV tiles: values past
// the last token that are not finite would reach the result. This is its smallest tile.
inline constexpr int32_t kFlash3TileTokens = 80;

// Chooses a route. `wanted` is "auto" (or empty) or the name of a route. A named route that
// cannot serve the request is an error; it is not replaced by another.
//
// "auto" keeps the promise of our kernels: a row's bits depend only on its own request. Prefills
// that max_rows announces go to FlashAttention without splits, which keeps the promise too.
NWOR_EXPORT RouteChoice ChooseRoute(const RouteRequest& request, const RouteAvailability& available,
                                    std::string_view wanted = {});

// The features that a route lacks for a request; empty if it serves it.
NWOR_EXPORT std::vector<RouteFeature> MissingFeatures(Route route, const RouteRequest& request,
                                                      const RouteAvailability& available);

// The required features, and one line per route with those that it supports and lacks.
NWOR_EXPORT std::string FeatureTable(const RouteRequest& request,
                                     const RouteAvailability& available);

}  // namespace nwor
