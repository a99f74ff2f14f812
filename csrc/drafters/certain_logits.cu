#include <cstdint>

#include "base/cuda/launch_check.h"
#include "drafters/certain_logits_params.h"

namespace nwor {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 16384;  // tokens of a vocabulary that a block of threads writes

__global__ void __launch_bounds__(kThreads)
    CertainLogitsKernel(const __grid_constant__ CertainLogitsParams params) {
  const auto request = static_cast<int32_t>(blockIdx.y);
  const auto draft = static_cast<int32_t>(blockIdx.z);
  const int32_t row = params.rows[request];
  if (row < 0 || row >= params.num_rows || draft < params.starts[request]) return;
  float* const logits = params.logits + row * params.row_stride + draft * params.draft_stride;
  const int64_t certain = params.tokens[request * params.token_stride + draft];
  const int64_t begin = int64_t{blockIdx.x} * kChunk;
  const int64_t left = params.vocabulary - begin;
  const int64_t end = begin + (left < kChunk ? left : kChunk);
  for (int64_t token = begin + threadIdx.x; token < end; token += kThreads) {
    logits[token] = token == certain ? 0.0f : kNoChance;
  }
}

}  // namespace

void LaunchCertainLogits(const CertainLogitsParams& params) {
  const dim3 grid(static_cast<unsigned>((params.vocabulary + kChunk - 1) / kChunk),
                  static_cast<unsigned>(params.num_requests), static_cast<unsigned>(params.drafts));
  CertainLogitsKernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "certain logits kernel");
}

}  // namespace nwor
