#include "session/chunked_verify.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/check.h"
#include "metrics/counters.h"
#include "test_seed.h"

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

// What the target says of a chunk's drafts and of the draft behind them.
ChunkVerdict Judge(const ChainChunk& chunk, const Chain& chain) {
  Chain prefix(chain.begin(), chain.begin() + chunk.first_row + 1);
  Chain drafts(chunk.tokens.begin() + 1, chunk.tokens.end());
  if (chunk.next_draft) drafts.push_back(*chunk.next_draft);
  for (const int64_t draft : drafts) {
    const int64_t token = Next(prefix);
    const auto accepted = static_cast<int64_t>(prefix.size()) - chunk.first_row - 1;
    if (token != draft) return {accepted, token};
    prefix.push_back(draft);
  }
  return {static_cast<int64_t>(drafts.size()), Next(prefix)};
}

TEST(ChunkSchedule, EqualsPlainDecodingForAnyChainAndChunkSize) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 3000; ++trial) {
    Chain chain{static_cast<int64_t>(random() % 100)};
    const size_t num_drafts = random() % 40;
    while (chain.size() <= num_drafts) {
      chain.push_back(random() % 12 == 0 ? static_cast<int64_t>(random() % 3) : Next(chain));
    }
    const auto chunk_rows = static_cast<int64_t>(1 + random() % 12);
    const auto [accepted, next_token] = PlainDecoding(chain);
    ChunkSchedule schedule(chain, chunk_rows);
    int64_t rows = 0, chunks = 0;
    for (; !schedule.done(); ++chunks) {
      const ChainChunk& chunk = schedule.chunk();
      ASSERT_EQ(chunk.first_row, rows);
      ASSERT_LE(static_cast<int64_t>(chunk.tokens.size()), chunk_rows);
      ASSERT_LE(chunk.first_row, accepted);  // nothing behind a rejection is run
      rows += static_cast<int64_t>(chunk.tokens.size());
      schedule.Report(Judge(chunk, chain));
    }
    const ChunkedResult& result = schedule.result();
    ASSERT_EQ(result.accepted, accepted);
    ASSERT_EQ(result.next_token, next_token);
    ASSERT_EQ(rows + result.rows_saved, static_cast<int64_t>(chain.size()));
    // No chunk more than the one that holds the last accepted row.
    ASSERT_EQ(chunks, accepted / chunk_rows + 1);
  }
}

TEST(ChunkSchedule, CountsTheRowsItSaves) {
  const CountersSnapshot before = Counters::Global().Read();
  ChunkSchedule schedule(Chain(33, 5), 8);
  schedule.Report({3, 9});
  ASSERT_TRUE(schedule.done());
  EXPECT_EQ(schedule.result().accepted, 3);
  EXPECT_EQ(schedule.result().next_token, 9);
  EXPECT_EQ(schedule.result().rows_saved, 25);
  const CountersSnapshot after = Counters::Global().Read();
  EXPECT_EQ(after[Counter::kChunkRowsSaved] - before[Counter::kChunkRowsSaved], 25);
  EXPECT_EQ(after[Counter::kChunkRows] - before[Counter::kChunkRows], 8);
}

TEST(ChunkSchedule, RefusesWhatCannotBe) {
  EXPECT_THROW(ChunkSchedule({}, 8), Error);
  EXPECT_THROW(ChunkSchedule({1, 2}, 0), Error);
  ChunkSchedule schedule({1, 2}, 8);
  EXPECT_THROW(schedule.Report({2, 0}), Error);
  EXPECT_THROW(schedule.Report({-1, 0}), Error);
}

}  // namespace
}  // namespace nwor
