#include "attention/routes/route.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/check.h"

namespace nwor {
namespace {

constexpr std::array<Route, kNumRoutes> kRoutes = {Route::kCpu, Route::kCuda, Route::kTorchFlash,
                                                   Route::kFlash2, Route::kFlash3};
// For prefill, fastest first.
constexpr std::array<Route, 3> kFlashRoutes = {Route::kFlash3, Route::kFlash2, Route::kTorchFlash};

std::vector<RouteFeature> RequiredFeatures(const RouteRequest& request) {
  std::vector<RouteFeature> required;
  const auto require = [&](bool needed, RouteFeature feature) {
    if (needed) required.push_back(feature);
  };
  require(!request.cuda, RouteFeature::kCpuDevice);
  require(request.cuda, RouteFeature::kCudaDevice);
  require(request.dtype == DType::kFloat32, RouteFeature::kFloat32Rows);
  require(request.cache_dtype == DType::kFloat8E4M3, RouteFeature::kFloat8Cache);
  required.push_back(RouteFeature::kHeadDim);
  required.push_back(RouteFeature::kPageSize);
  require(!request.compact_view, RouteFeature::kPages);
  require(request.block_size > 0, RouteFeature::kPartialView);
  require(request.compact_view, RouteFeature::kCompactView);
  require(request.tree_mask, RouteFeature::kTreeMask);
  require(request.window, RouteFeature::kWindow);
  require(request.softcap, RouteFeature::kSoftcap);
  require(!request.aligned, RouteFeature::kAlignedMemory);
  return required;
}

// Whether our CUDA kernels are built for this head size.
bool KernelHeadDim(int32_t head_dim) {
  constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 192, 256};
  return std::find(std::begin(kHeadDims), std::end(kHeadDims), head_dim) != std::end(kHeadDims);
}

bool FlashHeadDim(int32_t head_dim) { return head_dim % 8 == 0 && head_dim <= 256; }

// kAlignedMemory is required by requests whose memory is not aligned: only routes that read any
// address support it.
bool Supports(Route route, RouteFeature feature, const RouteRequest& request,
              const RouteAvailability& available) {
  using F = RouteFeature;
  const int32_t multiple = available.page_multiple[static_cast<int>(route)];
  const bool page_fits = request.page_size % multiple == 0 && request.block_size % 16 == 0;
  switch (route) {
    case Route::kCpu:
      return feature == F::kHeadDim ? request.head_dim % 8 == 0 : feature != F::kCudaDevice;
    case Route::kCuda:
      if (feature == F::kHeadDim) return KernelHeadDim(request.head_dim);
      if (feature == F::kPageSize) return page_fits;
      return feature != F::kCpuDevice && feature != F::kFloat32Rows && feature != F::kAlignedMemory;
    case Route::kTorchFlash:
      // Pages are first gathered into contiguous K/V: their size does not matter, their sum does.
      if (feature == F::kPages) return request.table_bytes <= kMaxGatheredBytes;
      return (feature == F::kHeadDim && FlashHeadDim(request.head_dim)) ||
             feature == F::kCudaDevice || feature == F::kPageSize || feature == F::kCompactView ||
             feature == F::kTreeMask || feature == F::kAlignedMemory;
    case Route::kFlash2:
    case Route::kFlash3:
      return (feature == F::kHeadDim && FlashHeadDim(request.head_dim)) ||
             (feature == F::kPageSize && page_fits) || feature == F::kCudaDevice ||
             feature == F::kPages || feature == F::kTreeMask || feature == F::kSoftcap;
  }
  return false;
}

std::optional<Route> ParseRoute(std::string_view name) {
  for (const Route route : kRoutes) {
    if (name == Name(route)) return route;
  }
  return std::nullopt;
}

std::string Join(const std::vector<RouteFeature>& features, const RouteRequest& request) {
  std::string text;
  const char* separator = "";
  for (const RouteFeature feature : features) {
    text += Concat(separator, Name(feature));
    if (feature == RouteFeature::kHeadDim) text += Concat(" ", request.head_dim);
    if (feature == RouteFeature::kPageSize) text += Concat(" ", request.page_size);
    separator = ", ";
  }
  return features.empty() ? "nothing" : text;
}

RouteChoice Take(Route route, std::string reason) {
  return {true, route, false, std::move(reason)};
}

RouteChoice Refuse(const RouteRequest& request, const RouteAvailability& available,
                   const std::string& why) {
  const char* advice = request.aligned
                           ? ""
                           : "\nkey_cache, value_cache or out: got rows that are not 16-byte "
                             "aligned, expected 16-byte alignment (as of a clone)";
  return {false, Route::kCpu, false, why + "\n" + FeatureTable(request, available) + advice};
}

// Flash routes take trees where our CUDA kernel does, too.
bool Serves(Route route, const RouteRequest& request, const RouteAvailability& available) {
  if (!available.Has(route) || !MissingFeatures(route, request, available).empty()) return false;
  const bool ours = route == Route::kCpu || route == Route::kCuda;
  return ours || !request.tree_mask ||
         (available.Has(Route::kCuda) && MissingFeatures(Route::kCuda, request, available).empty());
}

// Whether a route may be chosen without being named: it serves the request and reads nothing past
// the last token of a page.
bool ServesUnnamed(Route route, const RouteRequest& request, const RouteAvailability& available) {
  const bool reads_past_end = route == Route::kFlash3 && request.page_size >= kFlash3TileTokens;
  return !reads_past_end && Serves(route, request, available);
}

}  // namespace

const char* Name(Route route) {
  constexpr std::array<const char*, kNumRoutes> kNames = {"cpu", "cuda", "torch_flash",
                                                          "flash_attn_2", "flash_attn_3"};
  return kNames[static_cast<size_t>(route)];
}

const char* Name(RouteFeature feature) {
  constexpr std::array<const char*, kNumRouteFeatures> kNames = {
      "cpu tensors",
      "cuda tensors",
      "float32 rows",
      "float8 cache",
      "head size",
      "page size",
      "pages",
      "partial view",
      "compact view",
      "tree mask",
      "window",
      "softcap",
      "memory that is not 16-byte aligned"};
  return kNames[static_cast<size_t>(feature)];
}

std::vector<RouteFeature> MissingFeatures(Route route, const RouteRequest& request,
                                          const RouteAvailability& available) {
  std::vector<RouteFeature> missing;
  for (const RouteFeature feature : RequiredFeatures(request)) {
    if (!Supports(route, feature, request, available)) missing.push_back(feature);
  }
  return missing;
}

std::string FeatureTable(const RouteRequest& request, const RouteAvailability& available) {
  const std::vector<RouteFeature> required = RequiredFeatures(request);
  std::string text = "required: " + Join(required, request);
  for (const Route route : kRoutes) {
    const std::vector<RouteFeature> missing = MissingFeatures(route, request, available);
    std::vector<RouteFeature> supported;
    for (const RouteFeature feature : required) {
      if (std::find(missing.begin(), missing.end(), feature) == missing.end()) {
        supported.push_back(feature);
      }
    }
    text += Concat("\n", Name(route), available.Has(route) ? "" : " (absent)", ": supports ",
                   Join(supported, request), "; missing ", Join(missing, request));
  }
  return text;
}

RouteChoice ChooseRoute(const RouteRequest& request, const RouteAvailability& available,
                        std::string_view wanted) {
  if (!wanted.empty() && wanted != "auto") {
    const std::optional<Route> route = ParseRoute(wanted);
    if (!route.has_value()) {
      return Refuse(request, available,
                    "route: got '" + std::string(wanted) +
                        "', expected auto, cpu, cuda, torch_flash, flash_attn_2 or "
                        "flash_attn_3");
    }
    if (!Serves(*route, request, available)) {
      return Refuse(request, available,
                    "route: got '" + std::string(wanted) +
                        "', expected a route that is present and serves this request");
    }
    return Take(*route, "requested by name");
  }
  if (!request.cuda) {
    if (Serves(Route::kCpu, request, available)) return Take(Route::kCpu, "tensors on the cpu");
    return Refuse(request, available, "no attention route serves this request");
  }
  if (request.num_requests > 0 && request.max_rows > kPrefillRows && !request.tree_mask &&
      !request.compact_view) {
    for (const Route route : kFlashRoutes) {
      if (!ServesUnnamed(route, request, available)) continue;
      RouteChoice choice = Take(route, "prefill: more than 256 rows in a request");
      choice.only_prefill = Serves(Route::kCuda, request, available);
      if (choice.only_prefill) choice.reason += "; requests of fewer take cuda";
      return choice;
    }
  }
  if (Serves(Route::kCuda, request, available)) {
    return Take(Route::kCuda, "verification rows on a cuda device");
  }
  // A compact view may hold requests that use their pages; only our kernels read such a mix.
  for (const Route route : kFlashRoutes) {
    if (!request.compact_view && ServesUnnamed(route, request, available)) {
      return Take(route, "our kernels do not serve this request");
    }
  }
  return Refuse(request, available, "no attention route serves this request");
}

}  // namespace nwor
