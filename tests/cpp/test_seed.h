#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace nwor {

// The seed of a random test, printed: NWOR_TEST_SEED where it is set, else a new one.
inline uint64_t TestSeed() {
  const char* const given = std::getenv("NWOR_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "seed=" << seed << "\n";
  return seed;
}

}  // namespace nwor
