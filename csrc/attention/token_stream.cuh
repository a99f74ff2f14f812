#pragma once

#include "attention/status.cuh"
#include "attention/verify_traits.cuh"

namespace nwor {

// Feeds one stream's stages: tokens of the prefix through the page map, then in-flight rows.
// The warps of a stream share its stages and copy a part of every row block each.
template <class Traits>
class TokenStream {
 public:
  // Tokens [begin, end) of the prefix and the request's first tail_rows rows.
  __device__ TokenStream(const VerifyArgs& args, const SharedItem& item, uint32_t stages,
                         int stream, int begin, int end, int tail_rows)
      : args_(args),
        item_(item),
        stages_(stages),
        stream_(stream),
        begin_(begin),
        end_(end),
        tail_rows_(tail_rows),
        wide_(Traits::kFloat8 && item.plan.source == TokenSource::kCompact),
        policy_(ptx::EvictFirstPolicy()) {
    const int prefix = (end - begin + PrefixStepTokens() - 1) / PrefixStepTokens();
    const int tail = (tail_rows + Traits::kTailTokens - 1) / Traits::kTailTokens;
    prefix_total_ = prefix;
    num_prefix_ = Share(prefix);
    num_steps_ = Share(prefix + tail);
  }

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

  // Looks up the pages of the next 32 blocks of this stream, one per lane.
  __device__ void LookUp(int first_block) {
    const TokenMap& map = item_.tokens;
    const int block = first_block + static_cast<int>(threadIdx.x % 32);
    const int token = PrefixToken(block / kBlocks) + block % kBlocks * 16;
    page_ = 0;
    offset_ = token;
    if (map.ids == nullptr || token >= end_) return;
    const int id = map.ids[token / map.unit_tokens];
    page_ = id / map.units_per_page;
    offset_ = id % map.units_per_page * map.unit_tokens + token % map.unit_tokens;
    if (id < 0 || page_ >= map.num_pages) {
      ReportError(args_.params.status, VerifyStatus::kBadPage, item_.plan.request, id);
      page_ = -1;
    }
  }

  __device__ void LoadPrefix(int step, uint32_t stage) {
    const TokenMap& map = item_.tokens;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = step * kBlocks + i;
      if (block % 32 == 0) LookUp(block);
      const int page = __shfl_sync(0xffffffffu, page_, block % 32);
      const int offset = __shfl_sync(0xffffffffu, offset_, block % 32);
      const int token = PrefixToken(step) + i * 16;
      const int valid_end = page < 0 ? 0 : end_ - token;
      const int64_t safe_page = page < 0 ? 0 : page;
      LoadRows<Traits::kCacheRowBytes>(
          stage + i * 16 * Traits::kCacheRowBytes,
          map.keys + safe_page * map.key_page + offset * map.key_token, map.key_token,
          map.values + safe_page * map.value_page + offset * map.value_token, map.value_token,
          window_begin() - token, valid_end);
    }
  }

  // A compact view beside a float8 cache.
  __device__ void LoadWide(int step, uint32_t stage) {
    const TokenMap& map = item_.tokens;
    const int64_t token = PrefixToken(step);
    LoadRows<Traits::kRowBytes>(stage, map.keys + token * map.key_token, map.key_token,
                                map.values + token * map.value_token, map.value_token,
                                window_begin() - token, end_ - token);
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
      LoadRows<Traits::kRowBytes>(
          stage + i * 16 * Traits::kRowBytes,
          static_cast<const char*>(p.key) + first * key_row + head * p.key_strides.head * 2,
          key_row,
          static_cast<const char*>(p.value) + first * value_row + head * p.value_strides.head * 2,
          value_row, 0, tail_rows_ - row - i * 16);
    }
  }

  // 16 rows of K and of V; rows outside [valid_begin, valid_end) become zeros, unread.
  template <int kBytes>
  __device__ void LoadRows(uint32_t target, const char* keys, int64_t key_stride,
                           const char* values, int64_t value_stride, int valid_begin,
                           int valid_end) {
    constexpr int kChunks = kBytes / 16;
    constexpr int kCopies = 16 * kChunks;
    const int loader = threadIdx.x % kLoaders;
#pragma unroll
    for (int i = 0; i < (kCopies + kLoaders - 1) / kLoaders; ++i) {
      const int copy = i * kLoaders + loader;
      if (kCopies % kLoaders != 0 && copy >= kCopies) break;
      const int row = copy / kChunks;
      const int chunk = copy % kChunks;
      const bool valid = row >= valid_begin && row < valid_end;
      const uint32_t at = target + ChunkOffset<kBytes>(row, chunk);
      ptx::CopyAsync(at, keys + row * key_stride + chunk * 16, valid, policy_);
      ptx::CopyAsync(at + Traits::kStageBytes / 2, values + row * value_stride + chunk * 16, valid,
                     policy_);
    }
  }

  // Tokens before it are outside every row's window.
  __device__ int window_begin() const {
    const int window = args_.params.window;
    return window > 0 ? item_.plan.prefix_tokens - window + 1 : 0;
  }

  const VerifyArgs& args_;
  const SharedItem& item_;
  uint32_t stages_;
  int stream_;
  int begin_, end_, tail_rows_;
  bool wide_;  // prefix tokens are 16-bit although the pages are float8
  int prefix_total_, num_prefix_, num_steps_;
  int page_ = 0, offset_ = 0;  // of block (32k + lane)
  uint64_t policy_;
};

}  // namespace nwor
