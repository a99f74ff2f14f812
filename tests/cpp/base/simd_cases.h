#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/fp8.h"
#include "base/simd/simd.h"

// The tests of simd.h, for the level and under the suite name that the including file defines.

namespace nwor::NWOR_SIMD_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float Exp2Of(float x) { return Exp2(Broadcast(x))[0]; }

TEST(NWOR_SIMD_SUITE, Exp2IsWithinTwoUlpsEverywhere) {
  double worst = 0.0;
  for (int i = 0; i <= 2'000'000; ++i) {
    const float x = -126.0f + 253.0f * static_cast<float>(i) / 2'000'000.0f;
    const double expected = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::abs(Exp2Of(x) - expected) / expected);
  }
  EXPECT_LT(worst, 1.2e-7);
}

TEST(NWOR_SIMD_SUITE, Exp2OfIntegersIsExact) {
  for (int n = -126; n <= 127; ++n) EXPECT_EQ(Exp2Of(static_cast<float>(n)), std::ldexp(1.0f, n));
}

TEST(NWOR_SIMD_SUITE, Exp2OfSpecialValues) {
  EXPECT_EQ(Exp2Of(-kInfinity), 0.0f);
  EXPECT_EQ(Exp2Of(-1e30f), 0.0f);
  EXPECT_EQ(Exp2Of(-127.0f), 0.0f);
  EXPECT_EQ(Exp2Of(0.0f), 1.0f);
  EXPECT_TRUE(std::isnan(Exp2Of(kNaN)));
}

TEST(NWOR_SIMD_SUITE, TanhIsAccurateAndSaturates) {
  for (int i = -4000; i <= 4000; ++i) {
    const float x = static_cast<float>(i) / 200.0f;
    EXPECT_NEAR(Tanh(Broadcast(x))[0], std::tanh(static_cast<double>(x)), 2e-7) << x;
  }
  EXPECT_EQ(Tanh(Broadcast(1e30f))[0], 1.0f);
  EXPECT_EQ(Tanh(Broadcast(-1e30f))[0], -1.0f);
  EXPECT_EQ(Tanh(Broadcast(kInfinity))[0], 1.0f);
  EXPECT_TRUE(std::isnan(Tanh(Broadcast(kNaN))[0]));
}

TEST(NWOR_SIMD_SUITE, MaximumIgnoresNaNInTheSecondOperand) {
  EXPECT_EQ(MaxOf(Broadcast(1.0f), Broadcast(kNaN))[0], 1.0f);
  EXPECT_EQ(MaxOf(Broadcast(1.0f), Broadcast(2.0f))[0], 2.0f);
}

// Every bit pattern of a 16-bit type, against arithmetic on its fields.
double HalfValue(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * kInfinity : static_cast<double>(kNaN);
  }
  const double fraction = mantissa / std::exp2(mantissa_bits);
  return exponent == 0 ? sign * fraction * std::exp2(1 - bias)
                       : sign * (1.0 + fraction) * std::exp2(exponent - bias);
}

template <typename T>
void CheckAllPatterns(int exponent_bits) {
  for (int bits = 0; bits < 65536; ++bits) {
    T values[kLanes];
    for (T& value : values) value.bits = static_cast<uint16_t>(bits);
    const float got = LoadAs(values)[0];
    const double expected = HalfValue(static_cast<uint16_t>(bits), exponent_bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      continue;
    }
    EXPECT_EQ(got, expected) << bits;
    T back[kLanes];
    StoreAs(back, Broadcast(got));
    EXPECT_EQ(back[kLanes - 1].bits, bits);
  }
}

TEST(NWOR_SIMD_SUITE, ConvertsEveryHalfBothWays) { CheckAllPatterns<Half>(5); }
TEST(NWOR_SIMD_SUITE, ConvertsEveryBFloat16BothWays) { CheckAllPatterns<BFloat16>(8); }

// Round to nearest, ties to even: no other value of the type is closer.
template <typename T>
void CheckRounding(int exponent_bits) {
  uint32_t state = 12345;
  for (int i = 0; i < 200'000; ++i) {
    state = state * 1664525u + 1013904223u;
    // Exponents around the type's range, all mantissas.
    const float x =
        std::bit_cast<float>((state & 0x807fffffu) | ((90u + (state >> 8) % 60u) << 23));
    T stored[kLanes];
    StoreAs(stored, Broadcast(x));
    const uint16_t bits = stored[0].bits;
    const double got = HalfValue(bits, exponent_bits);
    if (std::isinf(got)) {
      EXPECT_GE(std::abs(x), 65520.0) << x;
      continue;
    }
    const double error = std::abs(got - x);
    for (const int step : {-1, 1}) {
      const auto neighbour = static_cast<uint16_t>(bits + step);
      if (((bits ^ neighbour) & 0x8000) != 0) continue;
      const double other = std::abs(HalfValue(neighbour, exponent_bits) - x);
      EXPECT_TRUE(error < other || (error == other && bits % 2 == 0)) << x;
    }
  }
  T stored[kLanes];
  StoreAs(stored, Broadcast(kNaN));
  EXPECT_TRUE(std::isnan(HalfValue(stored[0].bits, exponent_bits)));
}

TEST(NWOR_SIMD_SUITE, RoundsToHalfToNearestEven) { CheckRounding<Half>(5); }
TEST(NWOR_SIMD_SUITE, RoundsToBFloat16ToNearestEven) { CheckRounding<BFloat16>(8); }

TEST(NWOR_SIMD_SUITE, ConvertsEveryFloat8) {
  for (int bits = 0; bits < 256; ++bits) {
    Float8E4M3 values[kLanes];
    for (Float8E4M3& value : values) value.bits = static_cast<uint8_t>(bits);
    const float got = LoadAs(values)[0];
    const float expected = DequantizeE4M3(static_cast<uint8_t>(bits));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(got, expected) << bits;
    }
  }
}

TEST(NWOR_SIMD_SUITE, SumsLanesOfFourRegisters) {
  Vec rows[4] = {};
  float expected[4] = {};
  for (int r = 0; r < 4; ++r) {
    for (int lane = 0; lane < kLanes; ++lane) {
      rows[r][lane] = static_cast<float>(r * 100 + lane);
      expected[r] += rows[r][lane];
    }
  }
  const Quad sums = SumLanes(rows[0], rows[1], rows[2], rows[3]);
  for (int r = 0; r < 4; ++r) EXPECT_EQ(sums[r], expected[r]);
}

}  // namespace
}  // namespace nwor::NWOR_SIMD_NAMESPACE
