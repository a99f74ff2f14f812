#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/task.h"
#include "attention/cpu/visibility.h"
#include "attention/simd.h"

// The CPU attention itself, once per instruction set: kernel_<set>.cpp chooses the level of simd.h
// and includes this file.
//
// A block of tokens meets all tiles of packed rows twice: for the scores, with K, and for the sums,
// with V. Scores of a tile lie token-major, [token][4 rows], so that softmax works lane by row and
// the sums broadcast straight from them. A chunk of one tile reads K and V where they lie; several
// tiles share a copy of the block as float.

namespace nwor::NWOR_SIMD_NAMESPACE {

using cpu::kTileRows;
using cpu::RowChunk;
using cpu::Scratch;
using cpu::State;
using cpu::TokenRange;

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
constexpr int kPadTokens = 4;  // blocks are padded to a multiple, so that tiles need no remainder

// ---- scores -----------------------------------------------------------------------------------

// scores[t][r] = queries[r] . keys[t] for kRows of a tile's rows; other rows get 0.
template <int kRows, int kTokens, typename T>
NWOR_SIMD_INLINE void ScoreTile(const float* queries, const T* const* keys, int head_dim,
                                float* scores) {
  Vec sums[kTokens][kTileRows] = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    Vec q[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      q[r] = Load(queries + r * head_dim + d);
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

// The rows of K and V that come after the current block: fetched into L2 while it is worked on.
struct RowsAhead {
  const std::byte* keys[cpu::kMaxBlockTokens];
  const std::byte* values[cpu::kMaxBlockTokens];
  int count = 0;
  int row_bytes = 0;

  void Fetch(int begin, int end) const {
    for (int i = begin; i < end && i < count; ++i) {
      for (int byte = 0; byte < row_bytes; byte += 64) {
        __builtin_prefetch(keys[i] + byte, 0, 2);
        __builtin_prefetch(values[i] + byte, 0, 2);
      }
    }
  }
};

template <int kRows, typename T>
void ScoreBlock(const float* queries, const T* const* keys, int count, int head_dim,
                const RowsAhead* ahead, float* scores) {
  for (int t = 0; t < count; t += kTileTokens) {
    if (ahead != nullptr) {
      ahead->Fetch(t, t + kTileTokens);
    }
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

// ---- one range --------------------------------------------------------------------------------

class RangeAttention {
 public:
  RangeAttention(const VerifyParams& params, const RowChunk& rows, Scratch& scratch,
                 const State& state)
      : params_(params),
        rows_(rows),
        scratch_(scratch),
        state_(state),
        softmax_(params),
        visibility_(params, rows),
        head_dim_(params.head_dim),
        block_tokens_(cpu::BlockTokens(params.head_dim)),
        head_tiles_(rows.head_tiles()) {}

  void Run(const TokenRange& range) {
    Clear();
    if (params_.window > 0) {
      for (int r = 0; r < rows_.count; ++r) {
        scratch_.visible_from[r] = visibility_.VisibleFrom(rows_.first + r);
      }
    }
    const cpu::PrefixReader prefix(params_, rows_.request);
    const int64_t prefix_tokens = cpu::PrefixTokens(params_, rows_.request);
    ahead_.row_bytes = head_dim_ * ElementBytes(prefix.dtype());
    for (int64_t first = range.begin; first < range.end; first += block_tokens_) {
      count_ = BlockAt(first, range.end);
      const Cover cover = CoverOfPrefix(first);
      if (cover == Cover::kNone) {
        continue;
      }
      for (head_ = 0; head_ < rows_.num_heads; ++head_) {
        prefix.Read(rows_.first_head + head_, first, count_, keys_, values_);
        // The next head's block, or the first head's of the next tokens.
        const bool last = head_ + 1 == rows_.num_heads;
        const int64_t ahead = last ? first + block_tokens_ : first;
        ahead_.count = BlockAt(ahead, prefix_tokens);
        prefix.Read(rows_.first_head + (last ? 0 : head_ + 1), ahead, ahead_.count, ahead_.keys,
                    ahead_.values);
        Block(prefix.dtype(), cover == Cover::kSome);
      }
    }
    if (range.then_rows) {
      ahead_.count = 0;
      InFlight();
    }
  }

 private:
  enum class Cover { kNone, kSome, kAll };  // how much of a block the chunk's rows see

  void Clear() {
    const int rows = rows_.tiles() * kTileRows;
    for (int i = 0; i < rows; ++i) {
      state_.max[i] = kMinusInfinity;
      state_.sum[i] = 0.0f;
    }
    std::memset(state_.acc, 0, sizeof(float) * rows * head_dim_);
  }

  // Fills scratch_.visible for the prefix block at `first` where the window hides some of it.
  Cover CoverOfPrefix(int64_t first) {
    if (params_.window <= 0) {
      return Cover::kAll;
    }
    const uint64_t full = cpu::LowBits(count_);
    uint64_t any = 0, all = full;
    for (int r = 0; r < rows_.count; ++r) {
      const int64_t hidden = scratch_.visible_from[r] - first;
      const uint64_t bits =
          hidden <= 0 ? full
                      : (hidden >= count_ ? 0 : full & ~cpu::LowBits(static_cast<int>(hidden)));
      scratch_.visible[r] = bits;
      any |= bits;
      all &= bits;
    }
    return any == 0 ? Cover::kNone : (all == full ? Cover::kAll : Cover::kSome);
  }

  Cover CoverOfRows(int first) {
    const uint64_t full = cpu::LowBits(count_);
    uint64_t any = 0, all = full;
    for (int r = 0; r < rows_.count; ++r) {
      uint64_t bits = visibility_.RowBits(rows_.first + r, first, count_);
      if (params_.window > 0) {
        for (int i = 0; i < count_; ++i) {
          if (visibility_.Position(first + i) < scratch_.visible_from[r]) {
            bits &= ~(uint64_t{1} << i);
          }
        }
      }
      scratch_.visible[r] = bits;
      any |= bits;
      all &= bits;
    }
    return any == 0 ? Cover::kNone : (all == full ? Cover::kAll : Cover::kSome);
  }

  void InFlight() {
    // Without a mask the rows behind the chunk are hidden from all of it.
    const int end = params_.tree_mask == nullptr ? rows_.first + rows_.count : rows_.request_rows;
    for (int first = 0; first < end; first += block_tokens_) {
      count_ = BlockAt(first, end);
      const Cover cover = CoverOfRows(first);
      if (cover == Cover::kNone) {
        continue;
      }
      for (head_ = 0; head_ < rows_.num_heads; ++head_) {
        for (int i = 0; i < count_; ++i) {
          keys_[i] = RowAt(params_.key, params_.key_strides, first + i);
          values_[i] = RowAt(params_.value, params_.value_strides, first + i);
        }
        Block(params_.dtype, cover == Cover::kSome);
      }
    }
  }

  const std::byte* RowAt(const void* rows, const RowStrides& strides, int row) const {
    const int64_t offset =
        (rows_.request_row + row) * strides.row + (rows_.first_head + head_) * strides.head;
    return static_cast<const std::byte*>(rows) + offset * ElementBytes(params_.dtype);
  }

  // One block of tokens for one KV head: keys_, values_, count_, head_.
  void Block(DType dtype, bool masked) {
    switch (dtype) {
      case DType::kFloat32:
        return BlockOf<float>(masked);
      case DType::kFloat16:
        return BlockOf<Half>(masked);
      case DType::kBFloat16:
        return BlockOf<BFloat16>(masked);
      case DType::kFloat8E4M3: {
        const KvScales& scales = params_.cache.scales;
        return SharedBlock<Float8E4M3>(masked, ScaleOf(scales.key, scales.key_count),
                                       ScaleOf(scales.value, scales.value_count));
      }
    }
  }

  float ScaleOf(const float* scales, int count) const {
    return scales == nullptr ? 1.0f : scales[count == 1 ? 0 : rows_.first_head + head_];
  }

  template <typename T>
  void BlockOf(bool masked) {
    if (masked || head_tiles_ > 1) {
      return SharedBlock<T>(masked, 1.0f, 1.0f);
    }
    const T* keys[cpu::kMaxBlockTokens];
    const T* values[cpu::kMaxBlockTokens];
    const T* zeros = reinterpret_cast<const T*>(scratch_.zeros);
    const int padded = Padded();
    for (int i = 0; i < padded; ++i) {
      keys[i] = i < count_ ? reinterpret_cast<const T*>(keys_[i]) : zeros;
      values[i] = i < count_ ? reinterpret_cast<const T*>(values_[i]) : zeros;
    }
    Scores(keys, false);
    Sums(values);
  }

  // A block that several tiles use, or that some rows do not see: copied as float first.
  template <typename T>
  void SharedBlock(bool masked, float key_scale, float value_scale) {
    const float* tokens[cpu::kMaxBlockTokens];
    for (int i = 0; i < Padded(); ++i) {
      tokens[i] =
          i < count_ ? scratch_.tokens + static_cast<int64_t>(i) * head_dim_ : scratch_.zeros;
    }
    Copy<T>(keys_, key_scale);
    Scores(tokens, masked);
    Copy<T>(values_, value_scale);
    if (masked && !TokensAreFinite()) {
      SumsOfVisible(tokens);
    } else {
      Sums(tokens);
    }
  }

  // Copies the block's rows as float.
  template <typename T>
  void Copy(const std::byte* const* rows, float scale) {
    for (int i = 0; i < count_; ++i) {
      const T* from = reinterpret_cast<const T*>(rows[i]);
      float* to = scratch_.tokens + static_cast<int64_t>(i) * head_dim_;
      for (int d = 0; d < head_dim_; d += kLanes) {
        Vec v = LoadAs(from + d);
        if constexpr (sizeof(T) == 1) {
          v *= scale;
        }
        Store(to + d, v);
      }
    }
  }

  bool TokensAreFinite() const {
    for (int64_t i = 0; i < static_cast<int64_t>(count_) * head_dim_; ++i) {
      if (!std::isfinite(scratch_.tokens[i])) {
        return false;
      }
    }
    return true;
  }

  template <typename T>
  void Scores(const T* const* keys, bool masked) {
    const int padded = Padded();
    for (int tile = 0; tile < head_tiles_; ++tile) {
      const float* queries = scratch_.queries + FirstRowOf(tile) * head_dim_;
      float* scores = ScoresOf(tile);
      const RowsAhead* ahead = tile == 0 ? &ahead_ : nullptr;
      switch (RowsOf(tile)) {
        case 1:
          ScoreBlock<1>(queries, keys, padded, head_dim_, ahead, scores);
          break;
        case 2:
          ScoreBlock<2>(queries, keys, padded, head_dim_, ahead, scores);
          break;
        default:
          ScoreBlock<4>(queries, keys, padded, head_dim_, ahead, scores);
      }
      const uint64_t* bits[kTileRows];
      for (int r = 0; r < kTileRows; ++r) {
        const int row = (tile * kTileRows + r) / rows_.group;
        bits[r] = scratch_.visible + (row < rows_.count ? row : rows_.count - 1);
      }
      softmax_.Apply(scores, count_, padded, masked ? bits : nullptr, state_.max + FirstRowOf(tile),
                     state_.sum + FirstRowOf(tile), scratch_.decay + tile * kTileRows);
    }
  }

  template <typename T>
  void Sums(const T* const* values) {
    for (int tile = 0; tile < head_tiles_; ++tile) {
      const float* weights = ScoresOf(tile);
      const float* decay = scratch_.decay + tile * kTileRows;
      float* acc = state_.acc + FirstRowOf(tile) * head_dim_;
      switch (RowsOf(tile)) {
        case 1:
          SumBlock<1>(weights, values, count_, decay, head_dim_, acc);
          break;
        case 2:
          SumBlock<2>(weights, values, count_, decay, head_dim_, acc);
          break;
        default:
          SumBlock<4>(weights, values, count_, decay, head_dim_, acc);
      }
    }
  }

  // Row by row over the tokens it sees: a weight of zero would still turn an infinity into a NaN.
  void SumsOfVisible(const float* const* values) {
    const float* seen[cpu::kMaxBlockTokens];
    float weights[cpu::kMaxBlockTokens * kTileRows] = {};
    for (int packed = 0; packed < rows_.packed(); ++packed) {
      const int tile = packed / kTileRows;
      const int lane = packed % kTileRows;
      int count = 0;
      for (int t = 0; t < count_; ++t) {
        if (scratch_.visible[packed / rows_.group] >> t & 1) {
          seen[count] = values[t];
          weights[count * kTileRows] = ScoresOf(tile)[t * kTileRows + lane];
          ++count;
        }
      }
      SumBlock<1>(weights, seen, count, scratch_.decay + packed, head_dim_,
                  state_.acc + (FirstRowOf(0) + packed) * head_dim_);
    }
  }

  int BlockAt(int64_t first, int64_t end) const {
    return static_cast<int>(std::clamp<int64_t>(end - first, 0, block_tokens_));
  }
  int Padded() const { return (count_ + kPadTokens - 1) / kPadTokens * kPadTokens; }
  int RowsOf(int tile) const {
    const int left = rows_.packed() - tile * kTileRows;
    return left < kTileRows ? left : kTileRows;
  }
  float* ScoresOf(int tile) const {
    return scratch_.scores + static_cast<int64_t>(tile) * block_tokens_ * kTileRows;
  }
  // Row of the chunk's queries and states with which a tile of the current head begins.
  int64_t FirstRowOf(int tile) const {
    return static_cast<int64_t>(head_ * head_tiles_ + tile) * kTileRows;
  }

  const VerifyParams& params_;
  const RowChunk& rows_;
  Scratch& scratch_;
  const State& state_;
  const Softmax softmax_;
  const cpu::Visibility visibility_;
  const int head_dim_;
  const int block_tokens_;
  const int head_tiles_;  // tiles of one KV head
  RowsAhead ahead_;
  int head_ = 0;   // of the chunk's KV heads, the current one
  int count_ = 0;  // tokens in the current block
  const std::byte* keys_[cpu::kMaxBlockTokens];
  const std::byte* values_[cpu::kMaxBlockTokens];
};

void Attend(const VerifyParams& params, const RowChunk& rows, const TokenRange& range,
            Scratch& scratch, const State& state) {
  RangeAttention(params, rows, scratch, state).Run(range);
}

// ---- queries in, results out ------------------------------------------------------------------

template <typename T>
void PackQueriesAs(const VerifyParams& params, const RowChunk& rows, Scratch& scratch) {
  const int head_dim = params.head_dim;
  const int head_rows = rows.head_tiles() * kTileRows;
  for (int i = 0; i < rows.num_heads * head_rows; ++i) {
    float* to = scratch.queries + static_cast<int64_t>(i) * head_dim;
    const int packed = i % head_rows;
    if (packed >= rows.packed()) {
      std::memset(to, 0, sizeof(float) * head_dim);
      continue;
    }
    const int64_t row = rows.request_row + rows.first + packed / rows.group;
    const int64_t head = (rows.first_head + i / head_rows) * rows.group + packed % rows.group;
    const T* from = static_cast<const T*>(params.query) + row * params.query_strides.row +
                    head * params.query_strides.head;
    for (int d = 0; d < head_dim; d += kLanes) {
      Store(to + d, LoadAs(from + d));
    }
  }
}

void PackQueries(const VerifyParams& params, const RowChunk& rows, Scratch& scratch) {
  switch (params.dtype) {
    case DType::kFloat16:
      return PackQueriesAs<Half>(params, rows, scratch);
    case DType::kBFloat16:
      return PackQueriesAs<BFloat16>(params, rows, scratch);
    default:
      return PackQueriesAs<float>(params, rows, scratch);
  }
}

void Merge(const State& into, const State& from, int tiles, int head_dim) {
  for (int i = 0; i < tiles * kTileRows; ++i) {
    const float max = from.max[i] > into.max[i] ? from.max[i] : into.max[i];
    const float base = max == kMinusInfinity ? 0.0f : max;
    const Vec kept = Exp2(Broadcast(into.max[i] - base));
    const Vec added = Exp2(Broadcast(from.max[i] - base));
    into.max[i] = max;
    into.sum[i] = into.sum[i] * kept[0] + from.sum[i] * added[0];
    float* to = into.acc + static_cast<int64_t>(i) * head_dim;
    const float* other = from.acc + static_cast<int64_t>(i) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      Store(to + d, Fma(Load(other + d), added, Load(to + d) * kept));
    }
  }
}

template <typename T>
void FinishAs(const VerifyParams& params, const RowChunk& rows, const State& state) {
  const int head_dim = params.head_dim;
  const int head_rows = rows.head_tiles() * kTileRows;
  for (int i = 0; i < rows.num_heads * head_rows; ++i) {
    const int packed = i % head_rows;
    if (packed >= rows.packed()) {
      continue;
    }
    const int64_t row = rows.request_row + rows.first + packed / rows.group;
    const int64_t head = (rows.first_head + i / head_rows) * rows.group + packed % rows.group;
    const float sum = state.sum[i];
    const bool saw_nothing = state.max[i] == kMinusInfinity && sum == 0.0f;
    const Vec inverse = Broadcast(saw_nothing ? 0.0f : 1.0f / sum);
    const float* acc = state.acc + static_cast<int64_t>(i) * head_dim;
    T* out =
        static_cast<T*>(params.out) + row * params.out_strides.row + head * params.out_strides.head;
    for (int d = 0; d < head_dim; d += kLanes) {
      StoreAs(out + d, Load(acc + d) * inverse);
    }
    if (params.lse != nullptr) {
      params.lse[row * params.num_heads + head] =
          saw_nothing ? kMinusInfinity : state.max[i] / kLog2E + std::log(sum);
    }
  }
}

void Finish(const VerifyParams& params, const RowChunk& rows, const State& state) {
  switch (params.dtype) {
    case DType::kFloat16:
      return FinishAs<Half>(params, rows, state);
    case DType::kBFloat16:
      return FinishAs<BFloat16>(params, rows, state);
    default:
      return FinishAs<float>(params, rows, state);
  }
}

}  // namespace nwor::NWOR_SIMD_NAMESPACE
