#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/cuda/ptx.cuh"
#include "attention/cuda/sm90/shared_barrier.cuh"

// Barriers in shared memory that count bytes as well as arrivals, and the copy engine that arrives
// there: sm_90 and up. A phase ends when all announced bytes have come, too.

namespace nwor::bulk {

// Makes barriers visible to the copy engine; then the CTA must meet.
__device__ inline void FenceBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void Arrive(uint32_t barrier, int count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// Has the phase wait for so many bytes of the copy engine. Then the thread must arrive.
__device__ inline void Expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives once when all copies that this thread has made with ptx::CopyAsync are complete.
__device__ inline void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A box of a tensor of four dimensions: (channel, token, head, page).
__device__ inline void CopyBox(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                               int channel, int token, int head, int page, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(channel), "r"(token), "r"(head), "r"(page), "l"(policy)
      : "memory");
}

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A launch may begin before the one ahead of it has ended: up to here it touches nothing that
// others write. The launch behind may begin at once.
__device__ inline void AwaitLaunchAhead() {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}

// The warpgroup's registers per thread from here on.
template <int kRegisters>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace nwor::bulk
