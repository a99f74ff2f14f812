#include "specpv/view_gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "base/check.h"
#include "base/tensor_layout.h"

#ifdef NWOR_WITH_CUDA
#include <cuda_runtime_api.h>

#include "base/cuda/launch_check.h"
#endif

namespace nwor {
namespace {

// Memory of the views' device, or of the host where the device can read it.
void CheckReadable(const at::Tensor& tensor, const char* name, at::Device device) {
  if (tensor.device() == device) return;
  if (device.is_cuda() && tensor.is_cpu() && tensor.is_pinned()) return;
  throw Error(Concat(name, ": got ", Describe(tensor), ", expected memory of ", device.str(),
                     device.is_cuda() ? " or pinned host memory" : ""));
}

void CheckViews(const at::Tensor& keys, const at::Tensor& values, int64_t layers, int64_t requests,
                const CacheGeometry& geometry) {
  NWOR_CHECK(keys.dim() == 5 && keys.size(0) == layers && keys.size(1) == requests &&
                 keys.size(2) == geometry.num_heads && keys.size(4) == geometry.head_dim &&
                 keys.stride(4) == 1 && keys.size(3) <= INT32_MAX,
             "keys: got ", Describe(keys), " strides ", keys.strides(), ", expected [", layers,
             ", ", requests, ", ", geometry.num_heads, ", tokens, ", geometry.head_dim,
             "] with contiguous channels");
  NWOR_CHECK(values.sizes() == keys.sizes() && values.strides() == keys.strides() &&
                 values.scalar_type() == keys.scalar_type() && values.device() == keys.device(),
             "values: got ", Describe(values), ", expected ", Describe(keys), " as keys");
}

}  // namespace

void GatherView(const std::vector<at::Tensor>& key_caches,
                const std::vector<at::Tensor>& value_caches, const at::Tensor& blocks,
                at::Tensor lens, at::Tensor held, at::Tensor keys, at::Tensor values,
                int64_t block_size) {
  const size_t num_layers = key_caches.size();
  NWOR_CHECK(num_layers >= 1 && value_caches.size() == num_layers, "value_caches: got ",
             value_caches.size(), " layers, expected ", num_layers, " as key_caches, at least one");
  const at::Device device = keys.device();
  GatherParams params;
  std::vector<GatherLayer> layers;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    const CacheLayout cache = DescribeCache(key_caches[layer], value_caches[layer]);
    if (layer == 0) params.geometry = cache.geometry;
    NWOR_CHECK(cache.geometry == params.geometry, "key_caches: got ", Describe(key_caches[layer]),
               " strides ", key_caches[layer].strides(), " for layer ", layer, ", expected ",
               Describe(key_caches[0]), " strides ", key_caches[0].strides(), " as layer 0");
    CheckReadable(key_caches[layer], "key_caches", device);
    CheckReadable(value_caches[layer], "value_caches", device);
    layers.push_back({cache.key, cache.value});
  }
  const CacheGeometry& geometry = params.geometry;
  NWOR_CHECK(block_size >= 1 && geometry.page_size % block_size == 0, "block_size: got ",
             block_size, ", expected a divisor of the page size ", geometry.page_size);
  CheckIndex(blocks, "blocks", at::kInt,
             {static_cast<int64_t>(num_layers), -1, geometry.num_heads, -1}, device);
  const int64_t requests = blocks.size(1);
  CheckIndex(lens, "lens", at::kInt, {requests}, device);
  CheckIndex(held, "held", at::kInt, {requests}, device);
  CheckViews(keys, values, static_cast<int64_t>(num_layers), requests, geometry);
  NWOR_CHECK(RowDType(keys, "keys") == geometry.dtype, "keys: got dtype ",
             c10::toString(keys.scalar_type()), ", expected ", Name(geometry.dtype),
             " as key_caches");
  if (requests == 0 || IsFake(keys)) return;

  params.lens = static_cast<int32_t*>(lens.mutable_data_ptr());
  params.held = static_cast<int32_t*>(held.mutable_data_ptr());
  params.layer_stride = keys.stride(0);
  params.request_stride = keys.stride(1);
  params.head_stride = keys.stride(2);
  params.token_stride = keys.stride(3);
  params.num_requests = static_cast<int32_t>(requests);
  params.max_blocks = static_cast<int32_t>(blocks.size(3));
  params.capacity = static_cast<int32_t>(keys.size(3));
  params.block_size = static_cast<int32_t>(block_size);
  params.stream = CurrentStream(device);
  const c10::DeviceGuard guard(device);
  const auto for_all_layers = [&](void (*run)(const GatherParams&)) {
    for (size_t first = 0; first < num_layers; first += kMaxGatherLayers) {
      const auto at = static_cast<int64_t>(first);
      const size_t count = std::min<size_t>(kMaxGatherLayers, num_layers - first);
      std::copy_n(layers.begin() + at, count, params.layers.begin());
      params.first_layer = static_cast<int32_t>(first);
      params.num_layers = static_cast<int32_t>(count);
      params.last = first + count == num_layers;
      params.blocks = static_cast<const int32_t*>(blocks.select(0, at).const_data_ptr());
      params.keys = keys.select(0, at).mutable_data_ptr();
      params.values = values.select(0, at).mutable_data_ptr();
      run(params);
    }
  };
  if (device.is_cpu()) {
    for_all_layers(CheckGatherCpu);
    for_all_layers(GatherViewCpu);
  } else {
#ifdef NWOR_WITH_CUDA
    for_all_layers(LaunchGatherView);
#endif
  }
}

at::Tensor PinnedCache(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  const auto options = at::dtype(dtype).device(device);
  if (device.is_cpu()) return at::empty(sizes, options);
#ifdef NWOR_WITH_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    size_t bytes = c10::elementSize(dtype);
    for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
    void* host = nullptr;
    const cudaError_t allocated = cudaHostAlloc(&host, std::max<size_t>(bytes, 1),
                                                cudaHostAllocMapped | cudaHostAllocPortable);
    // The runtime keeps it until somebody asks: the next launch must not be blamed for it.
    if (allocated != cudaSuccess) static_cast<void>(cudaGetLastError());
    CheckCuda(allocated, "pinned_cache");
    const auto release = [host](void*) { cudaFreeHost(host); };
    void* mapped = nullptr;
    if (const cudaError_t error = cudaHostGetDevicePointer(&mapped, host, 0);
        error != cudaSuccess) {
      cudaFreeHost(host);
      CheckCuda(error, "pinned_cache's device address");
    }
    return at::from_blob(mapped, sizes, release, options, device);
  }
#endif
  throw Error(Concat("device: got ", device.str(), ", expected cpu or cuda of a CUDA build"));
}

}  // namespace nwor
