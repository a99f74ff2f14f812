#include <cstdint>

#include "kv_interceptor/early_launch.cuh"
#include "specpv/partial_view.h"

namespace nwor {
namespace {

// As many as a view of the default budget has blocks, so that they are looked up all at once.
constexpr int kThreads = 288;

// One block of threads for each list; the first list of a request also tells its lengths.
__global__ void __launch_bounds__(kThreads)
    BuildViewKernel(const __grid_constant__ ViewParams params) {
  __shared__ int32_t retrieved;
  if (threadIdx.x == 0) retrieved = params.k;
  AwaitLaunchAhead();
  LetNextBegin();
  const auto head = static_cast<int32_t>(blockIdx.x % params.num_kv_heads);
  const auto request = static_cast<int32_t>(blockIdx.x / params.num_kv_heads);
  const auto layer = static_cast<int32_t>(blockIdx.y);
  const bool tells = layer == 0 && head == 0 && threadIdx.x == 0;
  const int64_t row = (int64_t{layer} * params.num_requests + request) * params.num_kv_heads + head;
  const int32_t store_row = StoreRow(params.rows, request, params.num_rows);
  const int32_t* ids =
      params.ids +
      ((int64_t{layer} * params.num_rows + store_row) * params.num_kv_heads + head) * params.k;
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
  const bool fits = partial && total <= params.max_blocks && committed >= 0 &&
                    committed <= int64_t{params.max_pages} * params.page_size;
  if (tells) {
    params.num_blocks[request] = fits ? total : -1;
    params.view_lens[request] =
        fits ? total * params.block_size - (segments.end * params.block_size - committed) : 0;
  }
  if (!fits) return;
  int32_t* blocks = params.blocks + row * params.max_blocks;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < total; i += kThreads) {
    int32_t index = i;
    if (i >= chosen_end) {
      index = segments.window_begin + i - chosen_end;
    } else if (i >= segments.sink_blocks) {
      index = segments.sink_blocks + ids[i - segments.sink_blocks];
    }
    blocks[i] = CacheBlock(params, request, index);
  }
}

}  // namespace

void LaunchBuildView(const ViewParams& params) {
  const dim3 grid(static_cast<unsigned>(params.num_requests * params.num_kv_heads),
                  static_cast<unsigned>(params.num_layers));
  LaunchEarly(BuildViewKernel, grid, kThreads, 0, params, "view kernel");
}

}  // namespace nwor
