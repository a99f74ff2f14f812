#include "base/cuda/launch_check.h"
#include "tree/acceptance_params.h"
#include "tree/fault.h"
#include "tree/sampling_rows.cuh"
#include "tree/tree_params.h"

namespace nwor {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;  // tiles of a row, then tokens of a tile, per thread
static_assert(kThreads * kItems == kTileTokens);
static_assert(kThreads * kItems >= kMaxVocabulary / kTileTokens);
static_assert(kThreads >= kMaxTreeRows);

struct DrawShared {
  uint64_t masses[kThreads * kItems];  // of the tiles
  uint64_t warp_totals[kThreads / 32];
  uint32_t removed[kTileTokens / 32];  // of the tile that is looked at twice
  int tile;
  uint64_t place;  // within the tile
};

// The sum over the threads before this one; `total` is that over all. Has barriers.
__device__ uint64_t ExclusiveSum(uint64_t value, DrawShared& shared, uint64_t* total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint64_t sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared.warp_totals[warp] = sum;
  __syncthreads();
  uint64_t before = 0;
  *total = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += shared.warp_totals[i];
    *total += shared.warp_totals[i];
  }
  return before + sum - value;
}

__device__ void Refuse(const SamplingParams& params, int64_t request, int64_t fault) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < params.rows) params.out.path[request * params.rows + row] = -1;
  if (row != 0) return;
  params.out.counts[request] = 0;
  params.out.next_token[request] = -1;
  if (params.out.status != nullptr) params.out.status[request] = fault;
}

// This thread's rejected child, if it has one: the token and its mass.
struct Removed {
  bool any = false;
  int64_t token = 0;
  uint64_t mass = 0;
};

__device__ Removed FindRemoved(const SamplingParams& params, const SamplingHeader& header,
                               int64_t request) {
  const int row = static_cast<int>(threadIdx.x);
  Removed removed;
  removed.any = (header.rejected[row / 32] >> (row % 32) & 1) != 0;
  if (!removed.any) return removed;
  removed.token = params.tokens[request * params.rows + row];
  const float p =
      RowOf(params.target, request, header.last_row)[removed.token * params.target.token];
  removed.mass = FixedProbability(p);
  return removed;
}

// One block per request.
__global__ void __launch_bounds__(kThreads)
    SampleDrawKernel(const __grid_constant__ SamplingParams params) {
  __shared__ DrawShared shared;
  const int64_t request = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int tiles = NumTiles(params.vocabulary);
  const SamplingWorkspace workspace = Split(params.workspace, params.num_requests, tiles);
  const SamplingHeader& header = workspace.headers[request];
  if (header.fault != 0) return;

  uint64_t plain = 0;
  bool valid = true;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int tile = thread * kItems + j;
    const uint64_t own = tile < tiles ? workspace.totals[request * tiles + tile] : 0;
    valid &= own != kWrongTile;
    plain += own;
    shared.masses[tile] =
        header.excess != 0 && tile < tiles ? workspace.excess[request * tiles + tile] : own;
  }
  const Removed removed = FindRemoved(params, header, request);
  if (__syncthreads_and(valid) == 0) {
    return Refuse(params, request, PackFault(TreeFault::kProbability, header.last_row, 0));
  }
  uint64_t total = 0;
  ExclusiveSum(plain, shared, &total);
  if (!SumsToOne(total)) {
    return Refuse(
        params, request,
        PackFault(TreeFault::kProbabilitySum, header.last_row, __float_as_int(FloatOf(total))));
  }
  if (header.excess != 0) {  // then all of the draft's row was read as well
    uint64_t own = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int tile = thread * kItems + j;
      own += tile < tiles ? workspace.drafts[request * tiles + tile] : 0;
    }
    uint64_t drafts = 0;
    ExclusiveSum(own, shared, &drafts);
    if (!SumsToOne(drafts)) {
      return Refuse(
          params, request,
          PackFault(TreeFault::kDraftSum, header.last_row, __float_as_int(FloatOf(drafts))));
    }
  }
  if (removed.any) {  // adding the negative is subtracting, modulo 2^64
    atomicAdd(reinterpret_cast<unsigned long long*>(&shared.masses[removed.token / kTileTokens]),
              static_cast<unsigned long long>(-removed.mass));
  }
  __syncthreads();
  const auto sum_masses = [&] {
    uint64_t sum = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) sum += shared.masses[thread * kItems + j];
    return sum;
  };
  uint64_t left = 0;
  uint64_t before = ExclusiveSum(sum_masses(), shared, &left);
  // Nothing left takes a coin of one, or rounding: then the whole row.
  const bool whole = left == 0;
  if (whole) {
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int tile = thread * kItems + j;
      shared.masses[tile] = tile < tiles ? workspace.totals[request * tiles + tile] : 0;
    }
    before = ExclusiveSum(sum_masses(), shared, &left);
  }
  const uint64_t place = PlaceOfCoin(params.final_coins[request], left);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const uint64_t own = shared.masses[thread * kItems + j];
    if (place >= before && place - before < own) {
      shared.tile = thread * kItems + j;
      shared.place = place - before;
    }
    before += own;
  }
  if (thread < kTileTokens / 32) shared.removed[thread] = 0;
  __syncthreads();
  const int tile = shared.tile;
  if (removed.any && !whole && removed.token / kTileTokens == tile) {
    const int bit = static_cast<int>(removed.token % kTileTokens);
    atomicOr(&shared.removed[bit / 32], 1u << (bit % 32));
  }
  __syncthreads();

  const float* p = RowOf(params.target, request, header.last_row);
  const bool excess = header.excess != 0 && !whole;
  const float* q = excess ? RowOf(params.draft, request, header.last_row) : nullptr;
  uint64_t masses[kItems];
  uint64_t sum = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int bit = thread * kItems + j;
    const int64_t token = static_cast<int64_t>(tile) * kTileTokens + bit;
    masses[j] = 0;
    if (token < params.vocabulary && (shared.removed[bit / 32] >> (bit % 32) & 1) == 0) {
      const float own = p[token * params.target.token];
      masses[j] = excess ? FixedExcess(own, q[token * params.draft.token]) : FixedProbability(own);
    }
    sum += masses[j];
  }
  uint64_t unused = 0;
  before = ExclusiveSum(sum, shared, &unused);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (shared.place >= before && shared.place - before < masses[j]) {
      params.out.next_token[request] =
          static_cast<int64_t>(tile) * kTileTokens + thread * kItems + j;
    }
    before += masses[j];
  }
}

}  // namespace

void LaunchSampleDraw(const SamplingParams& params) {
  SampleDrawKernel<<<params.num_requests, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(
      params);
  CheckCuda(cudaGetLastError(), "accept_sampling draw launch");
}

}  // namespace nwor
