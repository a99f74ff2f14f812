#include "drafters/ngram_index.h"

#include <algorithm>

#include "base/check.h"
#include "drafters/vote_tree.h"

namespace nwor {
namespace {

constexpr int64_t kMaxNgram = 16;
constexpr int64_t kMaxMatches = 256;
constexpr int kWeightBits = 2;  // a further token in common weighs four times as much

uint64_t Mix(uint64_t hash, int64_t token) {
  hash ^= static_cast<uint64_t>(token) + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 32);
}

}  // namespace

void NgramOptions::Validate() const {
  NWOR_CHECK(max_tokens >= 1 && max_tokens <= kMaxNgram, "max_tokens: got ", max_tokens,
             ", expected 1 to ", kMaxNgram);
  NWOR_CHECK(min_tokens >= 1 && min_tokens <= max_tokens, "min_tokens: got ", min_tokens,
             ", expected 1 to max_tokens, which is ", max_tokens);
  NWOR_CHECK(max_matches >= 1 && max_matches <= kMaxMatches, "max_matches: got ", max_matches,
             ", expected 1 to ", kMaxMatches);
}

NgramIndex::NgramIndex(const NgramOptions& options) : options_(options) {
  options_.Validate();
  orders_.resize(options_.max_tokens - options_.min_tokens + 1);
}

// How many tokens a sequence that ends at `position` can have.
int64_t NgramIndex::max_order(int64_t position) const {
  return std::min(options_.max_tokens, position + 1);
}

void NgramIndex::Append(const std::vector<int64_t>& tokens) {
  for (const int64_t token : tokens) {
    const int64_t position = size();
    tokens_.push_back(token);
    for (Order& order : orders_) order.previous.push_back(-1);
    uint64_t hash = 0;
    for (int64_t count = 1; count <= max_order(position); ++count) {
      hash = Mix(hash, tokens_[position - count + 1]);
      if (count < options_.min_tokens) continue;
      Order& order = orders_[count - options_.min_tokens];
      const auto [entry, is_new] = order.last.try_emplace(hash, position);
      if (!is_new) {
        order.previous[position] = entry->second;
        entry->second = position;
      }
    }
  }
}

void NgramIndex::Truncate(int64_t length) {
  NWOR_CHECK(length >= 0 && length <= size(), "length: got ", length, ", expected 0 to ", size());
  for (int64_t position = size() - 1; position >= length; --position) {
    uint64_t hash = 0;
    for (int64_t count = 1; count <= max_order(position); ++count) {
      hash = Mix(hash, tokens_[position - count + 1]);
      if (count < options_.min_tokens) continue;
      Order& order = orders_[count - options_.min_tokens];
      const int64_t before = order.previous[position];
      if (before < 0) {
        order.last.erase(hash);
      } else {
        order.last[hash] = before;
      }
    }
    tokens_.pop_back();
    for (Order& order : orders_) order.previous.pop_back();
  }
}

bool NgramIndex::Equal(int64_t position, int64_t other, int64_t count) const {
  if (other - count + 1 < 0) return false;
  for (int64_t back = 0; back < count; ++back) {
    if (tokens_[position - back] != tokens_[other - back]) return false;
  }
  return true;
}

std::vector<NgramIndex::Match> NgramIndex::FindMatches() const {
  std::vector<Match> matches;
  const int64_t end = size() - 1;
  for (int64_t count = max_order(end); count >= options_.min_tokens; --count) {
    const Order& order = orders_[count - options_.min_tokens];
    for (int64_t place = order.previous[end]; place >= 0; place = order.previous[place]) {
      if (static_cast<int64_t>(matches.size()) == options_.max_matches) return matches;
      // Sequences of one hash may differ; those with more in common were found before.
      if (!Equal(end, place, count)) continue;
      if (count < options_.max_tokens && Equal(end, place, count + 1)) continue;
      matches.push_back({place, int64_t{1} << (kWeightBits * (count - options_.min_tokens))});
    }
  }
  return matches;
}

DraftTree NgramIndex::Draft(int64_t rows, int64_t depth, int64_t top_k) const {
  NWOR_CHECK(size() > 0, "text: got no token, expected the root at least");
  NWOR_CHECK(rows >= 1, "rows: got ", rows, ", expected 1 or more");
  NWOR_CHECK(depth >= 1, "depth: got ", depth, ", expected 1 or more");
  NWOR_CHECK(top_k >= 1, "top_k: got ", top_k, ", expected 1 or more");
  rows = std::min(rows, kMaxTreeRows);
  depth = std::min(depth, kMaxTreeRows);
  VoteTree votes(tokens_.back());
  std::vector<int64_t> continuation(depth);
  for (const Match& match : FindMatches()) {
    for (int64_t step = 0; step < depth; ++step) {
      const int64_t from = match.end + 1 + step;
      continuation[step] = from < size() ? tokens_[from] : continuation[from - size()];
    }
    votes.Add(continuation, match.weight);
  }
  return votes.Best(rows, top_k);
}

}  // namespace nwor
