#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/merge/merge_state_params.h"
#include "base/cuda/launch_check.h"

namespace nwor {
namespace {

constexpr int kThreads = 128;
constexpr int kWarpsPerBlock = kThreads / 32;

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__half x) { return __half2float(x); }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void Put(float* to, float x) { *to = x; }
__device__ void Put(__half* to, float x) { *to = __float2half_rn(x); }
__device__ void Put(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// One warp per row and head: every lane computes the few weights, and the lanes share the channels.
template <typename State, typename Out>
__global__ void __launch_bounds__(kThreads) MergeStatesKernel(const MergeParams params) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (index >= static_cast<int64_t>(params.num_rows) * params.num_heads) return;
  const int lane = threadIdx.x % 32;
  const int64_t row = index / params.num_heads;
  const int64_t head = index % params.num_heads;

  const auto lse_of = [&](int i) {
    const MergeState& state = params.states[i];
    return state.LseOf(state.lse[row * state.lse_strides.row + head * state.lse_strides.head]);
  };
  float max = -INFINITY;
  for (int i = 0; i < params.num_states; ++i) max = fmaxf(max, lse_of(i));
  const float base = max == -INFINITY ? 0.0f : max;
  float sum = 0.0f;
  for (int i = 0; i < params.num_states; ++i) sum += expf(lse_of(i) - base);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;

  Out* out =
      static_cast<Out*>(params.out) + row * params.out_strides.row + head * params.out_strides.head;
  for (int d = lane; d < params.head_dim; d += 32) {
    float total = 0.0f;
    for (int i = 0; i < params.num_states; ++i) {
      const float weight = expf(lse_of(i) - base);
      if (weight == 0.0f) continue;
      const MergeState& state = params.states[i];
      const State* from = static_cast<const State*>(state.out) + row * state.out_strides.row +
                          head * state.out_strides.head;
      total += weight * ToFloat(from[d]);
    }
    Put(out + d, total * inverse);
  }
  if (params.lse != nullptr && lane == 0) {
    params.lse[index] = sum == 0.0f ? -INFINITY : base + logf(sum);
  }
}

template <typename State, typename Out>
void Launch(const MergeParams& params) {
  const int64_t warps = static_cast<int64_t>(params.num_rows) * params.num_heads;
  const auto blocks = static_cast<unsigned>((warps + kWarpsPerBlock - 1) / kWarpsPerBlock);
  MergeStatesKernel<State, Out>
      <<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "merge_states launch");
}

template <typename Out>
void LaunchInto(const MergeParams& params) {
  switch (params.state_dtype) {
    case DType::kFloat16:
      return Launch<__half, Out>(params);
    case DType::kBFloat16:
      return Launch<__nv_bfloat16, Out>(params);
    default:
      return Launch<float, Out>(params);
  }
}

}  // namespace

void LaunchMergeStates(const MergeParams& params) {
  switch (params.out_dtype) {
    case DType::kFloat16:
      return LaunchInto<__half>(params);
    case DType::kBFloat16:
      return LaunchInto<__nv_bfloat16>(params);
    default:
      return LaunchInto<float>(params);
  }
}

}  // namespace nwor
