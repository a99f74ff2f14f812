#include "specpv/verify_policy.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "specpv/partial_cache.h"

namespace nwor {

VerifyPolicy::VerifyPolicy(const SpecPVConfig& config, PolicyCallback callback)
    : config_(config), callback_(std::move(callback)) {
  config_.Validate();
}

int64_t VerifyPolicy::AlwaysFullTokens(const Budget& budget) const {
  return std::max(budget.static_tokens(), config_.specpv_partial_threshold);
}

FullTrigger VerifyPolicy::FindTrigger(const PartialCache& cache, int64_t num_rows, bool viewable,
                                      bool* active) const {
  const int64_t context = cache.committed_len();
  *active = false;
  if (!config_.enable_specpv) return FullTrigger::kDisabled;
  if (context <= AlwaysFullTokens(cache.budget())) return FullTrigger::kShortContext;
  if (!viewable) return FullTrigger::kPolicy;
  *active = true;
  if (cache.required() != FullTrigger::kNone) return cache.required();
  if (!cache.selected()) return FullTrigger::kFirst;
  if (cache.tail_len() + num_rows > cache.budget().tail_capacity) return FullTrigger::kTailFull;
  const int64_t interval = config_.specpv_full_refresh_interval;
  if (interval > 0 && cache.partial_steps() >= interval) return FullTrigger::kInterval;
  if (callback_ && callback_(cache)) return FullTrigger::kPolicy;
  return FullTrigger::kNone;
}

StepDecision VerifyPolicy::Decide(const PartialCache& cache, int64_t num_rows,
                                  bool viewable) const {
  NWOR_CHECK(num_rows >= 1 && num_rows <= cache.max_rows(), "num_rows: got ", num_rows,
             ", expected 1 to ", cache.max_rows(), ", the rows of the largest tree");
  const int64_t room = kMaxContextTokens - cache.committed_len();
  NWOR_CHECK(num_rows <= room, "num_rows: got ", num_rows, ", expected at most ", room,
             ": the longest context has ", kMaxContextTokens, " tokens");
  NWOR_CHECK(viewable || config_.specpv_mode == SpecPVMode::kRefresh,
             "viewable: got false in mode ", ChoiceName(config_.specpv_mode, kSpecPVModeNames),
             ", whose full steps put the tail right; only mode refresh does without");
  StepDecision decision;
  decision.num_rows = num_rows;
  decision.required = cache.required();
  decision.full_len = cache.full_len();
  decision.committed_len = decision.prefix_len = decision.view_tokens = cache.committed_len();
  decision.anchor_len =
      config_.specpv_mode == SpecPVMode::kLossless ? cache.full_len() : cache.committed_len();
  bool active = false;
  decision.trigger = FindTrigger(cache, num_rows, viewable, &active);
  decision.keeps_view = !viewable && decision.trigger == FullTrigger::kPolicy;
  if (decision.trigger == FullTrigger::kNone) {
    decision.kind = StepKind::kPartial;
    decision.view_tokens = cache.view_tokens();
  } else if (active || (cache.tail_len() > 0 && !decision.keeps_view)) {
    decision.kind = StepKind::kFullRefresh;
    if (config_.specpv_mode != SpecPVMode::kRefresh) {
      decision.prefix_len = cache.full_len();
      decision.refed_rows = cache.tail_len();
    }
  }
  return decision;
}

}  // namespace nwor
