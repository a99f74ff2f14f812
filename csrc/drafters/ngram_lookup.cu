#include <cstdint>

#include "base/cuda/launch_check.h"
#include "drafters/ngram_match.h"

namespace nwor {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 4096;  // tokens of a text that a block of threads looks at

// Blocks beyond a text's end leave at once: the grid is one for all lengths, as graphs need it.
__global__ void __launch_bounds__(kThreads)
    ScanKernel(const __grid_constant__ NgramLookupParams params) {
  const auto request = static_cast<int32_t>(blockIdx.y);
  const NgramText text = TextOf(params, request);
  const int32_t begin = static_cast<int32_t>(blockIdx.x) * kChunk;
  const int32_t last = text.size - 1;  // the text's end is no match of itself
  if (begin >= last) return;
  __shared__ uint32_t best;
  if (threadIdx.x == 0) best = 0;
  __syncthreads();
  const int32_t end = last - begin < kChunk ? last : begin + kChunk;
  const int32_t token = text.tokens[last];
  uint32_t own = 0;
  for (int32_t at = begin + static_cast<int32_t>(threadIdx.x); at < end; at += kThreads) {
    if (text.tokens[at] != token) continue;
    const int32_t common = TokensInCommon(text, at, params.max_tokens);
    if (common >= params.min_tokens) own = max(own, MatchWord(common, at));
  }
  if (own != 0) atomicMax(&best, own);
  __syncthreads();
  if (threadIdx.x == 0 && best != 0) atomicMax(params.best + request, best);
}

__global__ void GuessKernel(const __grid_constant__ NgramLookupParams params) {
  const auto request = static_cast<int32_t>(blockIdx.x);
  const NgramText text = TextOf(params, request);
  const uint32_t word = params.best[request];
  if (threadIdx.x == 0) params.matched[request] = CommonOf(word);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < params.count;
       i += static_cast<int32_t>(blockDim.x)) {
    params.guesses[int64_t{request} * params.count + i] = GuessAt(text, word, i);
  }
}

}  // namespace

void LaunchNgramLookup(const NgramLookupParams& params) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const auto requests = static_cast<unsigned>(params.num_requests);
  const auto chunks = static_cast<unsigned>(params.capacity / kChunk + 1);
  ScanKernel<<<dim3(chunks, requests), kThreads, 0, stream>>>(params);
  CheckCuda(cudaGetLastError(), "n-gram scan kernel");
  GuessKernel<<<requests, 32, 0, stream>>>(params);
  CheckCuda(cudaGetLastError(), "n-gram guess kernel");
}

}  // namespace nwor
