#pragma once

#include <cstdint>

#include "specpv/retrieval.h"

// How the thread blocks of a launch are shared out among the requests of a batch. Which of them
// refresh, and how long they are, is known on the device alone; one of them gets as much of the
// device as a batch that refreshes together.

namespace nwor {

// A request's part of what was dealt out.
struct RequestShare {
  int32_t request;  // -1: nothing is left to do
  int32_t candidates;
  int32_t cta;  // of num_ctas
  int32_t num_ctas;
};

namespace share_detail {

struct Claim {
  int32_t candidates = 0;
  uint32_t units = 0;
};

// What a request asks for. Not kept in the L1 cache: see HintUnits.
__device__ inline Claim ReadClaim(const SelectParams& params, int32_t request, int unit_blocks) {
  Claim claim;
  if (request >= params.num_requests) return claim;
  claim.candidates = min(__ldcg(params.num_candidates + request), params.max_blocks);
  if (claim.candidates > 0) {
    claim.units = static_cast<uint32_t>((claim.candidates + unit_blocks - 1) / unit_blocks);
  }
  return claim;
}

}  // namespace share_detail

// Thread block `cta` of `ctas`: one for each request with candidates, the others in proportion to
// units of `unit_blocks` blocks. Called by whole warps, which all find the same.
// REQUIRES: ctas >= num_requests.
__device__ inline RequestShare FindShare(const SelectParams& params, int32_t cta, int32_t ctas,
                                         int unit_blocks) {
  using share_detail::Claim;
  using share_detail::ReadClaim;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (params.num_requests == 1) {
    const Claim claim = ReadClaim(params, 0, unit_blocks);
    return {claim.units > 0 ? 0 : -1, claim.candidates, cta, ctas};
  }
  uint32_t all_units = 0;
  int32_t claimants = 0;
#pragma unroll 1
  for (int32_t first = 0; first < params.num_requests; first += 32) {
    const Claim claim = ReadClaim(params, first + lane, unit_blocks);
    all_units += __reduce_add_sync(0xffffffff, claim.units);
    claimants += __popc(__ballot_sync(0xffffffff, claim.units > 0));
  }
  if (claimants == 0) return {-1, 0, 0, 0};
  // Rounding is the same for every thread block and never goes down as units go up, so that one
  // part ends where the next begins, and the last within `ctas`.
  const float ratio = static_cast<float>(ctas - claimants) / static_cast<float>(all_units);
  const auto dealt = [ratio](uint32_t units) {
    return static_cast<int32_t>(ratio * static_cast<float>(units));
  };
  uint32_t units_before = 0;
  int32_t claimants_before = 0;
#pragma unroll 1
  for (int32_t first = 0; first < params.num_requests; first += 32) {
    const Claim claim = ReadClaim(params, first + lane, unit_blocks);
    uint32_t reached = claim.units;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffff, reached, distance);
      if (lane >= distance) reached += other;
    }
    const unsigned mask = __ballot_sync(0xffffffff, claim.units > 0);
    const int32_t rank = claimants_before + __popc(mask & ((1u << lane) - 1));
    const int32_t begin = dealt(units_before + reached - claim.units) + rank;
    const int32_t end = dealt(units_before + reached) + rank + 1;
    const unsigned owner = __ballot_sync(0xffffffff, claim.units > 0 && begin <= cta && cta < end);
    if (owner != 0) {
      const int from = __ffs(static_cast<int>(owner)) - 1;
      return {first + from, __shfl_sync(0xffffffff, claim.candidates, from),
              cta - __shfl_sync(0xffffffff, begin, from),
              __shfl_sync(0xffffffff, end - begin, from)};
    }
    units_before += __shfl_sync(0xffffffff, reached, 31);
    claimants_before += __popc(mask);
  }
  return {-1, 0, 0, 0};
}

}  // namespace nwor
