#include "kv_interceptor/commit/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <set>
#include <vector>

#include "kv_interceptor/commit/commit.h"

namespace nwor {
namespace {

// A small commit on the host that tests change one number of.
struct Accepted {
  std::vector<int32_t> path = {0, 1, -1, 3, -1, -1, 6, 7, 8};
  std::vector<int32_t> counts = {2, 1, 3};
  std::vector<int64_t> slots = {10, 11, -1, 40, -1, -1, 70, 71, 72};
  std::vector<int64_t> other_slots = {5, 6, -1, 7, -1, -1, 8, 9, 10};
  int num_groups = 1;

  std::array<int64_t, 2> Digest() const {
    CommitParams params;
    params.num_groups = num_groups;
    params.groups[0].slots = slots.data();
    params.groups[1].slots = other_slots.data();
    params.path = path.data();
    params.counts = counts.data();
    params.num_requests = 3;
    params.depth = 3;
    params.num_staging_rows = 9;
    std::array<int64_t, 2> digest{};
    CommitDigestCpu(params, digest.data());
    return digest;
  }
};

TEST(Digest, GivesItsComplementSoThatMaximaShowAgreement) {
  const auto digest = Accepted{}.Digest();
  EXPECT_EQ(digest[1], ~digest[0]);
  EXPECT_EQ(digest, Accepted{}.Digest());
}

TEST(Digest, ChangesWithEveryCommittedNumber) {
  const int64_t original = Accepted{}.Digest()[0];
  std::set<int64_t> seen = {original};
  const auto expect_new = [&](const Accepted& changed) {
    EXPECT_TRUE(seen.insert(changed.Digest()[0]).second);
  };
  for (size_t at : {0, 1, 3, 6, 7, 8}) {
    Accepted changed;
    changed.path[at] += 1;
    expect_new(changed);
    changed = {};
    changed.slots[at] += 1;
    expect_new(changed);
  }
  for (size_t request : {0, 1, 2}) {
    Accepted changed;
    changed.counts[request] -= 1;
    expect_new(changed);
  }
  Accepted two_groups;
  two_groups.num_groups = 2;
  expect_new(two_groups);
  two_groups.other_slots[3] = 8;
  expect_new(two_groups);
}

TEST(Digest, IgnoresWhatIsNotCommitted) {
  Accepted changed;
  changed.path[2] = 5;
  changed.slots[4] = 99;
  EXPECT_EQ(changed.Digest(), Accepted{}.Digest());
}

TEST(Digest, SeesTwoEntriesThatChangePlaces) {
  Accepted swapped;
  std::swap(swapped.slots[0], swapped.slots[1]);
  EXPECT_NE(swapped.Digest(), Accepted{}.Digest());
  swapped = {};
  std::swap(swapped.slots[3], swapped.slots[6]);
  std::swap(swapped.path[3], swapped.path[6]);
  EXPECT_NE(swapped.Digest(), Accepted{}.Digest());
}

TEST(Digest, ReadsNothingBeyondDepthWhenACountIsWrong) {
  Accepted wrong;
  wrong.counts = {2, 1, 1 << 30};
  const auto beyond = wrong.Digest();
  wrong.counts = {2, 1, 3};
  EXPECT_NE(beyond, wrong.Digest());  // the count itself is part of it
  wrong.counts = {2, 1, -1};
  EXPECT_NE(beyond, wrong.Digest());
}

// An all-reduce sees signed words: max(~d) = ~min(d) must hold for digests of either sign.
TEST(Digest, AgreesExactlyWhenAllRanksAgree) {
  const std::vector<std::vector<int64_t>> ranks = {
      {7, 7, 7}, {-7, -7}, {-1, 1}, {INT64_MIN, INT64_MAX}, {INT64_MAX, INT64_MAX}, {0, -1}};
  for (const auto& digests : ranks) {
    int64_t largest = INT64_MIN, largest_complement = INT64_MIN;
    for (int64_t digest : digests) {
      largest = std::max(largest, digest);
      largest_complement = std::max(largest_complement, ~digest);
    }
    const bool alike = std::set<int64_t>(digests.begin(), digests.end()).size() == 1;
    EXPECT_EQ(largest == ~largest_complement, alike);
  }
}

// A change of one input bit should change about half of a term's bits.
TEST(Digest, SpreadsEveryInputBit) {
  const uint64_t base = DigestEntry(3, 2, 1, 17, 123456);
  for (int bit = 0; bit < 48; ++bit) {
    const int changed =
        std::popcount(base ^ DigestEntry(3, 2, 1, 17, int64_t{123456} ^ (int64_t{1} << bit)));
    EXPECT_GT(changed, 12) << "slot bit " << bit;
  }
  for (int bit = 0; bit < 13; ++bit) {
    EXPECT_GT(std::popcount(base ^ DigestEntry(3 ^ (1 << bit), 2, 1, 17, 123456)), 12);
    EXPECT_GT(std::popcount(base ^ DigestEntry(3, 2, 1, 17 ^ (1 << bit), 123456)), 12);
  }
}

}  // namespace
}  // namespace nwor
