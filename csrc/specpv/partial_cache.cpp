#include "specpv/partial_cache.h"

#include <algorithm>

#include "base/check.h"
#include "metrics/counters.h"

namespace nwor {
namespace {

SpecPVConfig Checked(const SpecPVConfig& config, int64_t max_rows, int64_t prompt_tokens,
                     int64_t max_new_tokens) {
  config.Validate();
  CheckMaxRows(max_rows);
  NWOR_CHECK(prompt_tokens >= 0, "prompt_tokens: got ", prompt_tokens, ", expected 0 or more");
  NWOR_CHECK(max_new_tokens >= 0, "max_new_tokens: got ", max_new_tokens, ", expected 0 or more");
  return config;
}

}  // namespace

PartialCache::PartialCache(const SpecPVConfig& config, int64_t max_rows, int64_t prompt_tokens,
                           int64_t max_new_tokens)
    : config_(Checked(config, max_rows, prompt_tokens, max_new_tokens)),
      budget_(ChooseBudget(config, max_rows, prompt_tokens, max_new_tokens)),
      max_rows_(max_rows) {}

void PartialCache::Prefill(int64_t num_tokens) {
  const int64_t room = kMaxContextTokens - full_len_;
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= room, "num_tokens: got ", num_tokens,
             ", expected 0 to ", room);
  NWOR_CHECK(tail_len() == 0, "prefill: got a tail of ", tail_len(), " tokens, expected none");
  if (num_tokens == 0) return;
  full_len_ += num_tokens;
  committed_len_ = emitted_len_ = full_len_;
  selected_ = false;
  anchor_len_ = 0;
}

void PartialCache::Restart(int64_t num_tokens) {
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= kMaxContextTokens, "num_tokens: got ", num_tokens,
             ", expected 0 to ", kMaxContextTokens);
  full_len_ = committed_len_ = emitted_len_ = num_tokens;
  selected_ = false;
  anchor_len_ = partial_steps_ = 0;
}

void PartialCache::Reach(int64_t num_tokens) {
  NWOR_CHECK(config_.specpv_mode == SpecPVMode::kRefresh,
             "reach: only hosts of mode refresh may learn later what was committed");
  NWOR_CHECK(num_tokens >= 0 && num_tokens <= kMaxContextTokens, "num_tokens: got ", num_tokens,
             ", expected 0 to ", kMaxContextTokens);
  committed_len_ = emitted_len_ = num_tokens;
  // Without a view every step was full; with one, its length may have been taken for too long.
  full_len_ = selected_ ? std::min(full_len_, num_tokens) : num_tokens;
}

void PartialCache::FinishLater(const StepDecision& decision) {
  NWOR_CHECK(config_.specpv_mode == SpecPVMode::kRefresh,
             "finish_later: only hosts of mode refresh may learn later what was committed");
  CheckDecision(decision);
  CountStep(decision);
  if (decision.kind == StepKind::kPartial) {
    ++partial_steps_;
  } else if (!decision.keeps_view) {
    full_len_ = committed_len_;
    EndFull(decision);
  }
}

void PartialCache::CheckDecision(const StepDecision& decision) const {
  NWOR_CHECK(decision.full_len == full_len_ && decision.committed_len == committed_len_,
             "decision: got one of F = ", decision.full_len, ", N = ", decision.committed_len,
             ", expected F = ", full_len_, ", N = ", committed_len_);
  NWOR_CHECK(decision.num_rows <= max_rows_, "decision: got one of ", decision.num_rows,
             " rows, expected at most ", max_rows_, ", the rows of the largest tree");
}

// A full step has ended, whose lengths are known: what its blocks are good for.
void PartialCache::EndFull(const StepDecision& decision) {
  partial_steps_ = 0;
  const bool failed = required_ != decision.required;  // in this step
  if (!failed) required_ = FullTrigger::kNone;
  if (decision.kind != StepKind::kFullRefresh) return;
  if (!failed && !RefreshComplete(decision)) required_ = FullTrigger::kRefreshFailure;
  selected_ = required_ == FullTrigger::kNone;
  // What the step's own rows added was not there to choose from.
  anchor_len_ = decision.anchor_len;
}

StepOutcome PartialCache::Finish(const StepDecision& decision, int64_t accepted,
                                 int64_t disagreed) {
  CheckDecision(decision);
  const bool lossless = config_.specpv_mode == SpecPVMode::kLossless;
  const bool over_tail = lossless && decision.kind == StepKind::kFullRefresh;
  const int64_t most = decision.num_rows - 1 + (over_tail ? decision.refed_rows : 0);
  NWOR_CHECK(accepted >= 0 && accepted <= most, "accepted: got ", accepted, ", expected 0 to ",
             most, ", the draft rows of the step");
  NWOR_CHECK(disagreed >= -1 && disagreed <= decision.refed_rows, "disagreed: got ", disagreed,
             ", expected 0 to ", decision.refed_rows, ", the step's re-fed rows, or -1");
  CountStep(decision);
  if (decision.refed_rows > 0) CountRefed(decision, accepted, disagreed);
  const int64_t before = committed_len_, tail_before = tail_len();
  StepOutcome outcome;
  if (decision.keeps_view) {
    committed_len_ += 1 + accepted;
    outcome.emitted = 1 + accepted;
  } else if (decision.kind == StepKind::kPartial) {
    committed_len_ += 1 + accepted;
    ++partial_steps_;
    if (tail_len() > budget_.tail_capacity) required_ = FullTrigger::kTailOverflow;
    outcome.emitted = lossless ? 0 : 1 + accepted;
  } else {
    committed_len_ = (over_tail ? full_len_ : committed_len_) + 1 + accepted;
    full_len_ = committed_len_;
    outcome.cut = over_tail ? std::max<int64_t>(0, tail_before - 1 - accepted) : 0;
    outcome.emitted = 1 + accepted;
    EndFull(decision);
  }
  outcome.committed = committed_len_ - before;
  emitted_len_ = lossless ? full_len_ : committed_len_;
  return outcome;
}

// Re-fed row i tells what should have followed it: the next token of the tail, for the last one the
// tree's root. In lossless mode rows are judged until the first that disagrees.
void PartialCache::CountRefed(const StepDecision& decision, int64_t accepted, int64_t disagreed) {
  if (config_.specpv_mode == SpecPVMode::kLossless) {
    const int64_t confirmed = std::min(accepted, decision.refed_rows);
    CountDrift(std::min(confirmed + 1, decision.refed_rows), confirmed < decision.refed_rows);
  } else if (disagreed >= 0) {
    CountDrift(decision.refed_rows, disagreed);
  }
}

void PartialCache::RequireFull(FullTrigger trigger) {
  NWOR_CHECK(trigger != FullTrigger::kNone, "trigger: got 'none', expected a reason");
  required_ = trigger;
}

void PartialCache::CountDrift(int64_t rechecked, int64_t disagreed) {
  NWOR_CHECK(0 <= disagreed && disagreed <= rechecked, "disagreed: got ", disagreed, " of ",
             rechecked, " rechecked tokens, expected 0 to as many");
  rechecked_tokens_ += rechecked;
  disagreed_tokens_ += disagreed;
  Counters::Global().Add(Counter::kRecheckedTokens, rechecked);
  Counters::Global().Add(Counter::kDisagreedTokens, disagreed);
}

ViewSegments PartialCache::segments() const {
  return SegmentsOf(static_cast<int32_t>(anchor_len_), static_cast<int32_t>(committed_len_),
                    static_cast<int32_t>(budget_.sink_blocks),
                    static_cast<int32_t>(budget_.window_blocks),
                    static_cast<int32_t>(budget_.block_size));
}

int64_t PartialCache::view_tokens() const {
  const ViewSegments view = segments();
  const int64_t retrieved = std::min<int64_t>(budget_.retrieval_blocks, view.candidates());
  const int64_t blocks = view.sink_blocks + retrieved;
  return std::min(committed_len_, blocks * budget_.block_size + committed_len_ -
                                      view.window_begin * budget_.block_size);
}

void PartialCache::CountStep(const StepDecision& decision) const {
  Counters& counters = Counters::Global();
  const bool partial = decision.kind == StepKind::kPartial;
  if (partial) {
    counters.Add(Counter::kPartialSteps, 1);
    counters.Observe(Summary::kViewTokens, decision.view_tokens);
    counters.Observe(Summary::kContextTokens, decision.committed_len);
  } else {
    counters.AddFullStep(decision.trigger);
  }
  const int64_t read = partial ? decision.view_tokens : decision.prefix_len;
  counters.Add(Counter::kKvBytesRead, read * bytes_per_token_);
  counters.Add(Counter::kKvBytesFull, decision.committed_len * bytes_per_token_);
}

}  // namespace nwor
