#include <algorithm>
#include <cstdint>

#include "kv_interceptor/launch_check.h"
#include "specpv/selection.h"

// The k highest of a list of scores, by one block of threads: a radix select, two bits a step. The
// keys lie in shared memory when they fit. Counting instead of a histogram: scores are close to
// each other, and a histogram's atomics would meet in few bins.

namespace nwor {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBits = 2;

// Counts of three thresholds in one number, 21 bits each.
constexpr int kCountBits = 21;
constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;

__device__ uint64_t SumOfWarp(uint64_t value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// The sum over the block, the same in every thread. `scratch` alternates between calls.
__device__ uint64_t SumOfBlock(uint64_t value, uint64_t* scratch) {
  const uint64_t of_warp = SumOfWarp(value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return SumOfWarp(scratch[threadIdx.x % 32]);
}

// The sum over the threads before this one.
__device__ uint64_t SumBefore(uint64_t value, uint64_t* scratch) {
  const unsigned lane = threadIdx.x % 32;
  uint64_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) scratch[threadIdx.x / 32] = inclusive;
  __syncthreads();
  uint64_t of_warps = scratch[lane];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, of_warps, distance);
    if (lane >= distance) of_warps += other;
  }
  const unsigned warp = threadIdx.x / 32;
  const uint64_t before = __shfl_sync(0xffffffff, of_warps, warp == 0 ? 0 : warp - 1);
  return inclusive - value + (warp == 0 ? 0 : before);
}

__device__ uint32_t KeyOf(const SelectParams& params, const float* scores, int32_t id) {
  float score = scores[id];
  if (params.selection == Selection::kShared) {
    for (int32_t head = 1; head < params.num_kv_heads; ++head) {
      score += scores[int64_t{head} * params.max_blocks + id];
    }
  }
  return OrderedKey(score);
}

template <bool kInShared>
__global__ void __launch_bounds__(kThreads)
    TakeHighestKernel(const __grid_constant__ SelectParams params) {
  extern __shared__ uint32_t keys[];
  __shared__ uint64_t scratch[2][kWarps];
  const bool shared_list = params.selection == Selection::kShared;
  const auto request =
      static_cast<int32_t>(shared_list ? blockIdx.x : blockIdx.x / params.num_kv_heads);
  const auto kv_head = static_cast<int32_t>(shared_list ? 0 : blockIdx.x % params.num_kv_heads);
  const int64_t store_row = StoreRow(params.rows, request, params.num_rows);
  if (params.num_candidates[request] < 0 || store_row < 0) return;
  const int32_t count = min(params.num_candidates[request], params.max_blocks);
  const int64_t row = int64_t{request} * params.num_kv_heads + kv_head;
  const float* scores = params.scores + row * params.max_blocks;
  const int32_t taken = BlocksToTake(params, request, count);
  const auto key_at = [&](int32_t id) {
    if constexpr (kInShared) return keys[id];
    return KeyOf(params, scores, id);
  };
  if constexpr (kInShared) {
    for (int32_t id = static_cast<int32_t>(threadIdx.x); id < count; id += kThreads) {
      keys[id] = KeyOf(params, scores, id);
    }
    __syncthreads();
  }

  // The largest threshold that at least `taken` keys reach, from the highest bits down.
  uint32_t threshold = 0;
#pragma unroll 1
  for (int step = 0; step < 32 / kBits && taken > 0 && taken < count; ++step) {
    const int shift = 32 - kBits * (step + 1);
    const uint32_t third = threshold | 3u << shift, second = threshold | 2u << shift;
    const uint32_t first = threshold | 1u << shift;
    uint64_t reached = 0;
    for (int32_t id = static_cast<int32_t>(threadIdx.x); id < count; id += kThreads) {
      const uint32_t key = key_at(id);
      reached += (key >= first ? uint64_t{1} : 0) +
                 (key >= second ? uint64_t{1} << kCountBits : 0) +
                 (key >= third ? uint64_t{1} << 2 * kCountBits : 0);
    }
    reached = SumOfBlock(reached, scratch[step % 2]);
    const auto needed = static_cast<uint64_t>(taken);
    if (reached >> 2 * kCountBits >= needed) {
      threshold = third;
    } else if ((reached >> kCountBits & kCountMask) >= needed) {
      threshold = second;
    } else if ((reached & kCountMask) >= needed) {
      threshold = first;
    }
  }

  // Ids in order: those above the threshold, and of those at it the first so many.
  const int32_t share = (count + kThreads - 1) / kThreads;
  const int32_t begin = min(count, static_cast<int32_t>(threadIdx.x) * share);
  const int32_t end = min(count, begin + share);
  uint64_t own = 0;  // above in the low half, equal in the high one
  for (int32_t id = begin; id < end; ++id) {
    const uint32_t key = key_at(id);
    own += key > threshold ? 1 : key == threshold ? uint64_t{1} << 32 : 0;
  }
  __syncthreads();
  const uint64_t all = SumOfBlock(own, scratch[0]);
  const uint64_t before = SumBefore(own, scratch[1]);
  const auto ties = taken - static_cast<int32_t>(all & 0xffffffff);
  auto above_before = static_cast<int32_t>(before & 0xffffffff);
  auto equal_before = static_cast<int32_t>(before >> 32);
  int32_t* ids = params.ids + (store_row * params.num_kv_heads + kv_head) * params.k;
  const int32_t lists = shared_list ? params.num_kv_heads : 1;
  const auto put = [&](int32_t position, int32_t id) {
    for (int32_t list = 0; list < lists; ++list) ids[int64_t{list} * params.k + position] = id;
  };
  for (int32_t id = begin; id < end && taken > 0; ++id) {
    const uint32_t key = key_at(id);
    const int32_t position = above_before + min(equal_before, ties);
    if (key > threshold) {
      put(position, id);
      ++above_before;
    } else if (key == threshold) {
      if (equal_before < ties) put(position, id);
      ++equal_before;
    }
  }
  for (int32_t i = taken + static_cast<int32_t>(threadIdx.x); i < params.k; i += kThreads) {
    put(i, -1);
  }
}

}  // namespace

void LaunchTakeHighest(const SelectParams& params) {
  const int lists = params.selection == Selection::kShared
                        ? params.num_requests
                        : params.num_requests * params.num_kv_heads;
  const int64_t bytes = int64_t{params.max_blocks} * 4;
  const int64_t reserved = 1024 + static_cast<int64_t>(2 * kWarps * sizeof(uint64_t));
  const int64_t limit = CurrentDeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - reserved;
  const auto stream = static_cast<cudaStream_t>(params.stream);
  if (bytes > limit) {
    TakeHighestKernel<false><<<lists, kThreads, 0, stream>>>(params);
  } else {
    if (bytes > 48 * 1024 - reserved) {
      CheckCuda(
          cudaFuncSetAttribute(TakeHighestKernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "selection kernel's shared memory");
    }
    TakeHighestKernel<true><<<lists, kThreads, static_cast<size_t>(bytes), stream>>>(params);
  }
  CheckCuda(cudaGetLastError(), "selection kernel");
}

}  // namespace nwor
