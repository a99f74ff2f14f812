#pragma once

#include "attention/cuda/verify_traits.cuh"

// Merging partial softmax results. Every fold is written with explicit roundings and happens in one
// fixed order, in registers or across CTAs: the same bits whatever the grain of the work items.

namespace nwor {

// exp2(max - top) where a state without tokens (-infinity) weighs nothing.
__device__ inline float StateWeight(float max, float top) {
  return ptx::Exp2(max - (top == -INFINITY ? 0.0f : top));
}

// Folds a later state (max, sum) into an earlier one; returns the weights (old, new).
__device__ inline float2 FoldState(float2* state, float2 later) {
  const float top = fmaxf(state->x, later.x);
  const float2 weight = {StateWeight(state->x, top), StateWeight(later.x, top)};
  state->y = __fmaf_rn(state->y, weight.x, __fmul_rn(later.y, weight.y));
  state->x = top;
  return weight;
}

__device__ inline float4 FoldOutput(float4 old, float4 later, float2 weight) {
  return {__fmaf_rn(old.x, weight.x, __fmul_rn(later.x, weight.y)),
          __fmaf_rn(old.y, weight.x, __fmul_rn(later.y, weight.y)),
          __fmaf_rn(old.z, weight.x, __fmul_rn(later.z, weight.y)),
          __fmaf_rn(old.w, weight.x, __fmul_rn(later.w, weight.y))};
}

// The same for two rows, two channels each; or for one, with one weight twice.
__device__ inline float4 FoldRows(float4 old, float4 later, float2 upper, float2 lower) {
  return {__fmaf_rn(old.x, upper.x, __fmul_rn(later.x, upper.y)),
          __fmaf_rn(old.y, upper.x, __fmul_rn(later.y, upper.y)),
          __fmaf_rn(old.z, lower.x, __fmul_rn(later.z, lower.y)),
          __fmaf_rn(old.w, lower.x, __fmul_rn(later.w, lower.y))};
}

// A row without visible tokens has sum 0 and gives zeros and an LSE of -infinity.
__device__ inline float InverseSum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
__device__ inline float LogSumExp(float2 state) {
  return (state.x + log2f(state.y)) * 0.6931471805599453f;
}

// Where packed row `row` of an item stands in the outputs.
struct OutputRow {
  int64_t row;
  int64_t head;
};
__device__ inline OutputRow LocateRow(const VerifyArgs& args, const PlanItem& item, int row) {
  const int packed = item.row_begin + row;
  const int query_row = args.group.Quotient(packed);
  const int group = static_cast<int>(args.group.value);
  return {item.query_start + query_row, int64_t{item.kv_head - query_row} * group + packed};
}

template <typename T>
__device__ void WriteOutput(const VerifyArgs& args, const PlanItem& item, int row, int channel,
                            float4 value, float factor) {
  const VerifyParams& p = args.params;
  const OutputRow at = LocateRow(args, item, row);
  const uint2 packed = {ptx::Pack<T>(value.x * factor, value.y * factor),
                        ptx::Pack<T>(value.z * factor, value.w * factor)};
  T* out = static_cast<T*>(p.out) + at.row * p.out_strides.row + at.head * p.out_strides.head;
  *reinterpret_cast<uint2*>(out + channel) = packed;
}

__device__ inline void WriteLse(const VerifyArgs& args, const PlanItem& item, int row,
                                float2 state) {
  const VerifyParams& p = args.params;
  if (p.lse == nullptr) return;
  const OutputRow at = LocateRow(args, item, row);
  p.lse[at.row * p.num_heads + at.head] = LogSumExp(state);
}

// Counts an item's leaves within their groups: an item of several leaves begins with a group.
__device__ inline int NextInGroup(const PlanItem& item, int in_group) {
  return in_group + 1 == LeafGroup(item.num_leaves) ? 0 : in_group + 1;
}

// What happens to a leaf once it is complete: see plan.h for the tree.
struct LeafFate {
  bool fold_group;  // into the leaves of its group so far
  bool ends_group;  // then
  bool fold_total;  //   into the groups so far (items of whole requests)
  bool ends_item;
  bool is_output;      // the request's result, else a partial one
  int64_t group_slot;  // where kernels that do not keep it elsewhere keep the group
  int64_t total_slot;
};

// The first of the slots that only this CTA uses.
__device__ inline int64_t OwnSlot(int max_slots) {
  return int64_t{max_slots} + int64_t{kOwnSlots} * blockIdx.x;
}

// `in_group`: see NextInGroup.
__device__ inline LeafFate FateOf(const PlanItem& item, int leaf, int in_group, int max_slots) {
  LeafFate fate;
  const bool whole = item.num_parts == 1;
  const int group = LeafGroup(item.num_leaves);
  const int64_t own = OwnSlot(max_slots);
  fate.fold_group = in_group > 0;
  fate.ends_item = leaf + 1 == item.leaf_end;
  fate.ends_group = fate.ends_item || in_group + 1 == group;
  fate.fold_total = fate.ends_group && whole && leaf >= group;
  fate.is_output = fate.ends_item && whole;
  fate.group_slot = own;
  fate.total_slot = whole ? own + 1 : item.slot;
  return fate;
}

// Where a row's state lies in a slot. Tile kernels with both halves (kTwoRows) keep rows r and r +
// 8 side by side.
template <class Traits>
__device__ int StateOffset(int row) {
  if constexpr (!Traits::kTwoRows) return row;
  return row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
}

// Merges the streams' states and outputs of one leaf (in shared memory) and sends them on.
// Called by the whole CTA; the merge buffer is free again at the end.
template <class Traits>
__device__ void FinishLeaf(const VerifyArgs& args, const SharedMemory<Traits>& smem, int leaf,
                           int in_group) {
  constexpr int kTile = Traits::kRowTile;
  constexpr int kQuads = Traits::kHeadDim / 4;
  const PlanItem& item = smem.item->plan;
  RowStates<kTile>& rows = *smem.rows;
  const LeafFate fate = FateOf(item, leaf, in_group, args.max_slots);

  if (const int row = threadIdx.x; row < item.num_rows) {
    float top = rows.max[0][row];
#pragma unroll
    for (int s = 1; s < kStreams; ++s) top = fmaxf(top, rows.max[s][row]);
    float2 state = {top, 0.0f};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const float weight = StateWeight(rows.max[s][row], top);
      rows.weight[s][row] = weight;
      state.y = __fmaf_rn(rows.sum[s][row], weight, state.y);
    }
    if (fate.fold_group) {
      float2 folded = rows.group[row];
      rows.group_weight[row] = FoldState(&folded, state);
      state = folded;
    }
    rows.group[row] = state;
    if (fate.fold_total) {
      float2 folded = rows.total[row];
      rows.total_weight[row] = FoldState(&folded, state);
      state = folded;
    }
    if (fate.ends_group) rows.total[row] = state;
    if (fate.is_output) {
      rows.inverse_sum[row] = InverseSum(state.y);
      WriteLse(args, item, row, state);
    } else if (fate.ends_item) {
      args.states[int64_t{item.slot} * kTile + StateOffset<Traits>(row)] = state;
    }
  }
  __syncthreads();

  const auto slot = [&](int64_t index) {
    return reinterpret_cast<float4*>(args.outputs + index * kTile * Traits::kHeadDim);
  };
  float4* group_slot = slot(fate.group_slot);
  float4* total_slot = slot(fate.total_slot);
  for (int i = threadIdx.x; i < item.num_rows * kQuads; i += Traits::kThreads) {
    const int row = i / kQuads;
    const int channel = i % kQuads * 4;
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const float weight = rows.weight[s][row];
      const float4 part = *reinterpret_cast<const float4*>(
          smem.merge + (s * kTile + row) * Traits::kMergeStride + channel);
      value.x = __fmaf_rn(part.x, weight, value.x);
      value.y = __fmaf_rn(part.y, weight, value.y);
      value.z = __fmaf_rn(part.z, weight, value.z);
      value.w = __fmaf_rn(part.w, weight, value.w);
    }
    // From a slot the group would come back behind all tokens that are under way.
    constexpr bool kInShared = FoldBytes(Traits::kHeadDim, kTile) > 0;
    if (fate.fold_group) {
      const float4 old = kInShared ? smem.group[i] : __ldcg(group_slot + i);
      value = FoldOutput(old, value, rows.group_weight[row]);
    }
    if (!fate.ends_group) {
      if constexpr (kInShared) {
        smem.group[i] = value;
      } else {
        __stcg(group_slot + i, value);
      }
      continue;
    }
    if (fate.fold_total) value = FoldOutput(__ldcg(total_slot + i), value, rows.total_weight[row]);
    if (fate.is_output) {
      WriteOutput<typename Traits::Row>(args, item, row, channel, value, rows.inverse_sum[row]);
    } else {
      __stcg(total_slot + i, value);
    }
  }
  __syncthreads();
}

}  // namespace nwor
