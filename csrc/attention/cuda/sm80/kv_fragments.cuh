#pragma once

#include "attention/cuda/sm80/traits.cuh"
#include "attention/cuda/swizzle.cuh"

// B fragments of K and V for mma.m16n8k16, loaded from shared memory: 16-bit tokens, float8 tokens
// that are converted on the way, and 16-bit tokens beside float8 pages, whose channels are taken in
// the order of the pages.

namespace nwor::sm80 {

// Fragments are read from shared memory this many mma steps before they are used.
constexpr int kLookAhead = 4;

// B fragments of K; step k has channels 16k..16k+15. Beside float8 pages the inner channels come in
// the order in which a lane finds them there: 4c..4c+3 for lane c of four. Queries are stored
// alike.
template <class Traits, int kFragments, bool kFloat8>
struct KeyFragments {
  using RowLayout = RowSwizzle<Traits::kRowBytes>;
  using PageLayout = RowSwizzle<Traits::kCacheRowBytes>;
  static constexpr int kInnerSteps = Traits::kInnerSteps;
  static constexpr int kWords = kFloat8 ? kFragments : 2 * kFragments;
  uint32_t address;
  uint32_t raw[kLookAhead][kWords];

  __device__ explicit KeyFragments(uint32_t keys) {
    const int lane = threadIdx.x % 32;
    if constexpr (kFloat8) {
      address = keys + PageLayout::Offset(lane, 0);
    } else if constexpr (Traits::kFloat8) {
      address = keys + RowLayout::Offset(lane / 4, lane % 4 / 2) + lane % 2 * 8;
    } else {
      address = keys + RowLayout::Offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
#pragma unroll
    for (int k = 0; k < kLookAhead && k < kInnerSteps; ++k) Load(k);
  }

  __device__ void Load(int k) {
    uint32_t(&r)[kWords] = raw[k % kLookAhead];
    if constexpr (!kFloat8 && Traits::kFloat8) {
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const uint2 four =
            ptx::LoadShared64(RowLayout::Advance(address, 2 * k) + n * 8 * Traits::kRowBytes);
        r[2 * n] = four.x;
        r[2 * n + 1] = four.y;
      }
    } else {
      constexpr int kRows = kFloat8 ? 32 : 16;  // tokens of one load
      constexpr int kBytes = kFloat8 ? Traits::kCacheRowBytes : Traits::kRowBytes;
      const uint32_t at =
          kFloat8 ? PageLayout::Advance(address, k) : RowLayout::Advance(address, 2 * k);
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        uint32_t quad[4];
        ptx::LoadMatrix4(quad, at + i * kRows * kBytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) r[4 * i + j] = quad[j];
      }
    }
  }

  // Half of fragment n of step k.
  __device__ uint32_t Get(int k, int n, int half) const {
    const uint32_t(&r)[kWords] = raw[k % kLookAhead];
    if constexpr (kFloat8) {
      return half == 0 ? ptx::Float8ToHalf2(r[n] & 0xffffu) : ptx::UpperFloat8ToHalf2(r[n]);
    } else if constexpr (Traits::kFloat8) {
      return ptx::ToHalf2<typename Traits::Element>(r[2 * n + half]);
    } else {
      return r[2 * n + half];
    }
  }
};

// B fragments of V: 16 channels of 16 tokens at a time. Beside float8 pages even channels form the
// first fragment and odd ones the second, as a lane finds them there.
template <class Traits, int kFragments, bool kFloat8>
struct ValueFragments {
  using RowLayout = RowSwizzle<Traits::kRowBytes>;
  using PageLayout = RowSwizzle<Traits::kCacheRowBytes>;
  static constexpr int kPerLoad = kFloat8 ? 2 : 1;          // 16-token steps
  static constexpr int kLoads = kFragments / 2 / kPerLoad;  // per 16 channels
  static constexpr int kUnits = Traits::kHeadDim / 16 * kLoads;
  uint32_t address;
  uint32_t raw[kLookAhead][4];

  __device__ explicit ValueFragments(uint32_t values) {
    const int lane = threadIdx.x % 32;
    if constexpr (kFloat8) {
      address = values + PageLayout::Offset(lane, 0);
    } else if constexpr (Traits::kFloat8) {
      address = values;
    } else {
      address = values + RowLayout::Offset(lane % 16, lane / 16);
    }
#pragma unroll
    for (int unit = 0; unit < kLookAhead && unit < kUnits; ++unit) Load(unit);
  }

  __device__ void Load(int unit) {
    uint32_t(&r)[4] = raw[unit % kLookAhead];
    const int channels = unit / kLoads;  // of 16
    const int tokens = unit % kLoads * kPerLoad * 16;
    if constexpr (kFloat8) {
      ptx::LoadMatrix4Transposed(
          r, PageLayout::Advance(address, channels) + tokens * Traits::kCacheRowBytes);
    } else if constexpr (Traits::kFloat8) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tokens + i / 2 * 8 + lane % 4 * 2 + i % 2;
        const uint32_t two = ptx::LoadShared32(
            address + RowLayout::Offset(row, 2 * channels + lane / 16) + lane / 4 % 4 * 4);
        r[i] = ptx::ToHalf2<typename Traits::Element>(two);
      }
    } else {
      ptx::LoadMatrix4Transposed(
          r, RowLayout::Advance(address, 2 * channels) + tokens * Traits::kRowBytes);
    }
  }

  // b[channel fragment][token half] of the unit's 16-token step.
  __device__ void Get(uint32_t (&b)[2][2], int unit, int step) const {
    const uint32_t(&r)[4] = raw[unit % kLookAhead];
    if constexpr (kFloat8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t sorted = __byte_perm(r[2 * step + half], 0, 0x3120);
        b[0][half] = ptx::Float8ToHalf2(sorted & 0xffffu);
        b[1][half] = ptx::UpperFloat8ToHalf2(sorted);
      }
    } else if constexpr (Traits::kFloat8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b[0][half] = __byte_perm(r[2 * half], r[2 * half + 1], 0x5410);
        b[1][half] = __byte_perm(r[2 * half], r[2 * half + 1], 0x7632);
      }
    } else {
      b[0][0] = r[0];
      b[0][1] = r[1];
      b[1][0] = r[2];
      b[1][1] = r[3];
    }
  }
};

}  // namespace nwor::sm80
