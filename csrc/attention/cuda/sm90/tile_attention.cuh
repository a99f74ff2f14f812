#pragma once

#include "attention/cuda/sm90/tile_memory.cuh"
#include "attention/cuda/sm90/tile_sight.cuh"

namespace nwor {

// A warpgroup's rows, up to 64, against an item's tokens, one step at a time and each step in
// parts: the matrix unit works on the values of the step before and on the scores of the step
// behind while a step's weights are computed. K and V are read by the matrix unit where they lie,
// everything else is in registers; Q is where it costs less. Rows are packed: row = q * group +
// head. Warp w has rows 16w..16w+15, a lane rows lane / 4 and + 8; with one half (TileHalves)
// 8w..8w+7.
//
// StartScores, AwaitScores<0> for the first step; for every step Weigh, StartScores of the next,
// StartValues, AwaitScores<1>; AwaitValues before Finish. One warpgroup also calls FindTops when
// scores are in, while the matrix unit is at the values ahead of them, and AwaitValues before the
// next Weigh; of two each does both in Weigh, as the other one has the matrix unit meanwhile.
template <class Traits>
class TileAttention {
  using Product = typename Traits::Product;
  static constexpr int kStep = Traits::kStepTokens;
  static constexpr int kFragments = kStep / 8;
  static constexpr int kInnerSteps = Traits::kHeadDim / 16;
  static constexpr int kAtomSteps = Traits::kAtomBytes / 32;
  static constexpr int kOutputs = Traits::kHeadDim / 2;  // per thread
  static constexpr bool kQueryInRegisters = Traits::kQueryInRegisters;
  static constexpr int kHalves = Traits::kHalves;
  static constexpr int kQuads = kOutputs * kHalves / 8;  // of them that rows have, in fours
  static constexpr bool kFoldsInShared = TileFolds(Traits::kHeadDim, Traits::kRowTile) > 0;

 public:
  __device__ TileAttention(const VerifyArgs& args, const TileMemory<Traits>& memory, int slot)
      : args_(args),
        memory_(memory),
        item_(*memory.item(slot)),
        folds_(memory.folds + threadIdx.x),
        has_rows_(TileRow<Traits>(0) - TileRow<Traits>(0) % 8 < item_.plan.num_rows) {
    const bool window = args.params.window > 0;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      position_[half] = window ? RowPosition(args, item_.plan, TileRow<Traits>(half)) : 0;
    }
    if constexpr (TileMemory<Traits>::kQueryBytes == 0) {
      LoadQueries();
    } else if constexpr (kQueryInRegisters) {
      ReadQueries();
    }
  }

  // An empty state, for a new leaf.
  __device__ void Clear() {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      max_[half] = -INFINITY;
      sum_[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out_[i] = 0.0f;
  }

  __device__ void StartScores(const RingPlace& stage) {
    bulk::Wait(memory_.keys_full(stage.at), stage.parity);
    const uint32_t keys = wgmma::DescriptorLow(memory_.keys(stage.at), 16);
    const uint32_t rows = wgmma::DescriptorLow(memory_.query, 16);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      const int in_atom = k % kAtomSteps * 32;
      const int atom = k / kAtomSteps;
      const uint64_t b = Descriptor(keys + (atom * Traits::kAtomStride + in_atom) / 16);
      if constexpr (kQueryInRegisters) {
        wgmma::Multiply<Product, kStep, false>::Run(scores_, query_[k], b, k > 0);
      } else {
        wgmma::MultiplyShared<Product, kStep>::Run(
            scores_,
            Descriptor(rows + (atom * Traits::kQueryRows * Traits::kAtomBytes + in_atom) / 16), b,
            k > 0);
      }
    }
    wgmma::Commit();
  }
  // Waits until no more than kPending groups of products are under way.
  template <int kPending>
  __device__ void AwaitScores() {
    wgmma::Wait<kPending>();
    wgmma::Pin(scores_);
  }
  __device__ void AwaitValues() {
    wgmma::Wait<0>();
    wgmma::Pin(out_);
  }

  // The largest score of each row; a branch around it for warps without rows would cost more.
  __device__ void FindTops() {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float tops[2][2];  // even and odd fragments: four chains at once
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float score = scores_[n * 4 + half * 2 + i];
          tops[n % 2][i] = n < 2 ? score : fmaxf(tops[n % 2][i], score);
        }
      }
      top_[half] = fmaxf(fmaxf(tops[0][0], tops[0][1]), fmaxf(tops[1][0], tops[1][1]));
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      float other[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        other[half] = __shfl_xor_sync(0xffffffffu, top_[half], lanes);
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) top_[half] = fmaxf(top_[half], other[half]);
    }
  }

  // Turns scores into weights. The values of the step before are in when it returns.
  __device__ void Weigh() {
    constexpr bool kOneGroup = Traits::kGroups == 1;
    float factor[kHalves];
    bool rescale = false;
    // Of two warpgroups hardly a warp has none: the branch would cost more than it saves.
    if (!kOneGroup || has_rows_) {
      if (Cap() || !kOneGroup) FindTops();
      rescale = WeighScores(factor);
      // Sums of weights are not negative: the branch keeps the assembler from moving the wait to
      // before the weights.
      if (!kOneGroup && sum_[0] + sum_[kHalves - 1] < 0.0f) __nanosleep(1);
    }
    if constexpr (!kOneGroup) AwaitValues();
    if (rescale) Rescale(factor);
    PackWeights();
  }
  // The same where some tokens do not exist, or not every row sees all of them.
  __device__ void WeighEdge(const StepSight& step) {
    Cap();
    Mask(step);
    FindTops();
    float factor[kHalves];
    const bool rescale = WeighScores(factor);
    AwaitValues();
    if (rescale) Rescale(factor);
    PackWeights();
  }

  template <int kBlocks>
  __device__ void StartValues(const RingPlace& stage) {
    bulk::Wait(memory_.values_full(stage.at), stage.parity);
    const uint32_t values = wgmma::DescriptorLow(memory_.values(stage.at), Traits::kAtomStride);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      wgmma::Multiply<Product, Traits::kHeadDim, true>::Run(
          out_, weights_[k], Descriptor(values + k * Traits::kAtomBytes), true);
    }
    wgmma::Commit();
  }

  // Between WeighEdge and StartValues of a step that not every row sees all of: in-flight rows, or
  // the edge of a window. A value that is not finite may reach only those rows that see it, but
  // zero times it is NaN. Such values are rare: they become zeros for the matrix unit and are added
  // by hand.
  __device__ void SetNonFiniteApart(const RingPlace& stage, const StepSight& step) {
    bulk::Wait(memory_.values_full(stage.at), stage.parity);
    const uint32_t tile = memory_.values(stage.at);
    constexpr int kChunks = Traits::kHeadDim / 8;
    constexpr int kThreadsPerRow = Traits::kThreads / kStep;
    const int row = threadIdx.x / kThreadsPerRow;
    bool found = false;
    if (row < step.end - step.first) {
#pragma unroll 1
      for (int i = threadIdx.x % kThreadsPerRow; i < kChunks; i += kThreadsPerRow) {
        const uint32_t address = tile + ChunkOffset<Traits>(row, i);
        const uint4 all = ptx::LoadShared128(address);
        const uint4 apart = ptx::NonFinite<Product>(all);
        if ((apart.x | apart.y | apart.z | apart.w) == 0) continue;
        found = true;
        ptx::StoreShared128(address,
                            {all.x ^ apart.x, all.y ^ apart.y, all.z ^ apart.z, all.w ^ apart.w});
      }
    }
    if (!ptx::NamedBarrierOr(3, Traits::kThreads, found)) return;
    wgmma::FenceShared();
    Traits::Meet();
    if (has_rows_) {
      uint64_t seen[kHalves];
      SeenTokens<Traits>(args_, item_.plan, position_, step, seen);
#pragma unroll 1
      for (int token = 0; token < kStep; ++token) {
        bool visible[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) visible[half] = (seen[half] >> token & 1) != 0;
        if (!visible[0] && !visible[kHalves - 1]) continue;
        AddNonFinite(ValueRow(step, token), visible);
      }
    }
    wgmma::Pin(out_);
  }

  // Sends the leaf's result on, see FinishLeaf: every thread keeps the states of its rows.
  __device__ void Finish(int leaf, int in_group) {
    const PlanItem& item = item_.plan;
    const LeafFate fate = FateOf(item, leaf, in_group, args_.max_slots);
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
    if (fate.fold_group) {
      FoldStates(state, group_state_, weight);
      Fold(0, fate.group_slot, weight);
    }
    if (!fate.ends_group) {
      Keep(group_state_, state);
      return Keep(0, fate.group_slot);
    }
    if (fate.fold_total) {
      FoldStates(state, total_state_, weight);
      Fold(1, fate.total_slot, weight);
    }
    if (!fate.ends_item) {
      Keep(total_state_, state);
      return Keep(1, fate.total_slot);
    }
    if (!fate.is_output) KeepSlot(fate.total_slot);

#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = TileRow<Traits>(half);
      if (row >= item.num_rows) continue;
      if (!fate.is_output) {
        if (lane % 4 == 0) {
          args_.states[int64_t{item.slot} * args_.row_tile + StateOffset<Traits>(row)] =
              state[half];
        }
        continue;
      }
      if (lane % 4 == 0) WriteLse(args_, item, row, state[half]);
      const float inverse = InverseSum(state[half].y);
      auto* out = OutputRowPointer(row) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
        const int at = n * 4 + half * 2;
        *reinterpret_cast<uint32_t*>(out + n * 8) =
            ptx::Pack<typename Traits::Row>(out_[at] * inverse, out_[at + 1] * inverse);
      }
    }
  }

 private:
  // This thread's part of Q: A fragments of the matrix instruction, from shared memory. Rows that
  // do not exist are whatever is there, lower halves that are not used the upper ones once more.
  __device__ void ReadQueries() {
    const int row = threadIdx.x / 32 * (8 * kHalves) + threadIdx.x % (8 * kHalves);
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      const int chunk = 2 * k + static_cast<int>(threadIdx.x % 32 / 16);
      ptx::LoadMatrix4(query_[k], memory_.query + QueryOffset<Traits>(row, chunk));
    }
  }

  // The same from global memory; zeros past the last row.
  __device__ void LoadQueries() {
    const VerifyParams& p = args_.params;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const bool valid = TileRow<Traits>(half) < item_.plan.num_rows;
      const OutputRow at = LocateRow(args_, item_.plan, valid ? TileRow<Traits>(half) : 0);
      const auto* source = static_cast<const typename Traits::Row*>(p.query) +
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

  // This thread's first place in a slot, the others are kSlotStride apart: see CombinedRows.
  static constexpr int kSlotStride = 4;
  __device__ float4* SlotPlace(int64_t slot) const {
    return reinterpret_cast<float4*>(args_.outputs + slot * args_.row_tile * Traits::kHeadDim) +
           threadIdx.x / 4 * (Traits::kHeadDim * kHalves / 4) + threadIdx.x % 4;
  }
  // The same among the folds in shared memory, where a warp's places lie together.
  __device__ int PlaceStride() const { return args_.row_tile * (4 / kHalves); }
  __device__ typename Traits::Row* OutputRowPointer(int row) const {
    const VerifyParams& p = args_.params;
    const OutputRow at = LocateRow(args_, item_.plan, row);
    return static_cast<typename Traits::Row*>(p.out) + at.row * p.out_strides.row +
           at.head * p.out_strides.head;
  }
  // Folds later states into earlier ones.
  __device__ static void FoldStates(float2 (&later)[kHalves], const float2 (&earlier)[kHalves],
                                    float2 (&weight)[kHalves]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float2 folded = earlier[half];
      weight[half] = FoldState(&folded, later[half]);
      later[half] = folded;
    }
  }
  __device__ static void Keep(float2 (&kept)[kHalves], const float2 (&state)[kHalves]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) kept[half] = state[half];
  }

  // Four outputs that are kept together: two channels of two rows, or four of one.
  __device__ static int QuadOutput(int n, int i) {
    return kHalves == 2 ? n * 4 + i : n * 8 + i / 2 * 4 + i % 2;
  }
  __device__ float4 Quad(int n) const {
    return {out_[QuadOutput(n, 0)], out_[QuadOutput(n, 1)], out_[QuadOutput(n, 2)],
            out_[QuadOutput(n, 3)]};
  }
  __device__ void FoldQuad(int n, float4 old, const float2 (&weight)[kHalves]) {
    const float4 folded = FoldRows(old, Quad(n), weight[0], weight[kHalves - 1]);
    out_[QuadOutput(n, 0)] = folded.x;
    out_[QuadOutput(n, 1)] = folded.y;
    out_[QuadOutput(n, 2)] = folded.z;
    out_[QuadOutput(n, 3)] = folded.w;
  }
  __device__ void FoldShared(const float4* old, const float2 (&weight)[kHalves]) {
    if (!has_rows_) return;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) FoldQuad(n, old[n * PlaceStride()], weight);
  }
  __device__ void KeepShared(float4* kept) const {
    if (!has_rows_) return;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) kept[n * PlaceStride()] = Quad(n);
  }

  __device__ int FoldQuads() const { return args_.row_tile * (Traits::kHeadDim / 4); }

  // Folds what Keep has kept, of the group (0) or of the request (1), in shared memory or in a
  // slot. The request's is folded when the group's is no longer needed: from a slot it comes there,
  // behind all tokens that are under way, but in one trip.
  __device__ void Fold(int kept, int64_t slot, const float2 (&weight)[kHalves]) {
    if constexpr (kFoldsInShared) {
      const bool here = kept < TileFolds(Traits::kHeadDim, args_.row_tile);
      if (!here) BringSlot(slot);
      FoldShared(folds_ + (here ? kept : 0) * FoldQuads(), weight);
    } else {
      FoldSlot(slot, weight);
    }
  }
  __device__ void Keep(int kept, int64_t slot) {
    if (kFoldsInShared && kept < TileFolds(Traits::kHeadDim, args_.row_tile)) {
      KeepShared(folds_ + kept * FoldQuads());
    } else {
      KeepSlot(slot);
    }
  }

  // This thread's places of a slot to its first ones in shared memory.
  __device__ void BringSlot(int64_t slot) {
    if (!has_rows_) return;
    const float4* place = SlotPlace(slot);
    const uint32_t to = ptx::SharedAddress(folds_);
    constexpr int kBytes = sizeof(float4);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      ptx::CopyAsync(to + n * PlaceStride() * kBytes, place + n * kSlotStride);
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
  }

  // out_ = old * weight.x + out_ * weight.y, old from a slot: many loads are under way at once.
  __device__ void FoldSlot(int64_t slot, const float2 (&weight)[kHalves]) {
    if (!has_rows_) return;
    constexpr int kAtOnce = 8;
    const float4* place = SlotPlace(slot);
#pragma unroll
    for (int first = 0; first < kQuads; first += kAtOnce) {
      const int count = min(kAtOnce, kQuads - first);
      float4 old[kAtOnce];
#pragma unroll
      for (int n = 0; n < count; ++n) old[n] = __ldcg(place + (first + n) * kSlotStride);
#pragma unroll
      for (int n = 0; n < count; ++n) FoldQuad(first + n, old[n], weight);
    }
  }
  __device__ void KeepSlot(int64_t slot) const {
    if (!has_rows_) return;
    float4* place = SlotPlace(slot);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) __stcg(place + n * kSlotStride, Quad(n));
  }

  // V of a token of the step, in global memory.
  __device__ const char* ValueRow(const StepSight& step, int token) const {
    const VerifyParams& p = args_.params;
    const int from = step.first + token;
    if (step.in_flight) {
      return static_cast<const char*>(p.value) +
             (int64_t{item_.plan.query_start + from} * p.value_strides.row +
              item_.plan.kv_head * p.value_strides.head) *
                 2;
    }
    const TokenMap& map = item_.tokens;
    const int block = from / 16 * 16;
    const BlockOffsets at = LocateBlock(args_, item_, block, ReadId(item_, block, step.end));
    return map.values + at.value + (from - block) * map.value_token;
  }

  // A weight is positive: it changes neither an infinity nor a NaN.
  __device__ void AddNonFinite(const char* row, const bool (&visible)[kHalves]) {
    const auto* value = reinterpret_cast<const typename Traits::Row*>(row) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
      const float2 apart = ptx::ToFloat2<Product>(
          ptx::NonFinite<Product>(*reinterpret_cast<const uint32_t*>(value + n * 8)));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        out_[n * 4 + half * 2] += visible[half] ? apart.x : 0.0f;
        out_[n * 4 + half * 2 + 1] += visible[half] ? apart.y : 0.0f;
      }
    }
  }

  // Of a matrix of tokens or rows.
  __device__ static uint64_t Descriptor(uint32_t low) {
    return wgmma::Descriptor<Traits::kAtomBytes>(low, 8 * Traits::kAtomBytes);
  }

  __device__ void PackWeights() {
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = k * 8 + i * 2;
        weights_[k][i] = i % 2 < kHalves ? ptx::Pack<Product>(scores_[at], scores_[at + 1]) : 0;
      }
    }
  }

  // What makes scores logits in log2 units. With a cap they have become that already.
  __device__ float ScoreScale() const {
    return item_.cap_outer == 0.0f ? item_.prefix_scale : 1.0f;
  }
  // Makes them that. Returns whether there is a cap.
  __device__ bool Cap() {
    if (item_.cap_outer == 0.0f) return false;
    SoftCap(item_.prefix_scale);
    return true;
  }

  // logit = cap * tanh(score * scale / cap), in log2 units.
  __device__ void SoftCap(float scale) {
    const float outer = item_.cap_outer;
    const float inner = item_.cap_inner * scale;  // exp(2x) of tanh's argument, as a power of two
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      if (i / 2 % 2 >= kHalves) continue;
      const float power = ptx::Exp2(scores_[i] * inner);
      scores_[i] = outer * (1.0f - __fdividef(2.0f, 1.0f + power));
    }
  }

  // Masks what a row does not see.
  __device__ void Mask(const StepSight& step) {
    uint64_t seen[kHalves];  // bit j: the step's token j
    SeenTokens<Traits>(args_, item_.plan, position_, step, seen);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint64_t bits = seen[half] >> (lane % 4 * 2);
      const uint32_t words[2] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const uint32_t word = words[n / 4] >> (n % 4 * 8);
        if (!(word & 1)) scores_[n * 4 + half * 2] = -INFINITY;
        if (!(word & 2)) scores_[n * 4 + half * 2 + 1] = -INFINITY;
      }
    }
  }

  __device__ void Rescale(const float (&factor)[kHalves]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      if (i / 2 % 2 < kHalves) out_[i] *= factor[i / 2 % 2];
    }
  }

  // Turns scores into weights and updates the rows' maxima and sums; a masked score is -infinity.
  // Returns whether the outputs have to be multiplied by `factor`. A maximum that lagged behind
  // would save that in most steps, but then the largest weights were rounded too, which are exactly
  // 1 here: errors would be 5 % larger. Only row tiles of two warpgroups feel the difference (4 %),
  // and a row must not depend on its tile.
  __device__ bool WeighScores(float (&factor)[kHalves]) {
    const float scale = ScoreScale();
    bool rescale = false;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float top = top_[half] * scale;
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
  const TileMemory<Traits>& memory_;
  const SharedItem& item_;
  float4* folds_;
  bool has_rows_;  // whether any of this warp's rows exists
  int position_[kHalves];
  float max_[kHalves];
  float sum_[kHalves];  // this lane's share
  float top_[kHalves];  // of the scores at hand
  float2 group_state_[kHalves], total_state_[kHalves];
  uint32_t query_[kQueryInRegisters ? kInnerSteps : 1][4];
  float scores_[kStep / 2];
  uint32_t weights_[kStep / 16][4];
  float out_[kOutputs];
};

}  // namespace nwor
