#include "specpv/verify_policy.h"

#include <utility>

#include "base/check.h"
#include "specpv/partial_cache.h"

namespace nwor {

VerifyPolicy::VerifyPolicy(const SpecPVConfig& config, PolicyCallback callback)
    : config_(config), callback_(std::move(callback)) {
  config_.Validate();
}

FullTrigger VerifyPolicy::FindTrigger(const PartialCache& cache, int64_t num_rows,
                                      bool* active) const {
  const int64_t context = cache.committed_len();
  *active = false;
  if (!config_.enable_specpv) return FullTrigger::kDisabled;
  if (context <= cache.budget().static_tokens() || context <= config_.specpv_partial_threshold) {
    return FullTrigger::kShortContext;
  }
  *active = true;
  if (cache.required() != FullTrigger::kNone) return cache.required();
  if (!cache.selected()) return FullTrigger::kFirst;
  if (cache.tail_len() + num_rows > cache.budget().tail_capacity) return FullTrigger::kTailFull;
  const int64_t interval = config_.specpv_full_refresh_interval;
  if (interval > 0 && cache.partial_steps() >= interval) return FullTrigger::kInterval;
  if (callback_ && callback_(cache)) return FullTrigger::kPolicy;
  return FullTrigger::kNone;
}

StepDecision VerifyPolicy::Decide(const PartialCache& cache, int64_t num_rows) const {
  NWOR_CHECK(num_rows >= 1 && num_rows <= cache.max_rows(), "num_rows: got ", num_rows,
             ", expected 1 to ", cache.max_rows(), ", the rows of the largest tree");
  const int64_t room = kMaxContextTokens - cache.committed_len();
  NWOR_CHECK(num_rows <= room, "num_rows: got ", num_rows, ", expected at most ", room,
             ": the longest context has ", kMaxContextTokens, " tokens");
  StepDecision decision;
  decision.num_rows = num_rows;
  decision.required = cache.required();
  decision.full_len = cache.full_len();
  decision.committed_len = decision.prefix_len = decision.view_tokens = cache.committed_len();
  decision.anchor_len =
      config_.specpv_mode == SpecPVMode::kLossless ? cache.full_len() : cache.committed_len();
  bool active = false;
  decision.trigger = FindTrigger(cache, num_rows, &active);
  if (decision.trigger == FullTrigger::kNone) {
    decision.kind = StepKind::kPartial;
    decision.view_tokens = cache.view_tokens();
  } else if (active || cache.tail_len() > 0) {
    decision.kind = StepKind::kFullRefresh;
    if (config_.specpv_mode != SpecPVMode::kRefresh) {
      decision.prefix_len = cache.full_len();
      decision.refed_rows = cache.tail_len();
    }
  }
  return decision;
}

}  // namespace nwor
