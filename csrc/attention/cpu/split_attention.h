#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "attention/cpu/amx.h"
#include "attention/cpu/block_mask.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/tile.h"
#include "base/simd/simd.h"

// Attention of a chunk's rows to one split. Compiled once per instruction set, see kernel.h.
//
// All tiles of packed rows pass over a block of tokens twice: over K for the scores, and over V for
// the sums. A few tiles read K and V in place; many share a copy of the block as float.

namespace nwor::NWOR_SIMD_NAMESPACE {

using cpu::BlockVisibility;
using cpu::RowChunk;
using cpu::Scratch;
using cpu::State;
using cpu::TokenRange;

// Rows of K or V that are read in place before the next tile reads them: they stay in L1.
constexpr int kDirectTokens = 16;
constexpr int kPadTokens = 4;  // blocks are padded to a multiple of it

class SplitAttention {
 public:
  // `amx`: for blocks of bfloat16 tokens that every row sees; may be null.
  SplitAttention(const VerifyParams& params, const RowChunk& rows, Scratch& scratch,
                 const State& state, cpu::Amx* amx)
      : params_(params),
        rows_(rows),
        scratch_(scratch),
        state_(state),
        softmax_(params),
        amx_(amx),
        mask_(params, rows, scratch),
        head_dim_(params.head_dim),
        block_tokens_(cpu::BlockTokens(params.head_dim)),
        head_tiles_(rows.head_tiles()) {}

  void Run(const TokenRange& range) {
    Clear();
    visible_from_ = mask_.Begin();
    const cpu::PrefixReader prefix(params_, rows_.request);
    next_bytes_ = ElementBytes(prefix.dtype());
    int64_t first = NextVisibleBlock(range.begin, range.end);
    if (first < range.end) {
      ReadBlock(prefix, first, range.end, 0, next_);
    }
    while (first < range.end) {
      const int64_t following = NextVisibleBlock(first + block_tokens_, range.end);
      const BlockVisibility visibility = mask_.OfPrefix(first, BlockAt(first, range.end));
      for (head_ = 0; head_ < rows_.num_heads; ++head_) {
        std::swap(block_, next_);
        // Finds the next block now, so that it is prefetched during this one.
        next_->count = 0;
        if (head_ + 1 < rows_.num_heads) {
          ReadBlock(prefix, first, range.end, head_ + 1, next_);
        } else if (following < range.end) {
          ReadBlock(prefix, following, range.end, 0, next_);
        }
        Block(prefix.dtype(), visibility == BlockVisibility::kPartial);
      }
      first = following;
    }
    if (range.then_rows) {
      next_->count = 0;
      InFlight();
    }
  }

 private:
  // Pointers to K and V of one head's block; to zeros past the last token and before all windows.
  struct Rows {
    const std::byte* keys[cpu::kMaxBlockTokens];
    const std::byte* values[cpu::kMaxBlockTokens];
    int count = 0;
  };

  // The first block from `first` on that some row sees.
  int64_t NextVisibleBlock(int64_t first, int64_t end) {
    while (first < end && mask_.OfPrefix(first, BlockAt(first, end)) == BlockVisibility::kEmpty) {
      first += block_tokens_;
    }
    return first;
  }

  void ReadBlock(const cpu::PrefixReader& prefix, int64_t first, int64_t end, int head,
                 Rows* rows) const {
    rows->count = BlockAt(first, end);
    const auto hidden =
        static_cast<int>(std::clamp<int64_t>(visible_from_ - first, 0, rows->count));
    SetZeros(rows, 0, hidden);
    prefix.Read(rows_.first_head + head, first + hidden, rows->count - hidden, rows->keys + hidden,
                rows->values + hidden);
    SetZeros(rows, rows->count, block_tokens_);
  }

  void SetZeros(Rows* rows, int begin, int end) const {
    const auto* zeros = reinterpret_cast<const std::byte*>(scratch_.zeros);
    for (int i = begin; i < end; ++i) {
      rows->keys[i] = rows->values[i] = zeros;
    }
  }

  void Clear() {
    const int rows = rows_.tiles() * kTileRows;
    for (int i = 0; i < rows; ++i) {
      state_.max[i] = kMinusInfinity;
      state_.sum[i] = 0.0f;
    }
    std::memset(state_.acc, 0, sizeof(float) * rows * head_dim_);
  }

  void InFlight() {
    // Without a mask no row of the chunk sees the rows after it.
    const int end = params_.tree_mask == nullptr ? rows_.first + rows_.count : rows_.request_rows;
    for (int first = 0; first < end; first += block_tokens_) {
      block_->count = BlockAt(first, end);
      const BlockVisibility visibility = mask_.OfRows(first, block_->count);
      if (visibility == BlockVisibility::kEmpty) {
        continue;
      }
      for (head_ = 0; head_ < rows_.num_heads; ++head_) {
        for (int i = 0; i < block_->count; ++i) {
          block_->keys[i] = RowAt(params_.key, params_.key_strides, first + i);
          block_->values[i] = RowAt(params_.value, params_.value_strides, first + i);
        }
        SetZeros(block_, block_->count, block_tokens_);
        Block(params_.dtype, visibility == BlockVisibility::kPartial);
      }
    }
  }

  const std::byte* RowAt(const void* rows, const RowStrides& strides, int row) const {
    const int64_t offset =
        (rows_.request_row + row) * strides.row + (rows_.first_head + head_) * strides.head;
    return static_cast<const std::byte*>(rows) + offset * ElementBytes(params_.dtype);
  }

  // Processes block_ for KV head head_.
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
    constexpr int kDirectTiles = sizeof(T) == 4 ? 4 : 2;
    constexpr bool kHasAmx = NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512;
    if constexpr (kHasAmx && std::is_same_v<T, BFloat16>) {
      if (amx_ != nullptr && !masked) return AmxBlock();
    }
    if (masked || head_tiles_ > kDirectTiles) {
      return SharedBlock<T>(masked, 1.0f, 1.0f);
    }
    const int step = head_tiles_ == 1 ? cpu::kMaxBlockTokens : kDirectTokens;
    Scores(reinterpret_cast<const T* const*>(block_->keys), false, step);
    Sums(reinterpret_cast<const T* const*>(block_->values), step);
  }

  void AmxBlock() {
    const bool prefetches = next_->count > 0;
    amx_->Scores(head_, block_->keys, block_->count, prefetches ? next_->keys : nullptr);
    ApplySoftmax(false);
    amx_->Sums(block_->values, block_->count, prefetches ? next_->values : nullptr,
               state_.acc + FirstRowOf(0) * head_dim_);
  }

  // A block that several tiles share, or that some rows do not see: copied as float first.
  template <typename T>
  void SharedBlock(bool masked, float key_scale, float value_scale) {
    const float* tokens[cpu::kMaxBlockTokens];
    for (int i = 0; i < Padded(); ++i) {
      tokens[i] = i < block_->count ? TokenAt(i) : scratch_.zeros;
    }
    Copy<T>(block_->keys, key_scale);
    Scores(tokens, masked, Padded());
    Copy<T>(block_->values, value_scale);
    if (masked && !TokensAreFinite()) {
      SumsOfVisible(tokens);
    } else {
      Sums(tokens, block_->count);
    }
  }

  // Copies the block's rows as float.
  template <typename T>
  void Copy(const std::byte* const* rows, float scale) {
    for (int i = 0; i < block_->count; ++i) {
      const T* from = reinterpret_cast<const T*>(rows[i]);
      float* to = TokenAt(i);
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
    for (int i = 0; i < block_->count; ++i) {
      for (int d = 0; d < head_dim_; ++d) {
        if (!std::isfinite(TokenAt(i)[d])) {
          return false;
        }
      }
    }
    return true;
  }

  // Rows of the copy are one register longer than D, which avoids cache bank conflicts.
  float* TokenAt(int i) const { return scratch_.tokens + i * (head_dim_ + kLanes); }

  // Scores and softmax of all tiles, `step` tokens at a time: rows of K that are read in place stay
  // in L1 only for a short time.
  template <typename T>
  void Scores(const T* const* keys, bool masked, int step) {
    const int padded = Padded();
    for (int begin = 0; begin < padded; begin += step) {
      const int count = std::min(step, padded - begin);
      for (int tile = 0; tile < head_tiles_; ++tile) {
        const float* queries = scratch_.queries + FirstRowOf(tile) * head_dim_;
        float* scores = ScoresOf(tile) + begin * kTileRows;
        const Prefetch prefetch = tile == 0 ? Next(next_->keys).From(begin) : Prefetch{};
        switch (RowsOf(tile)) {
          case 1:
            ScoreBlock<1>(queries, keys + begin, count, head_dim_, prefetch, scores);
            break;
          case 2:
            ScoreBlock<2>(queries, keys + begin, count, head_dim_, prefetch, scores);
            break;
          case 3:
            ScoreBlock<3>(queries, keys + begin, count, head_dim_, prefetch, scores);
            break;
          default:
            ScoreBlock<4>(queries, keys + begin, count, head_dim_, prefetch, scores);
        }
      }
    }
    ApplySoftmax(masked);
  }

  // Softmax of all tiles.
  void ApplySoftmax(bool masked) {
    const int padded = Padded();
    for (int tile = 0; tile < head_tiles_; ++tile) {
      const uint64_t* bits[kTileRows];
      for (int r = 0; r < kTileRows; ++r) {
        const int row = (tile * kTileRows + r) / rows_.group;
        bits[r] = scratch_.visible + (row < rows_.count ? row : rows_.count - 1);
      }
      softmax_.Apply(ScoresOf(tile), block_->count, padded, masked ? bits : nullptr,
                     state_.max + FirstRowOf(tile), state_.sum + FirstRowOf(tile),
                     scratch_.decay + tile * kTileRows);
    }
  }

  // Weighted sums of all tiles, `step` tokens at a time.
  template <typename T>
  void Sums(const T* const* values, int step) {
    constexpr float kKeep[kTileRows] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (int begin = 0; begin < block_->count; begin += step) {
      const int count = std::min(step, block_->count - begin);
      for (int tile = 0; tile < head_tiles_; ++tile) {
        const float* weights = ScoresOf(tile) + begin * kTileRows;
        const float* decay = begin == 0 ? scratch_.decay + tile * kTileRows : kKeep;
        float* acc = state_.acc + FirstRowOf(tile) * head_dim_;
        const Prefetch prefetch = tile == 0 ? Next(next_->values).From(begin) : Prefetch{};
        switch (RowsOf(tile)) {
          case 1:
            SumBlock<1>(weights, values + begin, count, decay, head_dim_, prefetch, acc);
            break;
          case 2:
            SumBlock<2>(weights, values + begin, count, decay, head_dim_, prefetch, acc);
            break;
          case 3:
            SumBlock<3>(weights, values + begin, count, decay, head_dim_, prefetch, acc);
            break;
          default:
            SumBlock<4>(weights, values + begin, count, decay, head_dim_, prefetch, acc);
        }
      }
    }
  }

  // Row by row, over the tokens that it sees: a weight of zero times an infinity would be NaN.
  void SumsOfVisible(const float* const* values) {
    const float* visible[cpu::kMaxBlockTokens];
    float weights[cpu::kMaxBlockTokens * kTileRows] = {};
    for (int packed = 0; packed < rows_.packed(); ++packed) {
      const int tile = packed / kTileRows;
      const int lane = packed % kTileRows;
      int count = 0;
      for (int t = 0; t < block_->count; ++t) {
        if (scratch_.visible[packed / rows_.group] >> t & 1) {
          visible[count] = values[t];
          weights[count * kTileRows] = ScoresOf(tile)[t * kTileRows + lane];
          ++count;
        }
      }
      SumBlock<1>(weights, visible, count, scratch_.decay + packed, head_dim_, Prefetch{},
                  state_.acc + (FirstRowOf(0) + packed) * head_dim_);
    }
  }

  // The rows of next_, to be prefetched during the current block.
  Prefetch Next(const std::byte* const* rows) const {
    return {next_->count > 0 ? rows : nullptr, next_bytes_};
  }
  int BlockAt(int64_t first, int64_t end) const {
    return static_cast<int>(std::clamp<int64_t>(end - first, 0, block_tokens_));
  }
  int Padded() const { return (block_->count + kPadTokens - 1) / kPadTokens * kPadTokens; }
  int RowsOf(int tile) const {
    const int left = rows_.packed() - tile * kTileRows;
    return left < kTileRows ? left : kTileRows;
  }
  float* ScoresOf(int tile) const {
    return scratch_.scores + static_cast<int64_t>(tile) * block_tokens_ * kTileRows;
  }
  // The first row, among the chunk's queries and states, of a tile of the current head.
  int64_t FirstRowOf(int tile) const {
    return static_cast<int64_t>(head_ * head_tiles_ + tile) * kTileRows;
  }

  const VerifyParams& params_;
  const RowChunk& rows_;
  Scratch& scratch_;
  const State& state_;
  const Softmax softmax_;
  cpu::Amx* const amx_;
  const cpu::BlockMask mask_;
  const int head_dim_;
  const int block_tokens_;
  const int head_tiles_;      // tiles of one KV head
  int64_t visible_from_ = 0;  // no row sees prefix tokens before it
  int next_bytes_ = 0;        // of an element of the prefix
  int head_ = 0;              // of the chunk's KV heads, the current one
  Rows blocks_[2];
  Rows* block_ = &blocks_[0];  // the current block
  Rows* next_ = &blocks_[1];   // the one after it, if any
};

void Attend(const VerifyParams& params, const RowChunk& rows, const TokenRange& range,
            Scratch& scratch, const State& state) {
  SplitAttention(params, rows, scratch, state, nullptr).Run(range);
}

#if NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
void AttendWithAmx(const VerifyParams& params, const RowChunk& rows, const TokenRange& range,
                   Scratch& scratch, const State& state) {
  // Few rows are memory-bound, and without AMX each token is read once instead of twice.
  constexpr int kFewRows = 8;
  if (params.dtype != DType::kBFloat16 || rows.request_rows * rows.group <= kFewRows) {
    return Attend(params, rows, range, scratch, state);
  }
  cpu::Amx amx(rows, params.head_dim, cpu::BlockTokens(params.head_dim), scratch);
  SplitAttention(params, rows, scratch, state, &amx).Run(range);
}
#endif

}  // namespace nwor::NWOR_SIMD_NAMESPACE
