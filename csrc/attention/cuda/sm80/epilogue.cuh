#pragma once

#include "attention/cuda/merge.cuh"
#include "attention/cuda/sm80/traits.cuh"

// The end of a split in the sm_80 kernel: merges the KV warps' states and outputs, then the split
// with the splits before it, and writes the output or a partial result.

namespace nwor::sm80 {

// Merges four channels of one row.
__device__ inline float4 MergeOutput(float4 old, float4 later, float2 weight) {
  return {__fmaf_rn(old.x, weight.x, __fmul_rn(later.x, weight.y)),
          __fmaf_rn(old.y, weight.x, __fmul_rn(later.y, weight.y)),
          __fmaf_rn(old.z, weight.x, __fmul_rn(later.z, weight.y)),
          __fmaf_rn(old.w, weight.x, __fmul_rn(later.w, weight.y))};
}

template <typename T>
__device__ void WriteOutput(const VerifyArgs& args, const WorkTile& work_tile, int row, int channel,
                            float4 value, float factor) {
  const VerifyParams& p = args.params;
  const OutputRow at = LocateRow(args, work_tile, row);
  const uint2 packed = {ptx::Pack<T>(value.x * factor, value.y * factor),
                        ptx::Pack<T>(value.z * factor, value.w * factor)};
  T* out = static_cast<T*>(p.out) + at.row * p.out_strides.row + at.head * p.out_strides.head;
  *reinterpret_cast<uint2*>(out + channel) = packed;
}

// Finishes one split, whose KV warps' results are in shared memory. Called by the whole CTA; the
// merge buffer is free again afterwards.
template <class Traits>
__device__ void FinishSplit(const VerifyArgs& args, const SharedStorage<Traits>& smem, int split,
                            int in_group) {
  constexpr int kTile = Traits::kRowTile;
  constexpr int kQuads = Traits::kHeadDim / 4;
  const WorkTile& work_tile = smem.work_tile->plan;
  RowStates<kTile>& rows = *smem.rows;
  const SplitEpilogue epilogue = EpilogueOf(work_tile, split, in_group, args.max_slots);

  if (const int row = threadIdx.x; row < work_tile.num_rows) {
    float top = rows.max[0][row];
#pragma unroll
    for (int s = 1; s < kKvWarps; ++s) top = fmaxf(top, rows.max[s][row]);
    float2 state = {top, 0.0f};
#pragma unroll
    for (int s = 0; s < kKvWarps; ++s) {
      const float weight = StateWeight(rows.max[s][row], top);
      rows.weight[s][row] = weight;
      state.y = __fmaf_rn(rows.sum[s][row], weight, state.y);
    }
    if (epilogue.merge_group) {
      float2 merged = rows.group[row];
      rows.group_weight[row] = MergeSoftmaxState(&merged, state);
      state = merged;
    }
    rows.group[row] = state;
    if (epilogue.merge_total) {
      float2 merged = rows.total[row];
      rows.total_weight[row] = MergeSoftmaxState(&merged, state);
      state = merged;
    }
    if (epilogue.ends_group) rows.total[row] = state;
    if (epilogue.is_output) {
      rows.inverse_sum[row] = InverseSum(state.y);
      WriteLse(args, work_tile, row, state);
    } else if (epilogue.ends_work_tile) {
      args.states[int64_t{work_tile.slot} * kTile + StateOffset<Traits>(row)] = state;
    }
  }
  __syncthreads();

  const auto slot = [&](int64_t index) {
    return reinterpret_cast<float4*>(args.outputs + index * kTile * Traits::kHeadDim);
  };
  float4* group_slot = slot(epilogue.group_slot);
  float4* total_slot = slot(epilogue.total_slot);
  for (int i = threadIdx.x; i < work_tile.num_rows * kQuads; i += Traits::kThreads) {
    const int row = i / kQuads;
    const int channel = i % kQuads * 4;
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < kKvWarps; ++s) {
      const float weight = rows.weight[s][row];
      const float4 part = *reinterpret_cast<const float4*>(
          smem.merge + (s * kTile + row) * Traits::kMergeStride + channel);
      value.x = __fmaf_rn(part.x, weight, value.x);
      value.y = __fmaf_rn(part.y, weight, value.y);
      value.z = __fmaf_rn(part.z, weight, value.z);
      value.w = __fmaf_rn(part.w, weight, value.w);
    }
    // A load from a slot would wait behind all token loads that are in flight.
    constexpr bool kInShared = GroupOutputBytes(Traits::kHeadDim, kTile) > 0;
    if (epilogue.merge_group) {
      const float4 old = kInShared ? smem.group[i] : __ldcg(group_slot + i);
      value = MergeOutput(old, value, rows.group_weight[row]);
    }
    if (!epilogue.ends_group) {
      if constexpr (kInShared) {
        smem.group[i] = value;
      } else {
        __stcg(group_slot + i, value);
      }
      continue;
    }
    if (epilogue.merge_total) {
      value = MergeOutput(__ldcg(total_slot + i), value, rows.total_weight[row]);
    }
    if (epilogue.is_output) {
      WriteOutput<typename Traits::Element>(args, work_tile, row, channel, value,
                                            rows.inverse_sum[row]);
    } else {
      __stcg(total_slot + i, value);
    }
  }
  __syncthreads();
}

}  // namespace nwor::sm80
