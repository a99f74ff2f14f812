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

// In shared memory. Who waits is waited for by nobody: a warp that is late delays itself only.
class VerdictPost {
 public:
  // All threads of the block meet here, from several places in the code. `num_deciders` warps will
  // call Add.
  __device__ void Open(int num_deciders) {
    if (threadIdx.x == 0) {
      found_ = {kNoFault, 0};
      bulk::InitBarrier(Address(), num_deciders);
    }
    asm volatile("barrier.sync 0;" ::: "memory");
  }

  // One warp's part of the verdict, the same in all its lanes.
  __device__ void Add(const BatchVerdict& part) {
    if (threadIdx.x % 32 != 0) return;
    if (part.fault != kNoFault) atomicMin(&found_.fault, part.fault);
    if (part.num_accepted != 0) atomicAdd(&found_.num_accepted, part.num_accepted);
    bulk::ArriveOnce(Address());
  }

  // Waits until all parts are there.
  __device__ BatchVerdict Await() const {
    bulk::Wait(Address(), 0);
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
