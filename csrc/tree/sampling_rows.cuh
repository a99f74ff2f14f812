#pragma once

#include <cstdint>

#include "tree/acceptance_params.h"
#include "tree/probability.h"

// Reading rows of probabilities, a warp to a tile, and what the walk leaves for the draw.

namespace nwor {

// One per request at the start of the workspace, then the sums of every request's tiles.
struct SamplingHeader {
  int64_t fault;         // the walk's; the draw then does nothing
  int32_t last_row;      // the row to draw from
  int32_t excess;        // 1: from max(p - q, 0), summed beside p
  uint32_t rejected[8];  // bit r: row r is a child of last_row whose token must not be drawn
};

// The workspace of a call, see SamplingWorkspaceBytes.
struct SamplingWorkspace {
  SamplingHeader* headers;  // [B]
  uint64_t* totals;         // [B][tiles]; kWrongTile where an entry is no probability
  uint64_t* excess;         // [B][tiles], where the draw is from the excess
  uint64_t* drafts;         // [B][tiles] sums of q, likewise
};

constexpr uint64_t kWrongTile = ~uint64_t{0};

__host__ __device__ inline SamplingWorkspace Split(void* workspace, int num_requests, int tiles) {
  SamplingWorkspace parts;
  parts.headers = static_cast<SamplingHeader*>(workspace);
  parts.totals = reinterpret_cast<uint64_t*>(parts.headers + num_requests);
  parts.excess = parts.totals + static_cast<int64_t>(num_requests) * tiles;
  parts.drafts = parts.excess + static_cast<int64_t>(num_requests) * tiles;
  return parts;
}

__device__ inline const float* RowOf(const ProbabilityRows& rows, int64_t request, int row) {
  return rows.data + request * rows.batch + row * rows.row;
}

__device__ inline bool IsVectorRow(const float* row, int64_t token_stride) {
  return token_stride == 1 && reinterpret_cast<uintptr_t>(row) % sizeof(float4) == 0;
}

// A running sum of a tile by one lane.
struct TileSum {
  uint64_t total = 0;
  uint64_t excess = 0;
  uint64_t drafts = 0;
  bool valid = true;

  __device__ void Add(float p) {
    const bool right = IsProbability(p);
    valid &= right;
    total += FixedProbability(right ? p : 0.0f);
  }
  __device__ void Add(float p, float q) {
    const bool right = IsProbability(p) && IsProbability(q);
    valid &= right;
    total += FixedProbability(right ? p : 0.0f);
    excess += right ? FixedExcess(p, q) : 0;
    drafts += FixedProbability(right ? q : 0.0f);
  }
};

__device__ inline uint64_t WarpSum(uint64_t value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

// Sums tile `tile` of a row by one warp. `q` null: the row alone.
__device__ inline TileSum SumTile(const float* p, int64_t p_stride, const float* q,
                                  int64_t q_stride, int tile, int vocabulary) {
  constexpr int kVectors = kTileTokens / (32 * 4);
  const int lane = threadIdx.x % 32;
  const int begin = tile * kTileTokens;
  TileSum sum;
  if (q == nullptr && begin + kTileTokens <= vocabulary && IsVectorRow(p, p_stride)) {
    const auto* vectors = reinterpret_cast<const float4*>(p + begin);
    float4 loaded[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) loaded[i] = __ldg(vectors + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sum.Add(loaded[i].x);
      sum.Add(loaded[i].y);
      sum.Add(loaded[i].z);
      sum.Add(loaded[i].w);
    }
  } else {
    const int end = min(begin + kTileTokens, vocabulary);
#pragma unroll 8
    for (int v = begin + lane; v < end; v += 32) {
      if (q == nullptr) {
        sum.Add(p[v * p_stride]);
      } else {
        sum.Add(p[v * p_stride], q[v * q_stride]);
      }
    }
  }
  sum.total = WarpSum(sum.total);
  sum.excess = q == nullptr ? 0 : WarpSum(sum.excess);
  sum.drafts = q == nullptr ? 0 : WarpSum(sum.drafts);
  sum.valid = __all_sync(0xFFFFFFFFu, sum.valid);
  return sum;
}

// Sums the tiles first_warp, first_warp + num_warps, ... of the row that will be drawn from.
__device__ inline void SumRow(const SamplingParams& params, const SamplingWorkspace& workspace,
                              int64_t request, int row, bool excess, int first_warp,
                              int num_warps) {
  const int tiles = NumTiles(params.vocabulary);
  const float* p = RowOf(params.target, request, row);
  const float* q = excess ? RowOf(params.draft, request, row) : nullptr;
  for (int tile = first_warp; tile < tiles; tile += num_warps) {
    const TileSum sum =
        SumTile(p, params.target.token, q, params.draft.token, tile, params.vocabulary);
    if (threadIdx.x % 32 == 0) {
      workspace.totals[request * tiles + tile] = sum.valid ? sum.total : kWrongTile;
      if (excess) {
        workspace.excess[request * tiles + tile] = sum.excess;
        workspace.drafts[request * tiles + tile] = sum.drafts;
      }
    }
  }
}

}  // namespace nwor
