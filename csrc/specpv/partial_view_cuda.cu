#include <cstdint>

#include "base/cuda/dependent_launch.cuh"
#include "specpv/partial_view.h"

namespace nwor {
namespace {

// As many as a view of the default budget has blocks, so that they are looked up all at once.
constexpr int kThreads = 288;

__device__ inline const int32_t* IdsOf(const ViewParams& params, int32_t layer, int32_t store_row,
                                       int32_t head) {
  return params.ids +
         ((int64_t{layer} * params.num_rows + store_row) * params.num_kv_heads + head) * params.k;
}

// Whether a list begins with `count` candidates and no more, by the ends that tell: ids ascend.
__device__ inline bool HasCandidates(const int32_t* ids, int32_t count, int32_t k,
                                     int32_t candidates) {
  const int32_t last = count > 0 ? ids[count - 1] : 0;
  const int32_t behind = count < k ? ids[count] : -1;
  return last >= 0 && (count == 0 || last < candidates) && behind < 0;
}

// The same of every list of a request. All threads of a block call it.
__device__ inline bool AllHaveCandidates(const ViewParams& params, int32_t store_row, int32_t count,
                                         int32_t candidates) {
  bool all = true;
  const int32_t num_lists = params.num_layers * params.num_kv_heads;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_lists; i += kThreads) {
    const int32_t* ids = IdsOf(params, i / params.num_kv_heads, store_row, i % params.num_kv_heads);
    all &= HasCandidates(ids, count, params.k, candidates);
  }
  return __syncthreads_and(all) != 0;
}

// One block of threads for each list; the first list of a request also tells its lengths.
__global__ void __launch_bounds__(kThreads)
    BuildViewKernel(const __grid_constant__ ViewParams params) {
  __shared__ int32_t retrieved;
  if (threadIdx.x == 0) retrieved = params.k;
  WaitOnDependentGrids();
  LaunchDependentGrids();
  const auto head = static_cast<int32_t>(blockIdx.x % params.num_kv_heads);
  const auto request = static_cast<int32_t>(blockIdx.x / params.num_kv_heads);
  const auto layer = static_cast<int32_t>(blockIdx.y);
  const bool tells = layer == 0 && head == 0;
  const int64_t row = (int64_t{layer} * params.num_requests + request) * params.num_kv_heads + head;
  const int32_t store_row = StoreRow(params.rows, request, params.num_rows);
  const int32_t* ids = IdsOf(params, layer, store_row, head);
  // Lengths and ids are asked for together; what does not count is not looked at.
  const int32_t committed = params.committed_lens[request];
  const int32_t full = params.full_lens[request];
  const bool partial = params.partial[request] != 0 && store_row >= 0;
  __syncthreads();
  if (store_row >= 0) {
    // Ids are padded behind: the first -1 tells how many there are.
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.k; i += kThreads) {
      if (ids[i] < 0) atomicMin(&retrieved, i);
    }
  }
  __syncthreads();
  const ViewSegments segments =
      SegmentsOf(full, committed, params.sink_blocks, params.window_blocks, params.block_size);
  const int32_t chosen_end = segments.sink_blocks + retrieved;
  const int32_t total = chosen_end + segments.end - segments.window_begin;
  bool fits = partial && total <= params.max_blocks && full >= 0 && full <= committed &&
              committed <= int64_t{params.max_pages} * params.page_size;
  if (tells) {
    if (fits) fits = AllHaveCandidates(params, store_row, retrieved, segments.candidates());
    if (threadIdx.x == 0) {
      params.num_blocks[request] = fits ? total : -1;
      params.view_lens[request] =
          fits ? total * params.block_size - (segments.end * params.block_size - committed) : 0;
    }
  }
  if (!fits) return;
  int32_t* blocks = params.blocks + row * params.max_blocks;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < total; i += kThreads) {
    int32_t index = i;
    if (i >= chosen_end) {
      index = segments.window_begin + i - chosen_end;
    } else if (i >= segments.sink_blocks) {
      const int32_t id = ids[i - segments.sink_blocks];
      index = id < segments.candidates() ? segments.sink_blocks + id : -1;
    }
    blocks[i] = index < 0 ? -1 : CacheBlock(params, request, index);
  }
}

}  // namespace

void LaunchBuildView(const ViewParams& params) {
  const dim3 grid(static_cast<unsigned>(params.num_requests * params.num_kv_heads),
                  static_cast<unsigned>(params.num_layers));
  LaunchDependent(BuildViewKernel, grid, kThreads, 0, params, "view kernel");
}

}  // namespace nwor
