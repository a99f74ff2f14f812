#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// float8 e4m3 (finite, no infinity) on the host, bit for bit as the GPU's conversion instruction:
// round to nearest even, saturate to +-448, NaN becomes 0x7F.

namespace nwor {

inline uint8_t QuantizeE4M3(float x) {
  constexpr uint32_t kInfinity = 0x7f800000;
  constexpr uint32_t kMinNormal = (127 - 6) << 23;  // 2^-6
  constexpr uint32_t kMaxFinite = 0x7e;             // 448
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80);
  if (magnitude > kInfinity) return 0x7f;
  if (magnitude < kMinNormal) {
    // Subnormals count in steps of 2^-9; eight of them carry into the first normal by themselves.
    const float steps = std::nearbyintf(std::bit_cast<float>(magnitude) * 512.0f);
    return sign | static_cast<uint8_t>(steps);
  }
  const uint32_t rounded = magnitude + 0x7ffff + ((magnitude >> 20) & 1);
  const uint32_t code = (rounded >> 20) - ((127 - 7) << 3);
  return sign | static_cast<uint8_t>(code > kMaxFinite ? kMaxFinite : code);
}

inline float DequantizeE4M3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t magnitude = code & 0x7f;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * (1.0f / 512.0f)
                                    : std::bit_cast<float>((magnitude << 20) + ((127u - 7u) << 23));
  return sign != 0 ? -value : value;
}

}  // namespace nwor
