#pragma once

#include "attention/cuda/ptx.cuh"
#include "attention/cuda/row_depth.cuh"
#include "attention/cuda/sm80/kv_fragments.cuh"
#include "attention/cuda/sm80/traits.cuh"
#include "attention/cuda/swizzle.cuh"

namespace nwor::sm80 {

// Attention of one warp's rows to its tokens, one step at a time: QK, mask, online softmax, PV, all
// in registers. Rows are packed: row = q * group + head.
//
// A lane holds rows lane / 4 and lane / 4 + 8 of each 16-row fragment, as mma.m16n8k16 lays it out.
template <class Traits>
class WarpAttention {
  using MmaElement = typename Traits::MmaElement;
  using RowLayout = RowSwizzle<Traits::kRowBytes>;
  static constexpr int kRowFragments = Traits::kRowFragments;
  static constexpr int kTokenFragments = Traits::kTokenFragments;
  static constexpr int kChannelFragments = Traits::kHeadDim / 8;
  static constexpr int kInnerSteps = Traits::kInnerSteps;
  // A row's reference maximum follows its true maximum only when that is larger by this much (log2
  // units): outputs are rescaled rarely, and weights stay below 2^8. It costs accuracy (see
  // sm90::Consumer), but hardly any where products are computed in half.
  static constexpr float kRescaleThreshold = Traits::kFloat8 ? 8.0f : 0.0f;

 public:
  __device__ WarpAttention(const VerifyArgs& args, const SharedWorkTile& work_tile, uint32_t query,
                           const int32_t* positions, int first_row)
      : args_(args), work_tile_(work_tile), positions_(positions), first_row_(first_row) {
    const int lane = threadIdx.x % 32;
    query_ = query + RowLayout::Offset(first_row + lane % 16, lane / 16);
    if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
      for (int k = 0; k < kInnerSteps; ++k) {
        ptx::LoadMatrix4(fragments_[k], RowLayout::Advance(query_, 2 * k));
      }
    }
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
      max_[m][0] = max_[m][1] = -INFINITY;
      sum_[m][0] = sum_[m][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < kChannelFragments; ++n) {
        out_[m][n][0] = out_[m][n][1] = out_[m][n][2] = out_[m][n][3] = 0.0f;
      }
    }
  }

  // One step of prefix tokens that every row sees.
  __device__ void UnmaskedStep(uint32_t stage) {
    Step<Traits::kFloat8, false>(stage, [](auto&) {});
  }

  // One boundary step of a float8 prefix: tokens from `end` on do not exist, and a window may hide
  // some.
  __device__ void BoundaryStep(uint32_t stage, int first, int end) {
    Step<Traits::kFloat8, false>(stage, [&](auto& scores) { MaskPrefix(scores, first, end); });
  }

  // One masked step of 16-bit tokens: in-flight rows, of which `end` exist, or prefix tokens.
  __device__ void MaskedStep(uint32_t stage, int first, int end, bool in_flight) {
    const bool some_hidden = in_flight || first < VisibleToAll();
    non_finite_ = some_hidden ? FindNonFinite(stage + Traits::kStageBytes / 2, end - first) : 0u;
    Step<false, true>(stage, [&](auto& scores) {
      if (in_flight) {
        MaskInFlight(scores, first, end);
      } else {
        MaskPrefix(scores, first, end);
      }
    });
  }

  // Dequantises the output so far, which was accumulated from quantised values.
  __device__ void ScaleOutput(float factor) {
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kChannelFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] *= factor;
      }
    }
  }

  // Stores maxima, sums and outputs of the warp's rows in shared memory.
  __device__ void Store(float* max, float* sum, float* out) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row_ + m * 16 + half * 8 + lane / 4;
        float total = sum_[m][half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (lane % 4 == 0) {
          max[row] = max_[m][half];
          sum[row] = total;
        }
        float* out_row = out + row * Traits::kMergeStride;
        if constexpr (Traits::kFloat8) {
          // Fragment pairs hold even and odd channels of 16: see ValueFragments.
#pragma unroll
          for (int n = 0; n < kChannelFragments; n += 2) {
            const float4 four = {out_[m][n][half * 2], out_[m][n + 1][half * 2],
                                 out_[m][n][half * 2 + 1], out_[m][n + 1][half * 2 + 1]};
            *reinterpret_cast<float4*>(out_row + n * 8 + lane % 4 * 4) = four;
          }
        } else {
#pragma unroll
          for (int n = 0; n < kChannelFragments; ++n) {
            const float2 two = {out_[m][n][half * 2], out_[m][n][half * 2 + 1]};
            *reinterpret_cast<float2*>(out_row + n * 8 + lane % 4 * 2) = two;
          }
        }
      }
    }
  }

 private:
  template <bool kFloat8, bool kIsMasked, typename ApplyMask>
  __device__ void Step(uint32_t stage, ApplyMask mask) {
    constexpr int kFragments = kFloat8 ? kTokenFragments : Traits::kInFlightStepTokens / 8;
    const float scale = kFloat8 ? work_tile_.prefix_scale : work_tile_.in_flight_scale;
    float scores[kRowFragments][kFragments][4];
    Scores<kFragments, kFloat8>(scores, stage);
    ValueFragments<Traits, kFragments, kFloat8> values(stage + Traits::kStageBytes / 2);
    SoftCap(scores, scale);
    mask(scores);
    uint32_t visible[kRowFragments][2];
    if constexpr (kIsMasked) CollectVisible(scores, visible);
    Softmax(scores, work_tile_.cap_outer == 0.0f ? scale : 1.0f);
    if (kIsMasked && non_finite_ != 0) AddNonFinite(visible, stage + Traits::kStageBytes / 2);
    AddValues<kIsMasked>(scores, values);
  }

  // In masked steps (in-flight rows, or the boundary of a window) a value that is not finite may
  // reach only the rows that see it, but zero times it is NaN. Such values are rare: they are left
  // out of the matrix product and added separately. Bit j of the result: token j of the step, of
  // which `count` exist, has one.
  __device__ static uint32_t FindNonFinite(uint32_t values, int count) {
    const int row = threadIdx.x % 32;
    bool found = false;
#pragma unroll 1
    for (int i = 0; i < RowLayout::kChunks && row < min(count, Traits::kInFlightStepTokens); ++i) {
      const uint4 v = ptx::LoadShared128(values + RowLayout::Offset(row, i));
      found |= (NonFinite(v.x) | NonFinite(v.y) | NonFinite(v.z) | NonFinite(v.w)) != 0;
    }
    return __ballot_sync(0xffffffffu, found);
  }

  // The non-finite ones of two values, as mma would take them.
  __device__ static uint32_t NonFinite(uint32_t pair) {
    if constexpr (Traits::kFloat8) pair = ptx::ToHalf2<typename Traits::Element>(pair);
    return ptx::NonFinite<MmaElement>(pair);
  }

  // Which of this lane's scores are not masked: bit 2n + i is token 8n + 2 * (lane % 4) + i.
  template <int kFragments>
  __device__ static void CollectVisible(const float (&scores)[kRowFragments][kFragments][4],
                                        uint32_t (&visible)[kRowFragments][2]) {
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visible[m][half] = 0;
#pragma unroll
        for (int i = 0; i < 2 * kFragments; ++i) {
          const bool shown = !(scores[m][i / 2][half * 2 + i % 2] == -INFINITY);
          visible[m][half] |= static_cast<uint32_t>(shown) << i;
        }
      }
    }
  }

  // A weight is positive: it changes neither an infinity nor a NaN.
  __device__ void AddNonFinite(const uint32_t (&visible)[kRowFragments][2], uint32_t values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll 1
        for (uint32_t rest = non_finite_; rest != 0; rest &= rest - 1) {
          const int token = __ffs(static_cast<int>(rest)) - 1;
          const uint32_t bits =
              __shfl_sync(0xffffffffu, visible[m][half], (lane & ~3) | token % 8 / 2);
          if ((bits >> (token / 8 * 2 + token % 2) & 1) == 0) continue;
#pragma unroll
          for (int n = 0; n < kChannelFragments; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              // As in Store.
              const int channel = Traits::kFloat8 ? n / 2 * 16 + lane % 4 * 4 + 2 * i + n % 2
                                                  : n * 8 + lane % 4 * 2 + i;
              const uint32_t pair = ptx::LoadShared32(
                  values + RowLayout::Offset(token, channel / 8) + channel % 8 / 2 * 4);
              const float2 two = ptx::ToFloat2<MmaElement>(NonFinite(pair));
              out_[m][n][half * 2 + i] += channel % 2 == 0 ? two.x : two.y;
            }
          }
        }
      }
    }
  }

  template <int kFragments, bool kFloat8>
  __device__ void Scores(float (&scores)[kRowFragments][kFragments][4], uint32_t keys) const {
    KeyFragments<Traits, kFragments, kFloat8> fragments(keys);
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        scores[m][n][0] = scores[m][n][1] = scores[m][n][2] = scores[m][n][3] = 0.0f;
      }
    }
    uint32_t a[2][kRowFragments][4];
    LoadQueries(a[0], 0);
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      if (k + 1 < kInnerSteps) LoadQueries(a[(k + 1) % 2], k + 1);
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const uint32_t b0 = fragments.Get(k, n, 0);
        const uint32_t b1 = fragments.Get(k, n, 1);
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
          ptx::Mma<MmaElement>(scores[m][n], a[k % 2][m], b0, b1);
        }
      }
      if (k + kLookAhead < kInnerSteps) fragments.Load(k + kLookAhead);
    }
  }

  __device__ void LoadQueries(uint32_t (&a)[kRowFragments][4], int k) const {
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
      if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = fragments_[k][i];
      } else {
        ptx::LoadMatrix4(a[m], RowLayout::Advance(query_, 2 * k) + m * 16 * Traits::kRowBytes);
      }
    }
  }

  // logit = cap * tanh(score * scale / cap), in log2 units.
  template <int kFragments>
  __device__ void SoftCap(float (&scores)[kRowFragments][kFragments][4], float scale) const {
    const float outer = work_tile_.cap_outer;
    if (outer == 0.0f) return;
    const float inner =
        work_tile_.cap_inner * scale;  // exp(2x) of tanh's argument, as a power of two
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float power = ptx::Exp2(scores[m][n][i] * inner);
          scores[m][n][i] = outer * (1.0f - __fdividef(2.0f, 1.0f + power));
        }
      }
    }
  }

  // Masks the tokens that a row does not see: bit j of bits(row) is the step's token j.
  template <int kFragments, typename RowBits>
  __device__ void Mask(float (&scores)[kRowFragments][kFragments][4], RowBits bits) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t visible = bits(first_row_ + m * 16 + half * 8 + lane / 4) >> (lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
          if (!(visible >> (n * 8) & 1)) scores[m][n][half * 2] = -INFINITY;
          if (!(visible >> (n * 8) & 2)) scores[m][n][half * 2 + 1] = -INFINITY;
        }
      }
    }
  }

  // Bits 0 .. count-1; count may lie outside 0..32.
  __device__ static uint32_t LowBits(int count) {
    return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1;
  }

  // The first prefix token that lies in every row's window. Positions of rows: prefix_tokens ..
  // prefix_tokens + request_rows - 1, at most.
  __device__ int VisibleToAll() const {
    const int window = args_.params.window;
    return window > 0 ? work_tile_.plan.prefix_tokens + work_tile_.plan.request_rows - window : 0;
  }

  // Masks only at the boundaries of what the rows see.
  template <int kFragments>
  __device__ void MaskPrefix(float (&scores)[kRowFragments][kFragments][4], int first,
                             int end) const {
    const int window = args_.params.window;
    if (first + kFragments * 8 <= end && first >= VisibleToAll()) return;
    Mask(scores, [&](int row) {
      const uint32_t past = window > 0 ? LowBits(positions_[row] - window + 1 - first) : 0u;
      return LowBits(end - first) & ~past;
    });
  }

  template <int kFragments>
  __device__ void MaskInFlight(float (&scores)[kRowFragments][kFragments][4], int first,
                               int end) const {
    const VerifyParams& p = args_.params;
    const int group = p.num_heads / p.num_kv_heads;
    const int last_row = work_tile_.plan.request_rows - 1;
    const int key_row = min(first + static_cast<int>(threadIdx.x % 32), last_row);
    const int depth = p.window > 0 ? RowDepth(p, work_tile_.plan, key_row) : 0;
    Mask(scores, [&](int row) {
      const int query_row = min((work_tile_.plan.row_begin + row) / group, last_row);
      uint32_t visible = LowBits(query_row + 1 - first);
      if (p.tree_mask != nullptr) {
        // The rows of a step share a mask word: steps start at multiples of 16 or 32.
        const int64_t at = work_tile_.plan.query_start + query_row;
        visible =
            static_cast<uint32_t>(p.tree_mask[at * p.mask_words + first / 64] >> (first % 64));
      }
      if (p.window > 0) {
        const int oldest = positions_[row] - work_tile_.plan.prefix_tokens - p.window + 1;
#pragma unroll 1
        for (int j = 0; j < kFragments * 8; ++j) {
          if (__shfl_sync(0xffffffffu, depth, j) < oldest) visible &= ~(1u << j);
        }
      }
      return visible & LowBits(end - first);
    });
  }

  // Turns scores into weights and updates the rows' maxima and sums. A masked score is -infinity.
  template <int kFragments>
  __device__ void Softmax(float (&scores)[kRowFragments][kFragments][4], float scale) {
    float factor[kRowFragments][2];
    bool rescale = false;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
          top = fmaxf(top, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
        const float before = max_[m][half];
        const bool ahead = top > before + kRescaleThreshold;
        const float after = ahead ? top : before;
        factor[m][half] = ahead ? ptx::Exp2(before - after) : 1.0f;
        rescale |= ahead;
        max_[m][half] = after;
        const float base = after == -INFINITY ? 0.0f : after;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i) {
            const float weight = ptx::Exp2(fmaf(scores[m][n][i], scale, -base));
            scores[m][n][i] = weight;
            total += weight;
          }
        }
        sum_[m][half] = fmaf(sum_[m][half], factor[m][half], total);
      }
    }
    if (!__any_sync(0xffffffffu, rescale)) return;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kChannelFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] *= factor[m][i / 2];
      }
    }
  }

  template <bool kIsMasked, int kFragments, bool kFloat8>
  __device__ void AddValues(const float (&weights)[kRowFragments][kFragments][4],
                            ValueFragments<Traits, kFragments, kFloat8>& values) {
    using Values = ValueFragments<Traits, kFragments, kFloat8>;
    uint32_t a[kRowFragments][kFragments / 2][4];
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int k = 0; k < kFragments / 2; ++k) {
        const auto& low = weights[m][2 * k];
        const auto& high = weights[m][2 * k + 1];
        a[m][k][0] = ptx::Pack<MmaElement>(low[0], low[1]);
        a[m][k][1] = ptx::Pack<MmaElement>(low[2], low[3]);
        a[m][k][2] = ptx::Pack<MmaElement>(high[0], high[1]);
        a[m][k][3] = ptx::Pack<MmaElement>(high[2], high[3]);
      }
    }
#pragma unroll
    for (int unit = 0; unit < Values::kUnits; ++unit) {
      const int n = unit / Values::kLoads * 2;
#pragma unroll
      for (int step = 0; step < Values::kPerLoad; ++step) {
        const int k = unit % Values::kLoads * Values::kPerLoad + step;
        uint32_t b[2][2];
        values.Get(b, unit, step);
        if (kIsMasked && non_finite_ != 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            b[0][half] ^= ptx::NonFinite<MmaElement>(b[0][half]);
            b[1][half] ^= ptx::NonFinite<MmaElement>(b[1][half]);
          }
        }
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
          ptx::Mma<MmaElement>(out_[m][n], a[m][k], b[0][0], b[0][1]);
          ptx::Mma<MmaElement>(out_[m][n + 1], a[m][k], b[1][0], b[1][1]);
        }
      }
      if (unit + kLookAhead < Values::kUnits) values.Load(unit + kLookAhead);
    }
  }

  const VerifyArgs& args_;
  const SharedWorkTile& work_tile_;
  const int32_t* positions_;
  int first_row_;
  uint32_t query_;  // address of this lane's first part of Q
  uint32_t fragments_[Traits::kQueryInRegisters ? kInnerSteps : 1][4];
  uint32_t non_finite_ = 0;  // tokens of a MaskedStep with values that are not finite
  float max_[kRowFragments][2];
  float sum_[kRowFragments][2];  // this lane's share
  float out_[kRowFragments][kChannelFragments][4];
};

}  // namespace nwor::sm80
