#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/simd/simd.h"
#include "specpv/cpu/kernels.h"

// Extremes and scores once per instruction set: kernel_<set>.cpp chooses the level of simd.h and
// includes this file.

namespace nwor::NWOR_SIMD_NAMESPACE {

using cpu::ExtremesTask;
using cpu::kMaxHeadDim;
using cpu::kMaxScoreRows;
using cpu::ScoreTask;

// -max(-a, -b): a NaN in b gives a, as MaxOf.
NWOR_SIMD_INLINE Vec MinOf(Vec a, Vec b) { return -MaxOf(-a, -b); }

// The larger of each pair; NaN gives way to any number.
NWOR_SIMD_INLINE Vec LargerNumber(Vec a, Vec b) { return a == a ? MaxOf(a, b) : b; }
NWOR_SIMD_INLINE float LargerNumber(float a, float b) { return b > a || a != a ? b : a; }

NWOR_SIMD_INLINE Vec AbsOf(Vec v) { return MaxOf(v, -v); }

NWOR_SIMD_INLINE float SumLanes(Vec v) {
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

// Fewer than kLanes elements, without reading or writing beyond them.
template <typename T>
NWOR_SIMD_INLINE Vec LoadSome(const T* p, int count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  return LoadAs(padded);
}
template <typename T>
NWOR_SIMD_INLINE void StoreSome(T* p, Vec v, int count) {
  T padded[kLanes];
  StoreAs(padded, v);
  std::memcpy(p, padded, static_cast<size_t>(count) * sizeof(T));
}

// Calls `body` with a pointer to the storage type.
template <typename Body>
NWOR_SIMD_INLINE void WithRowType(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<const float*>(nullptr));
    case DType::kFloat16:
      return body(static_cast<const Half*>(nullptr));
    case DType::kBFloat16:
      return body(static_cast<const BFloat16*>(nullptr));
    case DType::kFloat8E4M3:
      return body(static_cast<const Float8E4M3*>(nullptr));
  }
}

// ---- extremes -----------------------------------------------------------------------------------
//
// A running extreme is the first argument of MaxOf and MinOf and never NaN: a NaN counts for
// nothing, wherever it comes.

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// kVecs registers of channels at a time, so that they stay in registers over all rows.
template <int kVecs, typename In, typename Out>
NWOR_SIMD_INLINE void StripExtremes(const ExtremesTask& task, int first, Out* kmax, Out* kmin) {
  const Vec scale = Broadcast(task.scale);
  Vec high[kVecs], low[kVecs];
  for (int v = 0; v < kVecs; ++v) {
    high[v] = Broadcast(-kInfinity);
    low[v] = Broadcast(kInfinity);
  }
  for (int row = 0; row < task.count; ++row) {
    const In* channels = reinterpret_cast<const In*>(task.rows[row]) + first;
    for (int v = 0; v < kVecs; ++v) {
      const Vec k = LoadAs(channels + v * kLanes) * scale;
      high[v] = MaxOf(high[v], k);
      low[v] = MinOf(low[v], k);
    }
  }
  for (int v = 0; v < kVecs; ++v) {
    StoreAs(kmax + first + v * kLanes, high[v]);
    StoreAs(kmin + first + v * kLanes, low[v]);
  }
}

template <typename In, typename Out>
void ExtremesAs(const ExtremesTask& task) {
  Out* kmax = static_cast<Out*>(task.kmax);
  Out* kmin = static_cast<Out*>(task.kmin);
  constexpr int kStrip = 4;
  int channel = 0;
  for (; channel + kStrip * kLanes <= task.head_dim; channel += kStrip * kLanes) {
    StripExtremes<kStrip, In>(task, channel, kmax, kmin);
  }
  for (; channel + kLanes <= task.head_dim; channel += kLanes) {
    StripExtremes<1, In>(task, channel, kmax, kmin);
  }
  const int rest = task.head_dim - channel;
  if (rest == 0) return;
  const Vec scale = Broadcast(task.scale);
  Vec high = Broadcast(-kInfinity), low = Broadcast(kInfinity);
  for (int row = 0; row < task.count; ++row) {
    const Vec k = LoadSome(reinterpret_cast<const In*>(task.rows[row]) + channel, rest) * scale;
    high = MaxOf(high, k);
    low = MinOf(low, k);
  }
  StoreSome(kmax + channel, high, rest);
  StoreSome(kmin + channel, low, rest);
}

inline void Extremes(const ExtremesTask& task) {
  WithRowType(task.row_dtype, [&](auto* in) {
    using In = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    switch (task.out_dtype) {
      case DType::kFloat16:
        return ExtremesAs<In, Half>(task);
      case DType::kBFloat16:
        return ExtremesAs<In, BFloat16>(task);
      default:
        return ExtremesAs<In, float>(task);
    }
  });
}

// ---- scores -------------------------------------------------------------------------------------

constexpr int kTileBlocks = 2;
// Extremes of one block: the remainder of four channels reads a whole register too.
constexpr int kChannelRoom = kMaxHeadDim + 4;
// Registers of rows in a tile: with two blocks, their maxima and minima, four sums each.
constexpr int kTileVecs = kLanes == 8 ? 2 : 4;

template <typename T>
NWOR_SIMD_INLINE void ReadChannels(const std::byte* from, int head_dim, float* to) {
  const T* channels = reinterpret_cast<const T*>(from);
  int c = 0;
  for (; c + kLanes <= head_dim; c += kLanes) Store(to + c, LoadAs(channels + c));
  if (c < head_dim) StoreSome(to + c, LoadSome(channels + c, head_dim - c), head_dim - c);
}

// Scores of kVecs registers of rows for kBlocks blocks. kSame: one set of queries for both
// extremes, loaded once. Four channels at a time, so that their extremes are loaded as one
// register.
template <int kVecs, int kBlocks, bool kSame>
struct ScoreTile {
  NWOR_SIMD_INLINE void Run(const ScoreTask& task, const float (*kmax)[kChannelRoom],
                            const float (*kmin)[kChannelRoom], int first_row,
                            Vec (*scores)[kTileVecs]) {
    Vec high[kBlocks][kVecs] = {}, low[kBlocks][kVecs] = {};
    const float* upper = task.upper + first_row;
    const float* lower = task.lower + first_row;
    const int64_t stride = task.padded_rows;
    int c = 0;
    for (; c + 4 <= task.head_dim; c += 4) {
      Step<0>(upper, lower, kmax, kmin, c, high, low);
      Step<1>(upper + stride, lower + stride, kmax, kmin, c, high, low);
      Step<2>(upper + 2 * stride, lower + 2 * stride, kmax, kmin, c, high, low);
      Step<3>(upper + 3 * stride, lower + 3 * stride, kmax, kmin, c, high, low);
      upper += 4 * stride;
      lower += 4 * stride;
    }
    for (; c < task.head_dim; ++c) {
      Step<0>(upper, lower, kmax, kmin, c, high, low);
      upper += stride;
      lower += stride;
    }
    for (int block = 0; block < kBlocks; ++block) {
      for (int v = 0; v < kVecs; ++v) {
        scores[block][v] =
            task.add ? high[block][v] + low[block][v] : LargerNumber(high[block][v], low[block][v]);
      }
    }
  }

  // Channel c + kChannel. REQUIRES: extremes are readable up to c + 3.
  template <int kChannel>
  NWOR_SIMD_INLINE void Step(const float* upper, const float* lower,
                             const float (*kmax)[kChannelRoom], const float (*kmin)[kChannelRoom],
                             int c, Vec (*high)[kVecs], Vec (*low)[kVecs]) {
    for (int v = 0; v < kVecs; ++v) {
      const Vec up = Load(upper + v * kLanes);
      const Vec down = kSame ? up : Load(lower + v * kLanes);
      for (int block = 0; block < kBlocks; ++block) {
        high[block][v] = FmaRow<kChannel>(kmax[block] + c, up, high[block][v]);
        low[block][v] = FmaRow<kChannel>(kmin[block] + c, down, low[block][v]);
      }
    }
  }
};

// The tile with the queries that the task has.
template <int kVecs, int kBlocks>
NWOR_SIMD_INLINE void RunTile(const ScoreTask& task, const float (*kmax)[kChannelRoom],
                              const float (*kmin)[kChannelRoom], int first_row,
                              Vec (*scores)[kTileVecs]) {
  if (task.upper == task.lower) {
    ScoreTile<kVecs, kBlocks, true>::Run(task, kmax, kmin, first_row, scores);
  } else {
    ScoreTile<kVecs, kBlocks, false>::Run(task, kmax, kmin, first_row, scores);
  }
}

// Lanes from `count` on are zero: a row of padding scores NaN against a summary that is infinite.
NWOR_SIMD_INLINE Vec WithoutPadding(Vec v, int count) {
  for (int lane = count; lane < kLanes; ++lane) v[lane] = 0.0f;
  return v;
}

// Rows to one score: over the queries of each head, then over the heads.
inline float ReduceRows(const ScoreTask& task, const float* rows) {
  float total = 0.0f;
  for (int head = 0; head < task.num_groups; ++head) {
    const float* row = rows + head * task.num_queries;
    float score = row[0];
    for (int q = 1; q < task.num_queries; ++q) {
      score = task.query_max ? LargerNumber(score, row[q]) : score + row[q];
    }
    total = head == 0 ? score : task.group_max ? LargerNumber(total, score) : total + score;
  }
  return total;
}

// What a bound adds to a row: nothing where the row is zero, though it be infinite.
NWOR_SIMD_INLINE float Product(float query, float bound) {
  return query == 0.0f && bound == bound ? 0.0f : query * bound;
}

// The sum of both products of each row where a bound may be infinite. `rows`: scratch.
inline float ScoreInfinite(const ScoreTask& task, const float* kmax, const float* kmin,
                           float* rows) {
  const bool sums = !task.query_max && !task.group_max;
  float total = 0.0f;
  for (int row = 0; row < task.num_queries * task.num_groups; ++row) {
    float score = 0.0f;
    for (int c = 0; c < task.head_dim; ++c) {
      const int64_t at = static_cast<int64_t>(c) * task.padded_rows + row;
      score += Product(task.upper[at], kmax[c]) + Product(task.lower[at], kmin[c]);
    }
    if (sums) {
      total += score;
    } else {
      rows[row] = score;
    }
  }
  return sums ? total : ReduceRows(task, rows);
}

inline bool HasNaN(const float* values, int count) {
  bool found = false;
  for (int i = 0; i < count; ++i) found |= values[i] != values[i];
  return found;
}

// Rows of one head lie far apart: no hardware prefetcher follows them.
template <typename T>
NWOR_SIMD_INLINE void FetchAhead(const ScoreTask& task, int block) {
  constexpr int kAhead = 16;
  const int64_t next = std::min(block + kAhead, task.num_blocks - 1);
  for (int64_t byte = 0; byte < task.head_dim * static_cast<int64_t>(sizeof(T)); byte += 64) {
    __builtin_prefetch(task.kmax + next * task.kmax_stride_bytes + byte);
    __builtin_prefetch(task.kmin + next * task.kmin_stride_bytes + byte);
  }
}

template <typename T, int kBlocks>
NWOR_SIMD_INLINE void ScoreSome(const ScoreTask& task, int first) {
  alignas(64) float kmax[kBlocks][kChannelRoom], kmin[kBlocks][kChannelRoom];
  alignas(64) float rows[kBlocks][kMaxScoreRows];
  for (int block = 0; block < kBlocks; ++block) {
    ReadChannels<T>(task.kmax + (first + block) * task.kmax_stride_bytes, task.head_dim,
                    kmax[block]);
    ReadChannels<T>(task.kmin + (first + block) * task.kmin_stride_bytes, task.head_dim,
                    kmin[block]);
    FetchAhead<T>(task, first + block);
  }
  const bool sums = !task.query_max && !task.group_max;
  const int num_rows = task.num_queries * task.num_groups;
  Vec totals[kBlocks] = {};
  for (int row = 0; row < task.padded_rows; row += kTileVecs * kLanes) {
    Vec scores[kBlocks][kTileVecs];
    const int vecs = std::min(kTileVecs, (task.padded_rows - row) / kLanes);
    switch (vecs) {
      case 1:
        RunTile<1, kBlocks>(task, kmax, kmin, row, scores);
        break;
      case 2:
        RunTile<2, kBlocks>(task, kmax, kmin, row, scores);
        break;
      case 3:
        if constexpr (kTileVecs > 2) RunTile<3, kBlocks>(task, kmax, kmin, row, scores);
        break;
      default:
        if constexpr (kTileVecs > 2) RunTile<4, kBlocks>(task, kmax, kmin, row, scores);
        break;
    }
    for (int block = 0; block < kBlocks; ++block) {
      for (int v = 0; v < vecs; ++v) {
        if (sums) {
          totals[block] += WithoutPadding(scores[block][v], num_rows - row - v * kLanes);
        } else {
          Store(rows[block] + row + v * kLanes, scores[block][v]);
        }
      }
    }
  }
  for (int block = 0; block < kBlocks; ++block) {
    float score = sums ? SumLanes(totals[block]) : ReduceRows(task, rows[block]);
    // Zero times infinity: a maximum would hide it.
    if (task.add && (sums ? score != score : HasNaN(rows[block], num_rows))) {
      score = ScoreInfinite(task, kmax[block], kmin[block], rows[block]);
    }
    task.scores[first + block] = score;
  }
}

// ---- sums of maxima -----------------------------------------------------------------------------
//
// max(a, b) is half of (a + b) + |a - b|. Summed over rows, q . (kmax + kmin) is one product with
// the sum of the queries, so that only q . (kmax - kmin) is taken row by row: half the work.

constexpr int kSumBlocks = 4;
// With 16 sums of four lanes the compiler lets one of them go through memory in every step.
constexpr int kSumVecs = kLanes == 4 ? 2 : kTileVecs;

// Each channel's sum over the rows.
inline void SumQueries(const ScoreTask& task, float* sums) {
  for (int c = 0; c < task.head_dim; ++c) {
    const float* rows = task.upper + static_cast<int64_t>(c) * task.padded_rows;
    Vec total = {};
    for (int row = 0; row < task.padded_rows; row += kLanes) total += Load(rows + row);
    sums[c] = SumLanes(total);
  }
}

// kmax - kmin to `spread`; returns the product of `sums` and kmax + kmin.
template <typename T>
NWOR_SIMD_INLINE float ReadSpread(const ScoreTask& task, int block, const float* sums,
                                  float* spread) {
  const T* high = reinterpret_cast<const T*>(task.kmax + block * task.kmax_stride_bytes);
  const T* low = reinterpret_cast<const T*>(task.kmin + block * task.kmin_stride_bytes);
  Vec middle = {};
  int c = 0;
  for (; c + kLanes <= task.head_dim; c += kLanes) {
    const Vec up = LoadAs(high + c), down = LoadAs(low + c);
    Store(spread + c, up - down);
    middle = Fma(Load(sums + c), up + down, middle);
  }
  if (const int rest = task.head_dim - c; rest > 0) {
    const Vec up = LoadSome(high + c, rest), down = LoadSome(low + c, rest);
    StoreSome(spread + c, up - down, rest);
    middle = Fma(LoadSome(sums + c, rest), up + down, middle);
  }
  return SumLanes(middle);
}

// |q . spread| of kVecs registers of rows, added to `totals`.
template <int kVecs, int kBlocks>
NWOR_SIMD_INLINE void AddSpreads(const ScoreTask& task, const float (*spread)[kChannelRoom],
                                 int first_row, Vec* totals) {
  Vec products[kBlocks][kVecs] = {};
  const float* queries = task.upper + first_row;
  const auto step = [&]<int kChannel>(int c) {
    for (int v = 0; v < kVecs; ++v) {
      const Vec q = Load(queries + v * kLanes);
      for (int block = 0; block < kBlocks; ++block) {
        products[block][v] = FmaRow<kChannel>(spread[block] + c, q, products[block][v]);
      }
    }
    queries += task.padded_rows;
  };
  int c = 0;
  for (; c + 4 <= task.head_dim; c += 4) {
    step.template operator()<0>(c);
    step.template operator()<1>(c);
    step.template operator()<2>(c);
    step.template operator()<3>(c);
  }
  for (; c < task.head_dim; ++c) step.template operator()<0>(c);
  for (int block = 0; block < kBlocks; ++block) {
    for (int v = 0; v < kVecs; ++v) totals[block] += AbsOf(products[block][v]);
  }
}

template <typename T, int kBlocks>
NWOR_SIMD_INLINE void ScoreSums(const ScoreTask& task, const float* sums, int first) {
  alignas(64) float spread[kBlocks][kChannelRoom];
  float middle[kBlocks];
  for (int block = 0; block < kBlocks; ++block) {
    middle[block] = ReadSpread<T>(task, first + block, sums, spread[block]);
    FetchAhead<T>(task, first + block);
  }
  Vec totals[kBlocks] = {};
  int row = 0;
  for (; row + kSumVecs * kLanes <= task.padded_rows; row += kSumVecs * kLanes) {
    AddSpreads<kSumVecs, kBlocks>(task, spread, row, totals);
  }
  for (; row < task.padded_rows; row += kLanes) {
    AddSpreads<1, kBlocks>(task, spread, row, totals);
  }
  for (int block = 0; block < kBlocks; ++block) {
    const float score = 0.5f * (middle[block] + SumLanes(totals[block]));
    if (score - score == 0.0f) {
      task.scores[first + block] = score;
    } else {  // infinite summaries cancel here where they do not in the maximum
      ScoreSome<T, 1>(task, first + block);
    }
  }
}

inline void ScoreBlocks(const ScoreTask& task) {
  WithRowType(task.dtype, [&](auto* in) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(in)>>;
    int block = 0;
    if (task.upper == task.lower && !task.add && !task.query_max && !task.group_max) {
      alignas(64) float sums[kMaxHeadDim];
      SumQueries(task, sums);
      for (; block + kSumBlocks <= task.num_blocks; block += kSumBlocks) {
        ScoreSums<T, kSumBlocks>(task, sums, block);
      }
      for (; block < task.num_blocks; ++block) ScoreSums<T, 1>(task, sums, block);
      return;
    }
    for (; block + kTileBlocks <= task.num_blocks; block += kTileBlocks) {
      ScoreSome<T, kTileBlocks>(task, block);
    }
    if (block < task.num_blocks) ScoreSome<T, 1>(task, block);
  });
}

}  // namespace nwor::NWOR_SIMD_NAMESPACE
