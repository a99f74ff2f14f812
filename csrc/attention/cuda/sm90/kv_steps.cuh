#pragma once

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

}  // namespace nwor::sm90
