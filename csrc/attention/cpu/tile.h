#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "attention/cpu/task.h"
#include "attention/params.h"
#include "attention/simd.h"

// What one tile of four packed rows does with a block of tokens: scores, softmax, weighted sums.
// Compiled once per instruction set, see kernel.h.
//
// Scores of a tile lie token-major, [token][4 rows], so that softmax works lane by row and the sums
// broadcast straight from them.

namespace nwor::NWOR_SIMD_NAMESPACE {

using cpu::kTileRows;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Register tiles: tokens per score tile, registers of channels per sum tile.
#if NWOR_SIMD_LEVEL == NWOR_SIMD_AVX2
constexpr int kTileTokens = 2;
constexpr int kTileVecs = 2;
#else
constexpr int kTileTokens = 4;
constexpr int kTileVecs = 4;
#endif

// ---- scores -----------------------------------------------------------------------------------

// scores[t][r] = queries[r] . keys[t] for kRows of a tile's rows; other rows get 0. A tile's
// queries lie interleaved, [D / kLanes][4 rows][kLanes]: one stream, and no two rows in one cache
// bank.
template <int kRows, int kTokens, typename T>
NWOR_SIMD_INLINE void ScoreTile(const float* queries, const T* const* keys, int head_dim,
                                float* scores) {
  Vec sums[kTokens][kTileRows] = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    Vec q[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      q[r] = Load(queries + d * kTileRows + r * kLanes);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const Vec k = LoadAs(keys[t] + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[t][r] = Fma(q[r], k, sums[t][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    StoreQuad(scores + t * kTileRows, SumLanes(sums[t][0], sums[t][1], sums[t][2], sums[t][3]));
  }
}

template <int kRows, typename T>
void ScoreBlock(const float* queries, const T* const* keys, int count, int head_dim,
                float* scores) {
  for (int t = 0; t < count; t += kTileTokens) {
    ScoreTile<kRows, kTileTokens>(queries, keys + t, head_dim, scores + t * kTileRows);
  }
}

// ---- softmax ----------------------------------------------------------------------------------

struct Softmax {
  float scale = 0.0f;    // of q.k to log2 units, without softcap
  float softcap = 0.0f;  // in log2 units, 0: none
  float inverse_cap = 0.0f;

  explicit Softmax(const VerifyParams& params) {
    scale = params.scale * kLog2E;
    if (params.softcap > 0.0f) {
      softcap = params.softcap * kLog2E;
      inverse_cap = params.scale / params.softcap;
    }
  }

  // Turns a tile's scores into weights, updates its maximum and sum, and says in `decay` by what
  // the sums so far have to be multiplied. Scores past `count` are padding; row_bits, if given,
  // points to the tokens each row sees.
  void Apply(float* scores, int count, int padded, const uint64_t* const* row_bits, float* max,
             float* sum, float* decay) const {
    Vec largest = Broadcast(kMinusInfinity);
    for (int i = 0; i < padded * kTileRows; i += kLanes) {
      const Vec raw = Load(scores + i);
      const Vec logit = softcap > 0.0f ? Tanh(raw * inverse_cap) * softcap : raw * scale;
      Store(scores + i, logit);
      largest = MaxOf(largest, logit);
    }
    if (row_bits != nullptr || count != padded) {
      Hide(scores, count, padded, row_bits);
      largest = Broadcast(kMinusInfinity);
      for (int i = 0; i < padded * kTileRows; i += kLanes) {
        largest = MaxOf(largest, Load(scores + i));
      }
    }
    const Quad old_max = LoadQuad(max);
    const Quad new_max = MaxOf(
        old_max,
        FoldRows(
            largest, [](Quad a, Quad b) __attribute__((always_inline)) { return MaxOf(a, b); }));
    // Rows that have seen nothing yet have no maximum to subtract.
    const Quad base = new_max == kMinusInfinity ? Quad{} : new_max;
    const Vec bases = RepeatRows(base);
    Vec total = {};
    for (int i = 0; i < padded * kTileRows; i += kLanes) {
      const Vec weight = Exp2(Load(scores + i) - bases);
      Store(scores + i, weight);
      total += weight;
    }
    const Quad kept = FirstQuad(Exp2(RepeatRows(old_max - base)));
    StoreQuad(max, new_max);
    StoreQuad(decay, kept);
    StoreQuad(sum,
              LoadQuad(sum) * kept +
                  FoldRows(
                      total, [](Quad a, Quad b) __attribute__((always_inline)) { return a + b; }));
  }

 private:
  NWOR_SIMD_INLINE Quad FirstQuad(Vec v) {
    Quad q;
    std::memcpy(&q, &v, sizeof(q));
    return q;
  }

  static void Hide(float* scores, int count, int padded, const uint64_t* const* row_bits) {
    for (int i = count * kTileRows; i < padded * kTileRows; ++i) {
      scores[i] = kMinusInfinity;
    }
    for (int r = 0; row_bits != nullptr && r < kTileRows; ++r) {
      const uint64_t bits = *row_bits[r];
      for (int t = 0; t < count; ++t) {
        if ((bits >> t & 1) == 0) {
          scores[t * kTileRows + r] = kMinusInfinity;
        }
      }
    }
  }
};

// ---- weighted sums ----------------------------------------------------------------------------

// acc[r][d ..] = acc[r][d ..] * decay[r] + sum over tokens of weights[t][r] * values[t][d ..].
template <int kRows, int kVecs, typename T>
NWOR_SIMD_INLINE void SumTile(const float* weights, const T* const* values, int count, int d,
                              const float* decay, int head_dim, float* acc) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) {
      sums[r][c] = Load(acc + r * head_dim + d + c * kLanes) * decay[r];
    }
  }
  for (int t = 0; t < count; ++t) {
    const T* value = values[t] + d;
    const float* weight = weights + t * kTileRows;
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) {
      const Vec v = LoadAs(value + c * kLanes);
      sums[0][c] = FmaRow<0>(weight, v, sums[0][c]);
      if constexpr (kRows > 1) sums[1][c] = FmaRow<1>(weight, v, sums[1][c]);
      if constexpr (kRows > 2) sums[2][c] = FmaRow<2>(weight, v, sums[2][c]);
      if constexpr (kRows > 3) sums[3][c] = FmaRow<3>(weight, v, sums[3][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) {
      Store(acc + r * head_dim + d + c * kLanes, sums[r][c]);
    }
  }
}

template <int kRows, typename T>
void SumBlock(const float* weights, const T* const* values, int count, const float* decay,
              int head_dim, float* acc) {
  constexpr int kVecs = kRows <= 2 ? 2 * kTileVecs : kTileVecs;
  int d = 0;
  for (; d + kVecs * kLanes <= head_dim; d += kVecs * kLanes) {
    SumTile<kRows, kVecs>(weights, values, count, d, decay, head_dim, acc);
  }
  for (; d < head_dim; d += kLanes) {
    SumTile<kRows, 1>(weights, values, count, d, decay, head_dim, acc);
  }
}

}  // namespace nwor::NWOR_SIMD_NAMESPACE
