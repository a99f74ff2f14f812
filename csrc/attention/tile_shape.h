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
inline constexpr int kItemBytes = 256;  // and the streams' barriers
constexpr int RowStateBytes(int row_tile) { return row_tile * 4 * (3 * kStreams + 10); }

// The output of a group of leaves that is being folded, where it costs no stage on any device; else
// it goes to global memory.
constexpr int FoldBytes(int head_dim, int row_tile) {
  return row_tile == 16 && (head_dim == 64 || head_dim == 128) ? row_tile * head_dim * 4 : 0;
}

// Whether the first stages of a leaf are filled while the one before is merged: with more rows
// there are no registers to spare for it.
constexpr bool StartsLeavesEarly(int row_tile) { return row_tile == 16; }

// The streams' outputs, merged in the stages' memory at the end of a leaf; rows padded by 8.
constexpr int MergeBytes(int head_dim, int row_tile) {
  return kStreams * row_tile * (head_dim + 8) * 4;
}

// What a warp needs to combine an entry, `rows` rows of partial results side by side (one or two):
// one part's outputs, sixteen bytes to a lane; all it needs for so many parts at once, with their
// states and weights, up to one for each lane.
constexpr int CombinePartBytes(int head_dim, int rows) {
  return (head_dim * rows / 4 + 31) / 32 * 512;
}
constexpr int CombineStateBytes(int rows) { return 32 * 8 * rows; }
constexpr int CombineWeightBytes(int rows) { return 32 * 16 * rows; }
constexpr int CombineWarpBytes(int head_dim, int rows, int parts) {
  return CombineWeightBytes(rows) + CombineStateBytes(rows) +
         parts * CombinePartBytes(head_dim, rows);
}

// ---- tile kernels (sm_90a): one warpgroup, or two, compute up to 64 rows each, another brings the
// tokens ----

inline constexpr int kTileRows = 64;  // of a warpgroup, at most
// Of two warpgroups six of heads of 80 would leave a warp too little room to combine: see
// CombineWarpBytes.
inline constexpr int kMaxTileStages = 7;
// A warp has 16 rows in two halves. Tiles of up to 32 rows use the upper ones only, so that all
// four warps share what the matrix unit does not do; large heads gain nothing by it.
constexpr int TileHalves(int head_dim, int row_tile) {
  return head_dim <= 128 && row_tile <= kTileRows / 2 ? 1 : 2;
}
// Warpgroups that compute, by row tile: larger heads leave registers for no second one.
constexpr int TileGroups(int row_tile) { return row_tile > kTileRows ? 2 : 1; }
constexpr int MaxTileGroups(int head_dim) { return head_dim <= 128 ? 2 : 1; }
constexpr int TileConsumers(int groups) { return 128 * groups; }  // threads that compute
inline constexpr int kTileProducers = 128;                        // that bring tokens
inline constexpr int kTileFillers = 32;                           // of these, that touch them
constexpr int TileThreads(int groups) { return TileConsumers(groups) + kTileProducers; }
// A warpgroup computes a step's scores, softmax and values one after the other: two CTAs hide that.
// The registers of an SM do not suffice for two of large heads, or of two warpgroups.
constexpr int TileCtasPerSm(int head_dim, int groups) {
  return head_dim > 128 || groups > 1 ? 1 : 2;
}

// Tokens of a step, and the bytes of one step of K or V. Large heads leave registers for no more.
constexpr int TileStepTokens(int head_dim) { return head_dim > 192 ? 32 : 64; }
constexpr int TileBytes(int head_dim) { return TileStepTokens(head_dim) * head_dim * 2; }
// Large heads leave no registers for Q.
constexpr bool TileQueryInRegisters(int head_dim) { return head_dim <= 128; }
// Two warpgroups read Q from global memory.
constexpr int TileQueryRows(int head_dim, int row_tile) {
  return TileGroups(row_tile) > 1 ? 0 : kTileRows / 2 * TileHalves(head_dim, row_tile);
}
constexpr int TileQueryBytes(int head_dim, int row_tile) {
  return TileQueryRows(head_dim, row_tile) * head_dim * 2;
}
// Outputs that are being folded, of a group (the first) and of a request (the second), as many as
// there is shared memory for. Large heads keep them in global memory, and so do two warpgroups,
// which fold rarely.
constexpr int TileFolds(int head_dim, int row_tile) {
  return head_dim > 128 || TileGroups(row_tile) > 1 ? 0 : row_tile > 32 ? 1 : 2;
}
constexpr int TileFoldBytes(int head_dim, int row_tile) { return row_tile * head_dim * 4; }

inline constexpr int kTileItemBytes = 176;
// Ids of pages for the next steps: two windows of them.
inline constexpr int kTileIdBytes = 2 * 32 * 4;
// Beside the tokens a stage has barriers and, for in-flight rows, a word of the tree mask for each
// of so many query rows: those of a row tile where four heads or more share a KV head.
inline constexpr int kTileMaskRows = 16;
inline constexpr int kTileStageRest = 32 + 8 * kTileMaskRows;
constexpr int TileStageBytes(int head_dim) { return 2 * TileBytes(head_dim) + kTileStageRest; }
// Shared memory beside the stages: queries, folds, two items, ids, barriers.
constexpr int TileFixedBytes(int head_dim, int row_tile) {
  return TileQueryBytes(head_dim, row_tile) +
         TileFolds(head_dim, row_tile) * TileFoldBytes(head_dim, row_tile) + 2 * kTileItemBytes +
         kTileIdBytes + 6 * 16;
}

}  // namespace nwor
