#include "tree/threshold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace nwor {
namespace {

struct Item {
  uint32_t key;
  uint64_t weight;
};

// As a kernel would, with one thread. Also says how many passes it took.
uint32_t Search(const std::vector<Item>& items, uint32_t floor, uint32_t end, uint64_t needed,
                int* passes) {
  ThresholdSearch search{floor, end};
  for (*passes = 1;; ++*passes) {
    uint64_t weights[ThresholdSearch::kPivots] = {};
    uint32_t smallest = ~uint32_t{0}, largest = 0;
    for (const Item& item : items) {
      if (item.key < search.lo || item.weight == 0) continue;
      for (int i = 0; i < ThresholdSearch::kPivots; ++i) {
        if (item.key >= search.Pivot(i)) weights[i] += item.weight;
      }
      if (item.key < search.hi) {
        smallest = std::min(smallest, item.key);
        largest = std::max(largest, item.key);
      }
    }
    if (search.Narrow(weights, needed, smallest, largest)) return search.lo;
  }
}

// By going down the sorted keys.
uint32_t Expected(std::vector<Item> items, uint64_t needed) {
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.key > b.key; });
  uint64_t weight = 0;
  for (const Item& item : items) {
    weight += item.weight;
    if (weight >= needed) return item.key;
  }
  return 0;
}

TEST(ThresholdSearch, FindsWhatSortingFinds) {
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    const uint32_t spread = uint32_t{1} << (random() % 31);
    const uint32_t base = random() % 2 == 0 ? 0 : 0x7FFFFFFFu - spread;
    std::vector<Item> items(1 + random() % 60);
    uint64_t total = 0;
    for (Item& item : items) {
      item = {base + static_cast<uint32_t>(random() % spread), random() % 5};
      total += item.weight;
    }
    if (total == 0) continue;
    const uint64_t needed = 1 + random() % total;
    int passes = 0;
    ASSERT_EQ(Search(items, 0, 0x80000001u, needed, &passes), Expected(items, needed))
        << "round " << round;
    ASSERT_LE(passes, 13);
  }
}

TEST(ThresholdSearch, EndsAtOnceWhereAllKeysAreEqual) {
  const std::vector<Item> items(9, Item{1234567, 3});
  int passes = 0;
  EXPECT_EQ(Search(items, 0, 0x80000001u, 11, &passes), 1234567u);
  EXPECT_EQ(passes, 1);
}

TEST(ThresholdSearch, KeepsAFloorAndTakesItWhereNothingIsLeft) {
  const std::vector<Item> items = {{5, 1}, {7, 1}, {9, 1}};
  int passes = 0;
  EXPECT_EQ(Search(items, 7, 100, 2, &passes), 7u);
  EXPECT_EQ(Search(items, 50, 100, 1, &passes), 50u);
}

}  // namespace
}  // namespace nwor
