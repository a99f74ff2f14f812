#include <algorithm>
#include <climits>

#include "base/cuda/launch_check.h"
#include "tree/tree_links.cuh"
#include "tree/tree_params.h"

namespace nwor {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxItems = kMaxTreeCandidates / kMaxThreads;

// Ascending with the float; both zeros are one.
__device__ uint32_t OrderedKey(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

// The sum of `value` over the threads before this one.
__device__ int ExclusiveSum(int value, int* warp_totals) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // totals of an earlier call have been read
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  int before = lane < num_warps && lane < warp ? warp_totals[lane] : 0;
  before = __reduce_add_sync(0xFFFFFFFFu, before);
  return before + sum - value;
}

// What the block knows of its request's candidates; sized for the call.
struct Candidates {
  float* standing;   // [C] what a candidate competes with: at most its parent's
  int32_t* kept;     // [steps - 1][k] candidate ids of the parents
  uint16_t* row_of;  // [C]
};

struct TopKShared {
  TreeShared tree;
  int warp_totals[kMaxThreads / 32];
  int first_wrong;  // 2 * candidate, + 1 for its parent
};

__device__ int StepOf(int id, int k) { return id < k ? 0 : 1 + (id - k) / (k * k); }

// Loads this block's request: parents into shared memory, each thread's own candidates into
// registers. Returns through shared.first_wrong whether anything is wrong.
template <int kItems>
__device__ void Load(const TopKParams& params, int64_t request, const Candidates& all,
                     TopKShared& shared, float (&scores)[kItems], int64_t (&tokens)[kItems]) {
  const int k = params.k;
  const int total = NumCandidates(params.num_steps, k);
  for (int i = threadIdx.x; i < (params.num_steps - 1) * k; i += blockDim.x) {
    const int step = 1 + i / k;
    // With k = 1 there is one candidate to keep.
    const int64_t kept = k == 1 ? step - 1 : KeptParents(params, step, request)[i % k];
    const bool valid = kept >= FirstCandidate(step - 1, k) && kept < FirstCandidate(step, k);
    all.kept[i] = valid ? static_cast<int32_t>(kept) : 0;
    if (!valid) atomicMin(&shared.first_wrong, 2 * (k + i * k) + 1);
  }
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int id = static_cast<int>(threadIdx.x) * kItems + j;
    if (id >= total) continue;
    const int step = StepOf(id, k);
    const int64_t count = step == 0 ? k : k * k;
    const int64_t at = request * count + id - FirstCandidate(step, k);
    scores[j] = params.steps[step].scores[at];
    tokens[j] = params.steps[step].tokens[at];
    all.standing[id] = scores[j];
    if (isnan(scores[j])) atomicMin(&shared.first_wrong, 2 * id);
  }
}

// Selects the `need` best by standing, lower ids first among equals; bit j of the result is this
// thread's item j. A threshold is found bit by bit, from the top, by counting over the block.
template <int kItems>
__device__ uint32_t SelectBest(const float* standing, int total, int need, int* warp_totals) {
  uint32_t keys[kItems];
  uint32_t mine = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int id = static_cast<int>(threadIdx.x) * kItems + j;
    keys[j] = id < total ? OrderedKey(standing[id]) : 0;
    if (id < total) mine |= 1u << j;
  }
  const auto count_from = [&](uint32_t threshold) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      count += __syncthreads_count((mine >> j & 1) != 0 && keys[j] >= threshold);
    }
    return count;
  };
  uint32_t threshold = 0;
  int count = total;
  for (int bit = 31; bit >= 0 && count != need; --bit) {
    const uint32_t higher = threshold | 1u << bit;
    const int with = count_from(higher);
    if (with >= need) {
      threshold = higher;
      count = with;
    }
  }
  uint32_t above = 0, equal = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if ((mine >> j & 1) == 0) continue;
    if (keys[j] > threshold || (count == need && keys[j] == threshold)) above |= 1u << j;
    if (count != need && keys[j] == threshold) equal |= 1u << j;
  }
  if (count == need) return above;
  const int greater = threshold == 0xFFFFFFFFu ? 0 : count_from(threshold + 1);
  int rank = ExclusiveSum(__popc(equal), warp_totals);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if ((equal >> j & 1) == 0) continue;
    if (rank < need - greater) above |= 1u << j;
    ++rank;
  }
  return above;
}

// One block per request; a thread has kItems consecutive candidates.
template <int kItems>
__global__ void __launch_bounds__(kMaxThreads)
    TreeFromTopKKernel(const __grid_constant__ TopKParams params) {
  extern __shared__ float dynamic[];
  __shared__ TopKShared shared;
  const int64_t request = blockIdx.x;
  const int k = params.k;
  const int rows = params.rows;
  const int total = NumCandidates(params.num_steps, k);
  Candidates all;
  all.standing = dynamic;
  all.kept = reinterpret_cast<int32_t*>(dynamic + total);
  all.row_of = reinterpret_cast<uint16_t*>(all.kept + (params.num_steps - 1) * k);

  if (threadIdx.x == 0) shared.first_wrong = INT_MAX;
  ClearChildren(shared.tree);
  const int32_t prefix_len = params.prefix_lens[request];
  const int64_t wrong_prefix = PrefixFault(prefix_len);
  const int64_t root_token = threadIdx.x == 0 ? params.root_tokens[request] : 0;
  __syncthreads();
  float scores[kItems];
  int64_t tokens[kItems];
  Load<kItems>(params, request, all, shared, scores, tokens);
  __syncthreads();

  for (int step = 1; step < params.num_steps; ++step) {
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int id = static_cast<int>(threadIdx.x) * kItems + j;
      if (id >= FirstCandidate(step, k) && id < FirstCandidate(step + 1, k)) {
        all.standing[id] = fminf(scores[j], all.standing[all.kept[(id - k) / k]]);
      }
    }
    __syncthreads();
  }
  int64_t fault = 0;
  if (shared.first_wrong != INT_MAX) {
    const int id = shared.first_wrong / 2;
    fault = PackFault(TreeFault::kScore, 0, id);
    if (shared.first_wrong % 2 == 1) {
      const int64_t kept = KeptParents(params, StepOf(id, k), request)[(id - k) / k % k];
      fault = PackFault(TreeFault::kKeptRange, 0, Saturate(kept));
    }
  }
  if (wrong_prefix != 0) fault = wrong_prefix;

  const uint32_t chosen = SelectBest<kItems>(all.standing, total, rows - 1, shared.warp_totals);
  int row = 1 + ExclusiveSum(__popc(chosen), shared.warp_totals);
  int first_row = row;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int id = static_cast<int>(threadIdx.x) * kItems + j;
    if ((chosen >> j & 1) != 0) all.row_of[id] = static_cast<uint16_t>(row++);
  }
  if (threadIdx.x == 0) {
    shared.tree.parents[0] = -1;
    params.out.tokens[request * rows] = root_token;
  }
  __syncthreads();
  row = first_row;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int id = static_cast<int>(threadIdx.x) * kItems + j;
    if ((chosen >> j & 1) == 0) continue;
    shared.tree.parents[row] = id < k || fault != 0 ? 0 : all.row_of[all.kept[(id - k) / k]];
    params.out.tokens[request * rows + row] = fault == 0 ? tokens[j] : 0;
    ++row;
  }
  __syncthreads();
  WriteTree(params.out, shared.tree, request, rows, rows, wrong_prefix == 0 ? prefix_len : 0,
            fault);
}

}  // namespace

void LaunchTreeFromTopK(const TopKParams& params) {
  if (params.num_requests == 0) return;
  const int total = NumCandidates(params.num_steps, params.k);
  const int items = total <= kMaxThreads ? 1 : kMaxItems;
  const int threads = std::max((total + items - 1) / items, static_cast<int>(params.rows));
  const int rounded = std::max(32, (threads + 31) / 32 * 32);
  const size_t bytes = static_cast<size_t>(total) * (sizeof(float) + sizeof(uint16_t)) +
                       static_cast<size_t>(params.num_steps - 1) * params.k * sizeof(int32_t);
  const auto kernel = items == 1 ? TreeFromTopKKernel<1> : TreeFromTopKKernel<kMaxItems>;
  kernel<<<params.num_requests, rounded, bytes, static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "tree_from_topk launch");
}

}  // namespace nwor
