#pragma once

#include "attention/cuda/kernel_args.cuh"
#include "attention/cuda/ptx.cuh"

// Merging of partial softmax states, (max, sum) and output, and what the end of a split does. Both
// kernels use it at the end of a split (sm80/epilogue.cuh, sm90/consumer.cuh) and the combine uses
// it across CTAs. Every merge is written with explicit roundings and happens in one fixed order, so
// the bits do not depend on the granularity of the work tiles.

namespace nwor {

// exp2(max - top); a state without tokens (max = -infinity) has weight 0.
__device__ inline float StateWeight(float max, float top) {
  return ptx::Exp2(max - (top == -INFINITY ? 0.0f : top));
}

// Merges a later state (max, sum) into an earlier one. Returns the weights (old, new).
__device__ inline float2 MergeSoftmaxState(float2* state, float2 later) {
  const float top = fmaxf(state->x, later.x);
  const float2 weight = {StateWeight(state->x, top), StateWeight(later.x, top)};
  state->y = __fmaf_rn(state->y, weight.x, __fmul_rn(later.y, weight.y));
  state->x = top;
  return weight;
}

// Merges outputs by such weights: two channels each of two rows, or four channels of one row with
// the same weight twice.
__device__ inline float4 MergeOutput(float4 old, float4 later, float2 upper, float2 lower) {
  return {__fmaf_rn(old.x, upper.x, __fmul_rn(later.x, upper.y)),
          __fmaf_rn(old.y, upper.x, __fmul_rn(later.y, upper.y)),
          __fmaf_rn(old.z, lower.x, __fmul_rn(later.z, lower.y)),
          __fmaf_rn(old.w, lower.x, __fmul_rn(later.w, lower.y))};
}

// A row without visible tokens has sum 0; it gets zeros and an LSE of -infinity.
__device__ inline float InverseSum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
__device__ inline float LogSumExp(float2 state) {
  return (state.x + log2f(state.y)) * 0.6931471805599453f;
}

// Where packed row `row` of a work tile lies in the query and the output.
struct OutputRow {
  int64_t row;
  int64_t head;
};
__device__ inline OutputRow LocateRow(const VerifyArgs& args, const WorkTile& work_tile, int row) {
  const int packed = work_tile.row_begin + row;
  const int query_row = args.group.Quotient(packed);
  const int group = static_cast<int>(args.group.value);
  return {work_tile.query_start + query_row,
          int64_t{work_tile.kv_head - query_row} * group + packed};
}

__device__ inline void WriteLse(const VerifyArgs& args, const WorkTile& work_tile, int row,
                                float2 state) {
  const VerifyParams& p = args.params;
  if (p.lse == nullptr) return;
  const OutputRow at = LocateRow(args, work_tile, row);
  p.lse[at.row * p.num_heads + at.head] = LogSumExp(state);
}

// The index of the next split within its group. A work tile of several splits starts with a group.
__device__ inline int NextInGroup(const WorkTile& work_tile, int in_group) {
  return in_group + 1 == SplitsPerGroup(work_tile.num_splits) ? 0 : in_group + 1;
}

// What the end of a split does: see plan.h for the order of merges.
struct SplitEpilogue {
  bool merge_group;  // merge it into its group's running output
  bool ends_group;   // the group is complete; otherwise store the group's running output
  bool merge_total;  // merge the group into the request's running output (whole requests only)
  bool ends_work_tile;
  bool is_output;      // write the request's result; otherwise a partial one, if ends_work_tile
  int64_t group_slot;  // slots of the running outputs, if they are not in shared memory
  int64_t total_slot;
};

// The first of this CTA's scratch slots.
__device__ inline int64_t FirstScratchSlot(int max_slots) {
  return int64_t{max_slots} + int64_t{kScratchSlotsPerCta} * blockIdx.x;
}

// `in_group`: see NextInGroup.
__device__ inline SplitEpilogue EpilogueOf(const WorkTile& work_tile, int split, int in_group,
                                           int max_slots) {
  SplitEpilogue epilogue;
  const bool whole = work_tile.num_partials == 1;
  const int group = SplitsPerGroup(work_tile.num_splits);
  const int64_t scratch = FirstScratchSlot(max_slots);
  epilogue.merge_group = in_group > 0;
  epilogue.ends_work_tile = split + 1 == work_tile.split_end;
  epilogue.ends_group = epilogue.ends_work_tile || in_group + 1 == group;
  epilogue.merge_total = epilogue.ends_group && whole && split >= group;
  epilogue.is_output = epilogue.ends_work_tile && whole;
  epilogue.group_slot = scratch;
  epilogue.total_slot = whole ? scratch + 1 : work_tile.slot;
  return epilogue;
}

// Where a row's state lies in a slot. The sm_90a kernel with both row halves (kTwoRows) keeps rows
// r and r + 8 side by side.
template <class Traits>
__device__ int StateOffset(int row) {
  if constexpr (!Traits::kTwoRows) return row;
  return row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
}

}  // namespace nwor
