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
                                     int32_t blocks_per_sm) {
  const int64_t one_slice_per_warp = (num_slices + kCommitWarps - 1) / kCommitWarps;
  // Few slices: rather two half-empty blocks on two SMs than a full one on one.
  const int64_t one_block_per_sm = std::min<int64_t>(num_sms / std::max(1, num_planes), num_slices);
  const int64_t wanted = std::max(one_slice_per_warp, one_block_per_sm);
  const int64_t resident = int64_t{num_sms} * blocks_per_sm / std::max(1, num_planes);
  return static_cast<int32_t>(std::max<int64_t>(1, std::min(wanted, resident)));
}

}  // namespace nwor
