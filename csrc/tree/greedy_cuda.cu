#include "base/cuda/launch_check.h"
#include "tree/acceptance_params.h"
#include "tree/coins_params.h"
#include "tree/philox.h"
#include "tree/walk.cuh"

namespace nwor {
namespace {

// One block per request. Every row looks for its matching child at once, so the walk itself is as
// long as the path, not as wide as the tree.
__global__ void __launch_bounds__(kMaxTreeRows)
    AcceptGreedyKernel(const __grid_constant__ GreedyParams params) {
  __shared__ WalkShared shared;
  __shared__ int64_t targets[kMaxTreeRows];
  const int64_t request = blockIdx.x;
  const int row = static_cast<int>(threadIdx.x);
  const int rows = params.rows;
  int64_t target = 0;
  if (row < rows) {
    target = params.target_ids[request * rows + row];
    targets[row] = target;
  }
  LoadLinks(params.tokens, params.links, request, rows, shared);
  if (shared.fault == 0 && row < rows) {
    int child = shared.first[row];
    while (child >= 0 && shared.tokens[child] != target) child = shared.next[child];
    shared.choice[row] = child;
  }
  __syncthreads();
  if (row == 0 && shared.fault == 0) {
    FollowChoices(shared);
    params.out.next_token[request] = targets[shared.last_row];
  }
  __syncthreads();
  WriteWalk(params.out, shared, request, rows);
}

__global__ void MakeCoinsKernel(const __grid_constant__ CoinsParams params) {
  const int64_t request = blockIdx.x;
  const auto seed = static_cast<uint64_t>(params.seeds[request]);
  const auto position = static_cast<uint64_t>(params.positions[request]);
  const int row = static_cast<int>(threadIdx.x);
  if (row < params.rows) {
    params.accept[request * params.rows + row] = CoinAt(seed, position + row, CoinPurpose::kAccept);
  }
  if (row == 0) params.final[request] = CoinAt(seed, position, CoinPurpose::kFinal);
}

int ThreadsFor(int rows) { return (rows + 31) / 32 * 32; }

}  // namespace

void LaunchAcceptGreedy(const GreedyParams& params) {
  AcceptGreedyKernel<<<params.num_requests, ThreadsFor(params.rows), 0,
                       static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "accept_greedy launch");
}

void LaunchMakeCoins(const CoinsParams& params) {
  MakeCoinsKernel<<<params.num_requests, ThreadsFor(params.rows), 0,
                    static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "make_coins launch");
}

}  // namespace nwor
