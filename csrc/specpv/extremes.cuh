#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "base/cuda/element.cuh"

// Channelwise maximum and minimum of rows, a few channels to a lane: what block summaries are made
// of. Loaded is what a lane reads of a row; a NaN counts for nothing.

namespace nwor {

// Running extremes of one lane's channels, in float.
template <typename In, typename Out, int kVector>
struct FloatExtremes {
  using Loaded = Packet<In, kVector>;
  float high[kVector], low[kVector];

  __device__ FloatExtremes() {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      high[j] = -INFINITY;
      low[j] = INFINITY;
    }
  }
  __device__ void Add(const Loaded& packet, float scale) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float k = ElementToFloat(packet.element[j]) * scale;
      high[j] = fmaxf(high[j], k);
      low[j] = fminf(low[j], k);
    }
  }
  // Takes those of another lane in. All lanes of the warp call it; only those that `keep` do.
  __device__ void Meet(int lane, bool keep) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float other_high = __shfl_sync(0xffffffff, high[j], lane);
      const float other_low = __shfl_sync(0xffffffff, low[j], lane);
      if (keep) {
        high[j] = fmaxf(high[j], other_high);
        low[j] = fminf(low[j], other_low);
      }
    }
  }
  __device__ void Store(Out* kmax, Out* kmin) const {
    Packet<Out, kVector> upper, lower;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      StoreElement(&upper.element[j], high[j]);
      StoreElement(&lower.element[j], low[j]);
    }
    *reinterpret_cast<Packet<Out, kVector>*>(kmax) = upper;
    *reinterpret_cast<Packet<Out, kVector>*>(kmin) = lower;
  }
};

// The same for summaries of K's own 16-bit type without a scale: two channels in one instruction
// and no conversions, which would otherwise take as long as the reading.
template <typename T>
struct PairExtremes {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  struct alignas(16) Loaded {
    uint32_t pairs[4];
  };
  uint32_t high[4], low[4];

  // Global memory, read once.
  __device__ static Loaded Load(const char* row) {
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(row));
    return {{words.x, words.y, words.z, words.w}};
  }
  __device__ PairExtremes() {
    constexpr uint32_t kInfinity = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      high[j] = kInfinity | 0x80008000u;
      low[j] = kInfinity;
    }
  }
  __device__ static uint32_t Greater(uint32_t a, uint32_t b) {
    const Pair c = __hmax2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
    return reinterpret_cast<const uint32_t&>(c);
  }
  __device__ static uint32_t Less(uint32_t a, uint32_t b) {
    const Pair c = __hmin2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
    return reinterpret_cast<const uint32_t&>(c);
  }
  __device__ void Add(const Loaded& packet, float) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      high[j] = Greater(high[j], packet.pairs[j]);
      low[j] = Less(low[j], packet.pairs[j]);
    }
  }
  __device__ void Meet(int lane, bool keep) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t other_high = __shfl_sync(0xffffffff, high[j], lane);
      const uint32_t other_low = __shfl_sync(0xffffffff, low[j], lane);
      if (keep) {
        high[j] = Greater(high[j], other_high);
        low[j] = Less(low[j], other_low);
      }
    }
  }
  __device__ void Store(T* kmax, T* kmin) const {
    *reinterpret_cast<uint4*>(kmax) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(kmin) = make_uint4(low[0], low[1], low[2], low[3]);
  }
};

}  // namespace nwor
