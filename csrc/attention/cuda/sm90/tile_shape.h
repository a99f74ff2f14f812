#pragma once

#include <cstdint>

// Tile and shared-memory sizes of the sm_90a kernel (sm90/kernel.cuh), as functions of head size
// and row tile. The kernel templates, the host heuristics and the tests share them.
//
// One or two consumer warpgroups compute up to 64 packed rows each; one producer warpgroup loads
// the tokens.

namespace nwor::sm90 {

inline constexpr int kWarpgroupRows = 64;  // rows of a consumer warpgroup, at most

// Not fewer: with two consumer warpgroups and heads of 80 channels the memory of six stages would
// not suffice to combine (CombineWarpBytes).
inline constexpr int kMaxStages = 7;

// Head sizes with a kernel for float8 caches: a token's row is one swizzle atom of TMA.
constexpr bool TakesFloat8(int head_dim) { return head_dim == 64 || head_dim == 128; }

// A warp's 16 rows of a wgmma tile form two halves of 8. Row tiles of up to 32 rows use the upper
// half only, so that all four warps share the softmax work. Large heads gain nothing from that.
constexpr int RowHalves(int head_dim, int row_tile) {
  return head_dim <= 128 && row_tile <= kWarpgroupRows / 2 ? 1 : 2;
}

// Consumer warpgroups by row tile. Large heads leave no registers for a second one, and over float8
// caches it would wait for the widening warps.
constexpr int ConsumerWarpgroups(int row_tile) { return row_tile > kWarpgroupRows ? 2 : 1; }
constexpr int MaxConsumerWarpgroups(int head_dim, bool float8) {
  return head_dim <= 128 && !float8 ? 2 : 1;
}

constexpr int ConsumerThreads(int warpgroups) { return 128 * warpgroups; }
inline constexpr int kProducerThreads = 128;
// The producer warp that copies boundary steps itself; full barriers expect its arrivals.
inline constexpr int kBoundaryThreads = 32;
constexpr int CtaThreads(int warpgroups) { return ConsumerThreads(warpgroups) + kProducerThreads; }

// One consumer warpgroup runs QK, softmax and PV of a step one after the other; a second CTA on the
// SM hides that. The registers of an SM do not suffice for two CTAs of large heads or of two
// consumer warpgroups.
constexpr int CtasPerSm(int head_dim, int warpgroups) {
  return head_dim > 128 || warpgroups > 1 ? 1 : 2;
}

// Tokens of a pipeline step, and the bytes of its K or of its V. Large heads leave no registers for
// more tokens.
constexpr int StepTokens(int head_dim) { return head_dim > 192 ? 32 : 64; }
constexpr int KvTileBytes(int head_dim) { return StepTokens(head_dim) * head_dim * 2; }

// Float8 caches: a stage holds tokens as halves, a raw stage holds them as they were loaded. Tokens
// wait in raw stages; the widening warps refill a stage in less time than the consumers take for
// it, so one will do where shared memory is scarce.
inline constexpr int kMaxRawStages = 8;
inline constexpr int kRawExtraBytes = 32;  // four barriers
constexpr int RawTileBytes(int head_dim) { return StepTokens(head_dim) * head_dim; }
constexpr int RawStageBytes(int head_dim) { return 2 * RawTileBytes(head_dim) + kRawExtraBytes; }

// Large heads leave no registers for Q.
constexpr bool QueryInRegisters(int head_dim) { return head_dim <= 128; }
// Rows of Q in shared memory. Two consumer warpgroups read Q from global memory.
constexpr int QueryRows(int head_dim, int row_tile) {
  return ConsumerWarpgroups(row_tile) > 1 ? 0 : kWarpgroupRows / 2 * RowHalves(head_dim, row_tile);
}
constexpr int QueryBytes(int head_dim, int row_tile) {
  return QueryRows(head_dim, row_tile) * head_dim * 2;
}

// Running outputs that are kept in shared memory while splits are merged: that of the split group
// (the first) and that of the request (the second), as many as fit. Large heads keep both in global
// memory.
constexpr int RunningOutputs(int head_dim, int row_tile) {
  return head_dim > 128 ? 0 : row_tile > 32 ? 1 : 2;
}
constexpr int RunningOutputBytes(int head_dim, int row_tile) { return row_tile * head_dim * 4; }

inline constexpr int kWorkTileBytes = 176;
// Page ids of the next steps: two windows of 32.
inline constexpr int kPageIdBytes = 2 * 32 * 4;
// Besides its tokens a stage has four barriers and, for in-flight rows, one word of the tree mask
// for each of up to this many query rows. Row tiles with four or more heads per KV head fit.
inline constexpr int kStageMaskRows = 16;
inline constexpr int kStageExtraBytes = 32 + 8 * kStageMaskRows;
constexpr int StageBytes(int head_dim) { return 2 * KvTileBytes(head_dim) + kStageExtraBytes; }

// Shared memory besides the stages: queries, running outputs, two work tiles, page ids, barriers.
constexpr int FixedBytes(int head_dim, int row_tile) {
  return QueryBytes(head_dim, row_tile) +
         RunningOutputs(head_dim, row_tile) * RunningOutputBytes(head_dim, row_tile) +
         2 * kWorkTileBytes + kPageIdBytes + 6 * 16;
}

}  // namespace nwor::sm90
