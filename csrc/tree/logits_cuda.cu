#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/cuda/launch_check.h"
#include "tree/fault.h"
#include "tree/logits_rule.h"
#include "tree/probability.h"
#include "tree/threshold.h"
#include "tree/tree_params.h"

// One block per row, in passes that read the logits: their maximum, what top-k and top-p need, the
// sum, and the probabilities, which are written once. Thresholds of top-k and top-p are found by a
// radix descent over the ordered bits of the scaled logits (0 for the largest, less for the
// others), 11 + 11 + 10 of them, with histograms of counts or masses; masses are integers, so the
// order in which threads add them changes nothing.

namespace nwor {
namespace {

constexpr int kThreads = 1024;
constexpr int kFilterBits = 1024;

struct LogitsShared {
  uint64_t partial[ThresholdSearch::kPivots][kThreads / 32];  // of each warp
  uint32_t smallest[kThreads / 32];
  uint32_t largest[kThreads / 32];
  int64_t drafts[kMaxTreeRows];       // tokens between the root and this row
  uint32_t filter[kFilterBits / 32];  // bit t % kFilterBits of every such token
  int num_drafts;
  float warp_max[kThreads / 32];
  uint64_t warp_sum[kThreads / 32];
  int best;
};

__device__ float ReadLogit(const LogitsParams& params, int64_t index) {
  switch (params.dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(params.logits)[index]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(params.logits)[index]);
    default:
      return static_cast<const float*>(params.logits)[index];
  }
}

__device__ uint32_t KeyOf(float scaled) { return OrderedBits(__float_as_uint(scaled + 0.0f)); }

__device__ uint64_t MassOf(float scaled) { return FixedProbability(expf(scaled)); }

__device__ float BlockMax(float value, LogitsShared& shared) {
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  }
  if (threadIdx.x % 32 == 0) shared.warp_max[threadIdx.x / 32] = value;
  __syncthreads();
  float all = shared.warp_max[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) all = fmaxf(all, shared.warp_max[warp]);
  return all;
}

__device__ uint64_t WarpSum(uint64_t value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

__device__ uint64_t BlockSum(uint64_t value, LogitsShared& shared) {
  value = WarpSum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warp_sum[threadIdx.x / 32] = value;
  __syncthreads();
  uint64_t all = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) all += shared.warp_sum[warp];
  return all;
}

__device__ void CollectDrafts(const LogitsParams& params, int64_t request, int row,
                              LogitsShared& shared) {
  if (threadIdx.x < kFilterBits / 32) shared.filter[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x != 0) return;
  shared.num_drafts = 0;
  if (params.tokens == nullptr) return;
  const int64_t first = request * params.rows;
  for (int at = row; at > 0;) {
    const int64_t token = params.tokens[first + at];
    shared.drafts[shared.num_drafts++] = token;
    const auto bit = static_cast<uint32_t>(token) % kFilterBits;
    shared.filter[bit / 32] |= 1u << (bit % 32);
    // Only upwards, whatever the parents say: a walk that ends.
    const int parent = params.parents[first + at];
    at = parent < at ? parent : 0;
  }
}

__device__ float LogitOf(const LogitsParams& params, const RowOptions& options, int64_t request,
                         int row, int token, const LogitsShared& shared) {
  float logit = ReadLogit(params, request * params.batch_stride + row * params.row_stride +
                                      token * params.token_stride);
  const int64_t size = params.vocabulary;
  if (options.penalised) {
    int64_t count =
        params.output_counts == nullptr ? 0 : params.output_counts[request * size + token];
    const uint32_t bit = static_cast<uint32_t>(token) % kFilterBits;
    if ((shared.filter[bit / 32] >> (bit % 32) & 1) != 0) {
      for (int i = 0; i < shared.num_drafts; ++i) count += shared.drafts[i] == token ? 1 : 0;
    }
    const bool in_prompt =
        params.prompt_mask != nullptr && params.prompt_mask[request * size + token] != 0;
    logit = Penalise(logit, options, count, in_prompt);
  }
  if (params.bitmask != nullptr) {
    const int32_t word =
        params.bitmask[request * params.bitmask_batch + row * params.bitmask_row + token / 32];
    if ((static_cast<uint32_t>(word) >> (token % 32) & 1) == 0) return -INFINITY;
  }
  return logit;
}

// The largest key such that what is at least it weighs at least `needed`. Only keys of `floor` and
// more count. kMass: a token weighs its mass, else one.
template <bool kMass, typename Scaled>
__device__ uint32_t FindThreshold(const Scaled& scaled, int size, uint32_t floor, uint64_t needed,
                                  LogitsShared& shared) {
  constexpr int kPivots = ThresholdSearch::kPivots;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  ThresholdSearch search{floor, KeyOf(0.0f) + 1};
  for (;;) {
    uint32_t pivots[kPivots];
    uint64_t weights[kPivots];
#pragma unroll
    for (int i = 0; i < kPivots; ++i) {
      pivots[i] = search.Pivot(i);
      weights[i] = 0;
    }
    uint32_t smallest = 0xFFFFFFFFu, largest = 0;
    for (int v = threadIdx.x; v < size; v += kThreads) {
      const float value = scaled(v);
      const uint32_t key = KeyOf(value);
      const uint64_t weight = kMass ? MassOf(value) : 1;
      if (key < search.lo || weight == 0) continue;
#pragma unroll
      for (int i = 0; i < kPivots; ++i) weights[i] += key >= pivots[i] ? weight : 0;
      if (key < search.hi) {
        smallest = min(smallest, key);
        largest = max(largest, key);
      }
    }
#pragma unroll
    for (int i = 0; i < kPivots; ++i) {
      weights[i] = WarpSum(weights[i]);
      if (lane == 0) shared.partial[i][warp] = weights[i];
    }
    smallest = __reduce_min_sync(0xFFFFFFFFu, smallest);
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (lane == 0) {
      shared.smallest[warp] = smallest;
      shared.largest[warp] = largest;
    }
    __syncthreads();
    // Every warp adds up what the warps found, so no second barrier is needed before it is used.
#pragma unroll
    for (int i = 0; i < kPivots; ++i) {
      weights[i] = WarpSum(lane < kThreads / 32 ? shared.partial[i][lane] : 0);
    }
    smallest = lane < kThreads / 32 ? shared.smallest[lane] : 0xFFFFFFFFu;
    largest = lane < kThreads / 32 ? shared.largest[lane] : 0;
    smallest = __reduce_min_sync(0xFFFFFFFFu, smallest);
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    __syncthreads();  // before the next pass writes
    if (search.Narrow(weights, needed, smallest, largest)) return search.lo;
  }
}

__device__ void Refuse(const LogitsParams& params, int64_t request, int row, float* out,
                       TreeFault fault, int value) {
  for (int v = threadIdx.x; v < params.vocabulary; v += kThreads) out[v] = 0.0f;
  if (threadIdx.x == 0 && params.status != nullptr) {
    auto* word = reinterpret_cast<unsigned long long*>(params.status + request);
    atomicCAS(word, 0ull, static_cast<unsigned long long>(PackFault(fault, row, value)));
  }
}

__global__ void __launch_bounds__(kThreads)
    TargetProbsKernel(const __grid_constant__ LogitsParams params) {
  __shared__ LogitsShared shared;
  const int64_t request = blockIdx.x / params.rows;
  const int row = static_cast<int>(blockIdx.x % params.rows);
  const int size = params.vocabulary;
  float* out = params.out + static_cast<int64_t>(blockIdx.x) * size;
  const RowOptions options = OptionsOf(params.options, request);
  const int wrong = WrongOption(options);
  if (wrong != 0) {
    return Refuse(params, request, row, out, TreeFault::kParameter, wrong);
  }
  CollectDrafts(params, request, row, shared);
  __syncthreads();

  const auto logit_of = [&](int v) { return LogitOf(params, options, request, row, v, shared); };
  float largest = -INFINITY;
  bool valid = true;
#pragma unroll 4
  for (int v = threadIdx.x; v < size; v += kThreads) {
    const float logit = logit_of(v);
    valid &= !isnan(logit) && logit != INFINITY;
    largest = fmaxf(largest, logit);
  }
  valid = __syncthreads_and(valid) != 0;
  largest = BlockMax(largest, shared);
  if (!valid || largest == -INFINITY) {
    return Refuse(params, request, row, out, TreeFault::kLogits, 0);
  }
  if (options.temperature == 0.0f) {
    if (threadIdx.x == 0) shared.best = size;
    __syncthreads();
    for (int v = threadIdx.x; v < size; v += kThreads) {
      if (logit_of(v) == largest) {
        atomicMin(&shared.best, v);
        break;  // a thread's tokens ascend
      }
    }
    __syncthreads();
    for (int v = threadIdx.x; v < size; v += kThreads) out[v] = v == shared.best ? 1.0f : 0.0f;
    return;
  }

  const auto scaled = [&](int v) { return (logit_of(v) - largest) / options.temperature; };
  uint32_t threshold = 0;
  if (options.top_k > 0 && options.top_k < size) {
    threshold = FindThreshold<false>(scaled, size, 0, options.top_k, shared);
  }
  if (options.top_p < 1.0f) {
    uint64_t mass = 0;
#pragma unroll 4
    for (int v = threadIdx.x; v < size; v += kThreads) {
      const float value = scaled(v);
      if (KeyOf(value) >= threshold) mass += MassOf(value);
    }
    const auto total = static_cast<double>(BlockSum(mass, shared));
    const auto needed = static_cast<uint64_t>(ceil(options.top_p * total));
    threshold = FindThreshold<true>(scaled, size, threshold, needed, shared);
  }
  const auto weight_of = [&](int v) {
    const float value = scaled(v);
    const float weight = KeyOf(value) < threshold ? 0.0f : expf(value);
    return weight < options.min_p ? 0.0f : weight;
  };
  uint64_t mass = 0;
#pragma unroll 4
  for (int v = threadIdx.x; v < size; v += kThreads) mass += FixedProbability(weight_of(v));
  const auto scale = static_cast<float>(static_cast<double>(kProbabilityOne) /
                                        static_cast<double>(BlockSum(mass, shared)));
#pragma unroll 4
  for (int v = threadIdx.x; v < size; v += kThreads) out[v] = weight_of(v) * scale;
}

}  // namespace

void LaunchTargetProbs(const LogitsParams& params) {
  const auto blocks = static_cast<unsigned>(int64_t{params.num_requests} * params.rows);
  TargetProbsKernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "target_probs launch");
}

}  // namespace nwor
