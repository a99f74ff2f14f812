#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/types.h"

// Block summaries (channelwise maximum and minimum of K) that a commit completes in its own launch,
// so that partial verification never has to read fresh tokens again. Plain data: what is done with
// them is not this folder's business.
//
// Block i of request b covers block_size tokens from start_token + i * block_size on. A commit that
// leaves request b with cached_lens[b] + counts[b] tokens writes the summaries of the blocks that
// are complete then and were not within full_lens[b] tokens. Whole blocks only, from their tokens'
// K as the cache holds it: the result is that of a fresh computation, bit for bit. The slots of
// accepted rows are those that the block table gives their tokens: a page may be known by either.

namespace nwor {

struct CommitSummaries {
  void* kmax = nullptr;  // [layers, rows, N, Hkv, D], layers as the commit's; null: none
  void* kmin = nullptr;  // likewise, with the same strides
  int64_t layer_stride = 0, row_stride = 0, block_stride = 0, head_stride = 0;  // in elements
  DType dtype = DType::kBFloat16;        // float32, float16 or bfloat16
  const int32_t* block_table = nullptr;  // [B, table_stride] pages of each request
  const int32_t* full_lens = nullptr;    // [B] verified before this step; -1: its rows are not
  const int32_t* cached_lens = nullptr;  // [B] tokens in the cache before the accepted rows
  const int32_t* rows = nullptr;         // [B] row of request b, -1: none; null: row b
  int64_t table_stride = 0;
  int32_t max_pages = 0;
  int32_t max_blocks = 0;  // N
  int32_t num_rows = 0;
  int32_t start_token = 0;
  int32_t block_size = 0;
};

// The blocks that request b completes: first .. last - 1.
struct CompletedBlocks {
  int32_t row = -1;
  int32_t first = 0;
  int32_t last = 0;
};

// What decides about the blocks of one request.
struct SummaryLengths {
  int32_t row = -1;
  int32_t full = -1;
  int32_t cached = 0;
};

// `block_shift`: log2 of the block size, -1: no power of two, or not known.
NWOR_HOST_DEVICE inline CompletedBlocks FindCompleted(const CommitSummaries& summaries,
                                                      const SummaryLengths& lengths,
                                                      int32_t num_accepted,
                                                      int32_t block_shift = -1) {
  CompletedBlocks blocks;
  blocks.row = lengths.row;
  if (lengths.full < 0 || blocks.row < 0 || blocks.row >= summaries.num_rows) return blocks;
  const int32_t end = lengths.cached + num_accepted - summaries.start_token;
  const int32_t begin = lengths.full - summaries.start_token;
  if (block_shift >= 0) {
    blocks.first = begin > 0 ? begin >> block_shift : 0;
    blocks.last = end > 0 ? end >> block_shift : 0;
  } else {
    blocks.first = begin > 0 ? begin / summaries.block_size : 0;
    blocks.last = end > 0 ? end / summaries.block_size : 0;
  }
  if (blocks.last > summaries.max_blocks) blocks.last = summaries.max_blocks;
  return blocks;
}

inline CompletedBlocks FindCompleted(const CommitSummaries& summaries, int32_t b,
                                     int32_t num_accepted) {
  const SummaryLengths lengths = {summaries.rows == nullptr ? b : summaries.rows[b],
                                  summaries.full_lens[b], summaries.cached_lens[b]};
  return FindCompleted(summaries, lengths, num_accepted);
}

}  // namespace nwor
