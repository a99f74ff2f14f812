#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/task.h"
#include "base/export.h"

// Products of bfloat16 matrices by a unit of the processor's own, AMX of x86: what tile.h does with
// a block of tokens, less the softmax. K is read where it lies, 16 tokens at a time; V is put
// beside its neighbour first, which the unit wants. Weights go in as two bfloat16 numbers each, so
// that they keep sixteen bits: rounding them to eight would be most of the result's error.
//
// Thread-safety: none; a unit is a thread's own while the object lives. Others of the thread find
// theirs as they had set it up: some libraries set it up once and rely on it.

namespace nwor::cpu {

class NWOR_EXPORT MatrixUnit {
 public:
  static constexpr int kRows = 16;      // of a product's rows, tokens or channels
  static constexpr int kChannels = 32;  // of a step along a head: D is a multiple

  // Whether this machine has one, and the system lets this process use it: it is asked the first
  // time, and from then on wants alternative signal stacks that hold the unit's registers, too.
  static bool IsAvailable();

  // Takes a chunk's queries from scratch.queries, as pack_queries of 16 lanes has left them, to
  // scratch.pairs. REQUIRES: they are bfloat16 numbers.
  static void PackQueries(const RowChunk& rows, int head_dim, Scratch& scratch);

  // Of the KV head `head` of the chunk, and blocks of up to `block_tokens` tokens.
  MatrixUnit(const RowChunk& rows, int head_dim, int block_tokens, Scratch& scratch);
  ~MatrixUnit();
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  // scratch.scores of all tiles of a head, for `count` tokens and those that pad them to a multiple
  // of 4. `ahead`: rows that are fetched into L2 meanwhile, as many as tokens, or null.
  void Scores(int head, const std::byte* const* keys, int count, const std::byte* const* ahead);

  // acc = acc * scratch.decay + weights * values, weights being what scratch.scores has become.
  void Sums(const std::byte* const* values, int count, const std::byte* const* ahead, float* acc);

 private:
  void PairValues(const std::byte* const* values, int count, const std::byte* const* ahead);
  void PackWeights(int first_tile, int count, uint16_t* packed) const;

  const RowChunk& rows_;
  const int head_dim_, block_tokens_;
  Scratch& scratch_;
  alignas(64) uint8_t config_before_[64];  // as it was set up; zeros: it was not
};

}  // namespace nwor::cpu
