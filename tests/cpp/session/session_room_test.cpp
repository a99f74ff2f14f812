#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "message_of.h"
#include "session/session_store.h"
#include "session/toy_target.h"

// Who is evicted for whom: pages and places of a store.

namespace nwor {
namespace {

TEST(SessionRoom, EvictsTheLeastRecentlyUsedByBytes) {
  ToyTarget target;
  SessionConfig config;
  config.max_bytes = 6 * target.bytes_per_page();
  SessionStore store(config, target.interceptor(), target.AsForward());
  std::vector<ToyClient> clients;
  for (const char* name : {"a", "b", "c"}) {
    clients.push_back({name, {1, 2, 3, 4, 5}});
    clients.back().Take(store.Verify(clients.back().Ask(Tokens{})));  // two pages each
  }
  clients[0].Take(store.Verify(clients[0].Ask(Tokens{})));  // b is the oldest now
  ToyClient d{"d", {9, 9}};
  d.Take(store.Verify(d.Ask(Tokens{})));
  EXPECT_THROW(store.Info("b"), UnknownSessionError);
  EXPECT_EQ(store.stats().evicted, 1);
  EXPECT_LE(store.stats().held_bytes, config.max_bytes);
  // What can never fit evicts nobody.
  ToyClient huge{"huge", Tokens(25, 1)};
  EXPECT_THROW(store.Verify(huge.Ask(Tokens{})), CapacityError);
  EXPECT_EQ(store.stats().live, 3);
  for (ToyClient* client : {&clients[0], &clients[2], &d}) {
    client->Take(store.Verify(client->Ask(client->RightDrafts(1))));
    client->ExpectPlainDecoding(client == &d ? 2 : 5);
  }
}

TEST(SessionRoom, EvictsNobodyForWhatDoesNotFitBesideSessionsInUse) {
  ToyTarget target(6, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient idle{"idle", {1, 2}}, large{"large", Tokens(11, 1)}, more{"more", Tokens(11, 2)};
  idle.Take(store.Verify(idle.Ask(Tokens{})));
  large.Take(store.Verify(large.Ask(Tokens{})));  // three pages of six
  // Beside `large`, with drafts beyond its pages, there would be no room without `idle` either.
  const VerifyRequest grows = large.Ask(large.RightDrafts(5));
  const std::string message = MessageOf([&] {
    store.VerifyBatch({grows, more.Ask(Tokens(2, 3))});
  });
  EXPECT_NE(message.find("that are free or can be evicted"), std::string::npos) << message;
  EXPECT_EQ(store.stats().evicted, 0);
  EXPECT_EQ(store.stats().live, 2);
  for (ToyClient* client : {&idle, &large}) {
    client->Take(store.Verify(client->Ask(client->RightDrafts(1))));
    client->ExpectPlainDecoding(client == &idle ? 2 : 11);
  }
}

TEST(SessionRoom, EvictsNobodyForPassesThatCannotFit) {
  const auto refused = [](int64_t pages, int64_t max_batch, int64_t prompt, int64_t drafts) {
    ToyTarget target(pages, 4);
    SessionConfig config;
    config.max_batch = max_batch;
    SessionStore store(config, target.interceptor(), target.AsForward());
    for (const char* name : {"p", "q", "r"}) {
      ToyClient idle{name, {1, 2, 3}};
      idle.Take(store.Verify(idle.Ask(Tokens{})));
    }
    const int64_t forwards = store.stats().forwards;
    const ToyClient x{"x", Tokens(prompt, 1)}, y{"y", {5}};
    EXPECT_THROW(store.VerifyBatch({x.Ask(Tokens{}), y.Ask(Tokens(drafts, 2))}), CapacityError);
    EXPECT_EQ(store.stats().evicted, 0);
    EXPECT_EQ(store.stats().live, 3);
    EXPECT_EQ(store.stats().forwards, forwards);
  };
  refused(12, 1, 16, 100);     // in the second pass, which is beyond all pages
  refused(12, 1, 16, 32);      // in the second pass, beside what the first has left
  refused(100, 64, 257, 200);  // in the first of two passes
  refused(100, 64, 400, 10);   // by new tokens alone
}

TEST(SessionRoom, EvictsNoForkThatHasNoPageOfItsOwn) {
  ToyTarget target(4, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient parent{"parent", {1, 2, 3, 4, 5}}, idle{"idle", {6, 7, 8, 9, 10}};
  parent.Take(store.Verify(parent.Ask(Tokens{})));
  store.Fork("parent", "fork", 4);  // the oldest but for its parent
  idle.Take(store.Verify(idle.Ask(Tokens{})));
  parent.Take(store.Verify(parent.Ask(parent.RightDrafts(6))));
  EXPECT_EQ(store.stats().evicted, 1);
  EXPECT_EQ(store.Info("fork").length, 4);
  parent.ExpectPlainDecoding(5);
}

TEST(SessionRoom, AForkGoesWhereItsPagesCopyWouldNotFit) {
  ToyTarget target(1, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2}};
  client.Take(store.Verify(client.Ask(Tokens{})));
  store.Fork("a", "fork");
  client.Take(store.Verify(client.Ask(client.RightDrafts(1))));
  EXPECT_EQ(store.stats().evicted, 1);
  EXPECT_EQ(store.stats().live, 1);
  client.ExpectPlainDecoding(2);
}

TEST(SessionRoom, ABatchFitsOnceTheForksOfItsSessionsAreGone) {
  ToyTarget target(4, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient old{"old", {1, 2, 3, 4}}, fresh{"fresh", Tokens(8, 5)}, shared{"shared", Tokens(6, 6)};
  old.Take(store.Verify(old.Ask(Tokens{})));
  shared.Take(store.Verify(shared.Ask(Tokens{})));
  store.Fork("shared", "fork");
  const int64_t forwards = store.stats().forwards;
  const std::vector<VerifyResult> results =
      store.VerifyBatch({fresh.Ask(Tokens{}), shared.Ask(Tokens{})});
  fresh.Take(results[0]);
  shared.Take(results[1]);
  EXPECT_EQ(store.stats().forwards, forwards + 1);
  EXPECT_EQ(store.stats().evicted, 2);
  fresh.ExpectPlainDecoding(8);
  shared.ExpectPlainDecoding(6);
}

TEST(SessionRoom, EvictsNoForkOfAPageThatIsCopiedAnyway) {
  ToyTarget target(3, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient a{"a", {1, 2}}, idle{"idle", {3, 4, 5, 6, 7}};
  a.Take(store.Verify(a.Ask(Tokens{})));
  ToyClient b = a;
  b.session = "b";
  store.Fork("a", "b");
  store.Fork("a", "fork");
  idle.Take(store.Verify(idle.Ask(Tokens{})));
  // With or without the fork `a` cannot write to the page that `b` has too.
  const Tokens drafts = a.RightDrafts(1);
  const std::vector<VerifyResult> results = store.VerifyBatch({a.Ask(drafts), b.Ask(drafts)});
  a.Take(results[0]);
  b.Take(results[1]);
  EXPECT_EQ(store.stats().evicted, 1);
  EXPECT_THROW(store.Info("idle"), UnknownSessionError);
  EXPECT_EQ(store.Info("fork").length, 2);
  a.ExpectPlainDecoding(2);
  b.ExpectPlainDecoding(2);
}

TEST(SessionRoom, ASessionThatIsRefusedTakesNobodysPlace) {
  ToyTarget target(8, 4);
  SessionConfig config;
  config.max_sessions = 2;
  SessionStore store(config, target.interceptor(), target.AsForward());
  ToyClient a{"a", {1, 2}}, z{"z", {3, 4}}, fresh{"fresh", {5}}, huge{"huge", Tokens(40, 1)};
  a.Take(store.Verify(a.Ask(Tokens{})));
  z.Take(store.Verify(z.Ask(Tokens{})));
  EXPECT_THROW(store.Verify(huge.Ask(Tokens{})), CapacityError);
  VerifyRequest wrong = z.Ask(Tokens{});
  wrong.expected_prefix_len = 99;
  EXPECT_THROW(store.VerifyBatch({fresh.Ask(Tokens{}), wrong}), DesyncError);
  // Two places, and one of them is a session's of the batch.
  EXPECT_THROW(store.VerifyBatch({fresh.Ask(Tokens{}), huge.Ask(Tokens{}), z.Ask(Tokens{})}),
               CapacityError);
  EXPECT_EQ(store.stats().evicted, 0);
  EXPECT_EQ(store.stats().live, 2);
  for (ToyClient* client : {&a, &z}) {
    client->Take(store.Verify(client->Ask(client->RightDrafts(1))));
    client->ExpectPlainDecoding(2);
  }
}

TEST(SessionRoom, SeveralNewSessionsOfABatchGetTheirPlaces) {
  ToyTarget target;
  SessionConfig config;
  config.max_sessions = 4;
  SessionStore store(config, target.interceptor(), target.AsForward());
  std::vector<ToyClient> old{{"a", {1}}, {"b", {2}}, {"c", {3}}};
  for (ToyClient& client : old) client.Take(store.Verify(client.Ask(Tokens{})));
  std::vector<ToyClient> fresh{{"x", {4}}, {"y", {5}}, {"z", {6}}};
  // `a` is the oldest, and in the batch: the other two go.
  const std::vector<VerifyResult> results =
      store.VerifyBatch({fresh[0].Ask(Tokens{}), fresh[1].Ask(Tokens{}), fresh[2].Ask(Tokens{}),
                         old[0].Ask(Tokens{})});
  for (size_t i = 0; i < 3; ++i) fresh[i].Take(results[i]);
  old[0].Take(results[3]);
  EXPECT_EQ(store.stats().evicted, 2);
  EXPECT_EQ(store.stats().live, 4);
  EXPECT_EQ(store.Info("a").length, 2);
  store.Fork("a", "fork");  // in the place of the first, which is the oldest by now
  EXPECT_EQ(store.stats().live, 4);
  EXPECT_THROW(store.Info("x"), UnknownSessionError);
}

TEST(SessionRoom, ABatchEvictsNoneOfItsOwn) {
  for (const int64_t max_sessions : {1, 2}) {
    ToyTarget target;
    SessionConfig config;
    config.max_sessions = max_sessions;
    SessionStore store(config, target.interceptor(), target.AsForward());
    ToyClient old{"old", {1, 2, 3}}, other{"other", {4}}, fresh{"fresh", {5, 6}};
    old.Take(store.Verify(old.Ask(Tokens{})));
    if (max_sessions == 2) other.Take(store.Verify(other.Ask(Tokens{})));
    // By name `fresh` comes first, and needs a place.
    const std::vector<VerifyRequest> batch{old.Ask(Tokens{}), fresh.Ask(Tokens{})};
    if (max_sessions == 1) {
      EXPECT_THROW(store.VerifyBatch(batch), CapacityError);
      EXPECT_EQ(store.stats().live, 1);
    } else {
      const std::vector<VerifyResult> results = store.VerifyBatch(batch);
      old.Take(results[0]);
      fresh.Take(results[1]);
      fresh.ExpectPlainDecoding(2);
      EXPECT_THROW(store.Info("other"), UnknownSessionError);
    }
    old.Take(store.Verify(old.Ask(old.RightDrafts(2))));
    old.ExpectPlainDecoding(3);
  }
}

}  // namespace
}  // namespace nwor
