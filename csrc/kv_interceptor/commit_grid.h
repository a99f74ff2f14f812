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
inline constexpr int kCommitBlocksPerSm = 4;

// Shared memory of one block, in words: staging rows and entry numbers of its share, and a table in
// which every entry of the batch looks for others with its destination.
struct CommitShared {
  int32_t row_words;
  int32_t cell_words;
  int32_t entry_words;  // two 16-bit numbers each

  constexpr int64_t bytes() const { return (int64_t{row_words} + cell_words + entry_words) * 4; }
};

// Cells are half again as many as entries, so that even a full batch finds a place in a few steps
// and 8192 entries fit the 99 KB that every supported device has.
constexpr CommitShared ChooseCommitShared(int32_t num_entries) {
  return {num_entries, std::max(64, num_entries + num_entries / 2), (num_entries + 1) / 2};
}

// Into how many blocks the rows of one plane (K or V of one layer) are dealt: a power of two,
// enough to fill the device or to give every warp one slice, whichever is less.
constexpr int32_t ChooseCommitSplits(int32_t num_planes, int64_t max_slices, int32_t num_sms,
                                     int32_t blocks_per_sm) {
  const int64_t one_slice_per_warp = (max_slices + kCommitWarps - 1) / kCommitWarps;
  // Few slices: rather two half-empty blocks on two SMs than a full one on one.
  const int64_t one_block_per_sm = std::min<int64_t>(num_sms / std::max(1, num_planes), max_slices);
  const int64_t wanted = std::max(one_slice_per_warp, one_block_per_sm);
  const int64_t resident = int64_t{num_sms} * blocks_per_sm / std::max(1, num_planes);
  int32_t splits = 1;
  while (splits * 2 <= std::min(wanted, resident)) splits *= 2;
  return splits;
}

}  // namespace nwor
