#include <cuda_runtime.h>

#include "attention/cuda/row_depth.cuh"
#include "attention/cuda/status.cuh"
#include "attention/cuda/verify.h"
#include "attention/plan.h"
#include "base/check.h"

// The planner: one thread block, once per step (LaunchVerifyPlan in verify.h). It reads the lengths
// on the device and writes the plan (../plan.h): splits each request's prefix, chooses the
// granularity of its work tiles and lists them longest first, so that CTAs finish at about the same
// time. It also clears the scheduler's counters in the workspace.

namespace nwor {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;

__device__ int CeilDiv(int a, int b) { return (a + b - 1) / b; }

__device__ int ClampLength(int value, int64_t limit, VerifyStatus code, int request,
                           int64_t* status) {
  if (value >= 0 && value <= limit) return value;
  ReportError(status, code, request, value);
  return value < 0 ? 0 : static_cast<int>(limit);
}

// The rows of a request that the plan covers. Reports what is wrong with them, if `status` is not
// null.
struct RowRange {
  int query_start, request_rows;
};
__device__ RowRange RowsOf(const VerifyParams& p, int b, int64_t* status) {
  const int begin = p.query_start[b];
  const int end = p.query_start[b + 1];
  if (begin < 0 || end < begin || end > p.num_rows) {
    ReportError(status, VerifyStatus::kBadRowRange, b, end);
    return {0, 0};
  }
  const int rows = end - begin;
  if (p.max_request_rows > 0 && rows > p.max_request_rows) return {begin, 0};
  if (p.tree_mask == nullptr || rows <= 64 * p.mask_words) return {begin, rows};
  ReportError(status, VerifyStatus::kTooManyRows, b, rows);
  return {begin, 64 * p.mask_words};
}

// The least depth of the request's rows. Called by whole warps.
__device__ int LeastDepth(const VerifyParams& p, const RowRange& rows) {
  int least = rows.request_rows;
  for (int row = threadIdx.x % 32; row < rows.request_rows; row += 32) {
    least = min(least, RowDepth(p, rows, row));
  }
  return __reduce_min_sync(0xffffffffu, least);
}

// `depth` is the smallest depth of the rows: that row sees furthest back.
__device__ PlanRequest ReadRequest(const VerifyParams& p, int b, int depth,
                                   const VerifyConfig& config) {
  PlanRequest request = {};
  const RowRange rows = RowsOf(p, b, p.status);
  request.query_start = rows.query_start;
  request.num_rows = rows.request_rows;

  request.source = TokenSource::kPages;
  if (p.view.num_blocks != nullptr && p.view.num_blocks[b] >= 0) {
    request.source = TokenSource::kBlocks;
    const int blocks = ClampLength(p.view.num_blocks[b], p.view.max_blocks,
                                   VerifyStatus::kViewTooLong, b, p.status);
    request.prefix_tokens =
        ClampLength(p.view.view_lens[b], static_cast<int64_t>(blocks) * p.view.block_size,
                    VerifyStatus::kViewTooLong, b, p.status);
  } else if (p.compact.lens != nullptr && p.compact.lens[b] >= 0) {
    request.source = TokenSource::kCompact;
    request.prefix_tokens = ClampLength(p.compact.lens[b], p.compact.max_tokens,
                                        VerifyStatus::kViewTooLong, b, p.status);
  } else {
    const CacheGeometry& cache = p.cache.geometry;
    const int64_t room = cache.num_pages > 0 ? int64_t{p.max_pages} * cache.page_size : 0;
    request.prefix_tokens =
        ClampLength(p.prefix_lens[b], room, VerifyStatus::kPrefixTooLong, b, p.status);
  }

  if (p.window > 0) {
    const int first = request.prefix_tokens + depth - p.window + 1;
    request.token_begin = min(max(first, 0), request.prefix_tokens);
  }
  const int packed = request.num_rows * (p.num_heads / p.num_kv_heads);
  const PrefixSplits kv_splits = SplitRequest(request.span(), packed, p.num_kv_heads, config);
  request.split_tokens = kv_splits.split_tokens;
  request.num_splits = kv_splits.num_splits;
  return request;
}

__device__ PlanDemand DemandOf(const PlanRequest& request, int group, int kv_heads, int row_tile) {
  const int splits_per_work_tile = request.splits_per_work_tile;
  const int output_tiles = CeilDiv(request.num_rows * group, row_tile) * kv_heads;
  const int partials = CeilDiv(request.num_splits, splits_per_work_tile);
  const int splits = min(splits_per_work_tile, request.num_splits);
  PlanDemand demand;
  demand.work_tile_tokens = min(splits * request.split_tokens, request.span());
  demand.work_tiles = output_tiles * partials;
  demand.slots = partials > 1 ? demand.work_tiles : 0;
  demand.split_outputs = partials > 1 ? output_tiles : 0;
  demand.partials = output_tiles > 0 ? partials : 0;
  return demand;
}

// Sums over a warp; every lane gets the result.
__device__ int WarpSum(int value) { return __reduce_add_sync(0xffffffffu, value); }

// Sums over the requests queued before b, and over all requests; for `partials`, the maximum.
// Called by whole warps.
struct QueueSums {
  PlanDemand before;
  PlanDemand all;
};
__device__ QueueSums SumQueue(const PlanRequest* requests, int num_requests, int b,
                              int work_tile_tokens) {
  QueueSums sums = {};
  for (int other = threadIdx.x % 32; other < num_requests; other += 32) {
    const PlanDemand d = requests[other].demand;
    sums.all.work_tiles += d.work_tiles;
    sums.all.split_outputs += d.split_outputs;
    sums.all.partials = max(sums.all.partials, d.partials);
    if (d.work_tile_tokens > work_tile_tokens ||
        (d.work_tile_tokens == work_tile_tokens && other < b)) {
      sums.before.work_tiles += d.work_tiles;
      sums.before.slots += d.slots;
      sums.before.split_outputs += d.split_outputs;
    }
  }
  sums.before.work_tiles = WarpSum(sums.before.work_tiles);
  sums.before.slots = WarpSum(sums.before.slots);
  sums.before.split_outputs = WarpSum(sums.before.split_outputs);
  sums.all.work_tiles = WarpSum(sums.all.work_tiles);
  sums.all.split_outputs = WarpSum(sums.all.split_outputs);
  sums.all.partials = __reduce_max_sync(0xffffffffu, sums.all.partials);
  return sums;
}

__device__ GranularityQuery GranularityQueryOf(const PlanRequest& request, int group, int kv_heads,
                                               int row_tile) {
  GranularityQuery query;
  query.output_tiles = CeilDiv(request.num_rows * group, row_tile) * kv_heads;
  query.kv_splits = {request.split_tokens, request.num_splits};
  query.span = request.span();
  return query;
}

__device__ int SetGranularity(PlanRequest* request, const GranularityQuery& query, int num_ctas) {
  request->splits_per_work_tile =
      SplitsPerWorkTile(ChooseGranularity(query, num_ctas), request->num_splits);
  return CeilDiv(request->num_splits, request->splits_per_work_tile) * query.output_tiles;
}

// Chooses the granularity of the first requests, whose work tiles the CTAs start with, one after
// the other. Returns how many requests that are. Called by one warp.
__device__ int PlanFirstWave(PlanRequest* requests, int num_requests, int group, int kv_heads,
                             const VerifyConfig& config) {
  long long work = 0;
  for (int b = threadIdx.x; b < num_requests; b += 32) work += requests[b].work;
  for (int lane = 16; lane > 0; lane /= 2) work += __shfl_xor_sync(0xffffffffu, work, lane);
  if (threadIdx.x > 0) return 0;
  const int64_t all = work;
  int64_t left = work;
  int started = 0;
  int b = 0;
  for (; b < num_requests && started < kEvenWaves * config.num_ctas; ++b) {
    GranularityQuery query = GranularityQueryOf(requests[b], group, kv_heads, config.row_tile);
    query.work_all = all;
    query.work_left = left;
    query.started = started;
    started += SetGranularity(&requests[b], query, config.num_ctas);
    left -= requests[b].work;
  }
  return b;
}

// Marks entries [begin, end) as empty, for CTAs without work. Called by the whole block.
__device__ void MarkIdle(WorkTile* work_tiles, int begin, int end) {
  for (int i = begin + threadIdx.x; i < end; i += kPlanThreads) work_tiles[i].request = -1;
}

__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ VerifyParams p, const __grid_constant__ VerifyConfig config,
               uint8_t* plan, int32_t* counters, int num_counters) {
  const int group = p.num_heads / p.num_kv_heads;
  const PlanOffsets at = LocatePlan(p.num_requests, config);
  PlanHeader* header = reinterpret_cast<PlanHeader*>(plan);
  PlanRequest* requests = reinterpret_cast<PlanRequest*>(plan + at.requests);
  WorkTile* work_tiles = reinterpret_cast<WorkTile*>(plan + at.work_tiles);
  WorkTile* split_outputs = reinterpret_cast<WorkTile*>(plan + at.split_outputs);

  __shared__ unsigned long long total_output_tiles, total_slots;
  __shared__ int first_wave;
  if (threadIdx.x == 0) total_output_tiles = total_slots = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_counters; i += kPlanThreads) counters[i] = 0;
  // With a tree mask a row's depth follows from the mask; a warp reads those of a request.
  // Otherwise row 0 has depth 0.
  const bool uses_depths = p.window > 0 && p.tree_mask != nullptr;
  for (int b = threadIdx.x / 32; uses_depths && b < p.num_requests; b += kPlanWarps) {
    const int depth = LeastDepth(p, RowsOf(p, b, nullptr));
    if (threadIdx.x % 32 == 0) requests[b].token_begin = depth;
  }
  __syncthreads();
  for (int b = threadIdx.x; b < p.num_requests; b += kPlanThreads) {
    PlanRequest request = ReadRequest(p, b, uses_depths ? requests[b].token_begin : 0, config);
    const int output_tiles = CeilDiv(request.num_rows * group, config.row_tile) * p.num_kv_heads;
    request.work = int64_t{output_tiles} * (request.span() + request.num_rows);
    requests[b] = request;
    atomicAdd(&total_output_tiles, static_cast<unsigned long long>(output_tiles));
  }
  __syncthreads();
  // Overlapping row ranges could ask for more output tiles than T rows allow.
  if (total_output_tiles > static_cast<unsigned long long>(config.max_output_tiles)) {
    if (threadIdx.x == 0) {
      ReportError(p.status, VerifyStatus::kBadRowRange, 0, total_output_tiles);
      *header = {};
    }
    MarkIdle(work_tiles, 0, config.max_ctas);
    return;
  }
  if (p.num_requests == 0) {
    if (threadIdx.x == 0) *header = {};
    MarkIdle(work_tiles, 0, config.max_ctas);
  }

  if (threadIdx.x < 32) {
    const int count = PlanFirstWave(requests, p.num_requests, group, p.num_kv_heads, config);
    if (threadIdx.x == 0) first_wave = count;
  }
  __syncthreads();
  for (int b = first_wave + threadIdx.x; b < p.num_requests; b += kPlanThreads) {
    GranularityQuery query =
        GranularityQueryOf(requests[b], group, p.num_kv_heads, config.row_tile);
    for (int later = b; later < p.num_requests; ++later) query.work_left += requests[later].work;
    query.started = kEvenWaves * config.num_ctas;
    SetGranularity(&requests[b], query, config.num_ctas);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < p.num_requests; b += kPlanThreads) {
    requests[b].demand = DemandOf(requests[b], group, p.num_kv_heads, config.row_tile);
    atomicAdd(&total_slots, static_cast<unsigned long long>(requests[b].demand.slots));
  }
  __syncthreads();
  if (total_slots > static_cast<unsigned long long>(config.max_slots)) {
    // Work tiles of whole requests need no slots.
    for (int b = threadIdx.x; b < p.num_requests; b += kPlanThreads) {
      requests[b].splits_per_work_tile = requests[b].num_splits;
      requests[b].demand = DemandOf(requests[b], group, p.num_kv_heads, config.row_tile);
    }
  }
  __syncthreads();

  // One warp lists the work tiles of one request. Partials are the outermost index, so that the
  // heads and row tiles that share pages run at the same time.
  const int lane = threadIdx.x % 32;
  for (int b = threadIdx.x / 32; b < p.num_requests; b += kPlanWarps) {
    const PlanRequest request = requests[b];
    const QueueSums sums = SumQueue(requests, p.num_requests, b, request.demand.work_tile_tokens);
    if (b == 0) {
      for (int i = sums.all.work_tiles + lane; i < config.max_ctas; i += 32) {
        work_tiles[i].request = -1;
      }
      if (lane == 0) {
        PlanHeader done = {};
        done.num_work_tiles = sums.all.work_tiles;
        done.num_split_outputs = sums.all.split_outputs;
        done.max_partials = sums.all.partials;
        *header = done;
      }
    }
    const int packed_rows = request.num_rows * group;
    const int row_tiles = CeilDiv(packed_rows, config.row_tile);
    const int splits_per_work_tile = request.splits_per_work_tile;
    const int partials = CeilDiv(request.num_splits, splits_per_work_tile);
    for (int i = lane; i < request.demand.work_tiles; i += 32) {
      const int tile = i % row_tiles;
      const int head = i / row_tiles % p.num_kv_heads;
      const int partial = i / row_tiles / p.num_kv_heads;
      const int output_tile = head * row_tiles + tile;
      WorkTile work_tile;
      work_tile.request = b;
      work_tile.kv_head = head;
      work_tile.row_begin = tile * config.row_tile;
      work_tile.num_rows = min(config.row_tile, packed_rows - work_tile.row_begin);
      work_tile.query_start = request.query_start;
      work_tile.request_rows = request.num_rows;
      work_tile.prefix_tokens = request.prefix_tokens;
      work_tile.source = request.source;
      work_tile.token_begin = request.token_begin;
      work_tile.split_tokens = request.split_tokens;
      work_tile.num_splits = request.num_splits;
      work_tile.split_begin = partial * splits_per_work_tile;
      work_tile.split_end = min(work_tile.split_begin + splits_per_work_tile, request.num_splits);
      work_tile.slot = partials > 1 ? sums.before.slots + output_tile * partials + partial : -1;
      work_tile.output_tile = partials > 1 ? sums.before.split_outputs + output_tile : -1;
      work_tile.num_partials = partials;
      work_tiles[sums.before.work_tiles + i] = work_tile;
      if (partials > 1 && partial == 0) split_outputs[work_tile.output_tile] = work_tile;
    }
  }
}

}  // namespace

void LaunchVerifyPlan(const VerifyParams& params, const VerifyConfig& config, void* plan,
                      void* workspace) {
  const WorkspaceOffsets at = LocateWorkspace(params.head_dim, config);
  const int num_counters = static_cast<int>(at.states / sizeof(int32_t));
  PlanKernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(
      params, config, static_cast<uint8_t*>(plan), static_cast<int32_t*>(workspace), num_counters);
  const cudaError_t error = cudaGetLastError();
  NWOR_CHECK(error == cudaSuccess, "LaunchVerifyPlan: ", cudaGetErrorString(error));
}

}  // namespace nwor
