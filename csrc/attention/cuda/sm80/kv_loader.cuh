#pragma once

#include "attention/cuda/ptx.cuh"
#include "attention/cuda/sm80/traits.cuh"
#include "attention/cuda/swizzle.cuh"
#include "attention/cuda/work_tile.cuh"

namespace nwor::sm80 {

// Loads the stages of one KV warp with cp.async: prefix tokens through the page table, then
// in-flight rows. The query warps of a KV warp share its stages and copy a part of every block of
// rows each.
template <class Traits>
class KvLoader {
 public:
  __device__ KvLoader(const VerifyArgs& args, const SharedWorkTile& work_tile, uint32_t stages,
                      int kv_warp)
      : args_(args),
        work_tile_(work_tile),
        stages_(stages),
        kv_warp_(kv_warp),
        unquantised_(Traits::kFloat8 && work_tile.plan.source == TokenSource::kCompact),
        policy_(ptx::EvictFirstPolicy()) {}

  // Moves to a split. Returns the page id that SetFirstPage needs before steps are loaded, if
  // kPrefetchesNextSplit: its load from global memory is then in flight.
  __device__ int StartSplit(int split) {
    const WorkTile& plan = work_tile_.plan;
    begin_ = SplitOrigin(plan.token_begin) + split * plan.split_tokens;
    end_ = max(min(begin_ + plan.split_tokens, plan.prefix_tokens), begin_);
    in_flight_rows_ = InFlightRows(args_.params, plan, split);
    const int prefix = (end_ - begin_ + PrefixStepTokens() - 1) / PrefixStepTokens();
    const int in_flight =
        (in_flight_rows_ + Traits::kInFlightStepTokens - 1) / Traits::kInFlightStepTokens;
    prefix_total_ = prefix;
    num_prefix_ = Share(prefix);
    num_steps_ = Share(prefix + in_flight);
    return Traits::kPrefetchesNextSplit ? BlockId(0) : 0;
  }
  __device__ void SetFirstPage(int id) {
    if (Traits::kPrefetchesNextSplit && num_prefix_ > 0 && !unquantised_) Locate(0, id);
  }

  // Steps [unmasked_begin, unmasked_end) hold full blocks of prefix tokens that every row sees.
  __device__ int unmasked_begin() const {
    // Positions of rows: prefix_tokens .. prefix_tokens + request_rows - 1, at most.
    const int window = args_.params.window;
    if (window == 0) return 0;
    const int visible_to_all =
        work_tile_.plan.prefix_tokens + work_tile_.plan.request_rows - window;
    return Share((max(visible_to_all - begin_, 0) + Traits::kStepTokens - 1) / Traits::kStepTokens);
  }
  __device__ int unmasked_end() const {
    return unquantised_ ? 0 : Share((end_ - begin_) / Traits::kStepTokens);
  }

  __device__ int in_flight_rows() const { return in_flight_rows_; }
  __device__ int prefix_end() const { return end_; }
  __device__ int num_prefix() const { return num_prefix_; }
  __device__ int num_steps() const { return num_steps_; }

  // First prefix token, or first in-flight row, of a step.
  __device__ int PrefixToken(int step) const {
    return begin_ + (step * kKvWarps + kv_warp_) * PrefixStepTokens();
  }
  __device__ int InFlightRow(int step) const {
    return (step * kKvWarps + kv_warp_ - prefix_total_) * Traits::kInFlightStepTokens;
  }
  __device__ uint32_t StageAddress(int stage) const {
    return stages_ + (stage * kKvWarps + kv_warp_) * Traits::kStageBytes;
  }

  // Whether the pages of an unmasked step have been looked up: Load does that for 32 blocks at a
  // time.
  __device__ static bool HasPages(int step) { return step % (32 / kBlocks) != 0; }

  // Load, for an unmasked step that has its pages.
  __device__ void LoadUnmasked(int step, int stage) const {
    const PagedKv& kv = work_tile_.kv;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int lane = (step * kBlocks + i) % 32;
      LoadRows<Traits::kCacheRowBytes, true>(
          StageAddress(stage) + i * 16 * Traits::kCacheRowBytes,
          kv.keys + __shfl_sync(0xffffffffu, key_offset_, lane), kv.key_token,
          kv.values + __shfl_sync(0xffffffffu, value_offset_, lane), kv.value_token, 0, 16);
    }
    ptx::CommitCopies();
  }

  // Issues the copies of a step and commits their group; past the end the group is empty. Steps are
  // loaded in ascending order from 0.
  __device__ void Load(int step, int stage) {
    if (step < num_prefix_) {
      if (unquantised_) {
        LoadUnquantised(step, StageAddress(stage));
      } else {
        LoadPrefix(step, StageAddress(stage));
      }
    } else if (step < num_steps_) {
      LoadInFlight(step, StageAddress(stage));
    }
    ptx::CommitCopies();
  }

 private:
  static constexpr int kBlocks = Traits::kStepTokens / 16;  // of 16 tokens: never across pages
  static constexpr int kLoaders = 32 * Traits::kQueryWarps;

  __device__ int PrefixStepTokens() const {
    return unquantised_ ? Traits::kInFlightStepTokens : Traits::kStepTokens;
  }
  __device__ int Share(int steps) const { return (steps - kv_warp_ + kKvWarps - 1) / kKvWarps; }

  // The first token of this lane's of 32 blocks.
  __device__ int BlockToken(int first_block) const {
    const int block = first_block + static_cast<int>(threadIdx.x % 32);
    return PrefixToken(block / kBlocks) + block % kBlocks * 16;
  }
  // Its page id. Blocks before every row's window may have any table entry.
  __device__ int BlockId(int first_block) const {
    const int token = BlockToken(first_block);
    return min(token + 16, end_) > work_tile_.plan.token_begin ? ReadPageId(work_tile_, token, end_)
                                                               : 0;
  }
  // Finds where the blocks lie.
  __device__ void Locate(int first_block, int id) {
    const KvOffsets at = LookUpKv(args_, work_tile_, BlockToken(first_block), id);
    key_offset_ = at.key;
    value_offset_ = at.value;
  }
  __device__ void LookUp(int first_block) { Locate(first_block, BlockId(first_block)); }

  __device__ void LoadPrefix(int step, uint32_t stage) {
    const PagedKv& kv = work_tile_.kv;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = step * kBlocks + i;
      if (block % 32 == 0 && !(Traits::kPrefetchesNextSplit && block == 0)) LookUp(block);
      const int64_t key_offset = __shfl_sync(0xffffffffu, key_offset_, block % 32);
      const int64_t value_offset = __shfl_sync(0xffffffffu, value_offset_, block % 32);
      const int token = PrefixToken(step) + i * 16;
      LoadRows<Traits::kCacheRowBytes, false>(stage + i * 16 * Traits::kCacheRowBytes,
                                              kv.keys + key_offset, kv.key_token,
                                              kv.values + value_offset, kv.value_token,
                                              work_tile_.plan.token_begin - token, end_ - token);
    }
  }

  // Tokens of a compact view beside a float8 cache.
  __device__ void LoadUnquantised(int step, uint32_t stage) {
    const PagedKv& kv = work_tile_.kv;
    const int64_t token = PrefixToken(step);
    LoadRows<Traits::kRowBytes, false>(stage, kv.keys + token * kv.key_token, kv.key_token,
                                       kv.values + token * kv.value_token, kv.value_token,
                                       work_tile_.plan.token_begin - token, end_ - token);
  }

  __device__ void LoadInFlight(int step, uint32_t stage) {
    const VerifyParams& p = args_.params;
    const int row = InFlightRow(step);
#pragma unroll
    for (int i = 0; i < Traits::kInFlightStepTokens / 16; ++i) {
      const int64_t first = work_tile_.plan.query_start + row + i * 16;
      const int64_t head = work_tile_.plan.kv_head;
      const int64_t key_row = p.key_strides.row * 2;
      const int64_t value_row = p.value_strides.row * 2;
      LoadRows<Traits::kRowBytes, false>(
          stage + i * 16 * Traits::kRowBytes,
          static_cast<const char*>(p.key) + first * key_row + head * p.key_strides.head * 2,
          key_row,
          static_cast<const char*>(p.value) + first * value_row + head * p.value_strides.head * 2,
          value_row, 0, in_flight_rows_ - row - i * 16);
    }
  }

  // Copies 16 rows of K and of V. Rows outside [valid_begin, valid_end) are not read and become
  // zeros.
  template <int kBytes, bool kWhole>
  __device__ void LoadRows(uint32_t target, const char* keys, int64_t key_stride,
                           const char* values, int64_t value_stride, int valid_begin,
                           int valid_end) const {
    using Layout = RowSwizzle<kBytes>;
    constexpr int kChunks = Layout::kChunks;
    constexpr int kCopies = 16 * kChunks;
    constexpr int kValueOffset = Traits::kStageBytes / 2;
    const int loader = threadIdx.x % kLoaders;
    if constexpr (kWhole && kLoaders % kChunks == 0) {
      // A thread keeps its chunk and takes every kStep-th row, so its addresses differ by
      // constants.
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
        ptx::CopyAsync(to + kValueOffset, values, policy_);
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
        ptx::CopyAsync(to + kValueOffset, values + read_row * value_stride + chunk * 16, valid,
                       policy_);
      }
    }
  }

  const VerifyArgs& args_;
  const SharedWorkTile& work_tile_;
  uint32_t stages_;
  int kv_warp_;
  int begin_, end_, in_flight_rows_;
  bool unquantised_;  // prefix tokens are 16-bit although the pages are float8
  int prefix_total_, num_prefix_, num_steps_;
  int64_t key_offset_ = 0, value_offset_ = 0;  // of block 32k + lane
  uint64_t policy_;
};

}  // namespace nwor::sm80
