#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>

#include "base/export.h"
#include "base/full_trigger.h"
#include "specpv/config.h"

// How the next step of a request verifies its tree: over everything, over everything with the tail
// put right, or over the partial view.

namespace nwor {

class PartialCache;

enum class StepKind : uint8_t { kFull, kFullRefresh, kPartial };
inline constexpr std::array<std::string_view, 3> kStepKindNames = {"full", "full_refresh",
                                                                   "partial"};

// What a step of one request is to do. Its rows are, in this order: `refed_rows` tokens of the tail
// at positions full_len .. committed_len - 1, causal among themselves, then the tree's rows, which
// see those before them. All attend to the first `prefix_len` tokens, or to the view.
struct StepDecision {
  StepKind kind = StepKind::kFull;
  FullTrigger trigger = FullTrigger::kNone;  // why it is full; kNone for a partial step
  int64_t num_rows = 0;                      // of the tree, the root included
  int64_t full_len = 0;                      // F and N when it was decided
  int64_t committed_len = 0;
  int64_t prefix_len = 0;
  int64_t refed_rows = 0;
  // Tokens that a refresh may choose from and summarise: N, or F when the tail may yet be cut.
  int64_t anchor_len = 0;
  FullTrigger required = FullTrigger::kNone;  // what was required when it was decided
  int64_t view_tokens = 0;                    // what the tree's rows see of the context
  bool keeps_view = false;  // full for want of room: what was selected before stays as it is
};

// Asks for a full step where the rules would allow a partial one.
using PolicyCallback = std::function<bool(const PartialCache&)>;

// Thread-safety: const after construction; the callback is called on the caller's thread.
class NWOR_EXPORT VerifyPolicy {
 public:
  explicit VerifyPolicy(const SpecPVConfig& config, PolicyCallback callback = nullptr);

  // For a tree of num_rows rows, 1 to the cache's max_rows, that the longest context has room for.
  // viewable: the host has room for a view of this request in this step; mode refresh alone may do
  // without. Reads host state only. Rules, the first that holds:
  //   switched off, or the context within AlwaysFullTokens    full (with a tail: full + refresh)
  //   not viewable                                            full, policy; a view stays as it is
  //   a fault of an earlier step                              full + refresh, its trigger
  //   nothing was selected yet                                full + refresh, first
  //   tail + rows beyond the tail's capacity                  full + refresh, tail_full
  //   specpv_full_refresh_interval partial steps were done    full + refresh, interval
  //   the callback asks                                       full + refresh, policy
  //   otherwise                                               partial
  StepDecision Decide(const PartialCache& cache, int64_t num_rows, bool viewable = true) const;

  // Tokens of context up to which every step of a request with this budget is full: those of its
  // view, or specpv_partial_threshold where that is more.
  int64_t AlwaysFullTokens(const Budget& budget) const;

 private:
  FullTrigger FindTrigger(const PartialCache& cache, int64_t num_rows, bool viewable,
                          bool* active) const;

  SpecPVConfig config_;
  PolicyCallback callback_;
};

}  // namespace nwor
