#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "base/types.h"

// Eight channels at a time between memory and float registers, for each storage type.

namespace nwor {

struct E4M3 {
  uint8_t bits;
};

__device__ inline float ElementToFloat(float x) { return x; }
__device__ inline float ElementToFloat(__half x) { return __half2float(x); }
__device__ inline float ElementToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ElementToFloat(E4M3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
}

__device__ inline void StoreElement(float* p, float x) { *p = x; }
__device__ inline void StoreElement(__half* p, float x) { *p = __float2half_rn(x); }
__device__ inline void StoreElement(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }

// Storage of kCount elements, loaded and stored as one word where it is no larger than 16 bytes.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount > 16 ? 16 : sizeof(T) * kCount) Packet {
  T element[kCount];
};

// Calls `body` with a null pointer of the storage type.
template <typename Body>
void WithElementType(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return body(static_cast<__half*>(nullptr));
    case DType::kBFloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kFloat8E4M3:
      return body(static_cast<E4M3*>(nullptr));
  }
}

}  // namespace nwor
