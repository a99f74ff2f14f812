#pragma once

#include "attention/cuda/merge.cuh"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/sm90/mask.cuh"
#include "attention/cuda/sm90/shared_storage.cuh"
#include "attention/cuda/sm90/traits.cuh"
#include "attention/cuda/sm90/warpgroup.cuh"
#include "attention/cuda/work_tile.cuh"

namespace nwor::sm90 {

// A consumer warpgroup: attention of up to 64 rows to the tokens of a work tile, one step at a
// time. Each step has parts that overlap: while a step's softmax runs, the tensor core computes PV
// of the previous step and QK of the next one. wgmma reads K and V from shared memory; Q is in
// registers or in shared memory, everything else is in registers. Rows are packed: row = q * group
// + head. Warp w has rows 16w..16w+15, a lane rows lane / 4 and lane / 4 + 8; with one half
// (RowHalves) 8w..8w+7.
//
// Order of calls: StartQk and WaitQk<0> for the first step; for every step Softmax, StartQk of the
// next step, StartPv, WaitQk<1>; WaitPv before FinishSplit. With one warpgroup, also ReduceMax when
// the scores are there, while the tensor core computes the previous PV, and WaitPv before the next
// Softmax. With two warpgroups Softmax does both: the other warpgroup has the tensor core
// meanwhile.
template <class Traits>
class Consumer {
  using MmaElement = typename Traits::MmaElement;
  static constexpr int kStep = Traits::kStepTokens;
  static constexpr int kFragments = kStep / 8;
  static constexpr int kInnerSteps = Traits::kHeadDim / 16;
  static constexpr int kAtomSteps = Traits::kAtomBytes / 32;
  static constexpr int kOutputs = Traits::kHeadDim / 2;  // per thread
  static constexpr bool kQueryInRegisters = Traits::kQueryInRegisters;
  static constexpr int kHalves = Traits::kHalves;
  static constexpr int kQuads = kOutputs * kHalves / 8;  // of outputs, in the halves that are used
  static constexpr bool kRunningInShared = RunningOutputs(Traits::kHeadDim, Traits::kRowTile) > 0;

 public:
  __device__ Consumer(const VerifyArgs& args, const SharedStorage<Traits>& smem, int slot)
      : args_(args),
        smem_(smem),
        work_tile_(*smem.work_tile(slot)),
        running_(smem.running_outputs + threadIdx.x),
        has_rows_(TileRow<Traits>(0) - TileRow<Traits>(0) % 8 < work_tile_.plan.num_rows) {
    const bool window = args.params.window > 0;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      position_[half] = window ? RowPosition(args, work_tile_.plan, TileRow<Traits>(half)) : 0;
    }
    if constexpr (SharedStorage<Traits>::kQueryBytes == 0) {
      LoadQueries();
    } else if constexpr (kQueryInRegisters) {
      ReadQueries();
    }
  }

  // Resets the state, for a new split.
  __device__ void Clear() {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      max_[half] = -INFINITY;
      sum_[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out_[i] = 0.0f;
  }

  __device__ void StartQk(const PipelineState& stage) {
    mbarrier::Wait(smem_.keys_full(stage.index), stage.phase);
    const uint32_t keys = wgmma::DescriptorLow(smem_.keys(stage.index), 16);
    const uint32_t rows = wgmma::DescriptorLow(smem_.query, 16);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      const int in_atom = k % kAtomSteps * 32;
      const int atom = k / kAtomSteps;
      const uint64_t b = Descriptor(keys + (atom * Traits::kAtomStride + in_atom) / 16);
      if constexpr (kQueryInRegisters) {
        wgmma::Multiply<MmaElement, kStep, false>::Run(scores_, query_[k], b, k > 0);
      } else {
        wgmma::MultiplyShared<MmaElement, kStep>::Run(
            scores_,
            Descriptor(rows + (atom * Traits::kQueryRows * Traits::kAtomBytes + in_atom) / 16), b,
            k > 0);
      }
    }
    wgmma::Commit();
  }
  // Waits until at most kPending groups of products are in flight.
  template <int kPending>
  __device__ void WaitQk() {
    wgmma::Wait<kPending>();
    wgmma::Pin(scores_);
  }
  __device__ void WaitPv() {
    wgmma::Wait<0>();
    wgmma::Pin(out_);
  }

  // Reduces the scores to each row's maximum. A branch around it for warps without rows would cost
  // more.
  __device__ void ReduceMax() {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float maxima[2][2];  // even and odd fragments: four independent chains
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float score = scores_[n * 4 + half * 2 + i];
          maxima[n % 2][i] = n < 2 ? score : fmaxf(maxima[n % 2][i], score);
        }
      }
      step_max_[half] = fmaxf(fmaxf(maxima[0][0], maxima[0][1]), fmaxf(maxima[1][0], maxima[1][1]));
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      float other[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        other[half] = __shfl_xor_sync(0xffffffffu, step_max_[half], lanes);
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        step_max_[half] = fmaxf(step_max_[half], other[half]);
    }
  }

  // Turns scores into weights. The PV product of the previous step is done when it returns.
  __device__ void Softmax() {
    constexpr bool kOneWarpgroup = Traits::kWarpgroups == 1;
    float factor[kHalves];
    bool rescale = false;
    // With two warpgroups nearly every warp has rows: the branch would cost more than it saves.
    if (!kOneWarpgroup || has_rows_) {
      if (ApplySoftcap(work_tile_.prefix_scale) || !kOneWarpgroup) ReduceMax();
      rescale = OnlineSoftmax(factor, work_tile_.prefix_scale);
      // Never true, as sums of weights are not negative. The branch keeps ptxas from moving the
      // wait before the weights.
      if (!kOneWarpgroup && sum_[0] + sum_[kHalves - 1] < 0.0f) __nanosleep(1);
    }
    if constexpr (!kOneWarpgroup) WaitPv();
    if (rescale) RescaleOutput(factor);
    PackWeights();
  }
  // Softmax of a boundary step: some tokens do not exist, or some rows do not see them.
  __device__ void MaskedSoftmax(const StepMask& step) {
    const float scale =
        Traits::kFloat8 && step.in_flight ? work_tile_.in_flight_scale : work_tile_.prefix_scale;
    ApplySoftcap(scale);
    Mask(step);
    ReduceMax();
    float factor[kHalves];
    const bool rescale = OnlineSoftmax(factor, scale);
    WaitPv();
    if (rescale) RescaleOutput(factor);
    PackWeights();
  }

  template <int kBlocks>
  __device__ void StartPv(const PipelineState& stage) {
    mbarrier::Wait(smem_.values_full(stage.index), stage.phase);
    const uint32_t values = wgmma::DescriptorLow(smem_.values(stage.index), Traits::kAtomStride);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      wgmma::Multiply<MmaElement, Traits::kHeadDim, true>::Run(
          out_, weights_[k], Descriptor(values + k * Traits::kAtomBytes), true);
    }
    wgmma::Commit();
  }

  // Changes the unit of the outputs. Over float8 pages they are sums of quantised values from the
  // first prefix step of a split to its end, and true ones before and after.
  __device__ void QuantiseOutput() { ScaleOutput(1.0f / ValueScale()); }
  __device__ void DequantiseOutput() { ScaleOutput(ValueScale()); }

  // Called between MaskedSoftmax and StartPv in steps that some rows do not see completely:
  // in-flight rows, or the boundary of a window. A value that is not finite may reach only the rows
  // that see it, but zero times it is NaN. Such values are rare: they become zeros for wgmma and
  // are added separately.
  __device__ void SeparateNonFinite(const PipelineState& stage, const StepMask& step) {
    mbarrier::Wait(smem_.values_full(stage.index), stage.phase);
    const uint32_t tile = smem_.values(stage.index);
    constexpr int kChunks = Traits::kHeadDim / 8;
    constexpr int kThreadsPerRow = Traits::kThreads / kStep;
    const int row = threadIdx.x / kThreadsPerRow;
    bool found = false;
    if (row < step.end - step.first) {
#pragma unroll 1
      for (int i = threadIdx.x % kThreadsPerRow; i < kChunks; i += kThreadsPerRow) {
        const uint32_t address = tile + ChunkOffset<Traits>(row, i);
        const uint4 all = ptx::LoadShared128(address);
        const uint4 non_finite = ptx::NonFinite<MmaElement>(all);
        if ((non_finite.x | non_finite.y | non_finite.z | non_finite.w) == 0) continue;
        found = true;
        ptx::StoreShared128(address, {all.x ^ non_finite.x, all.y ^ non_finite.y,
                                      all.z ^ non_finite.z, all.w ^ non_finite.w});
      }
    }
    if (!ptx::NamedBarrierOr(3, Traits::kThreads, found)) return;
    wgmma::FenceShared();
    Traits::Sync();
    if (has_rows_) {
      uint64_t tokens[kHalves];
      VisibleTokens<Traits>(args_, work_tile_.plan, position_, step, tokens);
#pragma unroll 1
      for (int token = 0; token < kStep; ++token) {
        bool visible[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) visible[half] = (tokens[half] >> token & 1) != 0;
        if (!visible[0] && !visible[kHalves - 1]) continue;
        AddNonFinite(ValueRow(step, token), step.in_flight, visible);
      }
    }
    wgmma::Pin(out_);
  }

  // Merges the finished split and writes the output or a partial result: see SplitEpilogue. Every
  // thread keeps the states of its rows.
  __device__ void FinishSplit(int split, int in_group) {
    const WorkTile& work_tile = work_tile_.plan;
    const SplitEpilogue epilogue = EpilogueOf(work_tile, split, in_group, args_.max_slots);
    const int lane = threadIdx.x % 32;
    float2 state[kHalves];
    float2 weight[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float total = sum_[half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      state[half] = {max_[half], total};
    }
    if (epilogue.merge_group) {
      MergeStates(state, group_state_, weight);
      MergeRunning(0, epilogue.group_slot, weight);
    }
    if (!epilogue.ends_group) {
      Copy(group_state_, state);
      return StoreRunning(0, epilogue.group_slot);
    }
    if (epilogue.merge_total) {
      MergeStates(state, total_state_, weight);
      MergeRunning(1, epilogue.total_slot, weight);
    }
    if (!epilogue.ends_work_tile) {
      Copy(total_state_, state);
      return StoreRunning(1, epilogue.total_slot);
    }
    if (!epilogue.is_output) StoreSlot(epilogue.total_slot);

#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = TileRow<Traits>(half);
      if (row >= work_tile.num_rows) continue;
      if (!epilogue.is_output) {
        if (lane % 4 == 0) {
          args_.states[int64_t{work_tile.slot} * args_.row_tile + StateOffset<Traits>(row)] =
              state[half];
        }
        continue;
      }
      if (lane % 4 == 0) WriteLse(args_, work_tile, row, state[half]);
      const float inverse = InverseSum(state[half].y);
      auto* out = OutputRowPointer(row) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
        const int at = n * 4 + half * 2;
        *reinterpret_cast<uint32_t*>(out + n * 8) =
            ptx::Pack<typename Traits::Element>(out_[at] * inverse, out_[at + 1] * inverse);
      }
    }
  }

 private:
  // Reads this thread's A fragments of Q from shared memory. Rows that do not exist have any
  // contents; lower halves that are not used repeat the upper ones.
  __device__ void ReadQueries() {
    const int row = threadIdx.x / 32 * (8 * kHalves) + threadIdx.x % (8 * kHalves);
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      const int chunk = 2 * k + static_cast<int>(threadIdx.x % 32 / 16);
      ptx::LoadMatrix4(query_[k], smem_.query + QueryOffset<Traits>(row, chunk));
      if constexpr (Traits::kFloat8) {
#pragma unroll
        for (uint32_t& pair : query_[k]) pair = ptx::ToHalf2<typename Traits::Element>(pair);
      }
    }
  }

  // The same from global memory; zeros past the last row.
  __device__ void LoadQueries() {
    const VerifyParams& p = args_.params;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const bool valid = TileRow<Traits>(half) < work_tile_.plan.num_rows;
      const OutputRow at = LocateRow(args_, work_tile_.plan, valid ? TileRow<Traits>(half) : 0);
      const auto* source = static_cast<const typename Traits::Element*>(p.query) +
                           at.row * p.query_strides.row + at.head * p.query_strides.head +
                           threadIdx.x % 4 * 2;
#pragma unroll
      for (int k = 0; k < kInnerSteps; ++k) {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          uint32_t two = 0;
          if (valid) two = *reinterpret_cast<const uint32_t*>(source + 16 * k + 8 * high);
          query_[k][2 * high + half] = two;
        }
      }
    }
  }

  // This thread's first quad in a slot; its others are kSlotStride apart. See CombinedRows.
  static constexpr int kSlotStride = 4;
  __device__ float4* SlotPointer(int64_t slot) const {
    return reinterpret_cast<float4*>(args_.outputs + slot * args_.row_tile * Traits::kHeadDim) +
           threadIdx.x / 4 * (Traits::kHeadDim * kHalves / 4) + threadIdx.x % 4;
  }
  // The stride of this thread's quads in shared memory, where those of a warp lie together.
  __device__ int SharedStride() const { return args_.row_tile * (4 / kHalves); }
  __device__ typename Traits::Element* OutputRowPointer(int row) const {
    const VerifyParams& p = args_.params;
    const OutputRow at = LocateRow(args_, work_tile_.plan, row);
    return static_cast<typename Traits::Element*>(p.out) + at.row * p.out_strides.row +
           at.head * p.out_strides.head;
  }
  // Merges earlier states into later ones. Returns the weights (old, new).
  __device__ static void MergeStates(float2 (&later)[kHalves], const float2 (&earlier)[kHalves],
                                     float2 (&weight)[kHalves]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float2 merged = earlier[half];
      weight[half] = MergeSoftmaxState(&merged, later[half]);
      later[half] = merged;
    }
  }
  __device__ static void Copy(float2 (&to)[kHalves], const float2 (&from)[kHalves]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) to[half] = from[half];
  }

  // Four outputs that are stored together: two channels of two rows, or four of one.
  __device__ static int QuadOutput(int n, int i) {
    return kHalves == 2 ? n * 4 + i : n * 8 + i / 2 * 4 + i % 2;
  }
  __device__ float4 Quad(int n) const {
    return {out_[QuadOutput(n, 0)], out_[QuadOutput(n, 1)], out_[QuadOutput(n, 2)],
            out_[QuadOutput(n, 3)]};
  }
  __device__ void MergeQuad(int n, float4 old, const float2 (&weight)[kHalves]) {
    const float4 merged = MergeOutput(old, Quad(n), weight[0], weight[kHalves - 1]);
    out_[QuadOutput(n, 0)] = merged.x;
    out_[QuadOutput(n, 1)] = merged.y;
    out_[QuadOutput(n, 2)] = merged.z;
    out_[QuadOutput(n, 3)] = merged.w;
  }
  __device__ void MergeShared(const float4* old, const float2 (&weight)[kHalves]) {
    if (!has_rows_) return;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) MergeQuad(n, old[n * SharedStride()], weight);
  }
  __device__ void StoreShared(float4* to) const {
    if (!has_rows_) return;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) to[n * SharedStride()] = Quad(n);
  }

  __device__ int RunningQuads() const { return args_.row_tile * (Traits::kHeadDim / 4); }

  // Merges a running output that StoreRunning has stored, of the group (0) or of the request (1),
  // in shared memory or in a slot. The request's is merged when the group's is no longer needed, so
  // a slot is first copied there: it waits behind the token loads in flight, but only once.
  __device__ void MergeRunning(int which, int64_t slot, const float2 (&weight)[kHalves]) {
    if constexpr (kRunningInShared) {
      const bool here = which < RunningOutputs(Traits::kHeadDim, args_.row_tile);
      if (!here) CopySlotToShared(slot);
      MergeShared(running_ + (here ? which : 0) * RunningQuads(), weight);
    } else {
      MergeSlot(slot, weight);
    }
  }
  __device__ void StoreRunning(int which, int64_t slot) {
    if (kRunningInShared && which < RunningOutputs(Traits::kHeadDim, args_.row_tile)) {
      StoreShared(running_ + which * RunningQuads());
    } else {
      StoreSlot(slot);
    }
  }

  // Copies this thread's quads of a slot to its first quads in shared memory.
  __device__ void CopySlotToShared(int64_t slot) {
    if (!has_rows_) return;
    const float4* quads = SlotPointer(slot);
    const uint32_t to = ptx::SharedAddress(running_);
    constexpr int kBytes = sizeof(float4);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      ptx::CopyAsync(to + n * SharedStride() * kBytes, quads + n * kSlotStride);
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
  }

  // out_ = old * weight.x + out_ * weight.y, with old from a slot: many loads are in flight at
  // once.
  __device__ void MergeSlot(int64_t slot, const float2 (&weight)[kHalves]) {
    if (!has_rows_) return;
    constexpr int kAtOnce = 8;
    const float4* quads = SlotPointer(slot);
#pragma unroll
    for (int first = 0; first < kQuads; first += kAtOnce) {
      const int count = min(kAtOnce, kQuads - first);
      float4 old[kAtOnce];
#pragma unroll
      for (int n = 0; n < count; ++n) old[n] = __ldcg(quads + (first + n) * kSlotStride);
#pragma unroll
      for (int n = 0; n < count; ++n) MergeQuad(first + n, old[n], weight);
    }
  }
  __device__ void StoreSlot(int64_t slot) const {
    if (!has_rows_) return;
    float4* quads = SlotPointer(slot);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) __stcg(quads + n * kSlotStride, Quad(n));
  }

  // V of a token of the step, in global memory.
  __device__ const char* ValueRow(const StepMask& step, int token) const {
    const VerifyParams& p = args_.params;
    const int from = step.first + token;
    if (step.in_flight) {
      return static_cast<const char*>(p.value) +
             (int64_t{work_tile_.plan.query_start + from} * p.value_strides.row +
              work_tile_.plan.kv_head * p.value_strides.head) *
                 2;
    }
    const PagedKv& kv = work_tile_.kv;
    const int block = from / 16 * 16;
    const KvOffsets at =
        LookUpKv(args_, work_tile_, block, ReadPageId(work_tile_, block, step.end));
    return kv.values + at.value + (from - block) * kv.value_token;
  }

  // Two channels of such a row, as wgmma takes them.
  __device__ uint32_t ValuePair(const char* row, bool in_flight, int channel) const {
    if constexpr (Traits::kFloat8) {
      if (!in_flight && work_tile_.plan.source != TokenSource::kCompact) {
        return ptx::Float8ToHalf2(*reinterpret_cast<const uint16_t*>(row + channel));
      }
    }
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(row + channel * 2);
    if constexpr (Traits::kFloat8) return ptx::ToHalf2<typename Traits::Element>(pair);
    return pair;
  }

  // A weight is positive: it changes neither an infinity nor a NaN.
  __device__ void AddNonFinite(const char* row, bool in_flight, const bool (&visible)[kHalves]) {
#pragma unroll
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
      const int channel = n * 8 + static_cast<int>(threadIdx.x % 4) * 2;
      const float2 non_finite =
          ptx::ToFloat2<MmaElement>(ptx::NonFinite<MmaElement>(ValuePair(row, in_flight, channel)));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        out_[n * 4 + half * 2] += visible[half] ? non_finite.x : 0.0f;
        out_[n * 4 + half * 2 + 1] += visible[half] ? non_finite.y : 0.0f;
      }
    }
  }

  // The descriptor of a tile of tokens or rows.
  __device__ static uint64_t Descriptor(uint32_t low) {
    return wgmma::Descriptor<Traits::kAtomBytes>(low, 8 * Traits::kAtomBytes);
  }

  __device__ void PackWeights() {
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = k * 8 + i * 2;
        weights_[k][i] = i % 2 < kHalves ? ptx::Pack<MmaElement>(scores_[at], scores_[at + 1]) : 0;
      }
    }
  }

  // Applies the softcap to the scores. Returns whether there is one. `scale` makes logits in log2
  // units of them.
  __device__ bool ApplySoftcap(float scale) {
    if (work_tile_.cap_outer == 0.0f) return false;
    Softcap(scale);
    return true;
  }

  // logit = cap * tanh(score * scale / cap), in log2 units.
  __device__ void Softcap(float scale) {
    const float outer = work_tile_.cap_outer;
    const float inner =
        work_tile_.cap_inner * scale;  // exp(2x) of tanh's argument, as a power of two
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      if (i / 2 % 2 >= kHalves) continue;
      const float power = ptx::Exp2(scores_[i] * inner);
      scores_[i] = outer * (1.0f - __fdividef(2.0f, 1.0f + power));
    }
  }

  // Masks the tokens that a row does not see.
  __device__ void Mask(const StepMask& step) {
    uint64_t visible[kHalves];  // bit j: the step's token j
    VisibleTokens<Traits>(args_, work_tile_.plan, position_, step, visible);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint64_t bits = visible[half] >> (lane % 4 * 2);
      const uint32_t words[2] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const uint32_t word = words[n / 4] >> (n % 4 * 8);
        if (!(word & 1)) scores_[n * 4 + half * 2] = -INFINITY;
        if (!(word & 2)) scores_[n * 4 + half * 2 + 1] = -INFINITY;
      }
    }
  }

  // The scale of quantised values. One so small that its inverse is not a number counts as 2^-100:
  // such values leave no trace beside any that is.
  __device__ float ValueScale() const {
    const float scale = work_tile_.value_scale;
    return fabsf(scale) < 0x1p-100f ? 0x1p-100f : scale;
  }
  __device__ void ScaleOutput(float factor) {
    if (factor == 1.0f) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      if (i / 2 % 2 < kHalves) out_[i] *= factor;
    }
  }

  __device__ void RescaleOutput(const float (&factor)[kHalves]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      if (i / 2 % 2 < kHalves) out_[i] *= factor[i / 2 % 2];
    }
  }

  // Turns scores into weights and updates the rows' maxima and sums; a masked score is -infinity.
  // Returns whether the outputs must be multiplied by `factor`. A maximum that lags behind would
  // save that in most steps, but the largest weights, which are exactly 1 here, would be rounded
  // too: errors were 5 % larger. Only row tiles of two warpgroups gain from it (4 %), and a row's
  // result must not depend on its tile.
  __device__ bool OnlineSoftmax(float (&factor)[kHalves], float score_scale) {
    const float scale = work_tile_.cap_outer == 0.0f ? score_scale : 1.0f;  // a softcap scales, too
    bool rescale = false;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float top = step_max_[half] * scale;
      const float before = max_[half];
      const bool ahead = top > before;
      const float after = ahead ? top : before;
      factor[half] = ahead ? ptx::Exp2(before - after) : 1.0f;
      rescale |= ahead;
      max_[half] = after;
      const float base = after == -INFINITY ? 0.0f : after;
      float total[2];
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores_[n * 4 + half * 2 + i];
          score = ptx::Exp2(fmaf(score, scale, -base));
          total[i] = n == 0 ? score : total[i] + score;
        }
      }
      sum_[half] = fmaf(sum_[half], factor[half], total[0] + total[1]);
    }
    return __any_sync(0xffffffffu, rescale);
  }

  const VerifyArgs& args_;
  const SharedStorage<Traits>& smem_;
  const SharedWorkTile& work_tile_;
  float4* running_;
  bool has_rows_;  // whether any of this warp's rows exists
  int position_[kHalves];
  float max_[kHalves];
  float sum_[kHalves];       // this lane's part
  float step_max_[kHalves];  // of the current scores
  float2 group_state_[kHalves], total_state_[kHalves];
  uint32_t query_[kQueryInRegisters ? kInnerSteps : 1][4];
  float scores_[kStep / 2];
  uint32_t weights_[kStep / 16][4];
  float out_[kOutputs];
};

}  // namespace nwor::sm90
