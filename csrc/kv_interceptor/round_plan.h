#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace nwor {

// What the engine knows before the forward pass, all on the host. Request b has query_lens[b] rows
// in the batch, in order; its last num_drafts[b] rows are drafts, the others (the root, prefill
// rows) are written directly. So num_drafts[b] < query_lens[b]: there is always a root.
struct RoundPlan {
  std::vector<int32_t> query_lens;  // [B]
  std::vector<int32_t> num_drafts;  // [B]
  // Draft trees: per request, the parent of each draft as a row of the request (0 = its first row).
  // A parent comes before its child. Empty: chains, each row the child of the one before it.
  std::vector<std::vector<int32_t>> parents;
  // Draft trees whose parents only the device knows, `parents` is empty then: of a path it is
  // checked that its rows are drafts of the request in ascending order, not how they are linked.
  bool ascending = false;

  bool operator==(const RoundPlan&) const = default;

  int64_t num_rows() const {
    return std::accumulate(query_lens.begin(), query_lens.end(), int64_t{0});
  }
  int64_t num_draft_rows() const {
    return std::accumulate(num_drafts.begin(), num_drafts.end(), int64_t{0});
  }
};

}  // namespace nwor
