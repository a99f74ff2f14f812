#include <algorithm>
#include <cstdint>

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

// Element: as wide as the cache's elements. Word: what a lane copies at once.
template <typename Element, typename Word>
__device__ void CopySide(const GatherParams& params, const Run& run, const void* cache,
                         const KvStrides& strides, void* view, int64_t view_at, int32_t head) {
  constexpr int kElements = sizeof(Word) / sizeof(Element);
  const int words = params.geometry.head_dim / kElements;
  const Element* from = static_cast<const Element*>(cache) + run.page * strides.page +
                        run.offset * strides.token + head * strides.head;
  Element* to = static_cast<Element*>(view) + view_at;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 32); i < (run.end - run.begin) * words; i += 32) {
    const int token = run.begin + i / words, channel = i % words * kElements;
    *reinterpret_cast<Word*>(to + token * params.token_stride + channel) =
        *reinterpret_cast<const Word*>(from + (token - run.first) * strides.token + channel);
  }
}

template <typename Element, typename Word>
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
    CopySide<Element, Word>(params, run, from.key, params.geometry.key, params.keys, at, head);
    CopySide<Element, Word>(params, run, from.value, params.geometry.value, params.values, at,
                            head);
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

bool AllowsWords(const GatherParams& params, int64_t bytes) {
  const CacheGeometry& cache = params.geometry;
  Alignment all;
  for (int layer = 0; layer < params.num_layers; ++layer) {
    all.Add(params.layers[layer].key);
    all.Add(params.layers[layer].value);
  }
  all.Add(params.keys);
  all.Add(params.values);
  for (const KvStrides& strides : {cache.key, cache.value}) {
    all.AddElements({strides.page, strides.token, strides.head}, cache.dtype);
  }
  all.AddElements({params.layer_stride, params.request_stride, params.head_stride,
                   params.token_stride, cache.head_dim},
                  cache.dtype);
  return all.Allows(bytes);
}

template <typename Element>
auto ChooseKernel(const GatherParams& params) {
  return AllowsWords(params, sizeof(uint4)) ? GatherKernel<Element, uint4>
                                            : GatherKernel<Element, Element>;
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
  const auto kernel = params.geometry.dtype == DType::kFloat32 ? ChooseKernel<uint32_t>(params)
                                                               : ChooseKernel<uint16_t>(params);
  kernel<<<grid, kWarps * 32, 0, stream>>>(params);
  CheckCuda(cudaGetLastError(), "gather kernel");
  if (!params.last) return;
  const auto blocks = static_cast<unsigned>((params.num_requests + 127) / 128);
  HoldKernel<<<blocks, 128, 0, stream>>>(params);
  CheckCuda(cudaGetLastError(), "gather kernel's lengths");
}

}  // namespace nwor
