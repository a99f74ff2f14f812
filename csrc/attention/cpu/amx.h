#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/kernels.h"
#include "base/export.h"

// Products of bfloat16 matrices by AMX (x86): scores and weighted sums of a block of tokens, as
// tile.h computes them. K is read in place, 16 tokens at a time; V is first interleaved with its
// neighbour, as the instruction needs it. Weights go in as two bfloat16 numbers each and so keep
// sixteen bits: rounding them to eight would cause most of the result's error.
//
// Thread-safety: none. An object configures its thread's AMX tiles while it lives and restores the
// previous configuration afterwards, which other libraries may rely on.

namespace nwor::cpu {

class NWOR_EXPORT Amx {
 public:
  static constexpr int kRows = 16;      // rows, tokens or channels of a tile
  static constexpr int kChannels = 32;  // channels of a step; D is a multiple

  // Whether this machine has AMX and the system lets this process use it. The first call asks for
  // permission; from then on alternative signal stacks must have room for the tile registers.
  static bool IsAvailable();

  // Packs a chunk's queries from scratch.queries, as pack_queries of 16 lanes left them, into
  // scratch.pairs. REQUIRES: they are bfloat16 numbers.
  static void PackQueries(const RowChunk& rows, int head_dim, Scratch& scratch);

  // For blocks of up to `block_tokens` tokens.
  Amx(const RowChunk& rows, int head_dim, int block_tokens, Scratch& scratch);
  ~Amx();
  Amx(const Amx&) = delete;
  Amx& operator=(const Amx&) = delete;

  // Writes scratch.scores for all tiles of a head: `count` tokens, padded to a multiple of 4.
  // `prefetch`: as many rows as tokens, to be prefetched into L2; or null.
  void Scores(int head, const std::byte* const* keys, int count, const std::byte* const* prefetch);

  // acc = acc * scratch.decay + weights * values; scratch.scores holds the weights.
  void Sums(const std::byte* const* values, int count, const std::byte* const* prefetch,
            float* acc);

 private:
  void PairValues(const std::byte* const* values, int count, const std::byte* const* prefetch);
  void PackWeights(int first_tile, int count, uint16_t* packed) const;

  const RowChunk& rows_;
  const int head_dim_, block_tokens_;
  Scratch& scratch_;
  alignas(64) uint8_t config_before_[64];  // previous tile configuration; zeros: none
};

}  // namespace nwor::cpu
