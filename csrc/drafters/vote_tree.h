#pragma once

#include <cstdint>
#include <vector>

#include "base/export.h"
#include "session/draft_tree.h"

// Continuations that were voted for, as one tree; and of it the part worth verifying.

namespace nwor {

class NWOR_EXPORT VoteTree {
 public:
  explicit VoteTree(int64_t root_token);

  // Adds `weight` to every row along the continuation; rows that are not there yet appear.
  void Add(const std::vector<int64_t>& continuation, int64_t weight);

  // The `rows` rows with the most votes, the root among them, each with its `top_k` best children
  // at most. Equal votes go to the row nearer to the root, then to the one that was added first.
  DraftTree Best(int64_t rows, int64_t top_k) const;

 private:
  struct Node {
    int64_t token;
    int64_t votes;
    int32_t parent;
    int32_t depth;
    int32_t first_child;
    int32_t next_sibling;
  };

  int32_t Child(int32_t parent, int64_t token);
  void MarkBestChildren(int32_t parent, int64_t top_k, std::vector<bool>& wanted) const;

  std::vector<Node> nodes_;  // parents before children
};

}  // namespace nwor
