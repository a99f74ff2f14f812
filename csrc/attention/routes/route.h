#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "base/types.h"

// Which implementation serves a verification step: a pure function of what the host knows.
// Thread-safe; needs neither torch nor a device.

namespace nwor {

enum class Route : uint8_t {
  kCpu,         // verify_cpu.h
  kCuda,        // verify_cuda.h
  kTorchFlash,  // FlashAttention-2 inside LibTorch (aten::_flash_attention_forward)
  kFlash2,      // an installed FlashAttention-2 with pages, or the one in vLLM
  kFlash3,      // an installed FlashAttention-3, or the one in vLLM
};
inline constexpr int kNumRoutes = 5;

// "cpu", "cuda", "torch_flash", "flash_attn_2", "flash_attn_3".
NWOR_EXPORT const char* Name(Route route);

// What a request may ask for beyond plain attention over pages.
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
  int32_t max_rows = 1;      // rows of the longest request, as far as the host knows
  int32_t group = 1;         // query heads per KV head
  int64_t table_tokens = 0;  // room of the whole block table: an upper bound of all prefixes
  // What a kernel without pages would have to copy first: K and V of the whole block table.
  int64_t table_bytes = 0;
};

// A copy larger than this is not made behind the caller's back.
inline constexpr int64_t kMaxGatheredBytes = int64_t{1} << 30;

// Which routes this build and process have: compiled in, or registered with torch.
struct RouteAvailability {
  bool present[kNumRoutes] = {};
  int32_t page_multiple[kNumRoutes] = {16, 16, 16, 16, 16};  // page sizes a CUDA route takes

  void Set(Route route, bool here) { present[static_cast<int>(route)] = here; }
  bool Has(Route route) const { return present[static_cast<int>(route)]; }
};

struct RouteChoice {
  bool ok = false;
  Route route = Route::kCpu;
  // The route has the requests with more than kPrefillRows rows; the others are Route::kCuda's, so
  // that their bits are what they are without those.
  bool only_prefill = false;
  // Why this route; or, when not ok, the table of required, supported and missing features.
  std::string reason;
};

// Whether our CUDA kernels are built for heads of so many channels.
NWOR_EXPORT bool KernelHeadDim(int64_t head_dim);

// Requests with more rows than this are prefill: compute-bound, FlashAttention's own ground.
inline constexpr int32_t kPrefillRows = 256;

// FlashAttention-3 reads pages that hold a whole tile of its own, and no smaller ones, to their
// end: what is not finite behind the last token would reach the result. Its smallest tile.
inline constexpr int32_t kFlash3TileTokens = 80;

// From so many packed rows (rows times query heads per KV head) verification is bound by
// arithmetic, and from so many prefix tokens of all requests on the work pays for a kernel of
// another's and a merge: on an H200 with 64 rows FlashAttention-3 with its merge takes 281 us over
// 131072 tokens of one request where ours takes 267, and 510 over 262144 of eight instead of 522.
inline constexpr int32_t kComputeBoundRows = 128;
inline constexpr int64_t kMergePaysTokens = 262144;

// Picks a route. `wanted` is "auto" (or empty), "fast" or a route's name; a named route that cannot
// serve the request is not replaced by another.
//
// "auto" keeps what our kernels promise: a row's bits depend on its own request only. Prefill keeps
// it too, by kernels that do not split prefixes, where max_rows tells of it. "fast" gives it up
// where it pays: compute-bound verification over long prefixes goes to FlashAttention-3, if there
// is one, whose split of the work depends on the batch. Elsewhere it is "auto".
NWOR_EXPORT RouteChoice ChooseRoute(const RouteRequest& request, const RouteAvailability& available,
                                    std::string_view wanted = {});

// What a route lacks for a request; empty: it serves it.
NWOR_EXPORT std::vector<RouteFeature> MissingFeatures(Route route, const RouteRequest& request,
                                                      const RouteAvailability& available);

// One line per route: required features, and what each route supports and misses of them.
NWOR_EXPORT std::string FeatureTable(const RouteRequest& request,
                                     const RouteAvailability& available);

}  // namespace nwor
