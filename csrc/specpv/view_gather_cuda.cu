#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/cuda/element.cuh"
#include "base/cuda/launch_check.h"
#include "base/row_op.h"
#include "specpv/view_gather_params.h"

// One warp copies one head of one block, K and V. Blocks of threads share a request's lists in
// turn, so that a step with little to copy costs little: a view that holds all of its tokens is
// done after two loads.

namespace nwor {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 4;

// The tokens of one block that are to be copied, and where they lie.
struct Run {
  int64_t page;
  int32_t offset;  // of the block in its page
  int32_t first;   // token of the view that the block begins with
  int32_t begin, end;
};

__device__ int32_t MostTokens(const GatherParams& params) {
  const int64_t listed = int64_t{params.max_blocks} * params.block_size;
  return listed < params.capacity ? static_cast<int32_t>(listed) : params.capacity;
}

template <typename In, typename Out, int kVector>
__device__ void CopySide(const GatherParams& params, const Run& run, const void* cache,
                         const KvStrides& strides, void* view, int64_t view_at, int32_t head,
                         float scale) {
  const int vectors = params.geometry.head_dim / kVector;
  const In* from = static_cast<const In*>(cache) + run.page * strides.page +
                   run.offset * strides.token + head * strides.head;
  Out* to = static_cast<Out*>(view) + view_at;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 32); i < (run.end - run.begin) * vectors; i += 32) {
    const int token = run.begin + i / vectors, channel = i % vectors * kVector;
    const auto packet = *reinterpret_cast<const Packet<In, kVector>*>(
        from + (token - run.first) * strides.token + channel);
    Packet<Out, kVector> converted;
    if constexpr (std::is_same_v<In, Out>) {
      converted = packet;
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        StoreElement(&converted.element[j], ElementToFloat(packet.element[j]) * scale);
      }
    }
    *reinterpret_cast<Packet<Out, kVector>*>(to + token * params.token_stride + channel) =
        converted;
  }
}

template <typename In, typename Out, int kVector>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm)
    GatherKernel(const __grid_constant__ GatherParams params) {
  const auto request = static_cast<int32_t>(blockIdx.y);
  const int32_t held = params.held[request], length = params.lens[request];
  if (length <= held || held < 0 || length > MostTokens(params)) return;
  const int32_t heads = params.geometry.num_heads;
  const int32_t first_block = held / params.block_size;
  const int32_t blocks = (length + params.block_size - 1) / params.block_size - first_block;
  const int32_t parts = params.geometry.page_size / params.block_size;
  const int64_t units = int64_t{params.num_layers} * heads * blocks;
  for (int64_t unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < units;
       unit += int64_t{gridDim.x} * kWarps) {
    const auto list = static_cast<int32_t>(unit / blocks);
    const int32_t layer = list / heads, head = list % heads;
    const int32_t index = first_block + static_cast<int32_t>(unit % blocks);
    const int64_t row = (int64_t{layer} * params.num_requests + request) * heads + head;
    const int32_t block = params.blocks[row * params.max_blocks + index];
    if (block < 0 || block >= params.geometry.num_pages * parts) {
      params.lens[request] = -1;  // its whole prefix then
      continue;
    }
    const int32_t first = index * params.block_size;
    const Run run = {block / parts, block % parts * params.block_size, first, max(held, first),
                     min(length, first + params.block_size)};
    const GatherLayer& from = params.layers[layer];
    const int64_t at =
        layer * params.layer_stride + request * params.request_stride + head * params.head_stride;
    const KvScales& scales = from.scales;
    const float k_scale =
        scales.key == nullptr ? 1.0f : scales.key[scales.key_count == 1 ? 0 : head];
    const float v_scale =
        scales.value == nullptr ? 1.0f : scales.value[scales.value_count == 1 ? 0 : head];
    CopySide<In, Out, kVector>(params, run, from.key, params.geometry.key, params.keys, at, head,
                               k_scale);
    CopySide<In, Out, kVector>(params, run, from.value, params.geometry.value, params.values, at,
                               head, v_scale);
  }
}

// After every layer: what the views hold now. A length that is out of range becomes the prefix.
__global__ void HoldKernel(const __grid_constant__ GatherParams params) {
  const auto request = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (request >= params.num_requests) return;
  const int32_t length = params.lens[request];
  if (length < 0) return;
  if (length > MostTokens(params) || params.held[request] < 0) {
    params.lens[request] = -1;
  } else {
    params.held[request] = length;
  }
}

bool AllowsVectors(const GatherParams& params) {
  const CacheGeometry& cache = params.geometry;
  Alignment in, out;
  for (int layer = 0; layer < params.num_layers; ++layer) {
    in.Add(params.layers[layer].key);
    in.Add(params.layers[layer].value);
  }
  for (const KvStrides& strides : {cache.key, cache.value}) {
    in.AddElements({strides.page, strides.token, strides.head}, cache.dtype);
  }
  out.Add(params.keys);
  out.Add(params.values);
  out.AddElements(
      {params.layer_stride, params.request_stride, params.head_stride, params.token_stride},
      params.dtype);
  return cache.head_dim % 8 == 0 && in.Allows(std::min(16, 8 * ElementBytes(cache.dtype))) &&
         out.Allows(16);
}

}  // namespace

void LaunchGatherView(const GatherParams& params) {
  const int64_t units = int64_t{params.num_layers} * params.geometry.num_heads * params.max_blocks;
  const int sms = CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int64_t resident =
      std::max<int64_t>(1, int64_t{sms} * kBlocksPerSm / std::max(1, params.num_requests));
  const dim3 grid(static_cast<unsigned>(std::min((units + kWarps - 1) / kWarps, resident)),
                  static_cast<unsigned>(params.num_requests));
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const bool vectors = AllowsVectors(params);
  WithElementType(params.geometry.dtype, [&](auto* in) {
    using In = std::remove_pointer_t<decltype(in)>;
    WithElementType(params.dtype, [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      if constexpr (!std::is_same_v<Out, E4M3>) {
        const auto kernel = vectors ? GatherKernel<In, Out, 8> : GatherKernel<In, Out, 1>;
        kernel<<<grid, kWarps * 32, 0, stream>>>(params);
      }
    });
  });
  CheckCuda(cudaGetLastError(), "gather kernel");
  if (!params.last) return;
  const auto blocks = static_cast<unsigned>((params.num_requests + 127) / 128);
  HoldKernel<<<blocks, 128, 0, stream>>>(params);
  CheckCuda(cudaGetLastError(), "gather kernel's lengths");
}

}  // namespace nwor
