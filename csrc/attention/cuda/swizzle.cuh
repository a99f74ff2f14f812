#pragma once

#include <cstdint>

namespace nwor {

// XOR swizzle of rows in shared memory: 16-byte chunks of a row are stored at chunk ^ Of(row).
// Eight consecutive rows then lie in eight distinct bank groups for every supported row length.
template <int kRowBytes>
struct RowSwizzle {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kShift = kChunks % 8 == 0 ? 0 : kChunks % 4 == 0 ? 1 : 2;
  static constexpr int kMask = kChunks % 8 == 0   ? 7
                               : kChunks % 4 == 0 ? 3
                               : kChunks % 2 == 0 ? 1
                                                  : 0;

  __device__ static constexpr int Of(int row) { return (row >> kShift) & kMask; }
  __device__ static constexpr int Offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ Of(row)) << 4);
  }
  // The address `chunk` chunks after `address` = base + Offset(row, c). REQUIRES: c and chunk have
  // no bit in common; base is a multiple of 128. One xor with a constant, so that nothing has to
  // stay in registers.
  __device__ static constexpr uint32_t Advance(uint32_t address, int chunk) {
    return (address ^ ((chunk & kMask) << 4)) + (chunk & ~kMask) * 16;
  }
};

}  // namespace nwor
