#pragma once

#include <cstdint>

// Barriers in shared memory that count arrivals, sm_80 and up. A barrier goes through phases
// 0, 1, 0, ...; it starts in phase 0 and passes to the next one when `count` arrivals have come.
// Unlike the block's own barriers they let a thread arrive without waiting, and wait without
// arriving.

namespace nwor::bulk {

// Before the block meets.
__device__ inline void InitBarrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void ArriveOnce(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}

// Waits for the end of the given phase (its parity).
__device__ inline void Wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
#if __CUDA_ARCH__ >= 900
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
#else
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
#endif
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// The `count` threads of a barrier, whole warps, meet in the given phase (its parity). Each of them
// sees what the others have done before.
__device__ inline void Meet(uint32_t barrier, uint32_t parity) {
  ArriveOnce(barrier);
  Wait(barrier, parity);
  __syncwarp();
}

}  // namespace nwor::bulk
