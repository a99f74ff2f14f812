#include "attention/plan_users.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace nwor {
namespace {

class PlanUsersTest : public testing::Test {
 protected:
  PlanUsers users_;
  int plans_[2] = {};
  int streams_[2] = {};
};

TEST_F(PlanUsersTest, NobodyIsWaitedForOnOneStream) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(users_.Enter(&plans_[0], &streams_[0]).has_value());
    EXPECT_FALSE(users_.Enter(&plans_[1], &streams_[1]).has_value());
  }
}

TEST_F(PlanUsersTest, AStreamThatTakesAPlanOverWaitsOnce) {
  EXPECT_FALSE(users_.Enter(&plans_[0], &streams_[0]).has_value());
  EXPECT_EQ(users_.Enter(&plans_[0], &streams_[1]), StreamHandle{&streams_[0]});
  EXPECT_FALSE(users_.Enter(&plans_[0], &streams_[1]).has_value());
  EXPECT_EQ(users_.Enter(&plans_[0], &streams_[0]), StreamHandle{&streams_[1]});
}

// The default stream has no handle, and is waited for like any other.
TEST_F(PlanUsersTest, TheDefaultStreamIsAStream) {
  EXPECT_FALSE(users_.Enter(&plans_[0], nullptr).has_value());
  const auto before = users_.Enter(&plans_[0], &streams_[0]);
  ASSERT_TRUE(before.has_value());
  EXPECT_EQ(*before, nullptr);
}

// Of threads with a stream each, every one but the first finds somebody before it, all of them
// different.
TEST_F(PlanUsersTest, ThreadsTakeAPlanOverOneAfterTheOther) {
  constexpr int kThreads = 8;
  int streams[kThreads];
  std::optional<StreamHandle> found[kThreads];
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { found[i] = users_.Enter(&plans_[0], &streams[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  int first = 0;
  for (int i = 0; i < kThreads; ++i) {
    first += !found[i].has_value();
    for (int j = 0; j < i; ++j) EXPECT_NE(found[i], found[j]);
  }
  EXPECT_EQ(first, 1);
}

}  // namespace
}  // namespace nwor
