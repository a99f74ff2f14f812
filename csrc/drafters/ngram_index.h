#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "session/draft_tree.h"

// What followed the last tokens of a text where they stood before: drafts without a model.

namespace nwor {

struct NWOR_EXPORT NgramOptions {
  int64_t min_tokens = 2;    // fewer tokens in common are no match
  int64_t max_tokens = 6;    // more are not told apart
  int64_t max_matches = 16;  // places that are looked at, those with more in common first

  // Throws Error: 1 <= min_tokens <= max_tokens <= 16, 1 <= max_matches <= 256.
  void Validate() const;
};

// An index over one growing text. Adding a token takes time proportional to max_tokens, a draft
// to max_matches and its depth, however long the text is. A prompt of 32768 tokens takes a few
// milliseconds with sequences of 2 to 4 tokens, and 60 to 100 bytes a token.
//
// Thread-safety: const methods may run together; nothing else may run beside the others.
class NWOR_EXPORT NgramIndex {
 public:
  explicit NgramIndex(const NgramOptions& options);

  void Append(const std::vector<int64_t>& tokens);

  // Takes back what was added last, to a text of `length` tokens. REQUIRES: 0 <= length <= size().
  void Truncate(int64_t length);

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }

  // The text's last token. REQUIRES: size() > 0.
  int64_t last() const;

  // A tree below the text's last token, of at most `rows` rows and `depth` drafts in a row; a row
  // has at most `top_k` children. Each match is a vote for what came after it, with four times the
  // weight for every further token in common, and the rows with the most votes are taken. Where
  // what came after a match runs into the text's end it goes on with itself, so that a text that
  // repeats is repeated further. The root alone if nothing matches.
  // REQUIRES: size() > 0, rows >= 1, depth >= 1, top_k >= 1; rows is cut to kMaxTreeRows.
  DraftTree Draft(int64_t rows, int64_t depth, int64_t top_k) const;

  // Up to `count` tokens that followed the last tokens of the text and `drafts`, which are no part
  // of it, the last time these stood in the text: the longest match counts. Nothing follows the
  // text's own end. REQUIRES: count >= 0.
  std::vector<int64_t> Lookup(const std::vector<int64_t>& drafts, int64_t count) const;

 private:
  // All sequences of one length: where each stood last, and where it stood before that. `last` is
  // a hash table with linear probing, a power of two in size and never full.
  struct Entry {
    uint32_t hash = 0;
    int32_t position = -1;  // of the sequence's last token; -1 = the entry is free
  };
  struct Order {
    std::vector<Entry> last;
    int64_t used = 0;
    std::vector<int32_t> previous;  // of the sequence that ends at each position; -1 = none

    void Reserve(int64_t sequences);
    void Erase(size_t slot);
  };
  struct Match {
    int64_t end;     // position of the last token in common
    int64_t weight;  // of its vote
  };

  int64_t max_order(int64_t position) const;
  bool Equal(int64_t position, int64_t other, int64_t count) const;
  // The entry of a sequence with this hash for which same(position) holds, or the free one where it
  // would be.
  template <typename Same>
  static size_t Find(const Order& order, uint32_t hash, const Same& same);
  std::vector<Match> FindMatches() const;

  NgramOptions options_;
  std::vector<int64_t> tokens_;
  std::vector<Order> orders_;  // of min_tokens .. max_tokens
};

}  // namespace nwor
