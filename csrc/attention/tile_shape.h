#pragma once

#include <cstdint>

// The shapes a verify kernel is made of, as functions of head size and cache type alone: what the
// kernel templates, the host heuristics and the tests agree on.
//
// A CTA works on one row tile (packed rows q * group + head) of one request and KV head. Its warps
// form kStreams token streams; stream s takes steps s, s + kStreams, ... of the tokens. With two
// row splits two warps share a stream and own half of the rows each. Neither the number of streams
// nor the tokens of a step depend on the row tile, so the row tile does not change a row's result.

namespace nwor {

inline constexpr int kStreams = 4;
inline constexpr int kLeafGroup = 4;  // leaves folded before groups are folded: see plan.h

// Tokens a warp takes per pipeline step. 16-bit tails in front of a float8 cache take half of it.
constexpr int StepTokens(int head_dim, bool float8) { return head_dim <= 64 || float8 ? 32 : 16; }

// Bytes of one pipeline stage of one stream: K and V of a step.
constexpr int StageBytes(int head_dim, bool float8) {
  return StepTokens(head_dim, float8) * head_dim * (float8 ? 1 : 2) * 2;
}

// Rows of one warp (a multiple of 16) and warps that share a stream, by row tile.
constexpr int WarpRows(int head_dim, int row_tile) {
  return row_tile == 16 || head_dim > 128 ? 16 : 32;
}
constexpr int RowSplits(int head_dim, int row_tile) {
  return row_tile / WarpRows(head_dim, row_tile);
}
constexpr int MaxRowTile(int head_dim) { return head_dim > 128 ? 32 : 64; }
constexpr int CtaThreads(int head_dim, int row_tile) {
  return 32 * kStreams * RowSplits(head_dim, row_tile);
}

// Shared memory beside the stages: queries, and the rows' softmax states and merge weights.
constexpr int QueryBytes(int head_dim, int row_tile) { return row_tile * head_dim * 2; }
inline constexpr int kItemBytes = 256;
constexpr int RowStateBytes(int row_tile) { return row_tile * 4 * (3 * kStreams + 10); }

// The streams' outputs, merged in the stages' memory at the end of a leaf; rows padded by 8.
constexpr int MergeBytes(int head_dim, int row_tile) {
  return kStreams * row_tile * (head_dim + 8) * 4;
}

// ---- kernels for warpgroup matrix instructions (sm_90a): one warpgroup, 64 rows, no streams
// ------

inline constexpr int kGroupRows = 64;
inline constexpr int kGroupThreads = 128;

// Tokens of a step, and the bytes of one step of K or V as the matrix unit reads it. Large heads
// leave registers for no more.
constexpr int GroupStepTokens(int head_dim) { return head_dim > 192 ? 32 : 64; }
constexpr int GroupTileBytes(int head_dim) { return GroupStepTokens(head_dim) * head_dim * 2; }

// Bytes of one pipeline stage. Float8 tokens wait there as they are, 2 KB per 16 tokens, K or V,
// and 128 channels; they are widened into a tile pair of their own.
constexpr int GroupStageBytes(int head_dim, bool float8) {
  if (!float8) return 2 * GroupTileBytes(head_dim);
  return GroupStepTokens(head_dim) / 16 * ((head_dim + 127) / 128) * 2 * 2048;
}
constexpr int GroupFixedBytes(int head_dim, bool float8) {
  return (float8 ? 2 * GroupTileBytes(head_dim) : 0) + kItemBytes + kGroupRows * 4;
}

}  // namespace nwor
