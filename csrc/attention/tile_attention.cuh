#pragma once

#include "attention/tile_producer.cuh"

namespace nwor {

// A warpgroup's 64 rows against an item's tokens, one step at a time: scores, online softmax,
// weighted values; Q, K and V are read by the matrix unit where they lie, everything else is in
// registers. Rows are packed: row = q * group + head. Warp w has rows 16w..16w+15, a lane rows lane
// / 4 and + 8.
template <class Traits>
class TileAttention {
 protected:
  using Product = typename Traits::Product;
  static constexpr int kStep = Traits::kStepTokens;
  static constexpr int kFragments = kStep / 8;
  static constexpr int kInnerSteps = Traits::kHeadDim / 16;
  static constexpr int kAtomSteps = Traits::kAtomBytes / 32;
  static constexpr int kOutputs = Traits::kHeadDim / 2;  // per thread
  // The leaves of a group are folded in registers where there are enough.
  static constexpr bool kGroupInRegisters = Traits::kHeadDim <= 128 && Traits::kGroups == 1;
  static constexpr bool kBlockInShared = TileFoldBytes(Traits::kHeadDim, Traits::kGroups) > 0;
  // A row's reference maximum follows its true maximum only when that runs ahead by this much
  // (log2 units): outputs are rescaled rarely, weights stay below 2^8.
  static constexpr float kMaxLead = 8.0f;

 public:
  __device__ TileAttention(const VerifyArgs& args, const SharedItem& item, uint32_t query,
                           float4* folds)
      : args_(args),
        item_(item),
        query_(query),
        folds_(folds + threadIdx.x),
        has_rows_(Row(0) - Row(0) % 16 < item.plan.num_rows) {
    const bool window = args.params.window > 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      position_[half] = window ? RowPosition(args, item.plan, Row(half)) : 0;
    }
  }

  // Brings the item's rows of Q to shared memory; rows beyond keep what was there.
  __device__ void LoadQueries() const {
    using Atom = RowSwizzle<Traits::kAtomBytes>;
    constexpr int kChunks = Traits::kHeadDim / 8;
    constexpr int kAtomChunks = Traits::kAtomBytes / 16;
    const VerifyParams& p = args_.params;
    const PlanItem& item = item_.plan;
    Traits::Meet();  // the queries before are no longer read
#pragma unroll 2
    for (int i = threadIdx.x; i < item.num_rows * kChunks; i += Traits::kThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const int packed = item.row_begin + row;
      const int query_row = args_.group.Quotient(packed);
      const int64_t head = int64_t{item.kv_head - query_row} * args_.group.value + packed;
      const auto* source = static_cast<const typename Traits::Row*>(p.query) +
                           int64_t{item.query_start + query_row} * p.query_strides.row +
                           head * p.query_strides.head + chunk * 8;
      ptx::CopyAsync(query_ + chunk / kAtomChunks * (kTileRows * Traits::kAtomBytes) +
                         Atom::Offset(row, chunk % kAtomChunks),
                     source);
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
    wgmma::FenceShared();
    Traits::Meet();
  }

  // An empty state, for a new leaf.
  __device__ void Clear() {
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out_[i] = 0.0f;
  }

  // One step of tokens. Unless it is plain, tokens from `end` on do not exist, and not every row
  // sees all of them: `first` is its first prefix token or in-flight row.
  __device__ void Step(const TileMemory<Traits>& memory, const RingPlace& stage, bool plain,
                       bool in_flight, int first, int end) {
    bulk::Wait(memory.keys_full(stage.at), stage.parity);
    Scores(memory.keys(stage.at));
    if (has_rows_) {
      const float scale = item_.prefix_scale;
      SoftCap(scale);
      if (!plain) Mask(in_flight, first, end);
      Softmax(item_.cap_outer == 0.0f ? scale : 1.0f);
    }
    bulk::Wait(memory.values_full(stage.at), stage.parity);
    if (in_flight) SetNonFiniteApart(memory.values(stage.at), first, end);
    if (plain || end - first > 16) {
      AddValues<kStep / 16>(memory.values(stage.at));
    } else {
      AddValues<1>(memory.values(stage.at));
    }
    if (threadIdx.x % 32 == 0) bulk::Arrive(memory.stage_empty(stage.at));
  }

  // Sends the leaf's result on, see FinishLeaf: every thread keeps the states of its rows.
  __device__ void Finish(int leaf) {
    const PlanItem& item = item_.plan;
    const LeafFate fate = FateOf(item, leaf, args_.max_slots);
    const int lane = threadIdx.x % 32;
    float2 state[2];
    float2 weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum_[half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      state[half] = {max_[half], total};
    }
    if (fate.fold_group) {
      FoldStates(state, group_state_, weight);
      if constexpr (kGroupInRegisters) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
          const float2 w = weight[i / 2 % 2];
          out_[i] = __fmaf_rn(group_out_[i], w.x, __fmul_rn(out_[i], w.y));
        }
      } else {
        FoldSlot(fate.group_slot, weight);
      }
    }
    Keep(group_state_, state);
    if (!fate.ends_group) {
      if constexpr (kGroupInRegisters) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) group_out_[i] = out_[i];
      } else {
        KeepSlot(fate.group_slot);
      }
      return;
    }
    if (fate.fold_block) {
      FoldStates(state, block_state_, weight);
      if constexpr (kBlockInShared) {
        FoldShared(weight);
      } else {
        FoldSlot(fate.block_slot, weight);
      }
    }
    Keep(block_state_, state);
    if (!fate.ends_block) {
      if constexpr (kBlockInShared) {
        KeepShared();
      } else {
        KeepSlot(fate.block_slot);
      }
      return;
    }
    if (fate.fold_total) {
      FoldStates(state, total_state_, weight);
      FoldSlot(fate.total_slot, weight);
    }
    Keep(total_state_, state);
    if (!fate.is_output) KeepSlot(fate.total_slot);
    if (!fate.ends_item) return;

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      if (row >= item.num_rows) continue;
      if (!fate.is_output) {
        if (lane % 4 == 0) args_.states[int64_t{item.slot} * args_.row_tile + row] = state[half];
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

 protected:
  __device__ static int Row(int half) {
    return threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
  }
  // This thread's first place in a slot: see TilePlace.
  __device__ float4* SlotPlace(int64_t slot) const {
    return reinterpret_cast<float4*>(args_.outputs + slot * args_.row_tile * Traits::kHeadDim) +
           threadIdx.x;
  }
  // Places of a slot from one of a thread to its next.
  __device__ int PlaceStride() const { return args_.row_tile * 2; }
  __device__ typename Traits::Row* OutputRowPointer(int row) const {
    const VerifyParams& p = args_.params;
    const OutputRow at = LocateRow(args_, item_.plan, row);
    return static_cast<typename Traits::Row*>(p.out) + at.row * p.out_strides.row +
           at.head * p.out_strides.head;
  }
  // Folds later states into earlier ones.
  __device__ static void FoldStates(float2 (&later)[2], const float2 (&earlier)[2],
                                    float2 (&weight)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 folded = earlier[half];
      weight[half] = FoldState(&folded, later[half]);
      later[half] = folded;
    }
  }
  __device__ static void Keep(float2 (&kept)[2], const float2 (&state)[2]) {
    kept[0] = state[0];
    kept[1] = state[1];
  }

  __device__ void FoldQuad(int n, float4 old, const float2 (&weight)[2]) {
    const float4 now = {out_[n * 4], out_[n * 4 + 1], out_[n * 4 + 2], out_[n * 4 + 3]};
    const float4 folded = FoldRows(old, now, weight[0], weight[1]);
    out_[n * 4] = folded.x;
    out_[n * 4 + 1] = folded.y;
    out_[n * 4 + 2] = folded.z;
    out_[n * 4 + 3] = folded.w;
  }
  __device__ void FoldShared(const float2 (&weight)[2]) {
#pragma unroll
    for (int n = 0; n < Traits::kHeadDim / 8; ++n)
      FoldQuad(n, folds_[n * Traits::kThreads], weight);
  }
  __device__ void KeepShared() {
#pragma unroll
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
      folds_[n * Traits::kThreads] = {out_[n * 4], out_[n * 4 + 1], out_[n * 4 + 2],
                                      out_[n * 4 + 3]};
    }
  }

  // out_ = old * weight.x + out_ * weight.y, old from a slot: many loads are under way at once.
  __device__ void FoldSlot(int64_t slot, const float2 (&weight)[2]) {
    if (!has_rows_) return;
    constexpr int kAtOnce = Traits::kHeadDim / 16;
    const float4* place = SlotPlace(slot);
#pragma unroll
    for (int first = 0; first < Traits::kHeadDim / 8; first += kAtOnce) {
      float4 old[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) old[n] = __ldcg(place + (first + n) * PlaceStride());
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) FoldQuad(first + n, old[n], weight);
    }
  }
  __device__ void KeepSlot(int64_t slot) const {
    if (!has_rows_) return;
    float4* place = SlotPlace(slot);
#pragma unroll
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
      const float4 four = {out_[n * 4], out_[n * 4 + 1], out_[n * 4 + 2], out_[n * 4 + 3]};
      __stcg(place + n * PlaceStride(), four);
    }
  }

  // An in-flight value that is not finite may reach only those rows that see it, but zero times it
  // is NaN. Such values are rare: they become zeros for the matrix unit and are added by hand.
  __device__ void SetNonFiniteApart(uint32_t tile, int first, int end) {
    constexpr int kChunks = Traits::kHeadDim / 8;
    constexpr int kThreadsPerRow = Traits::kThreads / kStep;
    const int row = threadIdx.x / kThreadsPerRow;
    bool found = false;
    if (row < end - first) {
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
    if (!has_rows_) return;
    uint64_t seen[2];
    SeenTokens(true, first, end, seen);
#pragma unroll 1
    for (int token = 0; token < kStep; ++token) {
      const bool visible[2] = {(seen[0] >> token & 1) != 0, (seen[1] >> token & 1) != 0};
      if (!visible[0] && !visible[1]) continue;
      AddNonFinite(first + token, visible);
    }
  }

  // A weight is positive: it changes neither an infinity nor a NaN.
  __device__ void AddNonFinite(int from, const bool (&visible)[2]) {
    const VerifyParams& p = args_.params;
    const auto* value = static_cast<const typename Traits::Row*>(p.value) +
                        int64_t{item_.plan.query_start + from} * p.value_strides.row +
                        item_.plan.kv_head * p.value_strides.head + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
      const float2 apart = ptx::ToFloat2<Product>(
          ptx::NonFinite<Product>(*reinterpret_cast<const uint32_t*>(value + n * 8)));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        out_[n * 4 + half * 2] += visible[half] ? apart.x : 0.0f;
        out_[n * 4 + half * 2 + 1] += visible[half] ? apart.y : 0.0f;
      }
    }
  }

  __device__ void Scores(uint32_t tile) {
    const uint32_t rows = wgmma::DescriptorLow(query_, 16);
    const uint32_t keys = wgmma::DescriptorLow(tile, 16);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      const int in_atom = k % kAtomSteps * 32;
      const int atom = k / kAtomSteps;
      wgmma::MultiplyShared<Product, kStep>::Run(
          scores_, Descriptor(rows + (atom * kTileRows * Traits::kAtomBytes + in_atom) / 16),
          Descriptor(keys + (atom * Traits::kAtomStride + in_atom) / 16), k > 0);
    }
    wgmma::Commit();
    wgmma::Wait<0>();
    wgmma::Pin(scores_);
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
        weights_[k][i] = ptx::Pack<Product>(scores_[at], scores_[at + 1]);
      }
    }
  }

  // Of the first kBlocks times 16 tokens.
  template <int kBlocks>
  __device__ void IssueValues(uint32_t tile) {
    const uint32_t values = wgmma::DescriptorLow(tile, Traits::kAtomStride);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      wgmma::Multiply<Product, Traits::kHeadDim, true>::Run(
          out_, weights_[k], Descriptor(values + k * Traits::kAtomBytes), true);
    }
    wgmma::Commit();
  }

  template <int kBlocks>
  __device__ void AddValues(uint32_t tile) {
    PackWeights();
    wgmma::Pin(out_);
    IssueValues<kBlocks>(tile);
    wgmma::Wait<0>();
    wgmma::Pin(out_);
  }

  // logit = cap * tanh(score * scale / cap), in log2 units.
  __device__ void SoftCap(float scale) {
    const float outer = item_.cap_outer;
    if (outer == 0.0f) return;
    const float inner = item_.cap_inner * scale;  // exp(2x) of tanh's argument, as a power of two
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      const float power = ptx::Exp2(scores_[i] * inner);
      scores_[i] = outer * (1.0f - __fdividef(2.0f, 1.0f + power));
    }
  }

  // Bits 0 .. count-1; count may lie outside 0..64.
  __device__ static uint64_t LowBits(int count) {
    return count <= 0 ? 0ull : count >= 64 ? ~0ull : (1ull << count) - 1;
  }

  // Masks what a row does not see.
  __device__ void Mask(bool in_flight, int first, int end) {
    uint64_t seen[2];  // bit j: the step's token j
    SeenTokens(in_flight, first, end, seen);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
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

  __device__ void SeenTokens(bool in_flight, int first, int end, uint64_t (&seen)[2]) const {
    const VerifyParams& p = args_.params;
    const PlanItem& item = item_.plan;
    const int last_row = item.request_rows - 1;
    const int lane = threadIdx.x % 32;
    const bool windowed_rows = in_flight && p.window > 0;
    int depth[2] = {0, 0};  // of key rows first + lane and + 32
    if (windowed_rows) {
      depth[0] = RowDepth(p, item, min(first + lane, last_row));
      depth[1] = RowDepth(p, item, min(first + lane + 32, last_row));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      seen[half] = LowBits(end - first);
      if (!in_flight) {
        if (p.window > 0) seen[half] &= ~LowBits(position_[half] - p.window + 1 - first);
        continue;
      }
      const int query_row = min(args_.group.Quotient(item.row_begin + Row(half)), last_row);
      if (p.tree_mask == nullptr) {
        seen[half] &= LowBits(query_row + 1 - first);
      } else {
        // A step's rows lie in one mask word: steps start at multiples of 32 or 64.
        const int64_t at = item.query_start + query_row;
        seen[half] &= p.tree_mask[at * p.mask_words + first / 64] >> (first % 64);
      }
      if (windowed_rows) {
        const int oldest = position_[half] - item.prefix_tokens - p.window + 1;
#pragma unroll 1
        for (int j = 0; j < kStep; ++j) {
          const int other = __shfl_sync(0xffffffffu, j < 32 ? depth[0] : depth[1], j % 32);
          if (other < oldest) seen[half] &= ~(1ull << j);
        }
      }
    }
  }

  // Turns scores into weights and updates the rows' maxima and sums. A masked score is -infinity.
  __device__ void Softmax(float scale) {
    float factor[2];
    if (WeighScores(scale, factor)) Rescale(factor);
  }
  __device__ void Rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out_[i] *= factor[i / 2 % 2];
  }

  // All of it but the outputs: returns whether they have to be multiplied by `factor`.
  __device__ bool WeighScores(float scale, float (&factor)[2]) {
    bool rescale = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tops[2][2];  // even and odd fragments: four chains at once
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float score = scores_[n * 4 + half * 2 + i];
          tops[n % 2][i] = n < 2 ? score : fmaxf(tops[n % 2][i], score);
        }
      }
      float top = fmaxf(fmaxf(tops[0][0], tops[0][1]), fmaxf(tops[1][0], tops[1][1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
      const float before = max_[half];
      const bool ahead = top > before + kMaxLead;
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
  const SharedItem& item_;
  uint32_t query_;
  float4* folds_;
  bool has_rows_;  // whether any of this warp's rows exists
  int position_[2];
  float max_[2];
  float sum_[2];  // this lane's share
  float2 group_state_[2], block_state_[2], total_state_[2];
  float scores_[kStep / 2];
  uint32_t weights_[kStep / 16][4];
  float out_[kOutputs];
  float group_out_[kGroupInRegisters ? kOutputs : 1];
};

}  // namespace nwor
