#pragma once

#include <algorithm>
#include <cstdint>

// How a commit spreads over a device. Plain host functions, tested without a GPU.

namespace nwor {

inline constexpr int kCommitThreads = 256;
inline constexpr int kCommitWarps = kCommitThreads / 32;
inline constexpr int kCommitVectorsPerLane = 4;
// One warp's share of a row: a slice.
inline constexpr int kCommitSliceVectors = 32 * kCommitVectorsPerLane;
constexpr int32_t NumCommitSlices(int32_t vectors_per_row) {
  return (vectors_per_row + kCommitSliceVectors - 1) / kCommitSliceVectors;
}
inline constexpr int kCommitBlocksPerSm = 4;
// Batches of at most so many entries are validated by one more warp beside those that move rows, if
// rows are copied as they are.
inline constexpr int kSmallCommitEntries = 64;
inline constexpr int kSmallCommitThreads = kCommitThreads + 32;
// Warps of a block that complete summaries: in a small commit one or two of those that would move
// rows otherwise, in others one more. Each takes up to so many units (one head of one block).
inline constexpr int kMaxSummaryWarps = 2;
inline constexpr int kSummaryThreads = 32;
inline constexpr uint32_t kSmallSummaryUnits = 4, kSummaryUnits = 8;

// Cells of the table in which every entry of a batch looks for others with its destination, unless
// the batch is small and one warp compares them: half again as many as entries, so that even a full
// batch finds a place in a few steps and 8192 entries fit the shared memory of every supported
// device.
constexpr int32_t ChooseCommitCells(int32_t num_entries) {
  return std::max(64, num_entries + num_entries / 2);
}

// Into how many blocks the slices of one plane (K or V of one layer) are dealt: enough to give
// every warp one slice, or to give every SM a block when slices are few, as far as all blocks are
// resident at once.
constexpr int32_t ChooseCommitSplits(int32_t num_planes, int64_t num_slices, int32_t num_sms,
                                     int32_t blocks_per_sm, int32_t warps = kCommitWarps) {
  const int64_t one_slice_per_warp = (num_slices + warps - 1) / warps;
  // Few slices: rather two half-empty blocks on two SMs than a full one on one.
  const int64_t one_block_per_sm = std::min<int64_t>(num_sms / std::max(1, num_planes), num_slices);
  const int64_t wanted = std::max(one_slice_per_warp, one_block_per_sm);
  const int64_t resident = int64_t{num_sms} * blocks_per_sm / std::max(1, num_planes);
  return static_cast<int32_t>(std::max<int64_t>(1, std::min(wanted, resident)));
}

// How many units of summaries (one head of one block) a layer has to complete in a usual commit:
// blocks of requests at all phases of a block's life, of whose rows half is accepted.
constexpr int64_t ExpectSummaryUnits(int32_t num_requests, int32_t depth, int32_t block_size,
                                     int32_t num_heads) {
  const int64_t accepted = (int64_t{num_requests} * (depth + 1) + 1) / 2;
  return (accepted + block_size - 1) / block_size * num_heads;
}

// How a small commit that completes summaries spreads: into how many blocks a plane's slices are
// dealt, and how many of a block's warps take units instead of slices.
struct SummaryGrid {
  int32_t splits;
  int32_t warps;
};

// The fewest blocks in which each of a layer's units has a warp of its own, its two planes
// together, and no other warp has more slices to move than it must. Otherwise one warp of each
// block.
constexpr SummaryGrid ChooseSummaryGrid(int32_t num_planes, int64_t num_slices, int64_t num_units,
                                        int32_t num_sms, int32_t blocks_per_sm) {
  const int32_t fewest =
      ChooseCommitSplits(num_planes, num_slices, num_sms, blocks_per_sm, kCommitWarps - 1);
  const auto turns = [num_slices](int32_t splits, int32_t warps) {
    const int64_t num_warps = int64_t{splits} * (kCommitWarps - warps);
    return (num_slices + num_warps - 1) / num_warps;
  };
  const int32_t resident = num_sms * blocks_per_sm / std::max(1, num_planes);
  for (int32_t splits = fewest; splits <= std::max(fewest, resident); ++splits) {
    for (int32_t warps = 1; warps <= kMaxSummaryWarps; ++warps) {
      if (int64_t{2} * splits * warps >= num_units && turns(splits, warps) <= turns(fewest, 1)) {
        return {splits, warps};
      }
    }
  }
  return {fewest, 1};
}

}  // namespace nwor
