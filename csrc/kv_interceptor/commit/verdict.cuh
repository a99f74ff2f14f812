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

// Barriers of a block.
enum BlockBarrier : int { kOpening = 0, kVerdictForRows };
__device__ inline void ArriveAt(BlockBarrier barrier, int num_threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(num_threads)
               : "memory");
}
__device__ inline void MeetAt(BlockBarrier barrier, int num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(num_threads)
               : "memory");
}

// In shared memory, for a block of kThreads threads: the first kCommitThreads move rows. Those
// after them, if any, validate and do nothing else; without them those that move rows validate.
template <int kThreads>
class VerdictPost {
 public:
  // Before Add: all that move rows meet here.
  __device__ void Open() {
    if (threadIdx.x == 0) found_ = {kNoFault, 0};
    MeetAt(kOpening, kCommitThreads);
  }
  // A warp's part of the verdict, the same in all its lanes, where those that move rows validate.
  __device__ void Add(const BatchVerdict& part) {
    if (threadIdx.x % 32 == 0) {
      if (part.fault != kNoFault) atomicMin(&found_.fault, part.fault);
      if (part.num_accepted != 0) atomicAdd(&found_.num_accepted, part.num_accepted);
    }
  }
  // The verdict of the one warp that validates apart. It does not wait.
  __device__ void Post(const BatchVerdict& verdict) {
    if (threadIdx.x % 32 == 0) found_ = verdict;
    ArriveAt(kVerdictForRows, kThreads);
  }
  // Waits until all of it is there. For warps that move rows.
  __device__ BatchVerdict Await() const {
    MeetAt(kVerdictForRows, kThreads);
    return found_;
  }

 private:
  BatchVerdict found_;
};

}  // namespace nwor
