#include <cuda_runtime.h>

#include "attention/cuda/row_depth.cuh"
#include "attention/cuda/status.cuh"
#include "attention/cuda/verify_cuda.h"
#include "attention/plan.h"
#include "base/check.h"

// The planner: one block, once per step. Cuts requests into leaves, chooses the grain of the work
// items and lists them, longest first, so that the dynamic queue ends evenly.

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

// The rows of a request that the plan has work for. Tells `status`, if there is one, what is wrong
// with them.
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

// `depth` is that of the row that sees furthest back.
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
  const LeafSplit split = SplitRequest(request.span(), packed, p.num_kv_heads, config);
  request.leaf_tokens = split.leaf_tokens;
  request.num_leaves = split.num_leaves;
  return request;
}

__device__ PlanDemand DemandOf(const PlanRequest& request, int group, int kv_heads, int row_tile) {
  const int leaves_per_item = request.leaves_per_item;
  const int pairs = CeilDiv(request.num_rows * group, row_tile) * kv_heads;
  const int parts = CeilDiv(request.num_leaves, leaves_per_item);
  const int leaves = min(leaves_per_item, request.num_leaves);
  PlanDemand demand;
  demand.item_tokens = min(leaves * request.leaf_tokens, request.span());
  demand.items = pairs * parts;
  demand.slots = parts > 1 ? demand.items : 0;
  demand.split_pairs = parts > 1 ? pairs : 0;
  demand.parts = pairs > 0 ? parts : 0;
  return demand;
}

// Sums over a warp; every lane gets the result.
__device__ int WarpSum(int value) { return __reduce_add_sync(0xffffffffu, value); }

// The sums over the requests queued before b, and over all of them; of `parts` the largest. Called
// by whole warps.
struct QueueSums {
  PlanDemand before;
  PlanDemand all;
};
__device__ QueueSums SumQueue(const PlanRequest* requests, int num_requests, int b,
                              int item_tokens) {
  QueueSums sums = {};
  for (int other = threadIdx.x % 32; other < num_requests; other += 32) {
    const PlanDemand d = requests[other].demand;
    sums.all.items += d.items;
    sums.all.split_pairs += d.split_pairs;
    sums.all.parts = max(sums.all.parts, d.parts);
    if (d.item_tokens > item_tokens || (d.item_tokens == item_tokens && other < b)) {
      sums.before.items += d.items;
      sums.before.slots += d.slots;
      sums.before.split_pairs += d.split_pairs;
    }
  }
  sums.before.items = WarpSum(sums.before.items);
  sums.before.slots = WarpSum(sums.before.slots);
  sums.before.split_pairs = WarpSum(sums.before.split_pairs);
  sums.all.items = WarpSum(sums.all.items);
  sums.all.split_pairs = WarpSum(sums.all.split_pairs);
  sums.all.parts = __reduce_max_sync(0xffffffffu, sums.all.parts);
  return sums;
}

__device__ GrainQuery QueryOf(const PlanRequest& request, int group, int kv_heads, int row_tile) {
  GrainQuery query;
  query.pairs = CeilDiv(request.num_rows * group, row_tile) * kv_heads;
  query.split = {request.leaf_tokens, request.num_leaves};
  query.span = request.span();
  return query;
}

__device__ int SetGrain(PlanRequest* request, const GrainQuery& query, int num_ctas) {
  request->leaves_per_item = LeavesPerItem(ChooseGrain(query, num_ctas), request->num_leaves);
  return CeilDiv(request->num_leaves, request->leaves_per_item) * query.pairs;
}

// Chooses the grains of the first requests, whose items the CTAs start with, one after the other;
// returns how many they are. Called by one warp.
__device__ int PlanFirstRound(PlanRequest* requests, int num_requests, int group, int kv_heads,
                              const VerifyConfig& config) {
  long long work = 0;
  for (int b = threadIdx.x; b < num_requests; b += 32) work += requests[b].work;
  for (int lane = 16; lane > 0; lane /= 2) work += __shfl_xor_sync(0xffffffffu, work, lane);
  if (threadIdx.x > 0) return 0;
  const int64_t all = work;
  int64_t left = work;
  int started = 0;
  int b = 0;
  for (; b < num_requests && started < kEvenRounds * config.num_ctas; ++b) {
    GrainQuery query = QueryOf(requests[b], group, kv_heads, config.row_tile);
    query.work_all = all;
    query.work_left = left;
    query.started = started;
    started += SetGrain(&requests[b], query, config.num_ctas);
    left -= requests[b].work;
  }
  return b;
}

// Entries [begin, end) tell their CTAs that there is nothing to do. Called by the whole block.
__device__ void MarkIdle(PlanItem* items, int begin, int end) {
  for (int i = begin + threadIdx.x; i < end; i += kPlanThreads) items[i].request = -1;
}

__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ VerifyParams p, const __grid_constant__ VerifyConfig config,
               uint8_t* plan, int32_t* counters, int num_counters) {
  const int group = p.num_heads / p.num_kv_heads;
  const PlanOffsets at = LocatePlan(p.num_requests, config);
  PlanHeader* header = reinterpret_cast<PlanHeader*>(plan);
  PlanRequest* requests = reinterpret_cast<PlanRequest*>(plan + at.requests);
  PlanItem* items = reinterpret_cast<PlanItem*>(plan + at.items);
  PlanItem* pairs = reinterpret_cast<PlanItem*>(plan + at.pairs);

  __shared__ unsigned long long total_pairs, total_slots;
  __shared__ int first_round;
  if (threadIdx.x == 0) total_pairs = total_slots = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_counters; i += kPlanThreads) counters[i] = 0;
  // Positions in a tree follow from the mask: a warp looks at a request's. Else row 0 has depth 0.
  const bool uses_depths = p.window > 0 && p.tree_mask != nullptr;
  for (int b = threadIdx.x / 32; uses_depths && b < p.num_requests; b += kPlanWarps) {
    const int depth = LeastDepth(p, RowsOf(p, b, nullptr));
    if (threadIdx.x % 32 == 0) requests[b].token_begin = depth;
  }
  __syncthreads();
  for (int b = threadIdx.x; b < p.num_requests; b += kPlanThreads) {
    PlanRequest request = ReadRequest(p, b, uses_depths ? requests[b].token_begin : 0, config);
    const int pairs = CeilDiv(request.num_rows * group, config.row_tile) * p.num_kv_heads;
    request.work = int64_t{pairs} * (request.span() + request.num_rows);
    requests[b] = request;
    atomicAdd(&total_pairs, static_cast<unsigned long long>(pairs));
  }
  __syncthreads();
  // Row ranges that overlap could ask for more than T rows allow.
  if (total_pairs > static_cast<unsigned long long>(config.max_pairs)) {
    if (threadIdx.x == 0) {
      ReportError(p.status, VerifyStatus::kBadRowRange, 0, total_pairs);
      *header = {};
    }
    MarkIdle(items, 0, config.num_ctas);
    return;
  }
  if (p.num_requests == 0) {
    if (threadIdx.x == 0) *header = {};
    MarkIdle(items, 0, config.num_ctas);
  }

  if (threadIdx.x < 32) {
    const int count = PlanFirstRound(requests, p.num_requests, group, p.num_kv_heads, config);
    if (threadIdx.x == 0) first_round = count;
  }
  __syncthreads();
  for (int b = first_round + threadIdx.x; b < p.num_requests; b += kPlanThreads) {
    GrainQuery query = QueryOf(requests[b], group, p.num_kv_heads, config.row_tile);
    for (int later = b; later < p.num_requests; ++later) query.work_left += requests[later].work;
    query.started = kEvenRounds * config.num_ctas;
    SetGrain(&requests[b], query, config.num_ctas);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < p.num_requests; b += kPlanThreads) {
    requests[b].demand = DemandOf(requests[b], group, p.num_kv_heads, config.row_tile);
    atomicAdd(&total_slots, static_cast<unsigned long long>(requests[b].demand.slots));
  }
  __syncthreads();
  if (total_slots > static_cast<unsigned long long>(config.max_slots)) {
    // Whole requests need no slots.
    for (int b = threadIdx.x; b < p.num_requests; b += kPlanThreads) {
      requests[b].leaves_per_item = requests[b].num_leaves;
      requests[b].demand = DemandOf(requests[b], group, p.num_kv_heads, config.row_tile);
    }
  }
  __syncthreads();

  // One warp lists one request's items: parts outermost, so that the heads and row tiles that share
  // pages run at the same time.
  const int lane = threadIdx.x % 32;
  for (int b = threadIdx.x / 32; b < p.num_requests; b += kPlanWarps) {
    const PlanRequest request = requests[b];
    const QueueSums sums = SumQueue(requests, p.num_requests, b, request.demand.item_tokens);
    if (b == 0) {
      for (int i = sums.all.items + lane; i < config.num_ctas; i += 32) items[i].request = -1;
      if (lane == 0) {
        PlanHeader done = {};
        done.num_items = sums.all.items;
        done.num_split_pairs = sums.all.split_pairs;
        done.max_parts = sums.all.parts;
        *header = done;
      }
    }
    const int packed_rows = request.num_rows * group;
    const int row_tiles = CeilDiv(packed_rows, config.row_tile);
    const int leaves_per_item = request.leaves_per_item;
    const int parts = CeilDiv(request.num_leaves, leaves_per_item);
    for (int i = lane; i < request.demand.items; i += 32) {
      const int tile = i % row_tiles;
      const int head = i / row_tiles % p.num_kv_heads;
      const int part = i / row_tiles / p.num_kv_heads;
      const int pair = head * row_tiles + tile;
      PlanItem item;
      item.request = b;
      item.kv_head = head;
      item.row_begin = tile * config.row_tile;
      item.num_rows = min(config.row_tile, packed_rows - item.row_begin);
      item.query_start = request.query_start;
      item.request_rows = request.num_rows;
      item.prefix_tokens = request.prefix_tokens;
      item.source = request.source;
      item.token_begin = request.token_begin;
      item.leaf_tokens = request.leaf_tokens;
      item.num_leaves = request.num_leaves;
      item.leaf_begin = part * leaves_per_item;
      item.leaf_end = min(item.leaf_begin + leaves_per_item, request.num_leaves);
      item.slot = parts > 1 ? sums.before.slots + pair * parts + part : -1;
      item.pair = parts > 1 ? sums.before.split_pairs + pair : -1;
      item.num_parts = parts;
      items[sums.before.items + i] = item;
      if (parts > 1 && part == 0) pairs[item.pair] = item;
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
