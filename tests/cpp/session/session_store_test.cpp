#include "session/session_store.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "message_of.h"
#include "metrics/counters.h"
#include "session/toy_target.h"
#include "test_seed.h"

namespace nwor {
namespace {

// A tree whose drafts are right with some probability, grown row by row anywhere.
DraftTree RandomTree(std::mt19937_64& random, const Tokens& sequence, int64_t rows) {
  DraftTree tree{{sequence.back()}, {-1}};
  std::vector<Tokens> paths{sequence};
  while (tree.num_rows() < rows) {
    const auto parent = static_cast<int32_t>(random() % tree.num_rows());
    Tokens path = paths[parent];
    path.push_back(random() % 3 > 0 ? ToyTarget::Next(path)
                                    : static_cast<int64_t>(random() % ToyTarget::kVocab));
    tree.tokens.push_back(path.back());
    tree.parents.push_back(parent);
    paths.push_back(path);
  }
  return tree;
}

TEST(SessionStore, CachesAPromptAndSendsOnlyWhatIsNewFromThenOn) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {3, 1, 4, 1, 5}};
  Tokens drafts = client.RightDrafts(3);
  drafts[2] = (drafts[2] + 1) % ToyTarget::kVocab;
  VerifyResult result = store.Verify(client.Ask(drafts));
  EXPECT_FALSE(result.cache_hit);
  EXPECT_EQ(result.accepted_rows, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(result.length, 7);
  EXPECT_EQ(result.rows_run, 8);
  client.Take(result);
  result = store.Verify(client.Ask(client.RightDrafts(4)));
  EXPECT_TRUE(result.cache_hit);
  EXPECT_EQ(result.tokens.size(), 4u);
  EXPECT_EQ(result.rows_run, 5);
  client.Take(result);
  client.ExpectPlainDecoding(5);
  EXPECT_EQ(store.Info("a").length, 12);
  EXPECT_EQ(store.Info("a").bytes, 3 * target.bytes_per_page());
}

TEST(SessionStore, CommitsAPathThroughATreeWithoutAnyOtherPass) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {7, 7}};
  const Tokens right = client.RightDrafts(2);
  const int64_t wrong = (right[0] + 1) % ToyTarget::kVocab;
  // Row 1 is wrong, row 2 right, 3 below 1, 4 below 2.
  const VerifyResult result =
      store.Verify(client.Ask(DraftTree{{7, wrong, right[0], 5, right[1]}, {-1, 0, 0, 1, 2}}));
  EXPECT_EQ(result.accepted_rows, (std::vector<int32_t>{2, 4}));
  client.Take(result);
  client.Take(store.Verify(client.Ask(Tokens{})));
  client.ExpectPlainDecoding(2);
}

TEST(SessionStore, DecodesLikePlainDecodingWhateverIsDraftedTogether) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  ToyTarget target(400, 8);
  SessionStore store({}, target.interceptor(), target.AsForward());
  std::vector<ToyClient> clients;
  std::vector<int64_t> prompts;
  for (int i = 0; i < 5; ++i) {
    // One prompt is longer than a pass takes.
    prompts.push_back(static_cast<int64_t>(i == 0 ? 300 : 1 + random() % 20));
    ToyClient client{Concat("client ", i), {}};
    for (int64_t t = 0; t < prompts[i]; ++t) {
      client.sequence.push_back(static_cast<int64_t>(random() % ToyTarget::kVocab));
    }
    clients.push_back(client);
  }
  for (int round = 0; round < 12; ++round) {
    std::vector<VerifyRequest> requests;
    std::vector<ToyClient*> asked;
    for (ToyClient& client : clients) {
      if (random() % 3 == 0) continue;
      VerifyRequest request = client.Ask(RandomTree(random, client.sequence, 1 + random() % 12));
      if (random() % 4 == 0) {
        request = client.Ask(client.RightDrafts(random() % 10));
        request.chunk_rows = 1 + static_cast<int64_t>(random() % 4);
      }
      requests.push_back(request);
      asked.push_back(&client);
    }
    const std::vector<VerifyResult> results = store.VerifyBatch(requests);
    for (size_t i = 0; i < asked.size(); ++i) asked[i]->Take(results[i]);
  }
  for (size_t i = 0; i < clients.size(); ++i) clients[i].ExpectPlainDecoding(prompts[i]);
  EXPECT_GE(store.stats().largest_batch, 2);
}

TEST(SessionStore, SavesRowsOfALongChainInChunks) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient once{"once", {1, 2, 3}}, chunked{"chunked", {1, 2, 3}};
  Tokens drafts = once.RightDrafts(40);
  drafts[10] = (drafts[10] + 1) % ToyTarget::kVocab;
  const VerifyResult expected = store.Verify(once.Ask(drafts));
  VerifyRequest request = chunked.Ask(drafts);
  request.chunk_rows = 8;
  const VerifyResult result = store.Verify(request);
  EXPECT_EQ(result.accepted_rows, expected.accepted_rows);
  EXPECT_EQ(result.tokens, expected.tokens);
  EXPECT_EQ(result.next_token, expected.next_token);
  EXPECT_EQ(result.length, expected.length);
  EXPECT_EQ(result.tokens.size(), 10u);
  EXPECT_EQ(result.rows_saved, 41 - 16);
  EXPECT_EQ(store.stats().rows_saved, 25);
  chunked.Take(result);
  chunked.Take(store.Verify(chunked.Ask(chunked.RightDrafts(2))));
  chunked.ExpectPlainDecoding(3);
}

TEST(SessionStore, TakesChainsBeyondATreesRowsInChunks) {
  ToyTarget target(200, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {9}};
  VerifyRequest request = client.Ask(client.RightDrafts(300));
  EXPECT_NE(MessageOf([&] { store.Verify(request); }).find("got 301 rows, expected at most 256"),
            std::string::npos);
  request.chunk_rows = 64;
  client.Take(store.Verify(request));
  EXPECT_EQ(client.cached_len, 301);
  client.ExpectPlainDecoding(1);
}

TEST(SessionStore, CachesNothingBehindTheEnd) {
  for (const int64_t chunk_rows : {0, 1, 2, 3, 4, 5, 20}) {
    SCOPED_TRACE(chunk_rows);
    ToyTarget target;
    SessionStore store({}, target.interceptor(), target.AsForward());
    ToyClient client{"a", {1, 2, 3}};
    const Tokens right = client.RightDrafts(12);
    // By number: the third new token is the last.
    VerifyRequest request = client.Ask(right);
    request.chunk_rows = chunk_rows;
    request.max_new_tokens = 3;
    VerifyResult result = store.Verify(request);
    EXPECT_EQ(result.finish, FinishReason::kLength);
    EXPECT_EQ(result.tokens, (Tokens{right[0], right[1]}));
    EXPECT_EQ(result.next_token, right[2]);
    EXPECT_EQ(store.Info("a").length, 5);
    client.Take(result);
    // By a token, wherever it first stands in what follows.
    request = client.Ask(Tokens(right.begin() + 3, right.end()));
    request.chunk_rows = chunk_rows;
    request.max_new_tokens = 100;
    request.stop_ids = {-1, right[7]};
    const int64_t first = std::find(right.begin() + 3, right.end(), right[7]) - right.begin();
    result = store.Verify(request);
    EXPECT_EQ(result.finish, FinishReason::kStop);
    EXPECT_EQ(result.tokens, Tokens(right.begin() + 3, right.begin() + first));
    EXPECT_EQ(result.next_token, right[7]);
    EXPECT_EQ(store.Info("a").length, 3 + first);
    client.Take(result);
    client.Take(store.Verify(client.Ask(client.RightDrafts(2))));
    client.ExpectPlainDecoding(3);
  }
}

TEST(SessionStore, EndsByTheBonusTokenToo) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3}};
  const Tokens right = client.RightDrafts(3);
  VerifyRequest request = client.Ask(Tokens{right[0], right[1]});
  request.max_new_tokens = 3;
  VerifyResult result = store.Verify(request);
  EXPECT_EQ(result.finish, FinishReason::kLength);
  EXPECT_EQ(result.next_token, right[2]);
  EXPECT_EQ(result.tokens.size(), 2u);
  ToyClient other{"b", {1, 2, 3}};
  request = other.Ask(Tokens{});
  request.stop_ids = {right[1]};
  if (right[0] != right[1]) {
    EXPECT_EQ(store.Verify(request).finish, FinishReason::kNone);
  }
  request.max_new_tokens = -1;
  EXPECT_THROW(store.Verify(request), Error);
}

TEST(SessionStore, RefusesALengthThatDisagreesAndRebuildsNothing) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3}};
  client.Take(store.Verify(client.Ask(client.RightDrafts(2))));
  const SessionStoreStats before = store.stats();
  for (const int64_t expected : {0, 1, 4, 6, 100}) {
    VerifyRequest request = client.Ask(client.RightDrafts(1));
    request.expected_prefix_len = expected;
    EXPECT_THROW(store.Verify(request), DesyncError) << expected;
  }
  EXPECT_EQ(store.stats().desyncs, before.desyncs + 5);
  EXPECT_EQ(store.stats().forwards, before.forwards);
  EXPECT_EQ(store.Info("a").length, 5);
  client.Take(store.Verify(client.Ask(client.RightDrafts(1))));
  client.ExpectPlainDecoding(3);
}

TEST(SessionStore, RollsBackToWhatAClientKept) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3}};
  client.Take(store.Verify(client.Ask(client.RightDrafts(9))));
  store.Rollback("a", 7);
  client.sequence.resize(8);
  client.cached_len = 7;
  client.Take(store.Verify(client.Ask(client.RightDrafts(3))));
  client.ExpectPlainDecoding(3);
  EXPECT_NE(MessageOf([&] { store.Rollback("a", 99); }).find("length: got 99"), std::string::npos);
  EXPECT_THROW(store.Rollback("b", 0), UnknownSessionError);
}

TEST(SessionStore, ForkedSessionsShareTheirPrefixAndGoTheirOwnWays) {
  ToyTarget target(16, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3, 4, 5, 6}};
  client.Take(store.Verify(client.Ask(Tokens{})));
  const int64_t held = store.stats().held_bytes;
  store.Fork("a", "b");
  store.Fork("a", "c", 5);
  EXPECT_EQ(store.stats().held_bytes, held);
  ToyClient b = client, c{"c", {1, 2, 3, 4, 5, 40}, 5};
  b.session = "b";
  b.sequence.back() = 41;  // another token than the target's, as sampling might draw
  for (ToyClient* one : {&b, &client, &c}) one->Take(store.Verify(one->Ask(one->RightDrafts(2))));
  client.ExpectPlainDecoding(6);
  b.ExpectPlainDecoding(7);
  c.ExpectPlainDecoding(6);
  EXPECT_THROW(store.Fork("a", "b"), Error);
  EXPECT_THROW(store.Fork("none", "d"), UnknownSessionError);
  store.End("a");
  b.Take(store.Verify(b.Ask(b.RightDrafts(1))));
  b.ExpectPlainDecoding(7);
}

TEST(SessionStore, EndsOnceAndForgets) {
  ToyTarget target;
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3}};
  client.Take(store.Verify(client.Ask(Tokens{})));
  store.End("a");
  EXPECT_THROW(store.End("a"), UnknownSessionError);
  EXPECT_THROW(store.Verify(client.Ask(Tokens{})), UnknownSessionError);
  EXPECT_THROW(store.Info("a"), UnknownSessionError);
  EXPECT_EQ(store.stats().held_bytes, 0);
  client.cached_len = 0;  // the whole sequence again
  client.Take(store.Verify(client.Ask(client.RightDrafts(2))));
  client.ExpectPlainDecoding(3);
}

TEST(SessionStore, IsAsItWasWhenTheClockThrows) {
  ToyTarget target;
  int calls_left = 1000;
  SessionConfig config;
  config.clock = [&calls_left]() -> double {
    if (--calls_left < 0) throw std::runtime_error("the clock has stopped");
    return 1.0;
  };
  SessionStore store(config, target.interceptor(), target.AsForward());
  ToyClient a{"a", {1, 2, 3}}, b{"b", {4, 5}};
  a.Take(store.Verify(a.Ask(Tokens{})));
  for (int calls = 0; calls < 3; ++calls) {
    calls_left = calls;
    EXPECT_THROW(store.VerifyBatch({a.Ask(a.RightDrafts(2)), b.Ask(Tokens{})}), std::runtime_error)
        << calls;
    EXPECT_EQ(store.stats().live, 1) << calls;
  }
  calls_left = 0;
  EXPECT_THROW(store.Fork("a", "fork"), std::runtime_error);
  calls_left = 1000;
  EXPECT_EQ(store.stats().live, 1);
  const int64_t live = Counters::Global().Read().live_sessions;
  for (int round = 0; round < 2; ++round) {
    a.Take(store.Verify(a.Ask(a.RightDrafts(2))));
    b.Take(store.Verify(b.Ask(Tokens{})));
  }
  a.ExpectPlainDecoding(3);
  b.ExpectPlainDecoding(2);
  EXPECT_EQ(Counters::Global().Read().live_sessions, live + 1);
}

TEST(SessionStore, KeepsNoRoomForDraftsThatWereRejected) {
  ToyTarget target(2, 4);
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1}};
  for (int round = 0; round < 3; ++round) {
    Tokens wrong = client.RightDrafts(4);
    wrong[0] = (wrong[0] + 1) % ToyTarget::kVocab;
    client.Take(store.Verify(client.Ask(wrong)));  // room for all four beyond the root each time
  }
  client.ExpectPlainDecoding(1);
}

TEST(SessionStore, TakesAwayWhatIsIdle) {
  ToyTarget target;
  double now = 100;
  SessionConfig config;
  config.ttl_seconds = 10;
  config.clock = [&now] { return now; };
  SessionStore store(config, target.interceptor(), target.AsForward());
  ToyClient a{"a", {1}}, b{"b", {2}};
  a.Take(store.Verify(a.Ask(Tokens{})));
  now = 105;
  b.Take(store.Verify(b.Ask(Tokens{})));
  now = 109.5;
  EXPECT_EQ(store.Sweep(), 0);
  now = 112;
  EXPECT_EQ(store.Sweep(), 1);
  EXPECT_THROW(store.Verify(a.Ask(Tokens{})), UnknownSessionError);
  EXPECT_EQ(store.List().size(), 1u);
  EXPECT_DOUBLE_EQ(store.Info("b").idle_seconds, 7);
  now = 200;
  ToyClient c{"c", {3}};
  c.Take(store.Verify(c.Ask(Tokens{})));  // sweeps by itself
  EXPECT_EQ(store.stats().expired, 2);
  EXPECT_EQ(store.stats().live, 1);
}

TEST(SessionStore, ForksAndRollbacksAreUse) {
  ToyTarget target;
  double now = 100;
  SessionConfig config;
  config.ttl_seconds = 10;
  config.max_sessions = 3;
  config.clock = [&now] { return now; };
  SessionStore store(config, target.interceptor(), target.AsForward());
  ToyClient prompt{"prompt", {1, 2, 3}}, other{"other", {2}};
  prompt.Take(store.Verify(prompt.Ask(Tokens{})));
  now = 104;
  other.Take(store.Verify(other.Ask(Tokens{})));
  now = 108;
  store.Fork("prompt", "child");
  EXPECT_DOUBLE_EQ(store.Info("prompt").idle_seconds, 0);
  now = 113;
  store.Rollback("other", 0);
  EXPECT_DOUBLE_EQ(store.Info("other").idle_seconds, 0);
  now = 117;
  EXPECT_EQ(store.Sweep(), 0);
  // Who makes room goes by that, too.
  ToyClient fourth{"fourth", {4}};
  fourth.Take(store.Verify(fourth.Ask(Tokens{})));
  EXPECT_THROW(store.Info("prompt"), UnknownSessionError);
  EXPECT_EQ(store.Info("other").length, 0);
}

TEST(SessionStore, AClockThatSaysNothingTakesNobodyAway) {
  constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();
  ToyTarget target;
  double now = 100;
  SessionConfig config;
  config.ttl_seconds = 10;
  config.clock = [&now] { return now; };
  SessionStore store(config, target.interceptor(), target.AsForward());
  ToyClient a{"a", {1}}, b{"b", {2}};
  now = kNothing;
  a.Take(store.Verify(a.Ask(Tokens{})));
  now = 100;
  b.Take(store.Verify(b.Ask(Tokens{})));
  now = kNothing;
  EXPECT_EQ(store.Sweep(), 0);
  now = 200;  // nobody knows since when `a` is idle
  EXPECT_EQ(store.Sweep(), 1);
  EXPECT_THROW(store.Info("b"), UnknownSessionError);
  a.Take(store.Verify(a.Ask(Tokens{})));
  now = 300;
  EXPECT_EQ(store.Sweep(), 1);
}

TEST(SessionStore, CountsWhatBecameOfSessions) {
  const CountersSnapshot before = Counters::Global().Read();
  {
    ToyTarget target;
    SessionStore store({}, target.interceptor(), target.AsForward());
    ToyClient a{"a", {1}}, b{"b", {2}};
    a.Take(store.Verify(a.Ask(Tokens{})));
    a.Take(store.Verify(a.Ask(Tokens{})));
    b.Take(store.Verify(b.Ask(Tokens{})));
    EXPECT_EQ(Counters::Global().Read().live_sessions - before.live_sessions, 2);
    store.End("b");
  }
  const CountersSnapshot after = Counters::Global().Read();
  const auto grown = [&](Counter counter) { return after[counter] - before[counter]; };
  EXPECT_EQ(after.live_sessions, before.live_sessions);
  EXPECT_EQ(grown(Counter::kSessionsStarted), 2);
  EXPECT_EQ(grown(Counter::kSessionsEnded), 1);
  EXPECT_EQ(grown(Counter::kSessionHits), 1);
  EXPECT_EQ(grown(Counter::kSessionMisses), 2);
}

// ---- what goes wrong ---------------------------------------------------------------------------

TEST(SessionStore, NamesWrongArgumentsAndChangesNothing) {
  ToyTarget target;
  SessionConfig config;
  config.vocab_size = ToyTarget::kVocab;
  config.max_length = 40;
  SessionStore store(config, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3}};
  client.Take(store.Verify(client.Ask(Tokens{})));
  const int64_t root = client.sequence.back();
  const auto expect = [&](const DraftTree& tree, const std::string& text, int64_t chunk_rows = 0) {
    VerifyRequest request = client.Ask(tree);
    request.chunk_rows = chunk_rows;
    const std::string message = MessageOf([&] { store.Verify(request); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect({{}, {}}, "tree: got no rows");
  expect({{root, 1, 2}, {-1, 2, 1}}, "parents: got 2 for row 1");
  expect({{root, 1}, {-1, 1}}, "parents: got 1 for row 1");
  expect({{root, 1}, {-1, -1}}, "one root only");
  expect({{root, 1}, {0, 0}}, "parents: got 0 for row 0");
  expect({{root, 1}, {-1}}, "parents: got 1 rows, expected 2");
  expect({Tokens(257, root), {}}, "got 257 rows, expected at most 256");
  expect({{root, ToyTarget::kVocab}, {}}, "tree: got token 50 at index 1, expected 0 to 49");
  expect({{root, -1}, {}}, "tree: got token -1");
  expect({{(root + 1) % 50}, {}}, "tree: got root token");
  expect({{root, 1, 2}, {-1, 0, 0}}, "that branches, expected a chain", 2);
  expect({{root}, {}}, "chunk_rows: got -1", -1);
  expect({Tokens(38, root), {}}, "got a length of 41 with its drafts, expected at most 40");
  VerifyRequest request = client.Ask(Tokens{});
  request.new_tokens.clear();
  EXPECT_NE(MessageOf([&] { store.Verify(request); }).find("new_tokens: got none"),
            std::string::npos);
  EXPECT_NE(MessageOf([&] {
              store.VerifyBatch({client.Ask(Tokens{}), client.Ask(Tokens{})});
            }).find("'a' twice"),
            std::string::npos);
  EXPECT_EQ(store.Info("a").length, 3);
  client.Take(store.Verify(client.Ask(client.RightDrafts(2))));
  client.ExpectPlainDecoding(3);
}

NworConfig StagingOf(int64_t rows) {
  NworConfig config;
  config.staging_rows = 1;
  config.max_staging_bytes = rows * ToyTarget::kLayers * 2 * 64 * 4;
  return config;
}

TEST(SessionStore, RefusesMoreDraftsThanStagingTakes) {
  ToyTarget target(64, 4, StagingOf(4));
  SessionStore store({}, target.interceptor(), target.AsForward());
  ToyClient client{"a", {1, 2, 3}};
  EXPECT_THROW(store.Verify(client.Ask(client.RightDrafts(9))), CapacityError);
  EXPECT_EQ(store.stats().live, 0);
  client.Take(store.Verify(client.Ask(client.RightDrafts(3))));
  client.ExpectPlainDecoding(3);
}

TEST(SessionStore, DraftsThatStagingDoesNotTakeTogetherGoInSeveralPasses) {
  ToyTarget target(64, 4, StagingOf(7));
  SessionStore store({}, target.interceptor(), target.AsForward());
  std::vector<ToyClient> clients;
  for (const char* name : {"a", "b", "c", "d", "e"}) clients.push_back({name, {1, 2, name[0]}});
  for (int round = 0; round < 3; ++round) {
    std::vector<VerifyRequest> requests;
    for (const ToyClient& client : clients) requests.push_back(client.Ask(client.RightDrafts(3)));
    const std::vector<VerifyResult> results = store.VerifyBatch(requests);
    for (size_t i = 0; i < clients.size(); ++i) {
      EXPECT_EQ(results[i].tokens.size(), 3u);
      clients[i].Take(results[i]);
    }
  }
  for (const ToyClient& client : clients) client.ExpectPlainDecoding(3);
  EXPECT_EQ(store.stats().forwards, 9);  // of two, one and two sessions
  EXPECT_EQ(store.stats().largest_batch, 2);
  // One alone that does not fit is nobody else's trouble.
  ToyClient wide{"wide", {7}};
  const std::string message = MessageOf([&] { store.Verify(wide.Ask(wide.RightDrafts(9))); });
  EXPECT_NE(message.find("staging: got 9 draft rows, expected what fits into 7168 bytes"),
            std::string::npos)
      << message;
}

TEST(SessionStore, IsAsItWasWhenTheModelThrows) {
  ToyTarget target;
  int failures = 0;
  SessionStore store({}, target.interceptor(), [&](const SessionBatch& batch) {
    at::Tensor out = target.Forward(batch);
    if (failures-- > 0) throw std::runtime_error("out of memory");
    return out;
  });
  ToyClient client{"a", {1, 2, 3}};
  client.Take(store.Verify(client.Ask(client.RightDrafts(2))));
  const int64_t held = store.stats().held_bytes;
  failures = 1;
  EXPECT_THROW(store.Verify(client.Ask(client.RightDrafts(5))), std::runtime_error);
  EXPECT_EQ(store.Info("a").length, 5);
  EXPECT_EQ(store.stats().held_bytes, held);
  failures = 1;
  ToyClient fresh{"b", {9, 9, 9}};
  EXPECT_THROW(store.Verify(fresh.Ask(Tokens{})), std::runtime_error);
  EXPECT_EQ(store.stats().live, 1);
  client.Take(store.Verify(client.Ask(client.RightDrafts(8))));
  client.ExpectPlainDecoding(3);
}

TEST(SessionStore, TakesBackEarlierChunksWhenALaterOneFails) {
  ToyTarget target;
  int64_t passes = 0;
  SessionStore store({}, target.interceptor(), [&](const SessionBatch& batch) {
    at::Tensor out = target.Forward(batch);
    if (++passes == 3) throw std::runtime_error("out of memory");
    return out;
  });
  ToyClient client{"a", {1, 2, 3}};
  client.Take(store.Verify(client.Ask(Tokens{})));
  VerifyRequest request = client.Ask(client.RightDrafts(8));
  request.chunk_rows = 4;
  EXPECT_THROW(store.Verify(request), std::runtime_error);
  EXPECT_EQ(store.Info("a").length, 3);
  client.Take(store.Verify(request));
  client.ExpectPlainDecoding(3);
}

TEST(SessionStore, RefusesAModelThatForgetsALayerAndAnAcceptorThatInvents) {
  ToyTarget target;
  SessionStore forgetful({}, target.interceptor(), [&](const SessionBatch& batch) {
    const at::Tensor rows = at::zeros({batch.tokens.size(0), 1, 64});
    target.interceptor().Write("layer.0", rows, rows, batch.slot_mapping);
    return batch.tokens;
  });
  ToyClient client{"a", {1, 2}};
  for (const Tokens& drafts : {Tokens{3}, Tokens{}}) {  // without drafts nothing is to be committed
    const std::string message = MessageOf([&] { forgetful.Verify(client.Ask(drafts)); });
    EXPECT_NE(message.find("forward: got no write of layer 'layer.1'"), std::string::npos);
  }

  Accepted invented;
  SessionStore inventive({}, target.interceptor(), target.AsForward(),
                         [&](const SessionBatch&, const at::Tensor&) { return invented; });
  const auto expect = [&](Accepted acceptance, const std::string& text) {
    invented = std::move(acceptance);
    const std::string message = MessageOf([&] {
      inventive.Verify(client.Ask(DraftTree{{2, 3, 4, 5}, {-1, 0, 0, 2}}));
    });
    EXPECT_NE(message.find(text), std::string::npos) << message;
    EXPECT_EQ(inventive.stats().live, 0);
  };
  const auto ints = [](std::vector<int> values) { return at::tensor(values, at::kInt); };
  const at::Tensor next = at::tensor({1}, at::kLong);
  expect({}, "wrong shapes");
  expect({ints({1}).view({1, 1}), ints({5}), next}, "got a count of 5");
  expect({ints({3}).view({1, 1}), ints({1}), next}, "got row 3 at index 0");
  expect({ints({1, 3}).view({1, 2}), ints({2}), next}, "expected a child of row 1");
  expect({ints({1}).view({1, 1}), ints({1}), next - 2}, "got token -1");
}

TEST(SessionStore, NeedsCachesItCanServe) {
  Interceptor empty{NworConfig{}};
  const auto forward = [](const SessionBatch& batch) { return batch.tokens; };
  EXPECT_THROW(SessionStore({}, empty, forward), Error);
  ToyTarget target;
  SessionConfig config;
  config.max_bytes = target.bytes_per_page() - 1;
  EXPECT_NE(MessageOf([&] {
              SessionStore store(config, target.interceptor(), forward);
            }).find("max_bytes: got"),
            std::string::npos);
  EXPECT_THROW(SessionStore({}, target.interceptor(), nullptr), Error);
  config = {};
  config.max_batch = 0;
  EXPECT_THROW(SessionStore(config, target.interceptor(), forward), Error);
}

}  // namespace
}  // namespace nwor
