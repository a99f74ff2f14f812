#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "attention/cpu/kernels.h"
#include "attention/params.h"
#include "base/simd/simd.h"

// One tile of four packed rows and a block of tokens: scores (QK), softmax, weighted sums (PV).
// Compiled once per instruction set, see kernel.h.
//
// Scores of a tile lie token-major, [token][4 rows]: softmax works with one row per lane, and the
// sums broadcast weights directly from memory.

namespace nwor::NWOR_SIMD_NAMESPACE {

using cpu::kTileRows;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Register tiles of four rows: tokens per score tile, and vector registers of channels per sum
// tile. Fewer rows leave room for up to twice as many: more independent multiply-adds. Three rows
// of eight tokens would be 24 sums besides queries and keys, and some of 32 registers would be
// spilled.
#if NWOR_SIMD_LEVEL == NWOR_SIMD_AVX2
constexpr int kTileTokens = 2;
constexpr int kTileTokensOfThree = 4;
constexpr int kTileVecs = 2;
#else
constexpr int kTileTokens = 4;
constexpr int kTileTokensOfThree = 6;
constexpr int kTileVecs = 4;
#endif
constexpr int TileTokens(int rows) {
  return rows == kTileRows ? kTileTokens : rows == 3 ? kTileTokensOfThree : 2 * kTileTokens;
}
// Tokens of a score tile whose sums over lanes are computed four tokens at a time.
constexpr int TokensSummedTogether(int tokens) {
  return NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512 ? tokens : 0;
}
constexpr int TileVecs(int rows) { return rows < kTileRows ? 2 * kTileVecs : kTileVecs; }

// Rows that will be read next. They are prefetched into L2 a line or two at a time between the
// multiply-adds: a burst of prefetches would fill the miss queues and delay the loads after it.
struct Prefetch {
  const std::byte* const* rows = nullptr;  // one for each token of the current block; null: none
  int element_bytes = 0;

  Prefetch From(int token) const {
    return {rows == nullptr ? nullptr : rows + token, element_bytes};
  }
};

constexpr int kLineBytes = 64;
constexpr int kPrefetchTokens = 8;  // distance in tokens of prefetches into L1 in SumTile

// ---- scores -----------------------------------------------------------------------------------

// scores[t][r] = queries[r] . keys[t] for kRows of a tile's rows; other rows get 0. A tile's
// queries are interleaved, [D / kLanes][4 rows][kLanes]: one stream of memory, and no bank
// conflicts between rows.
//
// kPrefetch: prefetches lines of `prefetch` into L2, and those of the next score tile, which begins
// at `next`, into L1.
template <int kRows, int kTokens, bool kPrefetch, typename T>
NWOR_SIMD_INLINE void ScoreTile(const float* queries, const T* const* keys, const T* const* next,
                                int head_dim, const Prefetch& prefetch, float* scores) {
  Vec sums[kTokens][kTileRows] = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    if (kPrefetch && d * prefetch.element_bytes % kLineBytes == 0) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        __builtin_prefetch(prefetch.rows[t] + d * prefetch.element_bytes, 0, 2);
      }
    }
    if (kPrefetch && d * static_cast<int>(sizeof(T)) % kLineBytes == 0) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        __builtin_prefetch(next[t] + d, 0, 3);
      }
    }
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
  constexpr int kTogether = TokensSummedTogether(kTokens);
#if NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
#pragma GCC unroll 8
  for (int t = 0; t + 4 <= kTokens; t += 4) {
    Store(scores + t * kTileRows, SumLanesOfFour(sums + t));
  }
  if constexpr (kTokens % 4 != 0) {
    // The same order of additions: a score must not depend on its position.
    constexpr int kFirst = kTokens / 4 * 4, kRest = kTokens % 4;
    Vec rest[4][kTileRows] = {};
    std::memcpy(rest, sums + kFirst, kRest * sizeof(rest[0]));
    const Vec summed = SumLanesOfFour(rest);
    std::memcpy(scores + kFirst * kTileRows, &summed, kRest * kTileRows * sizeof(float));
  }
#endif
#pragma GCC unroll 8
  for (int t = kTogether; t < kTokens; ++t) {
    StoreQuad(scores + t * kTileRows, SumLanes(sums[t][0], sums[t][1], sums[t][2], sums[t][3]));
  }
}

// REQUIRES: count is a multiple of 4.
template <int kRows, bool kPrefetch, typename T>
void ScoreTiles(const float* queries, const T* const* keys, int count, int head_dim,
                const Prefetch& prefetch, float* scores) {
  constexpr int kTokens = TileTokens(kRows);
  int t = 0;
  for (; t + kTokens <= count; t += kTokens) {
    const T* const* next = keys + (t + 2 * kTokens <= count ? t + kTokens : t);
    ScoreTile<kRows, kTokens, kPrefetch>(queries, keys + t, next, head_dim, prefetch.From(t),
                                         scores + t * kTileRows);
  }
  for (; t + kTileTokens <= count; t += kTileTokens) {
    ScoreTile<kRows, kTileTokens, false>(queries, keys + t, keys + t, head_dim, prefetch,
                                         scores + t * kTileRows);
  }
  if constexpr (kTokens % kTileTokens != 0) {
    static_assert(kTokens % kTileTokens == 2 && kTileTokens == 4);
    if (t < count) {
      ScoreTile<kRows, 2, false>(queries, keys + t, keys + t, head_dim, prefetch,
                                 scores + t * kTileRows);
    }
  }
}

template <int kRows, typename T>
void ScoreBlock(const float* queries, const T* const* keys, int count, int head_dim,
                const Prefetch& prefetch, float* scores) {
  if (prefetch.rows != nullptr) {
    ScoreTiles<kRows, true>(queries, keys, count, head_dim, prefetch, scores);
  } else {
    ScoreTiles<kRows, false>(queries, keys, count, head_dim, prefetch, scores);
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

  // Turns a tile's scores into weights, updates its maximum and sum, and sets `decay` to the factor
  // of the sums so far. Scores from `count` on are padding. row_bits, if not null, points to the
  // tokens that each row sees.
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
      Mask(scores, count, padded, row_bits);
      largest = Broadcast(kMinusInfinity);
      for (int i = 0; i < padded * kTileRows; i += kLanes) {
        largest = MaxOf(largest, Load(scores + i));
      }
    }
    const Quad old_max = LoadQuad(max);
    const Quad new_max = MaxOf(
        old_max,
        ReduceRows(
            largest, [](Quad a, Quad b) __attribute__((always_inline)) { return MaxOf(a, b); }));
    // Rows that have seen no token yet have no maximum to subtract.
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
                  ReduceRows(
                      total, [](Quad a, Quad b) __attribute__((always_inline)) { return a + b; }));
  }

 private:
  NWOR_SIMD_INLINE Quad FirstQuad(Vec v) {
    Quad q;
    std::memcpy(&q, &v, sizeof(q));
    return q;
  }

  static void Mask(float* scores, int count, int padded, const uint64_t* const* row_bits) {
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
template <int kRows, int kVecs, bool kPrefetch, typename T>
NWOR_SIMD_INLINE void SumTile(const float* weights, const T* const* values, int count, int d,
                              const float* decay, int head_dim, const Prefetch& prefetch,
                              float* acc) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) {
      sums[r][c] = Load(acc + r * head_dim + d + c * kLanes) * decay[r];
    }
  }
  // The lines of a prefetched row that begin in these channels.
  const int prefetch_end = (d + kVecs * kLanes) * prefetch.element_bytes;
  const int prefetch_begin =
      (d * prefetch.element_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  for (int t = 0; t < count; ++t) {
    if (kPrefetch) {
      for (int byte = prefetch_begin; byte < prefetch_end; byte += kLineBytes) {
        __builtin_prefetch(prefetch.rows[t] + byte, 0, 2);
      }
      __builtin_prefetch(values[t + kPrefetchTokens < count ? t + kPrefetchTokens : t] + d, 0, 3);
    }
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

template <int kRows, bool kPrefetch, typename T>
void SumTiles(const float* weights, const T* const* values, int count, const float* decay,
              int head_dim, const Prefetch& prefetch, float* acc) {
  constexpr int kVecs = TileVecs(kRows);
  int d = 0;
  for (; d + kVecs * kLanes <= head_dim; d += kVecs * kLanes) {
    SumTile<kRows, kVecs, kPrefetch>(weights, values, count, d, decay, head_dim, prefetch, acc);
  }
  for (; d < head_dim; d += kLanes) {
    SumTile<kRows, 1, kPrefetch>(weights, values, count, d, decay, head_dim, prefetch, acc);
  }
}

template <int kRows, typename T>
void SumBlock(const float* weights, const T* const* values, int count, const float* decay,
              int head_dim, const Prefetch& prefetch, float* acc) {
  if (prefetch.rows != nullptr) {
    SumTiles<kRows, true>(weights, values, count, decay, head_dim, prefetch, acc);
  } else {
    SumTiles<kRows, false>(weights, values, count, decay, head_dim, prefetch, acc);
  }
}

}  // namespace nwor::NWOR_SIMD_NAMESPACE
