#include "metrics/counters.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "test_seed.h"

namespace nwor {
namespace {

int64_t Fallbacks(const CountersSnapshot& snapshot, BypassReason reason) {
  return snapshot.fallbacks[static_cast<size_t>(reason)];
}

TEST(Counters, LoseNothingWhenManyThreadsAdd) {
  constexpr int kThreads = 8;
  constexpr int kAdds = 20000;
  Counters counters;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&counters, t] {
      for (int i = 0; i < kAdds; ++i) {
        counters.Add(Counter::kStagedTokens, 3);
        counters.AddFallback(t % 2 == 0 ? BypassReason::kCapacity : BypassReason::kSlotMismatch);
        counters.AddStagingBytes(t % 2 == 0 ? 16 : -16);
        counters.ObserveCommitLatency(1e-6);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const CountersSnapshot snapshot = counters.Read();
  EXPECT_EQ(snapshot[Counter::kStagedTokens], int64_t{3} * kThreads * kAdds);
  EXPECT_EQ(snapshot[Counter::kCommittedTokens], 0);
  EXPECT_EQ(Fallbacks(snapshot, BypassReason::kCapacity), kThreads / 2 * kAdds);
  EXPECT_EQ(Fallbacks(snapshot, BypassReason::kSlotMismatch), kThreads / 2 * kAdds);
  EXPECT_EQ(Fallbacks(snapshot, BypassReason::kDisabled), 0);
  EXPECT_EQ(snapshot.staging_bytes, 0);
  EXPECT_EQ(snapshot.latency_buckets[0], kThreads * kAdds);
  EXPECT_NEAR(snapshot.latency_sum_seconds, kThreads * kAdds * 1e-6, 1e-9);
}

TEST(Counters, PutEachLatencyIntoTheSmallestBucketThatHoldsIt) {
  for (size_t i = 0; i < kCommitLatencyBounds.size(); ++i) {
    Counters counters;
    counters.ObserveCommitLatency(kCommitLatencyBounds[i]);
    counters.ObserveCommitLatency(std::nextafter(kCommitLatencyBounds[i], 1.0));
    const CountersSnapshot snapshot = counters.Read();
    for (size_t bucket = 0; bucket < snapshot.latency_buckets.size(); ++bucket) {
      EXPECT_EQ(snapshot.latency_buckets[bucket], bucket == i || bucket == i + 1) << bucket;
    }
  }
}

TEST(Counters, TakeABrokenClockForZero) {
  Counters counters;
  counters.ObserveCommitLatency(-1.0);
  counters.ObserveCommitLatency(std::numeric_limits<double>::quiet_NaN());
  const CountersSnapshot snapshot = counters.Read();
  EXPECT_EQ(snapshot.latency_buckets[0], 2);
  EXPECT_EQ(snapshot.latency_sum_seconds, 0);
}

TEST(Counters, ReadEverySourceOnTopOfTheirOwn) {
  Counters counters;
  counters.Add(Counter::kCommittedTokens, 5);
  int64_t first = 7;
  counters.AddSource([&](CountersSnapshot& s) {
    s.values[static_cast<size_t>(Counter::kCommittedTokens)] += first;
  });
  counters.AddSource([](CountersSnapshot& s) {
    s.values[static_cast<size_t>(Counter::kCommittedTokens)] += 100;
    s.fallbacks[static_cast<size_t>(BypassReason::kCommitLost)] += 1;
    s.latency_buckets[3] += 2;
    s.latency_sum_seconds += 0.25;
    s.staging_bytes += 64;
  });
  CountersSnapshot snapshot = counters.Read();
  EXPECT_EQ(snapshot[Counter::kCommittedTokens], 112);
  EXPECT_EQ(Fallbacks(snapshot, BypassReason::kCommitLost), 1);
  EXPECT_EQ(snapshot.latency_buckets[3], 2);
  EXPECT_DOUBLE_EQ(snapshot.latency_sum_seconds, 0.25);
  EXPECT_EQ(snapshot.staging_bytes, 64);
  first = 8;
  snapshot = counters.Read();
  EXPECT_EQ(snapshot[Counter::kCommittedTokens], 113);
  EXPECT_EQ(Fallbacks(snapshot, BypassReason::kCommitLost), 1);
}

TEST(Counters, KeepTheTotalsOfARemovedSourceButNotItsMemory) {
  Counters counters;
  int64_t total = 10;
  const int id = counters.AddSource([&](CountersSnapshot& s) {
    s.values[static_cast<size_t>(Counter::kRejectedTokens)] += total;
    s.fallbacks[static_cast<size_t>(BypassReason::kCapacity)] += 2;
    s.latency_buckets[1] += 4;
    s.latency_sum_seconds += 0.5;
    s.staging_bytes += 4096;
  });
  EXPECT_EQ(counters.Read()[Counter::kRejectedTokens], 10);
  total = 11;  // counted after the last read
  counters.RemoveSource(id);
  total = 1000;  // no longer anybody's
  const CountersSnapshot snapshot = counters.Read();
  EXPECT_EQ(snapshot[Counter::kRejectedTokens], 11);
  EXPECT_EQ(Fallbacks(snapshot, BypassReason::kCapacity), 2);
  EXPECT_EQ(snapshot.latency_buckets[1], 4);
  EXPECT_DOUBLE_EQ(snapshot.latency_sum_seconds, 0.5);
  EXPECT_EQ(snapshot.staging_bytes, 0);
  counters.RemoveSource(id);
  EXPECT_EQ(counters.Read()[Counter::kRejectedTokens], 11);
}

TEST(Counters, StandWhereASourceLastStoodWhenItThrows) {
  Counters counters;
  bool broken = false;
  const int id = counters.AddSource([&](CountersSnapshot& s) {
    s.values[static_cast<size_t>(Counter::kRounds)] += broken ? 1 : 3;
    if (broken) throw std::runtime_error("device lost");
  });
  EXPECT_EQ(counters.Read()[Counter::kRounds], 3);
  broken = true;
  EXPECT_EQ(counters.Read()[Counter::kRounds], 3);
  counters.RemoveSource(id);
  EXPECT_EQ(counters.Read()[Counter::kRounds], 3);
}

TEST(Counters, NeverGoBackwardsWhileSourcesComeAndGo) {
  const uint64_t seed = TestSeed();
  Counters counters;
  std::atomic<bool> done{false};
  std::atomic<int64_t> expected{0};
  std::thread changer([&] {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 2000; ++i) {
      std::atomic<int64_t> total{0};
      const int id = counters.AddSource([&](CountersSnapshot& s) {
        s.values[static_cast<size_t>(Counter::kRounds)] += total.load();
      });
      const int64_t amount = static_cast<int64_t>(random() % 5);
      total += amount;
      expected += amount;
      counters.RemoveSource(id);
    }
    done = true;
  });
  int64_t last = 0;
  int backwards = 0;
  while (!done) {
    const int64_t now = counters.Read()[Counter::kRounds];
    backwards += now < last;
    last = now;
  }
  changer.join();
  EXPECT_EQ(backwards, 0);
  EXPECT_EQ(counters.Read()[Counter::kRounds], expected);
}

TEST(Counters, CountWorkerCallsByOutcome) {
  Counters counters;
  for (int i = 0; i < kNumCallOutcomes; ++i) {
    for (int n = 0; n <= i; ++n) counters.AddWorkerCall(static_cast<CallOutcome>(i));
  }
  const int id = counters.AddSource([](CountersSnapshot& s) { s.worker_calls[0] += 10; });
  EXPECT_EQ(counters.Read().worker_calls[0], 11);
  counters.RemoveSource(id);
  const CountersSnapshot snapshot = counters.Read();
  EXPECT_EQ(snapshot.worker_calls[0], 11);
  for (int i = 1; i < kNumCallOutcomes; ++i) EXPECT_EQ(snapshot.worker_calls[i], i + 1) << i;
}

TEST(Counters, StartAtZeroInAForkedChildAndGoOnInTheParent) {
  Counters& counters = Counters::Global();
  counters.Add(Counter::kRounds, 4);
  counters.AddWorkerCall(CallOutcome::kAnswered);
  counters.AddStagingBytes(128);
  const int id = counters.AddSource(
      [](CountersSnapshot& s) { s.values[static_cast<size_t>(Counter::kCommittedTokens)] += 9; });
  const CountersSnapshot before = counters.Read();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    counters.Add(Counter::kRounds, 1);
    counters.RemoveSource(id);
    const CountersSnapshot own = counters.Read();
    const bool fresh = own[Counter::kRounds] == 1 && own[Counter::kCommittedTokens] == 0 &&
                       own.worker_calls[0] == 0 && own.staging_bytes == before.staging_bytes;
    _exit(fresh ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(counters.Read()[Counter::kRounds], before[Counter::kRounds]);
  EXPECT_EQ(counters.Read()[Counter::kCommittedTokens], before[Counter::kCommittedTokens]);
  counters.RemoveSource(id);
  counters.AddStagingBytes(-128);
}

TEST(Counters, HaveOneNameEachThatPrometheusAccepts) {
  std::set<std::string> names;
  for (const CounterText& text : kCounterTexts) {
    const std::string name = text.metric;
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_TRUE(name.starts_with("nwor_") || name.starts_with("specpv_")) << name;
    EXPECT_EQ(name.substr(name.size() - 6), "_total") << name;
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string::npos) << name;
    EXPECT_NE(std::string(text.help), "") << name;
  }
}

}  // namespace
}  // namespace nwor
