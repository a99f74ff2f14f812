#include "drafters/ngram_index.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

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

int64_t NgramIndex::last() const {
  NWOR_CHECK(size() > 0, "text: it has no token yet; append one first");
  return tokens_.back();
}

void NgramIndex::Order::Reserve(int64_t sequences) {
  const auto wanted = static_cast<uint64_t>(sequences + sequences / 2 + 1);  // 2/3 full at most
  if (wanted <= last.size()) return;
  const std::vector<Entry> before = std::move(last);
  last.assign(std::bit_ceil(wanted), {});
  for (const Entry& entry : before) {
    if (entry.position < 0) continue;
    size_t slot = entry.hash & (last.size() - 1);
    while (last[slot].position >= 0) slot = (slot + 1) & (last.size() - 1);
    last[slot] = entry;
  }
}

void NgramIndex::Order::Erase(size_t slot) {
  const size_t mask = last.size() - 1;
  --used;
  // Those that were put behind it for want of room move up.
  for (size_t next = (slot + 1) & mask; last[next].position >= 0; next = (next + 1) & mask) {
    const size_t home = last[next].hash & mask;
    if (((next - home) & mask) < ((next - slot) & mask)) continue;
    last[slot] = last[next];
    slot = next;
  }
  last[slot] = {};
}

template <typename Same>
size_t NgramIndex::Find(const Order& order, uint32_t hash, const Same& same) {
  const size_t mask = order.last.size() - 1;
  size_t slot = hash & mask;
  while (order.last[slot].position >= 0 &&
         !(order.last[slot].hash == hash && same(order.last[slot].position))) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

void NgramIndex::Append(const std::vector<int64_t>& tokens) {
  const int64_t room = std::numeric_limits<int32_t>::max() - size();
  const auto added = static_cast<int64_t>(tokens.size());
  NWOR_CHECK(added <= room, "tokens: got ", added, ", the text has room for ", room, " more");
  for (Order& order : orders_) order.Reserve(order.used + added);
  for (const int64_t token : tokens) {
    const int64_t position = size();
    tokens_.push_back(token);
    for (Order& order : orders_) order.previous.push_back(-1);
    uint64_t hash = 0;
    for (int64_t count = 1; count <= max_order(position); ++count) {
      hash = Mix(hash, tokens_[position - count + 1]);
      if (count < options_.min_tokens) continue;
      Order& order = orders_[count - options_.min_tokens];
      Entry& entry = order.last[Find(order, static_cast<uint32_t>(hash),
                                     [&](int64_t other) { return Equal(position, other, count); })];
      if (entry.position >= 0) {
        order.previous[position] = entry.position;
      } else {
        ++order.used;
      }
      entry = {static_cast<uint32_t>(hash), static_cast<int32_t>(position)};
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
      const size_t slot = Find(order, static_cast<uint32_t>(hash),
                               [&](int64_t other) { return other == position; });
      const int32_t before = order.previous[position];
      if (before < 0) {
        order.Erase(slot);
      } else {
        order.last[slot].position = before;
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
      // Those with more in common were found before.
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

std::vector<int64_t> NgramIndex::Lookup(const std::vector<int64_t>& drafts, int64_t count) const {
  NWOR_CHECK(count >= 0, "count: got ", count, ", expected 0 or more");
  const auto num_drafts = static_cast<int64_t>(drafts.size());
  // The token that stands `back` places before the end of text and drafts.
  const auto recent = [&](int64_t back) {
    return back < num_drafts ? drafts[num_drafts - 1 - back]
                             : tokens_[size() - 1 - (back - num_drafts)];
  };
  std::vector<uint64_t> hashes{0};  // by tokens
  for (int64_t back = 0; back < max_order(size() + num_drafts - 1); ++back) {
    hashes.push_back(Mix(hashes.back(), recent(back)));
  }
  for (auto length = static_cast<int64_t>(hashes.size()) - 1; length >= options_.min_tokens;
       --length) {
    const Order& order = orders_[length - options_.min_tokens];
    if (order.last.empty()) continue;
    const auto same = [&](int64_t end) {
      if (end + 1 < length) return false;
      for (int64_t back = 0; back < length; ++back) {
        if (tokens_[end - back] != recent(back)) return false;
      }
      return true;
    };
    int64_t end = order.last[Find(order, static_cast<uint32_t>(hashes[length]), same)].position;
    if (end >= 0 && end == size() - 1) end = order.previous[end];  // nothing follows it yet
    if (end < 0) continue;
    const auto first = tokens_.begin() + end + 1;
    return {first, first + std::min(count, size() - end - 1)};
  }
  return {};
}

}  // namespace nwor
