#pragma once

#include "attention/cuda/kernel_args.cuh"
#include "attention/cuda/sm90/traits.cuh"
#include "attention/cuda/work_tile.cuh"

namespace nwor::sm90 {

// The pipeline steps of a work tile: blocks of prefix tokens and, where the last split begins, the
// in-flight rows. These come first in that split because they can be loaded before the pages are
// known. Producers and consumers walk the same steps.
template <class Traits>
struct KvSteps {
  static constexpr int kStep = Traits::kStepTokens;
  static constexpr int kBlocks = kStep / 16;            // of 16 tokens: a block lies within a page
  static constexpr int kPageBatchSteps = 32 / kBlocks;  // steps whose pages are looked up at once
  int begin, end;                                       // prefix tokens
  int in_flight_rows;
  int num_steps;
  int in_flight_begin, in_flight_end;  // steps
  int unmasked_begin, unmasked_end;  // prefix steps whose tokens all exist and are seen by all rows

  __device__ KvSteps(const VerifyParams& p, const WorkTile& plan) {
    const int origin = SplitOrigin(plan.token_begin);
    begin = origin + plan.split_begin * plan.split_tokens;
    end = max(begin, min(origin + plan.split_end * plan.split_tokens, plan.prefix_tokens));
    in_flight_rows = InFlightRows(p, plan, plan.split_end - 1);
    in_flight_begin = (plan.split_end - 1 - plan.split_begin) * (plan.split_tokens / kStep);
    in_flight_end = in_flight_begin + (in_flight_rows + kStep - 1) / kStep;
    num_steps = (end - begin + kStep - 1) / kStep + in_flight_end - in_flight_begin;
    unmasked_end = (end - begin) / kStep;
    unmasked_begin = 0;
    if (p.window > 0) {
      // Positions of rows: prefix_tokens .. prefix_tokens + request_rows - 1, at most.
      const int visible_to_all = plan.prefix_tokens + plan.request_rows - p.window;
      unmasked_begin = (max(visible_to_all - begin, 0) + kStep - 1) / kStep;
    }
  }
  __device__ bool IsInFlight(int step) const {
    return step >= in_flight_begin && step < in_flight_end;
  }
  __device__ int InFlightRow(int step) const { return (step - in_flight_begin) * kStep; }
  // The index of a step among those of the prefix.
  __device__ int PrefixStep(int step) const {
    return step < in_flight_end ? step : step - (in_flight_end - in_flight_begin);
  }
  // Whether the boundary producer fills the step's stage.
  __device__ bool IsBoundary(int step) const {
    return IsInFlight(step) || !IsUnmasked(PrefixStep(step));
  }
  // The end of the run of unmasked steps from `step` on that are followed by another step; `step`
  // if there are none.
  __device__ int UnmaskedEnd(int step) const {
    const int prefix_step = PrefixStep(step);
    if (IsInFlight(step) || prefix_step < unmasked_begin) return step;
    const int end = min(num_steps - 1, step + unmasked_end - prefix_step);
    return step < in_flight_begin ? min(end, in_flight_begin) : end;
  }
  __device__ int num_prefix() const { return num_steps - (in_flight_end - in_flight_begin); }
  __device__ int PrefixToken(int prefix_step) const { return begin + prefix_step * kStep; }
  __device__ bool IsUnmasked(int prefix_step) const {
    return prefix_step >= unmasked_begin && prefix_step < unmasked_end;
  }
};

// Where the ring brings the request's running output back from its slot: if shared memory has room
// for the group's only, and the work tile is a whole request. It fills a stage of its own behind
// the last step of every group that is merged into it, so the consumers do not wait for it any
// longer than for tokens. Producers and consumers walk the same stages.
//
// A group has at least as many steps as there are stages. So when the producers find the stage
// empty, the consumers have used the values of a step of this group, and have stored the running
// output before.
template <class Traits>
class BroughtOutputs {
 public:
  // Over float8 caches there may be one stage, which K of the step behind needs before the split
  // ends.
  static constexpr bool kUsed =
      !Traits::kFloat8 && RunningOutputs(Traits::kHeadDim, Traits::kRowTile) == 1;
  static_assert(!kUsed ||
                RunningOutputBytes(Traits::kHeadDim, Traits::kRowTile) == Traits::kStageBytes);

  __device__ BroughtOutputs(const VerifyArgs& args, const WorkTile& plan,
                            const KvSteps<Traits>& steps) {
    if constexpr (kUsed) {
      const Groups groups(plan);
      if (plan.num_partials > 1 || groups.last == 0) return;
      if (min(groups.steps, steps.num_steps - groups.last) < args.stages) return;
      next_ = groups.steps;  // the first group is merged into nothing
      Advance(plan, steps.num_steps);
    }
  }

  // Whether the work tile has any.
  __device__ bool any() const { return kUsed && next_ >= 0; }
  // Whether one comes behind the first `steps` steps. If so, Advance goes on to the next one.
  __device__ bool IsBehind(int steps) const { return kUsed && steps == next_; }
  __device__ void Advance(const WorkTile& plan, int num_steps) {
    const Groups groups(plan);
    next_ += groups.steps;
    if (next_ > groups.last) next_ = num_steps;
  }

 private:
  struct Groups {
    int steps;  // of a group
    int last;   // the first step of the last group

    __device__ explicit Groups(const WorkTile& plan) {
      const int splits = SplitsPerGroup(plan.num_splits);
      steps = splits * (plan.split_tokens / Traits::kStepTokens);
      last = (plan.num_splits - 1) / splits * steps;
    }
  };

  int next_ = -1;
};

}  // namespace nwor::sm90
