#pragma once

#include <cstdint>

#include "base/host_device.h"

// Probabilities as integers. Acceptance compares and sums them as multiples of 2^-43: integer sums
// are exact in any order, so a row gives the same token however it is split over threads, blocks
// or requests, and the CPU gives what CUDA gives. What is lost, below 1.2e-13 a token, is far below
// the 2^-24 steps of a coin.

namespace nwor {

inline constexpr int kProbabilityBits = 43;
inline constexpr uint64_t kProbabilityOne = uint64_t{1} << kProbabilityBits;
// So that no sum of float32 probabilities overflows.
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 20;
// How far a row's sum may be from one; a softmax in float32 is far closer.
inline constexpr float kProbabilityTolerance = 1e-3f;

// False for NaN.
NWOR_HOST_DEVICE inline bool IsProbability(float p) {
  return p >= 0.0f && p <= 1.0f + kProbabilityTolerance;
}
NWOR_HOST_DEVICE inline bool IsCoin(float coin) { return coin >= 0.0f && coin <= 1.0f; }

// REQUIRES: IsProbability(p).
NWOR_HOST_DEVICE inline uint64_t FixedProbability(float p) {
  return static_cast<uint64_t>(static_cast<int64_t>(p * 8796093022208.0f));  // 2^43, exact
}

NWOR_HOST_DEVICE inline bool SumsToOne(uint64_t sum) {
  constexpr auto kSlack = static_cast<uint64_t>(kProbabilityTolerance * kProbabilityOne);
  return sum >= kProbabilityOne - kSlack && sum <= kProbabilityOne + kSlack;
}

NWOR_HOST_DEVICE inline float FloatOf(uint64_t sum) {
  return static_cast<float>(static_cast<double>(sum) / static_cast<double>(kProbabilityOne));
}

// A coin scaled by `weight` in [0, 1]: below a mass m of probability iff the result is < m.
NWOR_HOST_DEVICE inline uint64_t FixedCoin(float coin, double weight) {
  return static_cast<uint64_t>(coin * weight * static_cast<double>(kProbabilityOne));
}

// Where a coin falls within a mass: 0 .. mass - 1. REQUIRES: mass > 0.
NWOR_HOST_DEVICE inline uint64_t PlaceOfCoin(float coin, uint64_t mass) {
  const auto place = static_cast<uint64_t>(coin * static_cast<double>(mass));
  return place < mass ? place : mass - 1;
}

// max(p - q, 0), what is left of the target's mass after the draft's.
NWOR_HOST_DEVICE inline uint64_t FixedExcess(float p, float q) {
  const uint64_t a = FixedProbability(p);
  const uint64_t b = FixedProbability(q);
  return a > b ? a - b : 0;
}

}  // namespace nwor
