#pragma once

#include <cstdint>

// mbarriers in shared memory, sm_80 and up. A barrier alternates between phases 0 and 1; it starts
// in phase 0 and moves on when `count` arrivals have come. Unlike bar.sync, a thread can arrive
// without waiting and wait without arriving. sm90/tma.cuh adds the operations of sm_90.

namespace nwor::mbarrier {

// Call it before the CTA synchronises.
__device__ inline void Init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void ArriveOnce(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}

// Waits for the end of the phase with the given parity.
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

// Synchronises the `count` threads of a barrier, whole warps, in the phase with the given parity.
// Each thread sees what the others did before.
__device__ inline void Sync(uint32_t barrier, uint32_t parity) {
  ArriveOnce(barrier);
  Wait(barrier, parity);
  __syncwarp();
}

}  // namespace nwor::mbarrier
