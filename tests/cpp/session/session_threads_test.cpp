#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "session/session_store.h"
#include "session/toy_target.h"
#include "test_seed.h"

// The store under many threads. Built with -DNWOR_SANITIZE=thread these are the tests that count.

namespace nwor {
namespace {

void InThreads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// A door the model waits at.
class Gate {
 public:
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void AwaitArrival() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

TEST(SessionThreads, EachDecodesItsOwnSession) {
  ToyTarget target(256, 4);
  std::atomic<int> running{0};
  SessionStore store({}, target.interceptor(), [&](const SessionBatch& batch) {
    EXPECT_EQ(running.fetch_add(1), 0);  // one pass at a time
    at::Tensor out = target.Forward(batch);
    running.fetch_sub(1);
    return out;
  });
  InThreads(6, [&](int i) {
    ToyClient client{Concat("client ", i), {i, 2 * i, 7}};
    for (int round = 0; round < 10; ++round) {
      Tokens drafts = client.RightDrafts(4);
      drafts[(i + round) % 4] += round % 2;
      drafts[(i + round) % 4] %= ToyTarget::kVocab;
      client.Take(store.Verify(client.Ask(drafts)));
    }
    client.ExpectPlainDecoding(3);
    store.End(client.session);
  });
  EXPECT_EQ(store.stats().live, 0);
  EXPECT_EQ(store.stats().held_bytes, 0);
}

TEST(SessionThreads, GatherABatchWhileTheModelRuns) {
  ToyTarget target(256, 4);
  Gate gate;
  std::vector<size_t> batches;
  SessionStore store({}, target.interceptor(), [&](const SessionBatch& batch) {
    batches.push_back(batch.sessions.size());
    if (batches.size() == 1) gate.Pass();
    return target.Forward(batch);
  });
  std::thread first([&] { store.Verify(ToyClient{"first", {1}}.Ask(Tokens{2})); });
  gate.AwaitArrival();
  std::vector<std::thread> others;
  for (int i = 0; i < 5; ++i) {
    others.emplace_back([&, i] {
      ToyClient client{Concat("other ", i), {i}};
      client.Take(store.Verify(client.Ask(client.RightDrafts(3))));
      client.ExpectPlainDecoding(1);
    });
  }
  // All are in the table before they wait for the pass.
  while (store.stats().live < 6) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate.Open();
  first.join();
  for (std::thread& thread : others) thread.join();
  size_t total = 0;
  for (const size_t batch : batches) total += batch;
  EXPECT_EQ(total, 6u);
  EXPECT_GE(store.stats().largest_batch, 2);
}

TEST(SessionThreads, AStartThatStillWaitsTakesNoPlace) {
  ToyTarget target;
  Gate gate;
  SessionConfig config;
  config.max_sessions = 4;
  SessionStore store(config, target.interceptor(), [&](const SessionBatch& batch) {
    if (batch.sessions.front() == "busy") gate.Pass();
    return target.Forward(batch);
  });
  ToyClient idle{"idle", {1, 2, 3}}, busy{"busy", {4}};
  idle.Take(store.Verify(idle.Ask(Tokens{})));
  std::thread first([&] { store.Verify(busy.Ask(Tokens{})); });
  gate.AwaitArrival();
  std::thread second([&] {
    VerifyRequest wrong = ToyClient{"busy", {5}}.Ask(Tokens{});
    wrong.expected_prefix_len = 99;
    EXPECT_THROW(store.VerifyBatch({ToyClient{"at the door", {6}}.Ask(Tokens{}), wrong}),
                 DesyncError);
  });
  while (store.stats().live < 3) std::this_thread::yield();
  store.Fork("idle", "one");
  store.Fork("idle", "two");
  EXPECT_EQ(store.stats().evicted, 0);
  gate.Open();
  first.join();
  second.join();
  EXPECT_EQ(store.stats().evicted, 0);
  EXPECT_EQ(store.stats().live, 4);
}

TEST(SessionThreads, AnEndWaitsForTheVerifyInFlight) {
  ToyTarget target;
  Gate gate;
  SessionStore store({}, target.interceptor(), [&](const SessionBatch& batch) {
    gate.Pass();
    return target.Forward(batch);
  });
  std::atomic<bool> verified{false}, ended{false};
  std::thread verify([&] {
    ToyClient client{"a", {1, 2, 3}};
    client.Take(store.Verify(client.Ask(client.RightDrafts(2))));
    client.ExpectPlainDecoding(3);
    verified = true;
  });
  gate.AwaitArrival();
  std::thread end([&] {
    store.End("a");
    EXPECT_GT(store.stats().forwards, 0);
    ended = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(ended);
  gate.Open();
  verify.join();
  end.join();
  EXPECT_TRUE(verified);
  EXPECT_THROW(store.End("a"), UnknownSessionError);
  EXPECT_EQ(store.stats().held_bytes, 0);
}

TEST(SessionThreads, OneOfThoseWhoExpectTheSameLengthWins) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3}};
  client.Take(store.Verify(client.Ask(Tokens{})));
  std::atomic<int> won{0}, lost{0};
  InThreads(6, [&](int) {
    try {
      store.Verify(client.Ask(client.RightDrafts(2)));
      ++won;
    } catch (const DesyncError&) {
      ++lost;
    }
  });
  EXPECT_EQ(won, 1);
  EXPECT_EQ(lost, 5);
  EXPECT_EQ(store.Info("a").length, 6);
}

TEST(SessionThreads, AWaiterStartsAfreshWhenTheStarterFails) {
  ToyTarget target;
  Gate gate;
  std::atomic<int> passes{0};
  SessionStore store({}, target.interceptor(), [&](const SessionBatch& batch) {
    if (passes++ > 0) return target.Forward(batch);
    gate.Pass();
    throw std::runtime_error("the first pass fails");
  });
  ToyClient client{"a", {1, 2, 3}};
  std::thread starter(
      [&] { EXPECT_THROW(store.Verify(client.Ask(Tokens{})), std::runtime_error); });
  gate.AwaitArrival();
  std::thread waiter([&] {
    client.Take(store.Verify(client.Ask(client.RightDrafts(2))));
    client.ExpectPlainDecoding(3);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate.Open();
  starter.join();
  waiter.join();
  EXPECT_EQ(store.Info("a").length, 5);
  EXPECT_EQ(store.stats().started, 1);
}

TEST(SessionThreads, TheInterceptorIsAskedMeanwhile) {
  ToyTarget target(256, 4);
  Interceptor& interceptor = target.interceptor();
  SessionStore store({}, interceptor, target.AsForward());
  std::atomic<bool> done{false};
  std::thread reader([&] {
    int64_t epoch = 0;
    while (!done) {
      const Interceptor::Stats stats = interceptor.stats();
      EXPECT_GE(stats.epoch, epoch);
      EXPECT_GE(stats.staged_tokens, stats.rejected_tokens);
      EXPECT_EQ(interceptor.mode(), Mode::kStage);
      epoch = stats.epoch;
    }
  });
  ToyClient client{"a", {1, 2, 3}};
  for (int round = 0; round < 30; ++round) {
    client.Take(store.Verify(client.Ask(client.RightDrafts(4))));
  }
  done = true;
  reader.join();
  EXPECT_EQ(interceptor.stats().epoch, 30);
  EXPECT_FALSE(interceptor.stats().round_open);
}

TEST(SessionThreads, OneOfThoseWhoStartTheSameSessionWins) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  constexpr int kThreads = 4, kRounds = 50;
  std::barrier start(kThreads);
  std::atomic<int> won{0}, lost{0};
  InThreads(kThreads, [&](int i) {
    for (int round = 0; round < kRounds; ++round) {
      const ToyClient client{Concat("round ", round), {1, 2, 3 + i}};
      start.arrive_and_wait();
      try {
        EXPECT_EQ(store.Verify(client.Ask(Tokens{})).length, 3);
        ++won;
      } catch (const DesyncError&) {
        ++lost;
      }
      start.arrive_and_wait();
      if (i == 0) store.End(client.session);
    }
  });
  EXPECT_EQ(won, kRounds);
  EXPECT_EQ(lost, kRounds * (kThreads - 1));
  EXPECT_EQ(store.stats().held_bytes, 0);
}

TEST(SessionThreads, AnythingAtOnceLeavesEverySessionRightOrGone) {
  const uint64_t seed = TestSeed();
  ToyTarget target(24, 4);  // room for a few sessions only: they push each other out
  std::atomic<int64_t> ticks{0}, refused{0};
  SessionConfig config;
  config.ttl_seconds = 40;
  config.max_batch = 3;
  config.clock = [&] { return static_cast<double>(ticks.fetch_add(1)); };
  SessionStore store(config, target.interceptor(), [&](const SessionBatch& batch) {
    if (ticks.load() % 29 == 0) throw std::runtime_error("a model that fails now and then");
    return target.Forward(batch);
  });
  InThreads(4, [&](int i) {
    std::mt19937_64 random(seed + static_cast<uint64_t>(i));
    std::vector<ToyClient> clients;
    for (int c = 0; c < 3; ++c) clients.push_back({Concat(i, ".", c), {i, c}});
    for (int step = 0; step < 60; ++step) {
      ToyClient& client = clients[random() % clients.size()];
      const std::string& name = client.session;
      try {
        switch (random() % 8) {
          case 0:
            store.End(name);
            client = {name, {i, step % ToyTarget::kVocab}};
            break;
          case 1:
            store.Sweep();
            break;
          case 2:
            store.stats();
            store.List();
            break;
          case 3:
            store.Rollback(name, client.cached_len);
            break;
          case 4:
            // Somebody else's, whatever its state.
            store.End(Concat(random() % 4, ".", random() % 3));
            break;
          default: {
            VerifyRequest request = client.Ask(client.RightDrafts(random() % 6));
            request.chunk_rows = static_cast<int64_t>(random() % 3);
            client.Take(store.Verify(request));
            client.ExpectPlainDecoding(2);
            if (client.sequence.size() > 30) {
              store.End(name);
              client = {name, {i, 1}};
            }
          }
        }
      } catch (const UnknownSessionError&) {
        client.cached_len = 0;  // the whole sequence next time
      } catch (const DesyncError&) {
        client = {Concat(name, "'"), {i, 2}};
      } catch (const CapacityError&) {
        ++refused;
      } catch (const std::runtime_error&) {
        ++refused;
      }
    }
  });
  for (const SessionInfo& info : store.List()) store.End(info.session);
  EXPECT_EQ(store.stats().live, 0);
  EXPECT_EQ(store.stats().held_bytes, 0);
}

}  // namespace
}  // namespace nwor
