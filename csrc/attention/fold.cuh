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

// The same for two rows, two channels each.
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

// What happens to a leaf once it is complete: see plan.h for the tree.
struct LeafFate {
  bool fold_group;  // into the leaves of its group so far
  bool ends_group;  // then
  bool fold_block;  //   into the groups of its block so far
  bool ends_block;  //   then
  bool fold_total;  //     into the blocks so far (items of whole requests)
  bool ends_item;
  bool is_output;      // the request's result, else a partial one
  int64_t group_slot;  // where kernels that do not keep it elsewhere keep the group
  int64_t block_slot;
  int64_t total_slot;
};

__device__ inline LeafFate FateOf(const PlanItem& item, int leaf, int max_slots) {
  LeafFate fate;
  const bool whole = item.num_parts == 1;
  const int64_t own = int64_t{max_slots} + int64_t{kOwnSlots} * blockIdx.x;
  const int group = leaf / kLeafGroup;
  fate.fold_group = leaf > item.leaf_begin && leaf % kLeafGroup != 0;
  fate.ends_item = leaf + 1 == item.leaf_end;
  fate.ends_group = fate.ends_item || leaf % kLeafGroup == kLeafGroup - 1;
  fate.fold_block =
      fate.ends_group && group > item.leaf_begin / kLeafGroup && leaf % kLeafBlock >= kLeafGroup;
  fate.ends_block = fate.ends_item || leaf % kLeafBlock == kLeafBlock - 1;
  fate.fold_total = fate.ends_block && whole && leaf >= kLeafBlock;
  fate.is_output = fate.ends_item && whole;
  fate.group_slot = own;
  fate.block_slot = whole ? own + 1 : item.slot;
  fate.total_slot = whole ? own + 2 : item.slot;
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
    if (fate.fold_block) {
      float2 folded = rows.block[row];
      rows.block_weight[row] = FoldState(&folded, state);
      state = folded;
    }
    if (fate.ends_group) rows.block[row] = state;
    if (fate.fold_total) {
      float2 folded = rows.total[row];
      rows.total_weight[row] = FoldState(&folded, state);
      state = folded;
    }
    if (fate.ends_block) rows.total[row] = state;
    if (fate.is_output) {
      rows.inverse_sum[row] = InverseSum(state.y);
      WriteLse(args, item, row, state);
    } else if (fate.ends_item) {
      args.states[int64_t{item.slot} * kTile + row] = state;
    }
  }
  __syncthreads();

  const auto slot = [&](int64_t index) {
    return reinterpret_cast<float4*>(args.outputs + index * kTile * Traits::kHeadDim);
  };
  float4* group_slot = slot(fate.group_slot);
  float4* block_slot = slot(fate.block_slot);
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
    if (fate.fold_group) value = FoldOutput(__ldcg(group_slot + i), value, rows.group_weight[row]);
    if (!fate.ends_group) {
      __stcg(group_slot + i, value);
      continue;
    }
    if (fate.fold_block) value = FoldOutput(__ldcg(block_slot + i), value, rows.block_weight[row]);
    if (!fate.ends_block) {
      __stcg(block_slot + i, value);
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

// Partial results of a pair, as the threads of its items' CTAs left them in a slot: quads of one
// row, or of tile kernels (kTwoRows) two values of row and two of row + 8. A place is two quads of
// the same rows, half of the channels apart.
template <class Traits>
struct PartPlace {
  static constexpr int kRows = Traits::kTwoRows ? 2 : 1;
  static constexpr int kChannels = 4 / kRows;  // of a quad and row
  // Quads of a row, or of a pair of rows and one of the four threads that have it.
  static constexpr int kQuads = Traits::kHeadDim / (Traits::kTwoRows ? 8 : 4);
  float4 output[2];
  float2 state[kRows];

  // Threads whose outputs a tile kernel's item leaves behind.
  __device__ static int Threads(int num_rows) { return (num_rows + 15) / 16 * 32; }
  __device__ static int CountPlaces(int num_rows) {
    return (Traits::kTwoRows ? Threads(num_rows) : num_rows) * (kQuads / 2);
  }

  // Of place `at`: its (first) row, its first quad, and the quad's first channel.
  __device__ static int Row(int at, int num_rows) {
    if constexpr (!Traits::kTwoRows) return at / (kQuads / 2);
    const int thread = at % Threads(num_rows);
    return thread / 32 * 16 + thread % 32 / 4;
  }
  __device__ static int Quad(int at, int num_rows) {
    return Traits::kTwoRows ? at / Threads(num_rows) : at % (kQuads / 2);
  }
  __device__ static int Channel(int at, int quad) {
    return Traits::kTwoRows ? quad * 8 + at % 4 * 2 : quad * 4;
  }
  // Where the quad lies in a slot of `tile` rows.
  __device__ static int Offset(int at, int quad, int num_rows, int tile) {
    if constexpr (!Traits::kTwoRows) return Row(at, num_rows) * kQuads + quad;
    return quad * (tile * 2) + at % Threads(num_rows);
  }

  __device__ void Fold(const PartPlace& later) {
    const float2 upper = FoldState(&state[0], later.state[0]);
    const float2 lower =
        Traits::kTwoRows ? FoldState(&state[kRows - 1], later.state[kRows - 1]) : upper;
#pragma unroll
    for (int i = 0; i < 2; ++i) output[i] = FoldRows(output[i], later.output[i], upper, lower);
  }

  // Quad `quad` is output[i].
  __device__ void Write(const VerifyArgs& args, const PlanItem& item, int row, int channel,
                        int i) const {
    using T = typename Traits::Row;
    const float values[4] = {output[i].x, output[i].y, output[i].z, output[i].w};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at_row = row + 8 * r;
      if (at_row >= item.num_rows) break;
      const OutputRow at = LocateRow(args, item, at_row);
      const RowStrides strides = args.params.out_strides;
      const float factor = InverseSum(state[r].y);
      T* out = static_cast<T*>(args.params.out) + at.row * strides.row + at.head * strides.head;
#pragma unroll
      for (int c = 0; c < kChannels; c += 2) {
        *reinterpret_cast<uint32_t*>(out + channel + c) = ptx::Pack<T>(
            values[r * kChannels + c] * factor, values[r * kChannels + c + 1] * factor);
      }
      if (channel == 0) WriteLse(args, item, at_row, state[r]);
    }
  }
};

// Folds the partial results of a pair, kThreads places from `first` on, and writes the output.
// `item` is the pair's first. Called by the whole CTA once all parts are there.
template <class Traits>
__device__ void CombineParts(const VerifyArgs& args, const PlanItem& item, int first) {
  using Place = PartPlace<Traits>;
  constexpr int kBatch = 10;  // parts per round trip to memory
  const int at = first + static_cast<int>(threadIdx.x);
  if (at >= Place::CountPlaces(item.num_rows)) return;
  const int leaves_per_part = item.leaves_per_part();
  const int num_parts = item.num_parts;
  const int64_t tile = args.row_tile;
  const int row = Place::Row(at, item.num_rows);
  const int quad = Place::Quad(at, item.num_rows);
  const float4* slot =
      reinterpret_cast<const float4*>(args.outputs + item.slot * tile * Traits::kHeadDim);
  const float4* low = slot + Place::Offset(at, quad, item.num_rows, tile);
  const float4* high = slot + Place::Offset(at, quad + Place::kQuads / 2, item.num_rows, tile);
  const float2* states = args.states + item.slot * tile + row;
  const int64_t slot_quads = tile * (Traits::kHeadDim / 4);
  Place total, block, group;
#pragma unroll 1
  for (int batch = 0; batch < num_parts; batch += kBatch) {
    Place part[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t index = min(batch + j, num_parts - 1);
      part[j].output[0] = __ldcg(low + index * slot_quads);
      part[j].output[1] = __ldcg(high + index * slot_quads);
#pragma unroll
      for (int r = 0; r < Place::kRows; ++r) {
        part[j].state[r] = __ldcg(states + index * tile + 8 * r);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int leaf = (batch + j) * leaves_per_part;
      if (batch + j >= num_parts) break;
      if (leaf % kLeafGroup == 0) {
        group = part[j];
      } else {
        group.Fold(part[j]);
      }
      const bool last = batch + j == num_parts - 1;
      const int next = leaf + leaves_per_part;
      if (!last && next % kLeafGroup != 0) continue;
      if (leaf % kLeafBlock < kLeafGroup) {
        block = group;
      } else {
        block.Fold(group);
      }
      if (!last && next % kLeafBlock != 0) continue;
      if (leaf < kLeafBlock) {
        total = block;
      } else {
        total.Fold(block);
      }
    }
  }
  total.Write(args, item, row, Place::Channel(at, quad), 0);
  total.Write(args, item, row, Place::Channel(at, quad + Place::kQuads / 2), 1);
}

}  // namespace nwor
