#pragma once

#include <cstdint>

#include "kv_interceptor/commit_validate.cuh"
#include "kv_interceptor/shared_barrier.cuh"

// What validation found, and where those who wait for it within a block find it.

namespace nwor {

// The same in every block.
struct BatchVerdict {
  uint32_t fault;
  int32_t num_accepted;
};

// In shared memory. kLate: a warp that waits may be late and delays itself only; otherwise all
// threads of the block wait, at its own barrier.
template <bool kLate>
class VerdictPost {
 public:
  // All threads of the block meet here, from several places in the code. `num_deciders` warps will
  // call Add.
  __device__ void Open(int num_deciders) {
    if (threadIdx.x == 0) {
      found_ = {kNoFault, 0};
      if constexpr (kLate) bulk::InitBarrier(Address(), num_deciders);
    }
    asm volatile("barrier.sync 0;" ::: "memory");
  }

  // One warp's part of the verdict, the same in all its lanes.
  __device__ void Add(const BatchVerdict& part) {
    if (threadIdx.x % 32 != 0) return;
    if (part.fault != kNoFault) atomicMin(&found_.fault, part.fault);
    if (part.num_accepted != 0) atomicAdd(&found_.num_accepted, part.num_accepted);
    if constexpr (kLate) bulk::ArriveOnce(Address());
  }

  // Waits until all parts are there.
  __device__ BatchVerdict Await() const {
    if constexpr (kLate) {
      bulk::Wait(Address(), 0);
    } else {
      asm volatile("barrier.sync 0;" ::: "memory");
    }
    return found_;
  }

 private:
  __device__ uint32_t Address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&barrier_));
  }

  uint64_t barrier_;
  BatchVerdict found_;
};

}  // namespace nwor
