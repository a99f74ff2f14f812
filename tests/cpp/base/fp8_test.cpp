#include "base/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace nwor {
namespace {

// Nearest by search over all finite codes in double precision, ties to the even code.
uint8_t NearestBySearch(float x) {
  double best_distance = std::numeric_limits<double>::infinity();
  int best = 0;
  for (int code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    const double value =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
    const double distance = std::fabs(std::fabs(static_cast<double>(x)) - value);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best_distance = distance;
      best = code;
    }
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

TEST(Fp8, EveryCodeSurvivesARoundTrip) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;  // NaN
    EXPECT_EQ(QuantizeE4M3(DequantizeE4M3(static_cast<uint8_t>(code))), code);
  }
}

TEST(Fp8, RoundsToNearestEvenAtEveryMidpointAndItsNeighbours) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = DequantizeE4M3(static_cast<uint8_t>(code));
    const float high = DequantizeE4M3(static_cast<uint8_t>(code + 1));
    const float middle = 0.5f * (low + high);
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f), low,
                          std::nextafter(low, 1e9f)}) {
      EXPECT_EQ(QuantizeE4M3(x), NearestBySearch(x)) << x;
      EXPECT_EQ(QuantizeE4M3(-x), NearestBySearch(-x)) << -x;
    }
  }
}

TEST(Fp8, SaturatesBeyondTheLargestValueAndKeepsNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float x : {448.0f, 449.0f, 464.0f, 480.0f, 1e30f, infinity}) {
    EXPECT_EQ(QuantizeE4M3(x), 0x7e) << x;
    EXPECT_EQ(QuantizeE4M3(-x), 0xfe) << x;
  }
  EXPECT_EQ(QuantizeE4M3(std::nanf("")), 0x7f);
  EXPECT_EQ(QuantizeE4M3(-std::nanf("")), 0x7f);
  EXPECT_TRUE(std::isnan(DequantizeE4M3(0x7f)));
}

TEST(Fp8, KeepsTheSignOfZero) {
  EXPECT_EQ(QuantizeE4M3(0.0f), 0x00);
  EXPECT_EQ(QuantizeE4M3(-0.0f), 0x80);
  EXPECT_EQ(QuantizeE4M3(-1e-9f), 0x80);
}

}  // namespace
}  // namespace nwor
