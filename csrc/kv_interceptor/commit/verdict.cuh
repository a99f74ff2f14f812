#pragma once

#include <cstdint>

#include "kv_interceptor/commit/validate.cuh"

// What validation found, and where those who wait for it within a block find it.

namespace nwor {

// The same in every block.
struct BatchVerdict {
  uint32_t fault;
  int32_t num_accepted;
};

// How many threads of a block do what, in whole warps: those that move rows come first, then those
// that complete summaries, if any, then those that validate and do nothing else. Without the last
// ones those that move rows validate.
struct BlockRoles {
  int rows;
  int summaries;
  int apart;

  __device__ constexpr int validating() const { return apart > 0 ? apart : rows; }
  // Who meets at kVerdictForRows. Beside those that wait there: who has a word for them.
  __device__ constexpr int told() const { return apart > 0 ? rows + summaries + apart : rows; }
};

// Barriers of a block.
enum BlockBarrier : int { kOpening = 0, kVerdictForRows, kVerdictForSummaries, kSummaryHelp };
__device__ inline void ArriveAt(BlockBarrier barrier, int num_threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(num_threads)
               : "memory");
}
__device__ inline void MeetAt(BlockBarrier barrier, int num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(num_threads)
               : "memory");
}

// In shared memory. Those that complete summaries may be late for it, and those that validate apart
// do not wait at all.
class VerdictPost {
 public:
  // Before Add: all that move rows meet here.
  __device__ void Open(const BlockRoles& roles) {
    if (threadIdx.x == 0) found_ = {kNoFault, 0};
    MeetAt(kOpening, roles.rows);
  }
  // A warp's part of the verdict, the same in all its lanes, where those that move rows validate.
  __device__ void Add(const BatchVerdict& part, const BlockRoles& roles) {
    if (threadIdx.x % 32 == 0) {
      if (part.fault != kNoFault) atomicMin(&found_.fault, part.fault);
      if (part.num_accepted != 0) atomicAdd(&found_.num_accepted, part.num_accepted);
    }
    TellSummaries(roles);
  }
  // The verdict of the one warp that validates apart.
  __device__ void Post(const BatchVerdict& verdict, const BlockRoles& roles) {
    if (threadIdx.x % 32 == 0) found_ = verdict;
    ArriveAt(kVerdictForRows, roles.told());
    TellSummaries(roles);
  }

  // Waits until all of it is there. For warps that move rows.
  __device__ BatchVerdict Await(const BlockRoles& roles) const {
    MeetAt(kVerdictForRows, roles.told());
    return found_;
  }
  // For those that complete summaries: one of these, once each.
  __device__ BatchVerdict AwaitLate(const BlockRoles& roles) const {
    MeetAt(kVerdictForSummaries, roles.summaries + roles.validating());
    return found_;
  }
  __device__ void DoWithout(const BlockRoles& roles) const {
    ArriveAt(kVerdictForSummaries, roles.summaries + roles.validating());
  }

 private:
  __device__ static void TellSummaries(const BlockRoles& roles) {
    if (roles.summaries > 0) {
      ArriveAt(kVerdictForSummaries, roles.summaries + roles.validating());
    }
  }

  BatchVerdict found_;
};

}  // namespace nwor
