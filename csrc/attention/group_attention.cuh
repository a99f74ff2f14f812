#pragma once

#include "attention/group_stream.cuh"

namespace nwor {

// A warpgroup's 64 rows against a leaf's tokens, one step at a time: scores, online softmax,
// weighted values; K and V are read by the matrix unit where they lie, everything else is in
// registers. Rows are packed: row = q * group + head. Warp w has rows 16w..16w+15, a lane rows lane
// / 4 and + 8.
template <class Traits>
class GroupAttention {
  using Product = typename Traits::Product;
  static constexpr int kStep = Traits::kStepTokens;
  static constexpr int kFragments = kStep / 8;
  static constexpr int kInnerSteps = Traits::kHeadDim / 16;
  static constexpr int kAtomSteps = Traits::kAtomBytes / 32;
  // A row's reference maximum follows its true maximum only when that runs ahead by this much
  // (log2 units): outputs are rescaled rarely, weights stay below 2^8.
  static constexpr float kMaxLead = 8.0f;

 public:
  __device__ GroupAttention(const VerifyArgs& args, const SharedItem& item,
                            const int32_t* positions)
      : args_(args), item_(item), positions_(positions) {}

  // Reads this thread's part of Q: A fragments of the matrix instruction.
  __device__ void LoadQueries() {
    const VerifyParams& p = args_.params;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = Row(half) < item_.plan.num_rows;
      const OutputRow at = LocateRow(p, item_.plan, valid ? Row(half) : 0);
      const auto* source = static_cast<const typename Traits::Row*>(p.query) +
                           at.row * p.query_strides.row + at.head * p.query_strides.head +
                           lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < kInnerSteps; ++k) {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          uint32_t two = 0;
          if (valid) two = *reinterpret_cast<const uint32_t*>(source + 16 * k + 8 * high);
          if constexpr (Traits::kFloat8) two = ptx::ToHalf2<typename Traits::Row>(two);
          query_[k][2 * high + half] = two;
        }
      }
    }
  }

  // An empty state, for a new leaf.
  __device__ void Clear() {
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) out_[i] = 0.0f;
  }

  // One step of prefix tokens that every row sees. meanwhile() runs while the matrix unit computes
  // the scores.
  template <typename Meanwhile>
  __device__ void ClearStep(uint32_t tile, float scale, Meanwhile meanwhile) {
    Step(tile, scale, meanwhile, [](auto&) {});
  }

  // One step of prefix tokens, of which those at or past `end` do not exist, or of in-flight rows.
  template <typename Meanwhile>
  __device__ void EdgeStep(uint32_t tile, float scale, int first, int end, bool in_flight,
                           Meanwhile meanwhile) {
    Step(tile, scale, meanwhile, [&](auto& scores) {
      if (in_flight) {
        MaskRows(scores, first, end);
      } else {
        MaskPrefix(scores, first, end);
      }
    });
  }

  // Outputs so far were made of quantised values: brings them to the values' own scale.
  __device__ void ScaleOutput(float factor) {
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) out_[i] *= factor;
  }

  // Sends the leaf's result on, see FinishLeaf: every thread keeps the states of its rows.
  __device__ void Finish(int leaf) {
    const PlanItem& item = item_.plan;
    const LeafFate fate = FateOf(item, leaf, args_.max_slots);
    const int lane = threadIdx.x % 32;
    float2 state[2];
    float2 group_weight[2] = {}, total_weight[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum_[half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      state[half] = {max_[half], total};
      if (fate.fold_group) {
        float2 folded = group_state_[half];
        group_weight[half] = FoldState(&folded, state[half]);
        state[half] = folded;
      }
      group_state_[half] = state[half];
      if (fate.fold_total) {
        float2 folded = total_state_[half];
        total_weight[half] = FoldState(&folded, state[half]);
        state[half] = folded;
      }
      if (fate.ends_group) total_state_[half] = state[half];
    }
    if (fate.fold_group) FoldSlot(fate.group_slot, group_weight);
    if (!fate.ends_group) return KeepSlot(fate.group_slot);
    if (fate.fold_total) FoldSlot(fate.total_slot, total_weight);
    if (!fate.is_output) KeepSlot(fate.total_slot);
    if (!fate.ends_item) return;

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      if (row >= item.num_rows) continue;
      if (!fate.is_output) {
        if (lane % 4 == 0) args_.states[int64_t{item.slot} * kGroupRows + row] = state[half];
        continue;
      }
      if (lane % 4 == 0) WriteLse(args_.params, item, row, state[half]);
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
  __device__ static int Row(int half) {
    return threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
  }
  // This thread's first place in a slot.
  __device__ float* SlotPlace(int64_t slot) const {
    return args_.outputs + (slot * kGroupRows + Row(0)) * Traits::kHeadDim + threadIdx.x % 4 * 2;
  }
  __device__ typename Traits::Row* OutputRowPointer(int row) const {
    const VerifyParams& p = args_.params;
    const OutputRow at = LocateRow(p, item_.plan, row);
    return static_cast<typename Traits::Row*>(p.out) + at.row * p.out_strides.row +
           at.head * p.out_strides.head;
  }
  // out_ = old * weight.x + out_ * weight.y, old from a slot: all its loads are under way at once.
  __device__ void FoldSlot(int64_t slot, const float2 (&weight)[2]) {
    constexpr int kAtOnce = Traits::kHeadDim > 128 ? Traits::kHeadDim / 16 : Traits::kHeadDim / 8;
    const float* place = SlotPlace(slot);
#pragma unroll
    for (int first = 0; first < Traits::kHeadDim / 8; first += kAtOnce) {
      float2 old[2][kAtOnce];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          old[half][n] = {0.0f, 0.0f};
          if (Row(half) < item_.plan.num_rows) {
            old[half][n] = __ldcg(reinterpret_cast<const float2*>(
                place + half * 8 * Traits::kHeadDim + (first + n) * 8));
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const int at = (first + n) * 4 + half * 2;
          const float2 w = weight[half];
          out_[at] = __fmaf_rn(old[half][n].x, w.x, __fmul_rn(out_[at], w.y));
          out_[at + 1] = __fmaf_rn(old[half][n].y, w.x, __fmul_rn(out_[at + 1], w.y));
        }
      }
    }
  }
  __device__ void KeepSlot(int64_t slot) const {
    float* place = SlotPlace(slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (Row(half) >= item_.plan.num_rows) continue;
#pragma unroll
      for (int n = 0; n < Traits::kHeadDim / 8; ++n) {
        const int at = n * 4 + half * 2;
        __stcg(reinterpret_cast<float2*>(place + half * 8 * Traits::kHeadDim + n * 8),
               float2{out_[at], out_[at + 1]});
      }
    }
  }

  template <typename Meanwhile, typename ApplyMask>
  __device__ void Step(uint32_t tile, float scale, Meanwhile meanwhile, ApplyMask mask) {
    float scores[kStep / 2];
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      const uint32_t keys = tile + k / kAtomSteps * Traits::kAtomStride + k % kAtomSteps * 32;
      wgmma::Multiply<Product, kStep, false>::Run(
          scores, query_[k],
          wgmma::Descriptor<Traits::kAtomBytes>(keys, 16, 8 * Traits::kAtomBytes), k > 0);
    }
    wgmma::Commit();
    meanwhile();
    wgmma::Wait();
    wgmma::Pin(scores);

    SoftCap(scores, scale);
    mask(scores);
    Softmax(scores, item_.cap_outer == 0.0f ? scale : 1.0f);

    uint32_t weights[kStep / 16][4];
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = k * 8 + i * 2;
        weights[k][i] = ptx::Pack<Product>(scores[at], scores[at + 1]);
      }
    }
    wgmma::Pin(out_);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      const uint32_t values = tile + Traits::kTileBytes + k * 16 * Traits::kAtomBytes;
      wgmma::Multiply<Product, Traits::kHeadDim, true>::Run(
          out_, weights[k],
          wgmma::Descriptor<Traits::kAtomBytes>(values, Traits::kAtomStride,
                                                8 * Traits::kAtomBytes),
          true);
    }
    wgmma::Commit();
    wgmma::Wait();
    wgmma::Pin(out_);
  }

  // logit = cap * tanh(score * scale / cap), in log2 units.
  __device__ void SoftCap(float (&scores)[kStep / 2], float scale) const {
    const float outer = item_.cap_outer;
    if (outer == 0.0f) return;
    const float inner = item_.cap_inner * scale;  // exp(2x) of tanh's argument, as a power of two
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      const float power = ptx::Exp2(scores[i] * inner);
      scores[i] = outer * (1.0f - __fdividef(2.0f, 1.0f + power));
    }
  }

  // Masks what a row does not see: bit j of bits(row) is the step's token j.
  template <typename RowBits>
  __device__ void Mask(float (&scores)[kStep / 2], RowBits bits) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t seen = bits(Row(half)) >> (lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        if (!(seen >> (n * 8) & 1)) scores[n * 4 + half * 2] = -INFINITY;
        if (!(seen >> (n * 8) & 2)) scores[n * 4 + half * 2 + 1] = -INFINITY;
      }
    }
  }

  // Bits 0 .. count-1; count may lie outside 0..64.
  __device__ static uint64_t LowBits(int count) {
    return count <= 0 ? 0ull : count >= 64 ? ~0ull : (1ull << count) - 1;
  }

  __device__ void MaskPrefix(float (&scores)[kStep / 2], int first, int end) const {
    const int window = args_.params.window;
    Mask(scores, [&](int row) {
      const uint64_t past = window > 0 ? LowBits(positions_[row] - window + 1 - first) : 0ull;
      return LowBits(end - first) & ~past;
    });
  }

  __device__ void MaskRows(float (&scores)[kStep / 2], int first, int end) const {
    const VerifyParams& p = args_.params;
    const PlanItem& item = item_.plan;
    const int group = p.num_heads / p.num_kv_heads;
    const int last_row = item.request_rows - 1;
    const int lane = threadIdx.x % 32;
    int depth[2] = {0, 0};  // of key rows first + lane and + 32
    if (p.window > 0) {
      depth[0] = RowDepth(p, item, min(first + lane, last_row));
      depth[1] = RowDepth(p, item, min(first + lane + 32, last_row));
    }
    Mask(scores, [&](int row) {
      const int query_row = min((item.row_begin + row) / group, last_row);
      uint64_t seen = LowBits(query_row + 1 - first);
      if (p.tree_mask != nullptr) {
        // A step's rows lie in one mask word: steps start at multiples of 32 or 64.
        const int64_t at = item.query_start + query_row;
        seen = p.tree_mask[at * p.mask_words + first / 64] >> (first % 64);
      }
      if (p.window > 0) {
        const int oldest = positions_[row] - item.prefix_tokens - p.window + 1;
#pragma unroll 1
        for (int j = 0; j < kStep; ++j) {
          const int other = __shfl_sync(0xffffffffu, j < 32 ? depth[0] : depth[1], j % 32);
          if (other < oldest) seen &= ~(1ull << j);
        }
      }
      return seen & LowBits(end - first);
    });
  }

  // Turns scores into weights and updates the rows' maxima and sums. A masked score is -infinity.
  __device__ void Softmax(float (&scores)[kStep / 2], float scale) {
    float factor[2];
    bool rescale = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        top = fmaxf(top, fmaxf(scores[n * 4 + half * 2], scores[n * 4 + half * 2 + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
      const float before = max_[half];
      const bool ahead = top > before + kMaxLead;
      const float after = ahead ? top : before;
      factor[half] = ahead ? ptx::Exp2(before - after) : 1.0f;
      rescale |= ahead;
      max_[half] = after;
      const float base = after == -INFINITY ? 0.0f : after;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
#pragma unroll
        for (int i = n * 4 + half * 2; i < n * 4 + half * 2 + 2; ++i) {
          scores[i] = ptx::Exp2(fmaf(scores[i], scale, -base));
          total += scores[i];
        }
      }
      sum_[half] = fmaf(sum_[half], factor[half], total);
    }
    if (!__any_sync(0xffffffffu, rescale)) return;
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) out_[i] *= factor[i / 2 % 2];
  }

  const VerifyArgs& args_;
  const SharedItem& item_;
  const int32_t* positions_;
  uint32_t query_[kInnerSteps][4];
  float max_[2];
  float sum_[2];  // this lane's share
  float2 group_state_[2], total_state_[2];
  float out_[Traits::kHeadDim / 2];
};

}  // namespace nwor
