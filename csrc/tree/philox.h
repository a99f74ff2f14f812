#pragma once

#include <cstdint>

#include "base/host_device.h"

// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (2011): a draw is a function of key and counter, so it depends on nothing that happened
// before, nor on the batch it is made in.

namespace nwor {

struct PhiloxBlock {
  uint32_t word[4];
};

NWOR_HOST_DEVICE inline PhiloxBlock Philox(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53u;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57u;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = kMultiplier0 * counter.word[0];
    const uint64_t b = kMultiplier1 * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// What a draw is for; keeps the draws of one position apart.
enum class CoinPurpose : uint32_t { kAccept = 0, kFinal = 1 };

// A coin in [0, 1), a multiple of 2^-24, for the token at `position` of the sequence with `seed`.
NWOR_HOST_DEVICE inline float CoinAt(uint64_t seed, uint64_t position, CoinPurpose purpose) {
  const PhiloxBlock drawn =
      Philox({{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
               static_cast<uint32_t>(purpose), 0}},
             static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return static_cast<float>(drawn.word[0] >> 8) * (1.0f / 16777216.0f);
}

}  // namespace nwor
