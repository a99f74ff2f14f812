#pragma once

#include "attention/cuda/item.cuh"

namespace nwor {

// Feeds one stream's stages: tokens of the prefix through the page map, then in-flight rows.
// The warps of a stream share its stages and copy a part of every row block each.
template <class Traits>
class TokenStream {
 public:
  __device__ TokenStream(const VerifyArgs& args, const SharedItem& item, uint32_t stages,
                         int stream)
      : args_(args),
        item_(item),
        stages_(stages),
        stream_(stream),
        wide_(Traits::kFloat8 && item.plan.source == TokenSource::kCompact),
        policy_(ptx::EvictFirstPolicy()) {}

  // Turns to a leaf. Where leaves start early it returns what Begin has to be called with before
  // steps are loaded: that is on its way from global memory.
  __device__ int Open(int leaf) {
    const PlanItem& plan = item_.plan;
    begin_ = LeafOrigin(plan.token_begin) + leaf * plan.leaf_tokens;
    end_ = max(min(begin_ + plan.leaf_tokens, plan.prefix_tokens), begin_);
    tail_rows_ = TailRows(args_.params, plan, leaf);
    const int prefix = (end_ - begin_ + PrefixStepTokens() - 1) / PrefixStepTokens();
    const int tail = (tail_rows_ + Traits::kTailTokens - 1) / Traits::kTailTokens;
    prefix_total_ = prefix;
    num_prefix_ = Share(prefix);
    num_steps_ = Share(prefix + tail);
    return Traits::kStartsEarly ? BlockId(0) : 0;
  }
  __device__ void Begin(int id) {
    if (Traits::kStartsEarly && num_prefix_ > 0 && !wide_) Locate(0, id);
  }

  // Steps [plain_begin, plain_end) hold whole blocks of prefix tokens that every row sees.
  __device__ int plain_begin() const {
    // Rows stand at prefix_tokens and beyond, at most request_rows - 1 further.
    const int window = args_.params.window;
    if (window == 0) return 0;
    const int seen_by_all = item_.plan.prefix_tokens + item_.plan.request_rows - window;
    return Share((max(seen_by_all - begin_, 0) + Traits::kStepTokens - 1) / Traits::kStepTokens);
  }
  __device__ int plain_end() const {
    return wide_ ? 0 : Share((end_ - begin_) / Traits::kStepTokens);
  }

  __device__ int tail_rows() const { return tail_rows_; }
  __device__ int prefix_end() const { return end_; }
  __device__ int num_prefix() const { return num_prefix_; }
  __device__ int num_steps() const { return num_steps_; }

  // First prefix token, or first in-flight row, of the stream's step.
  __device__ int PrefixToken(int step) const {
    return begin_ + (step * kStreams + stream_) * PrefixStepTokens();
  }
  __device__ int TailRow(int step) const {
    return (step * kStreams + stream_ - prefix_total_) * Traits::kTailTokens;
  }
  __device__ uint32_t StageAddress(int stage) const {
    return stages_ + (stage * kStreams + stream_) * Traits::kStageBytes;
  }

  // Whether a plain step's pages are at hand: every so often Load has to look them up.
  __device__ static bool IsAtHand(int step) { return step % (32 / kBlocks) != 0; }

  // Load for a plain step that is at hand.
  __device__ void LoadPlain(int step, int stage) const {
    const TokenMap& map = item_.tokens;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int lane = (step * kBlocks + i) % 32;
      LoadRows<Traits::kCacheRowBytes, true>(
          StageAddress(stage) + i * 16 * Traits::kCacheRowBytes,
          map.keys + __shfl_sync(0xffffffffu, key_offset_, lane), map.key_token,
          map.values + __shfl_sync(0xffffffffu, value_offset_, lane), map.value_token, 0, 16);
    }
    ptx::CommitCopies();
  }

  // Starts the copies of a step, ascending from 0, and closes their group; an empty one past the
  // end.
  __device__ void Load(int step, int stage) {
    if (step < num_prefix_) {
      if (wide_) {
        LoadWide(step, StageAddress(stage));
      } else {
        LoadPrefix(step, StageAddress(stage));
      }
    } else if (step < num_steps_) {
      LoadTail(step, StageAddress(stage));
    }
    ptx::CommitCopies();
  }

 private:
  static constexpr int kBlocks = Traits::kStepTokens / 16;  // of 16 tokens: never across pages
  static constexpr int kLoaders = 32 * Traits::kRowSplits;

  __device__ int PrefixStepTokens() const {
    return wide_ ? Traits::kTailTokens : Traits::kStepTokens;
  }
  __device__ int Share(int steps) const { return (steps - stream_ + kStreams - 1) / kStreams; }

  // This lane's of 32 blocks of this stream.
  __device__ int BlockToken(int first_block) const {
    const int block = first_block + static_cast<int>(threadIdx.x % 32);
    return PrefixToken(block / kBlocks) + block % kBlocks * 16;
  }
  // Its id. Of blocks before every row's window the table may say anything.
  __device__ int BlockId(int first_block) const {
    const int token = BlockToken(first_block);
    return min(token + 16, end_) > item_.plan.token_begin ? ReadId(item_, token, end_) : 0;
  }
  // Finds where they lie.
  __device__ void Locate(int first_block, int id) {
    const BlockOffsets at = LocateBlock(args_, item_, BlockToken(first_block), id);
    key_offset_ = at.key;
    value_offset_ = at.value;
  }
  __device__ void LookUp(int first_block) { Locate(first_block, BlockId(first_block)); }

  __device__ void LoadPrefix(int step, uint32_t stage) {
    const TokenMap& map = item_.tokens;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = step * kBlocks + i;
      if (block % 32 == 0 && !(Traits::kStartsEarly && block == 0)) LookUp(block);
      const int64_t key_offset = __shfl_sync(0xffffffffu, key_offset_, block % 32);
      const int64_t value_offset = __shfl_sync(0xffffffffu, value_offset_, block % 32);
      const int token = PrefixToken(step) + i * 16;
      LoadRows<Traits::kCacheRowBytes, false>(
          stage + i * 16 * Traits::kCacheRowBytes, map.keys + key_offset, map.key_token,
          map.values + value_offset, map.value_token, item_.plan.token_begin - token, end_ - token);
    }
  }

  // A compact view beside a float8 cache.
  __device__ void LoadWide(int step, uint32_t stage) {
    const TokenMap& map = item_.tokens;
    const int64_t token = PrefixToken(step);
    LoadRows<Traits::kRowBytes, false>(stage, map.keys + token * map.key_token, map.key_token,
                                       map.values + token * map.value_token, map.value_token,
                                       item_.plan.token_begin - token, end_ - token);
  }

  __device__ void LoadTail(int step, uint32_t stage) {
    const VerifyParams& p = args_.params;
    const int row = TailRow(step);
#pragma unroll
    for (int i = 0; i < Traits::kTailTokens / 16; ++i) {
      const int64_t first = item_.plan.query_start + row + i * 16;
      const int64_t head = item_.plan.kv_head;
      const int64_t key_row = p.key_strides.row * 2;
      const int64_t value_row = p.value_strides.row * 2;
      LoadRows<Traits::kRowBytes, false>(
          stage + i * 16 * Traits::kRowBytes,
          static_cast<const char*>(p.key) + first * key_row + head * p.key_strides.head * 2,
          key_row,
          static_cast<const char*>(p.value) + first * value_row + head * p.value_strides.head * 2,
          value_row, 0, tail_rows_ - row - i * 16);
    }
  }

  // 16 rows of K and of V; rows outside [valid_begin, valid_end) become zeros, unread.
  template <int kBytes, bool kWhole>
  __device__ void LoadRows(uint32_t target, const char* keys, int64_t key_stride,
                           const char* values, int64_t value_stride, int valid_begin,
                           int valid_end) const {
    using Layout = RowSwizzle<kBytes>;
    constexpr int kChunks = Layout::kChunks;
    constexpr int kCopies = 16 * kChunks;
    constexpr int kToValues = Traits::kStageBytes / 2;
    const int loader = threadIdx.x % kLoaders;
    if constexpr (kWhole && kLoaders % kChunks == 0) {
      // A loader keeps its chunk and takes every kStep-th row: its addresses differ by constants.
      constexpr int kStep = kLoaders / kChunks;
      const int row = loader / kChunks;
      const int chunk = loader % kChunks;
      const uint32_t at = target + Layout::Offset(row, chunk);
      keys += row * key_stride + chunk * 16;
      values += row * value_stride + chunk * 16;
#pragma unroll
      for (int i = 0; i < kCopies / kLoaders; ++i) {
        const uint32_t to = (at ^ (Layout::Of(i * kStep) << 4)) + i * kStep * kBytes;
        ptx::CopyAsync(to, keys, policy_);
        ptx::CopyAsync(to + kToValues, values, policy_);
        keys += kStep * key_stride;
        values += kStep * value_stride;
      }
    } else {
#pragma unroll(kWhole ? (kCopies + kLoaders - 1) / kLoaders : 1)
      for (int copy = loader; copy < kCopies; copy += kLoaders) {
        const int row = copy / kChunks;
        const int chunk = copy % kChunks;
        const bool valid = kWhole || (row >= valid_begin && row < valid_end);
        const uint32_t to = target + Layout::Offset(row, chunk);
        const int64_t read_row = valid ? row : 0;
        ptx::CopyAsync(to, keys + read_row * key_stride + chunk * 16, valid, policy_);
        ptx::CopyAsync(to + kToValues, values + read_row * value_stride + chunk * 16, valid,
                       policy_);
      }
    }
  }

  const VerifyArgs& args_;
  const SharedItem& item_;
  uint32_t stages_;
  int stream_;
  int begin_, end_, tail_rows_;
  bool wide_;  // prefix tokens are 16-bit although the pages are float8
  int prefix_total_, num_prefix_, num_steps_;
  int64_t key_offset_ = 0, value_offset_ = 0;  // of block 32k + lane
  uint64_t policy_;
};

}  // namespace nwor
