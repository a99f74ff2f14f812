#include <algorithm>

#include "base/cuda/launch_check.h"
#include "tree/acceptance_params.h"
#include "tree/sampling_rows.cuh"
#include "tree/walk.cuh"

// Two launches. The first walks down the tree and sums the tiles of the row where the walk ends;
// several blocks share a request, each walks for itself and sums its part. The second draws: it
// finds the tile from the sums, then the token within the tile. Sums are integers, so the split
// changes nothing.

namespace nwor {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBadChoice = -2;
static_assert(kThreads >= kMaxTreeRows);

struct SampleShared {
  WalkShared walk;
  int32_t parents[kMaxTreeRows];
  float coins[kMaxTreeRows];
  float probs[kMaxTreeRows];   // the target's, of each row's token at its parent
  float drafts[kMaxTreeRows];  // the draft's
  uint8_t repeated[kMaxTreeRows];
  uint32_t rejected[8];
};

__device__ int32_t Bits(float value) { return __float_as_int(value); }

// Every row's parent, and whether an earlier sibling has its token.
__device__ void FindParents(SampleShared& shared, int rows) {
  const int row = static_cast<int>(threadIdx.x);
  shared.parents[row] = -1;
  shared.repeated[row] = 0;
  __syncthreads();
  if (row < rows) {
    for (int child = shared.walk.first[row]; child >= 0; child = shared.walk.next[child]) {
      shared.parents[child] = row;
    }
  }
  __syncthreads();
  if (row < rows && shared.parents[row] >= 0) {
    const int64_t token = shared.walk.tokens[row];
    int elder = shared.walk.first[shared.parents[row]];
    for (; elder != row; elder = shared.walk.next[elder]) {
      if (shared.walk.tokens[elder] == token) shared.repeated[row] = 1;
    }
  }
}

// Tokens outside the vocabulary and coins outside [0, 1].
__device__ void CheckValues(const SamplingParams& params, int64_t request, SampleShared& shared) {
  const int row = static_cast<int>(threadIdx.x);
  const int rows = params.rows;
  if (row == 0) shared.walk.first_wrong = 2 * rows + 2;
  __syncthreads();
  if (row < rows) {
    const int64_t token = shared.walk.tokens[row];
    if (shared.parents[row] >= 0 && (token < 0 || token >= params.vocabulary)) {
      atomicMin(&shared.walk.first_wrong, 2 * row);
    }
    if (!IsCoin(shared.coins[row])) atomicMin(&shared.walk.first_wrong, 2 * row + 1);
  }
  const float final_coin = row == 0 ? params.final_coins[request] : 0.0f;
  if (!IsCoin(final_coin)) atomicMin(&shared.walk.first_wrong, 2 * rows + 1);
  __syncthreads();
  if (row == 0 && shared.walk.first_wrong < 2 * rows + 2) {
    const int wrong = shared.walk.first_wrong / 2;
    if (shared.walk.first_wrong % 2 == 0) {
      shared.walk.fault = PackFault(TreeFault::kToken, wrong, Saturate(shared.walk.tokens[wrong]));
    } else {
      shared.walk.fault = PackFault(TreeFault::kCoin, wrong,
                                    Bits(wrong == rows ? final_coin : shared.coins[wrong]));
    }
  }
  __syncthreads();
}

// The child this row would go to, whether or not the walk comes by.
__device__ int Choose(const SamplingParams& params, const SampleShared& shared, int row) {
  int depth = row;
  if (params.links.first_child != nullptr) {
    depth = 0;
    for (int at = shared.parents[row]; at >= 0; at = shared.parents[at]) ++depth;
  }
  const float coin = shared.coins[depth];
  const bool by_draft = params.rule == AcceptRule::kDraft;
  uint64_t mass = 0;
  for (int child = shared.walk.first[row]; child >= 0; child = shared.walk.next[child]) {
    const float p = shared.probs[child];
    if (!IsProbability(p)) return kBadChoice;
    if (shared.repeated[child] != 0) continue;
    double weight = params.threshold_acc;
    if (by_draft) {
      if (!IsProbability(shared.drafts[child])) return kBadChoice;
      weight = fminf(shared.drafts[child], 1.0f);
    }
    const uint64_t own = FixedProbability(p);
    if (own == 0) continue;
    mass += own;
    if (FixedCoin(coin, weight) < mass ||
        (params.threshold_single < 1.0 && p >= params.threshold_single)) {
      return child;
    }
  }
  return -1;
}

// The first child of `row` with a value that is no probability.
__device__ int64_t DescribeBadChild(const SampleShared& shared, int row, bool by_draft) {
  for (int child = shared.walk.first[row]; child >= 0; child = shared.walk.next[child]) {
    const float p = shared.probs[child];
    if (!IsProbability(p)) return PackFault(TreeFault::kProbability, row, Bits(p));
    const float q = by_draft ? shared.drafts[child] : 0.0f;
    if (!IsProbability(q)) return PackFault(TreeFault::kProbability, row, Bits(q));
  }
  return PackFault(TreeFault::kProbability, row, 0);
}

__global__ void __launch_bounds__(kThreads)
    SampleWalkKernel(const __grid_constant__ SamplingParams params) {
  __shared__ SampleShared shared;
  const int64_t request = blockIdx.x;
  const int row = static_cast<int>(threadIdx.x);
  const int rows = params.rows;
  const bool by_draft = params.rule == AcceptRule::kDraft;
  shared.coins[row] = row < rows ? params.coins[request * rows + row] : 0.0f;
  LoadLinks(params.tokens, params.links, request, rows, shared.walk);
  if (shared.walk.fault == 0) {
    FindParents(shared, rows);
    CheckValues(params, request, shared);
  }
  if (shared.walk.fault == 0) {
    // All that any walk may ask for, in one round trip to memory.
    const int parent = shared.parents[row];
    if (parent >= 0) {
      const int64_t token = shared.walk.tokens[row];
      shared.probs[row] = RowOf(params.target, request, parent)[token * params.target.token];
      if (by_draft) {
        shared.drafts[row] = RowOf(params.draft, request, parent)[token * params.draft.token];
      }
    }
    __syncthreads();
    if (row < rows) shared.walk.choice[row] = Choose(params, shared, row);
    __syncthreads();
    if (row == 0) {
      FollowChoices(shared.walk);
      if (shared.walk.choice[shared.walk.last_row] == kBadChoice) {
        shared.walk.fault = DescribeBadChild(shared, shared.walk.last_row, by_draft);
      }
    }
    __syncthreads();
  }
  const bool fine = shared.walk.fault == 0;
  const int last = fine ? shared.walk.last_row : 0;
  const bool excess = fine && by_draft && shared.walk.first[last] >= 0;
  const SamplingWorkspace workspace =
      Split(params.workspace, params.num_requests, NumTiles(params.vocabulary));
  if (blockIdx.y == 0) {
    const bool rejected =
        fine && !excess && row < rows && shared.parents[row] == last && shared.repeated[row] == 0;
    const uint32_t word = __ballot_sync(0xFFFFFFFFu, rejected);
    SamplingHeader& header = workspace.headers[request];
    if (row % 32 == 0) header.rejected[row / 32] = word;
    if (row == 0) {
      header.fault = shared.walk.fault;
      header.last_row = last;
      header.excess = excess ? 1 : 0;
    }
    WriteWalk(params.out, shared.walk, request, rows);
  }
  if (!fine) return;
  SumRow(params, workspace, request, last, excess, static_cast<int>(blockIdx.y) * kWarps + row / 32,
         static_cast<int>(gridDim.y) * kWarps);
}

int BlocksPerRequest(const SamplingParams& params) {
  // A warp to a tile where the batch is small; where it is large, what fills the device.
  const int wanted = (NumTiles(params.vocabulary) + kWarps - 1) / kWarps;
  const int sms = CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int room = (8 * sms + params.num_requests - 1) / params.num_requests;
  return std::max(1, std::min(wanted, room));
}

}  // namespace

int64_t SamplingWorkspaceBytes(int num_requests, int vocabulary) {
  const int64_t words = int64_t{3} * NumTiles(vocabulary) * static_cast<int64_t>(sizeof(uint64_t));
  return num_requests * (static_cast<int64_t>(sizeof(SamplingHeader)) + words);
}

void LaunchAcceptSampling(const SamplingParams& params) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const dim3 grid(params.num_requests, BlocksPerRequest(params));
  SampleWalkKernel<<<grid, kThreads, 0, stream>>>(params);
  CheckCuda(cudaGetLastError(), "accept_sampling walk launch");
  LaunchSampleDraw(params);
}

}  // namespace nwor
