#include "session/slot_allocator.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "message_of.h"
#include "session/session_error.h"

namespace nwor {
namespace {

using Slots = std::vector<int64_t>;

void ExpectBalanced(const SlotAllocator& allocator) {
  const AllocatorStats stats = allocator.stats();
  EXPECT_EQ(stats.free_slots + stats.held_slots, stats.total_slots);
  EXPECT_EQ(stats.free_pages + stats.held_pages, stats.total_pages);
}

TEST(SlotAllocator, FillsAPageBeforeItTakesTheNext) {
  SlotAllocator allocator(4, 4);
  EXPECT_EQ(allocator.Extend(7, 3), (Slots{0, 1, 2}));
  EXPECT_EQ(allocator.Extend("other", 1), (Slots{4}));
  EXPECT_EQ(allocator.Extend(7, 3), (Slots{3, 8, 9}));
  EXPECT_EQ(allocator.Pages(7), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(allocator.Slots(7, 2, 5), (Slots{2, 3, 8}));
  EXPECT_EQ(allocator.stats().held_pages, 3);
  EXPECT_EQ(allocator.stats().tokens, 7);
  ExpectBalanced(allocator);
}

TEST(SlotAllocator, GivesBackPagesWhoseTokensAreAllGone) {
  SlotAllocator allocator(4, 2);
  allocator.Extend(1, 6);
  allocator.Truncate(1, 3);
  EXPECT_EQ(allocator.stats().free_pages, 2);
  EXPECT_EQ(allocator.length(1), 3);
  EXPECT_EQ(allocator.Extend(1, 1), (Slots{3}));
  allocator.Free(1);
  EXPECT_EQ(allocator.stats().free_pages, 4);
  EXPECT_FALSE(allocator.Contains(1));
}

TEST(SlotAllocator, KeepsTheSlotsOfTokensThatAMaskSpares) {
  SlotAllocator allocator(4, 4);
  allocator.Extend(1, 10);  // slots 0 .. 9
  // Of the last eight, tokens 2 .. 9: keep 2, 5 and 8.
  allocator.Free(1, {false, true, true, false, true, true, false, true});
  EXPECT_EQ(allocator.Slots(1), (Slots{0, 1, 2, 5, 8}));
  EXPECT_FALSE(allocator.IsDense(1));
  EXPECT_NE(MessageOf([&] { allocator.Pages(1); }).find("compact"), std::string::npos);
  EXPECT_EQ(allocator.Extend(1, 1), (Slots{9}));
  EXPECT_EQ(allocator.Compact(1), (std::vector<SlotMove>{{5, 3}, {8, 4}, {9, 5}}));
  EXPECT_EQ(allocator.Slots(1), (Slots{0, 1, 2, 3, 4, 5}));
  EXPECT_TRUE(allocator.IsDense(1));
  EXPECT_EQ(allocator.stats().held_pages, 2);
  ExpectBalanced(allocator);
}

TEST(SlotAllocator, LeavesNoHoleWhereAWholePageWent) {
  SlotAllocator allocator(6, 1);
  allocator.Extend(1, 6);
  allocator.Free(1, {true, false, false, true, false});
  EXPECT_TRUE(allocator.IsDense(1));
  EXPECT_EQ(allocator.Pages(1), (std::vector<int32_t>{0, 2, 3, 5}));
  EXPECT_EQ(allocator.stats().free_pages, 2);
}

TEST(SlotAllocator, CopiesASharedPageOnlyWhenSomebodyWritesIt) {
  SlotAllocator allocator(6, 4);
  allocator.Extend(1, 6);  // pages 0, 1
  allocator.Fork(1, 2);
  EXPECT_EQ(allocator.stats().held_pages, 2);
  EXPECT_EQ(allocator.stats().shared_pages, 2);
  EXPECT_EQ(allocator.Extend(2, 1), (Slots{10}));  // page 2 instead of 1
  EXPECT_EQ(allocator.TakeCopies(), (std::vector<PageCopy>{{1, 2}}));
  EXPECT_EQ(allocator.Slots(2), (Slots{0, 1, 2, 3, 8, 9, 10}));
  EXPECT_EQ(allocator.Extend(1, 1), (Slots{6}));  // its own by now
  EXPECT_TRUE(allocator.TakeCopies().empty());
  allocator.Free(1);
  EXPECT_EQ(allocator.stats().held_pages, 2);
  allocator.Free(2);
  EXPECT_EQ(allocator.stats().free_pages, 6);
}

TEST(SlotAllocator, SharesAPrefixOfAnyLength) {
  SlotAllocator allocator(8, 4);
  allocator.Extend("system", 9);
  allocator.Fork("system", "a", 8);
  allocator.Fork("system", "b", 6);
  allocator.Free("system");
  EXPECT_EQ(allocator.stats().held_pages, 2);
  EXPECT_EQ(allocator.Extend("a", 1).at(0) % 4, 0);  // a page boundary: nothing to copy
  EXPECT_TRUE(allocator.TakeCopies().empty());
  EXPECT_EQ(allocator.Extend("b", 1).at(0) % 4, 2);
  EXPECT_EQ(allocator.TakeCopies().size(), 1u);
}

TEST(SlotAllocator, StartsEveryBranchOnAPageOfItsOwn) {
  SlotAllocator allocator(16, 4);
  allocator.Extend(0, 6);
  const auto slots = allocator.Branch(0, {1, 2, 3}, 5);
  ASSERT_EQ(slots.size(), 3u);
  std::vector<bool> used(16, false);
  for (const Slots& branch : slots) {
    ASSERT_EQ(branch.size(), 5u);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(branch[i] % 4, (6 + i) % 4);
    EXPECT_FALSE(used[branch[0] / 4]);
    used[branch[0] / 4] = true;
  }
  const std::vector<PageCopy> copies = allocator.TakeCopies();
  ASSERT_EQ(copies.size(), 3u);
  for (const PageCopy& copy : copies) EXPECT_EQ(copy.source, 1);
  ExpectBalanced(allocator);
}

TEST(SlotAllocator, RefusesABranchThatDoesNotFitAsAWhole) {
  SlotAllocator allocator(5, 4);
  allocator.Extend(0, 6);
  EXPECT_THROW(allocator.Branch(0, {1, 2, 3}, 5), CapacityError);
  EXPECT_EQ(allocator.stats().requests, 1);
  EXPECT_EQ(allocator.stats().free_pages, 3);
  EXPECT_EQ(allocator.stats().pending_copies, 0);
}

TEST(SlotAllocator, GoesBackToABackupAsOftenAsAsked) {
  SlotAllocator allocator(8, 2);
  allocator.Extend(1, 3);
  const SlotAllocator::Backup outer = allocator.TakeBackup();
  allocator.Extend(1, 4);
  allocator.Fork(1, 2);
  const SlotAllocator::Backup inner = allocator.TakeBackup();
  allocator.Free(1);
  allocator.Extend(2, 2);
  allocator.Restore(inner);
  EXPECT_EQ(allocator.length(1), 7);
  EXPECT_EQ(allocator.length(2), 7);
  EXPECT_EQ(allocator.stats().pending_copies, 0);
  allocator.Restore(outer);
  EXPECT_EQ(allocator.Slots(1), (Slots{0, 1, 2}));
  EXPECT_FALSE(allocator.Contains(2));
  EXPECT_EQ(allocator.stats().free_pages, 6);
  allocator.Restore(inner);
  EXPECT_EQ(allocator.stats().shared_pages, 4);
  ExpectBalanced(allocator);
}

TEST(SlotAllocator, StillOwesTheCopiesThatABackupOwed) {
  SlotAllocator allocator(8, 4);
  allocator.Extend(1, 2);
  allocator.Fork(1, 2);
  allocator.Extend(2, 1);
  const SlotAllocator::Backup owing = allocator.TakeBackup();
  allocator.Fork(1, 3);
  allocator.Extend(3, 1);
  allocator.Restore(owing);
  EXPECT_EQ(allocator.TakeCopies(), (std::vector<PageCopy>{{0, 1}}));
  allocator.Restore(owing);  // made by now: not asked for again
  EXPECT_TRUE(allocator.TakeCopies().empty());
}

TEST(SlotAllocator, NamesWhatIsWrongAndChangesNothing) {
  SlotAllocator allocator(2, 4);
  allocator.Extend(1, 5);
  const auto expect = [&](const std::function<void()>& call, const std::string& text) {
    EXPECT_NE(MessageOf(call).find(text), std::string::npos) << MessageOf(call);
  };
  SlotAllocator other(2, 4);
  expect([&] { allocator.Extend(1, 4); }, "pages: request 1 needs 1, but only 0 of 2 are free");
  expect([&] { allocator.Extend(2, int64_t{1} << 62); }, "but only 0 of 2 are free");
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  expect([&] { allocator.Extend(2, kLargest); }, "but only 0 of 2 are free");
  expect([&] { allocator.Extend(1, kLargest); }, "but only 0 of 2 are free");
  expect([&] { allocator.Extend(1, -1); }, "num_tokens: got -1");
  expect([&] { allocator.Free("1"); }, "request: got '1'");
  expect([&] { allocator.Free(1, std::vector<bool>(6, true)); }, "mask: got 6 entries");
  expect([&] { allocator.Truncate(1, 6); }, "length: got 6");
  expect([&] { allocator.Fork(1, 1); }, "child: got 1");
  expect([&] { allocator.Fork(1, 2, 6); }, "num_tokens: got 6");
  expect([&] { allocator.Slots(1, 3, 2); }, "first, last: got 3 and 2");
  expect([&] { allocator.Restore(other.TakeBackup()); }, "another allocator");
  expect([] { SlotAllocator none(0, 4); }, "num_pages: got 0");
  expect([] { SlotAllocator none(4, 0); }, "page_size: got 0");
  EXPECT_EQ(allocator.Slots(1), (Slots{0, 1, 2, 3, 4}));
  EXPECT_EQ(allocator.stats().requests, 1);
  ExpectBalanced(allocator);
}

}  // namespace
}  // namespace nwor
