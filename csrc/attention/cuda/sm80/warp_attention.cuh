#pragma once

#include "attention/cuda/sm80/token_fragments.cuh"
#include "attention/cuda/verify_traits.cuh"

namespace nwor {

// One warp's rows against the tokens of its stream, one step at a time: scores, online softmax,
// weighted values, all in registers. Rows are packed: row = q * group + head.
//
// A lane holds rows lane / 4 and lane / 4 + 8 of each 16-row fragment, as mma.m16n8k16 lays it out.
template <class Traits>
class WarpAttention {
  using Product = typename Traits::Product;
  using RowLayout = RowSwizzle<Traits::kRowBytes>;
  static constexpr int kRowFragments = Traits::kRowFragments;
  static constexpr int kTokenFragments = Traits::kTokenFragments;
  static constexpr int kChannelFragments = Traits::kHeadDim / 8;
  static constexpr int kInnerSteps = Traits::kInnerSteps;
  // A row's reference maximum follows its true maximum only when that runs ahead by this much
  // (log2 units): outputs are rescaled rarely, weights stay below 2^8. It costs accuracy (see
  // TileAttention), hardly any where products are computed in half.
  static constexpr float kMaxLead = Traits::kFloat8 ? 8.0f : 0.0f;

 public:
  __device__ WarpAttention(const VerifyArgs& args, const SharedItem& item, uint32_t query,
                           const int32_t* positions, int first_row)
      : args_(args), item_(item), positions_(positions), first_row_(first_row) {
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
  template <bool kFloat8>
  __device__ void ClearStep(uint32_t stage) {
    Step<kFloat8, false>(stage, [](auto&) {});
  }

  // One step of prefix tokens, of which those at or past `end` do not exist.
  template <bool kFloat8>
  __device__ void EdgeStep(uint32_t stage, int first, int end) {
    Step<kFloat8, false>(stage, [&](auto& scores) { MaskPrefix(scores, first, end); });
  }

  // One step of 16-bit tokens: in-flight rows, of which `end` exist, or prefix tokens.
  __device__ void RowStep(uint32_t stage, int first, int end, bool in_flight) {
    const bool some_hidden = in_flight || first < SeenByAll();
    apart_ = some_hidden ? FindNonFinite(stage + Traits::kStageBytes / 2, end - first) : 0u;
    Step<false, true>(stage, [&](auto& scores) {
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
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kChannelFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] *= factor;
      }
    }
  }

  // Leaves maxima, sums and outputs of the warp's rows in shared memory.
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
  template <bool kFloat8, bool kRows, typename ApplyMask>
  __device__ void Step(uint32_t stage, ApplyMask mask) {
    constexpr int kFragments = kFloat8 ? kTokenFragments : Traits::kTailTokens / 8;
    const float scale = kFloat8 ? item_.prefix_scale : item_.tail_scale;
    float scores[kRowFragments][kFragments][4];
    Scores<kFragments, kFloat8>(scores, stage);
    ValueFragments<Traits, kFragments, kFloat8> values(stage + Traits::kStageBytes / 2);
    SoftCap(scores, scale);
    mask(scores);
    uint32_t seen[kRowFragments][2];
    if constexpr (kRows) CollectSeen(scores, seen);
    Softmax(scores, item_.cap_outer == 0.0f ? scale : 1.0f);
    if (kRows && apart_ != 0) AddNonFinite(seen, stage + Traits::kStageBytes / 2);
    AddValues<kRows>(scores, values);
  }

  // Where not every row sees every token, of in-flight rows and at the edge of a window, a value
  // that is not finite may reach only those rows that see it, but zero times it is NaN. Such values
  // are rare: they are left out of the matrix product and added by hand. Bit j of the result: token
  // j of the step, of which `count` exist, has one.
  __device__ static uint32_t FindNonFinite(uint32_t values, int count) {
    const int row = threadIdx.x % 32;
    bool found = false;
#pragma unroll 1
    for (int i = 0; i < RowLayout::kChunks && row < min(count, Traits::kTailTokens); ++i) {
      const uint4 v = ptx::LoadShared128(values + RowLayout::Offset(row, i));
      found |= (NonFinite(v.x) | NonFinite(v.y) | NonFinite(v.z) | NonFinite(v.w)) != 0;
    }
    return __ballot_sync(0xffffffffu, found);
  }

  // Of two values, as the matrix unit would take them.
  __device__ static uint32_t NonFinite(uint32_t pair) {
    if constexpr (Traits::kFloat8) pair = ptx::ToHalf2<typename Traits::Row>(pair);
    return ptx::NonFinite<Product>(pair);
  }

  // Which of this lane's scores are not masked: bit 2n + i is token 8n + 2 * (lane % 4) + i.
  template <int kFragments>
  __device__ static void CollectSeen(const float (&scores)[kRowFragments][kFragments][4],
                                     uint32_t (&seen)[kRowFragments][2]) {
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        seen[m][half] = 0;
#pragma unroll
        for (int i = 0; i < 2 * kFragments; ++i) {
          const bool shown = !(scores[m][i / 2][half * 2 + i % 2] == -INFINITY);
          seen[m][half] |= static_cast<uint32_t>(shown) << i;
        }
      }
    }
  }

  // A weight is positive: it changes neither an infinity nor a NaN.
  __device__ void AddNonFinite(const uint32_t (&seen)[kRowFragments][2], uint32_t values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll 1
        for (uint32_t rest = apart_; rest != 0; rest &= rest - 1) {
          const int token = __ffs(static_cast<int>(rest)) - 1;
          const uint32_t bits =
              __shfl_sync(0xffffffffu, seen[m][half], (lane & ~3) | token % 8 / 2);
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
              const float2 two = ptx::ToFloat2<Product>(NonFinite(pair));
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
          ptx::Mma<Product>(scores[m][n], a[k % 2][m], b0, b1);
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
    const float outer = item_.cap_outer;
    if (outer == 0.0f) return;
    const float inner = item_.cap_inner * scale;  // exp(2x) of tanh's argument, as a power of two
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
  // Masks what a row does not see: bit j of bits(row) is the step's token j.
  template <int kFragments, typename RowBits>
  __device__ void Mask(float (&scores)[kRowFragments][kFragments][4], RowBits bits) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t seen = bits(first_row_ + m * 16 + half * 8 + lane / 4) >> (lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
          if (!(seen >> (n * 8) & 1)) scores[m][n][half * 2] = -INFINITY;
          if (!(seen >> (n * 8) & 2)) scores[m][n][half * 2 + 1] = -INFINITY;
        }
      }
    }
  }

  // Bits 0 .. count-1; count may lie outside 0..32.
  __device__ static uint32_t LowBits(int count) {
    return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1;
  }

  // From this prefix token on every row's window has begun: rows stand at prefix_tokens and beyond,
  // at most request_rows - 1 further.
  __device__ int SeenByAll() const {
    const int window = args_.params.window;
    return window > 0 ? item_.plan.prefix_tokens + item_.plan.request_rows - window : 0;
  }

  // Tested only at the ends of what the rows see.
  template <int kFragments>
  __device__ void MaskPrefix(float (&scores)[kRowFragments][kFragments][4], int first,
                             int end) const {
    const int window = args_.params.window;
    if (first + kFragments * 8 <= end && first >= SeenByAll()) return;
    Mask(scores, [&](int row) {
      const uint32_t past = window > 0 ? LowBits(positions_[row] - window + 1 - first) : 0u;
      return LowBits(end - first) & ~past;
    });
  }

  template <int kFragments>
  __device__ void MaskRows(float (&scores)[kRowFragments][kFragments][4], int first,
                           int end) const {
    const VerifyParams& p = args_.params;
    const int group = p.num_heads / p.num_kv_heads;
    const int last_row = item_.plan.request_rows - 1;
    const int key_row = min(first + static_cast<int>(threadIdx.x % 32), last_row);
    const int depth = p.window > 0 ? RowDepth(p, item_.plan, key_row) : 0;
    Mask(scores, [&](int row) {
      const int query_row = min((item_.plan.row_begin + row) / group, last_row);
      uint32_t seen = LowBits(query_row + 1 - first);
      if (p.tree_mask != nullptr) {
        // A step's rows lie in one mask word: steps start at multiples of 16 or 32.
        const int64_t at = item_.plan.query_start + query_row;
        seen = static_cast<uint32_t>(p.tree_mask[at * p.mask_words + first / 64] >> (first % 64));
      }
      if (p.window > 0) {
        const int oldest = positions_[row] - item_.plan.prefix_tokens - p.window + 1;
#pragma unroll 1
        for (int j = 0; j < kFragments * 8; ++j) {
          if (__shfl_sync(0xffffffffu, depth, j) < oldest) seen &= ~(1u << j);
        }
      }
      return seen & LowBits(end - first);
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
        const bool ahead = top > before + kMaxLead;
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

  template <bool kRows, int kFragments, bool kFloat8>
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
        a[m][k][0] = ptx::Pack<Product>(low[0], low[1]);
        a[m][k][1] = ptx::Pack<Product>(low[2], low[3]);
        a[m][k][2] = ptx::Pack<Product>(high[0], high[1]);
        a[m][k][3] = ptx::Pack<Product>(high[2], high[3]);
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
        if (kRows && apart_ != 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            b[0][half] ^= ptx::NonFinite<Product>(b[0][half]);
            b[1][half] ^= ptx::NonFinite<Product>(b[1][half]);
          }
        }
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
          ptx::Mma<Product>(out_[m][n], a[m][k], b[0][0], b[0][1]);
          ptx::Mma<Product>(out_[m][n + 1], a[m][k], b[1][0], b[1][1]);
        }
      }
      if (unit + kLookAhead < Values::kUnits) values.Load(unit + kLookAhead);
    }
  }

  const VerifyArgs& args_;
  const SharedItem& item_;
  const int32_t* positions_;
  int first_row_;
  uint32_t query_;  // where this lane finds its first part of Q
  uint32_t fragments_[Traits::kQueryInRegisters ? kInnerSteps : 1][4];
  uint32_t apart_ = 0;  // tokens of a RowStep with values that are not finite
  float max_[kRowFragments][2];
  float sum_[kRowFragments][2];  // this lane's share
  float out_[kRowFragments][kChannelFragments][4];
};

}  // namespace nwor
