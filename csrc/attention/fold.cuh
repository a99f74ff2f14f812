#pragma once

#include "attention/verify_traits.cuh"

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
__device__ inline OutputRow LocateRow(const VerifyParams& p, const PlanItem& item, int row) {
  const int group = p.num_heads / p.num_kv_heads;
  const int packed = item.row_begin + row;
  return {item.query_start + packed / group, int64_t{item.kv_head} * group + packed % group};
}

template <typename T>
__device__ void WriteOutput(const VerifyParams& p, const PlanItem& item, int row, int channel,
                            float4 value, float factor) {
  const OutputRow at = LocateRow(p, item, row);
  const uint2 packed = {ptx::Pack<T>(value.x * factor, value.y * factor),
                        ptx::Pack<T>(value.z * factor, value.w * factor)};
  T* out = static_cast<T*>(p.out) + at.row * p.out_strides.row + at.head * p.out_strides.head;
  *reinterpret_cast<uint2*>(out + channel) = packed;
}

__device__ inline void WriteLse(const VerifyParams& p, const PlanItem& item, int row,
                                float2 state) {
  if (p.lse == nullptr) return;
  const OutputRow at = LocateRow(p, item, row);
  p.lse[at.row * p.num_heads + at.head] = LogSumExp(state);
}

// What happens to a leaf once its streams are merged.
struct LeafFate {
  bool fold_group;  // into the leaves of its group so far
  bool ends_group;  // then
  bool fold_total;  //   into the groups so far (items of whole requests)
  bool ends_item;
  bool is_output;  // the request's result, else a partial one
  int64_t group_slot;
  int64_t total_slot;
};

__device__ inline LeafFate FateOf(const PlanItem& item, int leaf, int max_slots) {
  LeafFate fate;
  const bool whole = item.num_parts == 1;
  const int64_t own = int64_t{max_slots} + 2 * blockIdx.x;
  fate.fold_group = leaf > item.leaf_begin && leaf % kLeafGroup != 0;
  fate.ends_item = leaf + 1 == item.leaf_end;
  fate.ends_group = fate.ends_item || leaf % kLeafGroup == kLeafGroup - 1;
  fate.fold_total = fate.ends_group && whole && leaf / kLeafGroup > 0;
  fate.is_output = fate.ends_item && whole;
  fate.group_slot = whole ? own : item.slot;
  fate.total_slot = whole ? own + 1 : item.slot;
  return fate;
}

// Merges the streams' states and outputs of one leaf (in shared memory) and sends them on.
// Called by the whole CTA; the merge buffer is free again at the end.
template <class Traits>
__device__ void FinishLeaf(const VerifyArgs& args, const SharedMemory<Traits>& smem, int leaf) {
  constexpr int kTile = Traits::kRowTile;
  constexpr int kQuads = Traits::kHeadDim / 4;
  const PlanItem& item = smem.item->plan;
  RowStates<kTile>& rows = *smem.rows;
  const LeafFate fate = FateOf(item, leaf, args.max_slots);

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
      WriteLse(args.params, item, row, state);
    } else if (fate.ends_item) {
      args.states[int64_t{item.slot} * kTile + row] = state;
    }
  }
  __syncthreads();

  float4* group_slot =
      reinterpret_cast<float4*>(args.outputs + fate.group_slot * kTile * Traits::kHeadDim);
  float4* total_slot =
      reinterpret_cast<float4*>(args.outputs + fate.total_slot * kTile * Traits::kHeadDim);
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
    if (fate.fold_group) value = FoldOutput(__ldcg(group_slot + i), value, rows.group_weight[row]);
    if (!fate.ends_group) {
      __stcg(group_slot + i, value);
      continue;
    }
    if (fate.fold_total) value = FoldOutput(__ldcg(total_slot + i), value, rows.total_weight[row]);
    if (fate.is_output) {
      WriteOutput<typename Traits::Row>(args.params, item, row, channel, value,
                                        rows.inverse_sum[row]);
    } else {
      __stcg(total_slot + i, value);
    }
  }
  __syncthreads();
}

// Folds the partial results of an item's pair, share `share` of `shares` of its rows' channels, and
// writes the output. Called by the whole CTA once all parts have arrived.
template <class Traits>
__device__ void CombineParts(const VerifyArgs& args, const PlanItem& item, int share, int shares) {
  constexpr int kTile = Traits::kRowTile;
  constexpr int kQuads = Traits::kHeadDim / 4;
  // Per thread and round trip to memory: so many places of so many parts.
  constexpr int kPlaces = 4;
  constexpr int kBatch = 4;
  static_assert(kBatch == kLeafGroup);
  const int leaves_per_part = item.leaves_per_part();
  const int num_parts = item.num_parts;
  const int64_t first_slot = item.slot - item.leaf_begin / leaves_per_part;
  const float4* outputs =
      reinterpret_cast<const float4*>(args.outputs + first_slot * kTile * Traits::kHeadDim);
  const float2* states = args.states + first_slot * kTile;
  const int quads = item.num_rows * kQuads;
  const int end = (share + 1) * quads / shares;

#pragma unroll 1
  for (int first = share * quads / shares + threadIdx.x; first < end;
       first += kPlaces * Traits::kThreads) {
    float4 total[kPlaces], group[kPlaces];
    float2 total_state[kPlaces], group_state[kPlaces];
#pragma unroll 1
    for (int batch = 0; batch < num_parts; batch += kBatch) {
      float4 part[kBatch][kPlaces];
      float2 state[kBatch][kPlaces];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int at = min(batch + j, num_parts - 1);
#pragma unroll
        for (int k = 0; k < kPlaces; ++k) {
          const int place = min(first + k * Traits::kThreads, end - 1);
          part[j][k] = __ldcg(outputs + int64_t{at} * kTile * kQuads + place);
          state[j][k] = __ldcg(states + at * kTile + place / kQuads);
        }
      }
      // A batch is a group of leaves, or kBatch groups.
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (batch + j >= num_parts) break;
        const bool ends_group =
            leaves_per_part > 1 || j == kBatch - 1 || batch + j == num_parts - 1;
#pragma unroll
        for (int k = 0; k < kPlaces; ++k) {
          if (leaves_per_part > 1 || j == 0) {
            group[k] = part[j][k];
            group_state[k] = state[j][k];
          } else {
            const float2 weight = FoldState(&group_state[k], state[j][k]);
            group[k] = FoldOutput(group[k], part[j][k], weight);
          }
          if (!ends_group) continue;
          if (batch == 0 && (j == 0 || leaves_per_part == 1)) {
            total[k] = group[k];
            total_state[k] = group_state[k];
          } else {
            const float2 weight = FoldState(&total_state[k], group_state[k]);
            total[k] = FoldOutput(total[k], group[k], weight);
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      const int place = first + k * Traits::kThreads;
      if (place >= end) break;
      const int row = place / kQuads;
      WriteOutput<typename Traits::Row>(args.params, item, row, place % kQuads * 4, total[k],
                                        InverseSum(total_state[k].y));
      if (place % kQuads == 0) WriteLse(args.params, item, row, total_state[k]);
    }
  }
}

}  // namespace nwor
