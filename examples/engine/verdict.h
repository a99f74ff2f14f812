#pragma once

#include <vector>

#include "round.h"

// What the target says about the drafts of a round.

namespace engine {

struct Sampling {
  double temperature = 0.0;  // 0: greedy
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;

  bool greedy() const { return temperature == 0.0; }
};

struct Verdict {
  std::vector<int64_t> path;  // accepted rows of the tree
  int64_t next_token = -1;
  // Mode lossless, when a full step has run a tail again: how many of its tokens stand.
  int64_t confirmed = 0;
  bool whole = true;       // all of them; else the tree below the tail is void
  int64_t disagreed = -1;  // mode rectify: tokens of the tail that full attention would not choose
};

// One for each part of the round; parts without logits get an empty one. The same seed gives the
// same tokens in any batch.
std::vector<Verdict> Judge(const Round& round, const Sampling& sampling, bool lossless);

}  // namespace engine
