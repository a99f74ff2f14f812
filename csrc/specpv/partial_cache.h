#pragma once

#include <cstdint>

#include "base/export.h"
#include "base/full_trigger.h"
#include "specpv/config.h"
#include "specpv/partial_view.h"
#include "specpv/verify_policy.h"

// The state of one request under partial verification, on the host:
//
//   sink [0, S) · candidates [S, W0) · window [W0, F) · tail [F, N)
//
// F tokens were verified by full attention, N are committed; K/V of the tail came from partial
// attention and is provisional. Prefix caches may publish what lies before F and nothing after it.

namespace nwor {

// What a step changed.
struct StepOutcome {
  int64_t committed = 0;  // change of N; negative when a lossless step cut the tail
  int64_t emitted = 0;    // tokens the host may show, the correction or bonus token included
  int64_t cut = 0;        // tokens of the tail that were taken back
};

// Thread-safety: none; one step at a time per request.
class NWOR_EXPORT PartialCache {
 public:
  // max_rows: rows of the largest tree, the root included. The lengths matter to an adaptive budget
  // alone. REQUIRES: config.Validate() passes. Throws Error.
  PartialCache(const SpecPVConfig& config, int64_t max_rows, int64_t prompt_tokens = 0,
               int64_t max_new_tokens = 0);
  virtual ~PartialCache() = default;
  PartialCache(const PartialCache&) = delete;
  PartialCache& operator=(const PartialCache&) = delete;

  // Tokens that full attention has put into the cache outside of steps: the prompt. Blocks that
  // were selected before are no longer: the view would not begin where its window should.
  // REQUIRES: the tail is empty; the context stays within kMaxContextTokens.
  void Prefill(int64_t num_tokens);

  // All of the context, `num_tokens` tokens, was computed by full attention outside of steps: rows
  // of a prompt, or tokens that are computed again. There is no tail, and blocks are selected anew.
  void Restart(int64_t num_tokens);

  // For hosts that learn later what their steps have committed, in mode refresh: the context has
  // `num_tokens` tokens, at most. Called before each step is decided; FinishLater ends it. F is
  // then the length at which blocks were selected, and all that came after it is the tail.
  void Reach(int64_t num_tokens);
  void FinishLater(const StepDecision& decision);

  // The step of `decision` is over. accepted: draft rows that acceptance took, the root excluded.
  // In a full + refresh step of lossless mode acceptance runs over the re-fed rows too, as a chain
  // before the tree, and its root is the first of them. Counts the step.
  //   full            N += 1 + accepted, F = N
  //   full + refresh  likewise, and a view was selected over what was committed before the step;
  //                   lossless: N = F + 1 + accepted, then F = N
  //   partial         N += 1 + accepted; lossless: nothing is emitted yet
  // A step that keeps its view adds to the tail as a partial one does.
  // A partial step that committed more than the tail holds makes the next one full (tail_overflow).
  // disagreed: of the step's re-fed rows, those at which full attention chooses another token than
  // the one that was emitted; -1: not looked at. It is counted as drift (see CountDrift); in
  // lossless mode `accepted` tells it and nothing is to be given.
  // Throws Error when the decision is not of this state.
  StepOutcome Finish(const StepDecision& decision, int64_t accepted, int64_t disagreed = -1);

  // The next step is to be full + refresh: something failed, or the host wants its tokens confirmed
  // (at the end of a lossless generation).
  void RequireFull(FullTrigger trigger);

  // Drift, for hosts that learn of it apart from a step's end: of `rechecked` emitted tokens full
  // attention would have chosen `disagreed` differently. The logits of re-fed rows tell. Counted in
  // the metrics, and here.
  void CountDrift(int64_t rechecked, int64_t disagreed);

  int64_t full_len() const { return full_len_; }            // F
  int64_t committed_len() const { return committed_len_; }  // N
  int64_t tail_len() const { return committed_len_ - full_len_; }
  int64_t partial_steps() const { return partial_steps_; }  // since the last full one
  int64_t emitted_len() const { return emitted_len_; }      // lossless: N less what is unconfirmed
  bool selected() const { return selected_; }
  FullTrigger required() const { return required_; }
  int64_t rechecked_tokens() const { return rechecked_tokens_; }
  int64_t disagreed_tokens() const { return disagreed_tokens_; }
  const Budget& budget() const { return budget_; }
  const SpecPVConfig& config() const { return config_; }

  // The view's segments for the length it was selected at: what a full + refresh step committed
  // itself lies after the window's end and is seen as well.
  ViewSegments segments() const;
  int64_t anchor_len() const { return anchor_len_; }
  int64_t view_tokens() const;  // of a partial step now
  int64_t max_rows() const { return max_rows_; }

  // Bytes of K and V of one token over all layers, for specpv_kv_bytes_read_total.
  void set_bytes_per_token(int64_t bytes) { bytes_per_token_ = bytes; }

 protected:
  // Whether the blocks of every layer were selected in the step of `decision`, which ends: else it
  // was in vain.
  virtual bool RefreshComplete(const StepDecision&) const { return true; }

 private:
  void CheckDecision(const StepDecision& decision) const;
  void EndFull(const StepDecision& decision);
  void CountStep(const StepDecision& decision) const;
  void CountRefed(const StepDecision& decision, int64_t accepted, int64_t disagreed);

  const SpecPVConfig config_;
  const Budget budget_;
  const int64_t max_rows_;
  int64_t bytes_per_token_ = 0;
  int64_t full_len_ = 0;
  int64_t committed_len_ = 0;
  int64_t anchor_len_ = 0;
  int64_t emitted_len_ = 0;
  int64_t partial_steps_ = 0;
  int64_t rechecked_tokens_ = 0;
  int64_t disagreed_tokens_ = 0;
  bool selected_ = false;
  FullTrigger required_ = FullTrigger::kNone;
};

}  // namespace nwor
