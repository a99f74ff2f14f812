#pragma once

#include <cstdint>

#include "base/host_device.h"

// The terms of a commit's digest, the same on host and device. A digest is the wrapping sum of its
// terms, so threads may add them in any order; each term is mixed until every bit of its inputs
// reaches every bit of it, so equal sums mean equal commits up to chance in 2^64.

namespace nwor {

// Both words of a rank that cannot commit whatever the others accepted: with it among them no rank
// finds agreement, for no digest has a maximum that is the complement of the other.
inline constexpr int64_t kDigestRefusal = INT64_MAX;

// The digest of a round that was written directly: it agrees only with other such rounds.
inline constexpr int64_t kDigestDirect = 0x6e776f7264697265;

// A bijection of 64-bit words (two rounds of multiply and xor-shift).
NWOR_HOST_DEVICE constexpr uint64_t DigestMix(uint64_t word) {
  word = (word ^ (word >> 32)) * 0xd6e8feb86659fd93ULL;
  word = (word ^ (word >> 32)) * 0xd6e8feb86659fd93ULL;
  return word ^ (word >> 32);
}

// Two non-negative 32-bit positions or small values in one word.
NWOR_HOST_DEVICE constexpr uint64_t DigestPair(int32_t high, int32_t low) {
  return static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
}

// How many drafts a request commits. Counted even when nothing is: a request with none differs from
// no request.
NWOR_HOST_DEVICE constexpr uint64_t DigestCount(int32_t request, int32_t count) {
  return DigestMix(DigestPair(request, count) ^ 0x2545f4914f6cdd1dULL);
}

// One accepted entry in one cache group: path[request][index] goes to `slot`.
NWOR_HOST_DEVICE constexpr uint64_t DigestEntry(int32_t request, int32_t index, int32_t group,
                                                int32_t path_entry, int64_t slot) {
  uint64_t term = DigestMix(DigestPair(request, index) ^ 0x9e3779b97f4a7c15ULL);
  term = DigestMix(term ^ DigestPair(group, path_entry));
  return DigestMix(term ^ static_cast<uint64_t>(slot));
}

}  // namespace nwor
