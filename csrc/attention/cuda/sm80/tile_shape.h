#pragma once

#include <cstdint>

// Tile and shared-memory sizes of the sm_80 kernel (sm80/kernel.cuh), as functions of head size and
// cache type. The kernel templates, the host heuristics and the tests share them.
//
// A CTA works on one row tile (packed rows: row * group + head) of one request and KV head.
// kKvWarps warps share out its tokens: KV warp w takes steps w, w + kKvWarps, ... (FlashInfer's
// NUM_WARPS_KV). With two query warps, two warps read the same tokens and own half of the rows each
// (NUM_WARPS_Q). Neither the number of KV warps nor the tokens of a step depend on the row tile, so
// the row tile does not change a row's result.

namespace nwor::sm80 {

inline constexpr int kKvWarps = 4;

// Tokens a warp takes per pipeline step. 16-bit tokens beside a float8 cache take half of it.
constexpr int StepTokens(int head_dim, bool float8) { return head_dim <= 64 || float8 ? 32 : 16; }

// Bytes of one pipeline stage of one KV warp: K and V of a step.
constexpr int StageBytes(int head_dim, bool float8) {
  return StepTokens(head_dim, float8) * head_dim * (float8 ? 1 : 2) * 2;
}

// Rows of one warp (a multiple of 16), and warps that share the rows of a row tile.
constexpr int WarpRows(int head_dim, int row_tile) {
  return row_tile == 16 || head_dim > 128 ? 16 : 32;
}
constexpr int QueryWarps(int head_dim, int row_tile) {
  return row_tile / WarpRows(head_dim, row_tile);
}
constexpr int MaxRowTile(int head_dim) { return head_dim > 128 ? 32 : 64; }
constexpr int CtaThreads(int head_dim, int row_tile) {
  return 32 * kKvWarps * QueryWarps(head_dim, row_tile);
}

// Shared memory besides the stages: queries, the work tile with the KV warps' barriers, and the
// rows' softmax states and merge weights.
constexpr int QueryBytes(int head_dim, int row_tile) { return row_tile * head_dim * 2; }
inline constexpr int kWorkTileBytes = 256;
constexpr int RowStateBytes(int row_tile) { return row_tile * 4 * (3 * kKvWarps + 10); }

// The running output of the current split group, where it costs no stage on any device. Otherwise
// it is kept in global memory.
constexpr int GroupOutputBytes(int head_dim, int row_tile) {
  return row_tile == 16 && (head_dim == 64 || head_dim == 128) ? row_tile * head_dim * 4 : 0;
}

// Whether the first stages of the next split are filled while the current one is merged. More rows
// leave no registers for it.
constexpr bool PrefetchesNextSplit(int row_tile) { return row_tile == 16; }

// The KV warps' outputs, which are merged in the stages' memory at the end of a split. Rows are
// padded by 8 floats.
constexpr int MergeBytes(int head_dim, int row_tile) {
  return kKvWarps * row_tile * (head_dim + 8) * 4;
}

}  // namespace nwor::sm80
