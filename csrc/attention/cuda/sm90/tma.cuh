#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/cuda/mbarrier.cuh"

// TMA (tensor memory accelerator) loads, and mbarriers that count their bytes: sm_90 and up. A
// phase ends when all arrivals and all expected bytes have come.

namespace nwor::mbarrier {

// Makes initialised barriers visible to TMA. The CTA must synchronise afterwards.
__device__ inline void FenceInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void Arrive(uint32_t barrier, int count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// Makes the current phase wait for `bytes` bytes of TMA loads. The thread must arrive afterwards.
__device__ inline void ExpectTx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives once when all copies that this thread has made with ptx::CopyAsync are complete.
__device__ inline void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace nwor::mbarrier

namespace nwor::tma {

// Loads a box of a 4-dimensional tensor: (channel, token, head, page).
__device__ inline void LoadBox(uint32_t target, const CUtensorMap* map, uint32_t barrier,
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

}  // namespace nwor::tma
