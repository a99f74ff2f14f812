#include "session/chunked_verify.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <vector>

#include "base/check.h"
#include "metrics/counters.h"

namespace nwor {
namespace {

using Chain = std::vector<int64_t>;

// A target whose next token is a function of everything before it, as a language model's is.
int64_t Next(const Chain& prefix) {
  uint64_t hash = 1469598103934665603u;
  for (const int64_t token : prefix) hash = (hash ^ static_cast<uint64_t>(token)) * 1099511628211u;
  return static_cast<int64_t>((hash >> 33) % 3);
}

// Reference: drafts one at a time, as plain decoding would.
std::pair<int64_t, int64_t> PlainDecoding(const Chain& chain) {
  Chain prefix{chain[0]};
  for (size_t i = 1; i < chain.size(); ++i) {
    const int64_t token = Next(prefix);
    if (token != chain[i]) return {static_cast<int64_t>(i) - 1, token};
    prefix.push_back(token);
  }
  return {static_cast<int64_t>(chain.size()) - 1, Next(prefix)};
}

TEST(VerifyInChunks, EqualsPlainDecodingForAnyChainAndChunkSize) {
  const char* const given = std::getenv("NWOR_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed=" << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 3000; ++trial) {
    Chain chain{static_cast<int64_t>(random() % 100)};
    const size_t num_drafts = random() % 40;
    while (chain.size() <= num_drafts) {
      chain.push_back(random() % 12 == 0 ? static_cast<int64_t>(random() % 3) : Next(chain));
    }
    const auto chunk_rows = static_cast<int64_t>(1 + random() % 12);
    const auto [accepted, next_token] = PlainDecoding(chain);
    int64_t rows = 0;
    const ChunkedResult result = VerifyInChunks(
        chain,
        [&](const ChainChunk& chunk) {
          EXPECT_EQ(chunk.first_row, rows);
          EXPECT_LE(static_cast<int64_t>(chunk.tokens.size()), chunk_rows);
          EXPECT_LE(chunk.first_row, accepted);  // nothing behind a rejection is run
          rows += static_cast<int64_t>(chunk.tokens.size());
          std::vector<int64_t> targets;
          Chain prefix(chain.begin(), chain.begin() + chunk.first_row);
          for (const int64_t token : chunk.tokens) {
            prefix.push_back(token);
            targets.push_back(Next(prefix));
          }
          return JudgeGreedy(chunk, targets);
        },
        chunk_rows);
    ASSERT_EQ(result.accepted, accepted);
    ASSERT_EQ(result.next_token, next_token);
    ASSERT_EQ(result.rows_run, rows);
    ASSERT_EQ(result.rows_run + result.rows_saved, static_cast<int64_t>(chain.size()));
    // No chunk more than the one that holds the last accepted row.
    ASSERT_EQ(result.chunks, accepted / chunk_rows + 1);
  }
}

TEST(VerifyInChunks, CountsTheRowsItSaves) {
  const CountersSnapshot before = Counters::Global().Read();
  const Chain chain(33, 5);
  const ChunkedResult result = VerifyInChunks(chain, [](const ChainChunk& chunk) {
    return ChunkVerdict{3, 9};
  });
  EXPECT_EQ(result.accepted, 3);
  EXPECT_EQ(result.next_token, 9);
  EXPECT_EQ(result.rows_run, kDefaultChunkRows);
  EXPECT_EQ(result.rows_saved, 33 - kDefaultChunkRows);
  const CountersSnapshot after = Counters::Global().Read();
  EXPECT_EQ(after[Counter::kChunkRowsSaved] - before[Counter::kChunkRowsSaved], 25);
  EXPECT_EQ(after[Counter::kChunkRows] - before[Counter::kChunkRows], 8);
}

TEST(VerifyInChunks, RefusesWhatCannotBe) {
  const auto all = [](const ChainChunk& chunk) { return ChunkVerdict{0, 0}; };
  EXPECT_THROW(VerifyInChunks({}, all), Error);
  EXPECT_THROW(VerifyInChunks(Chain{1, 2}, all, 0), Error);
  EXPECT_THROW(VerifyInChunks(Chain{1, 2},
                              [](const ChainChunk&) {
                                return ChunkVerdict{2, 0};
                              }),
               Error);
  EXPECT_THROW(JudgeGreedy({0, {1, 2}, {}}, Chain{1}), Error);
}

}  // namespace
}  // namespace nwor
