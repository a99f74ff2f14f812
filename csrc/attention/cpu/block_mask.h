#pragma once

#include <cstdint>

#include "attention/cpu/kernels.h"
#include "attention/cpu/row_mask.h"
#include "attention/params.h"

namespace nwor::cpu {

// How much of a block of tokens the rows of a chunk see: no row sees any, some see some, all see
// all.
enum class BlockVisibility : uint8_t { kEmpty, kPartial, kFull };

// The mask of a block of tokens for the rows of a chunk: as a whole, as a BlockVisibility, and row
// by row, as bits in scratch.visible, which are valid until the next call.
class BlockMask {
 public:
  BlockMask(const VerifyParams& params, const RowChunk& rows, Scratch& scratch)
      : params_(params), rows_(rows), scratch_(scratch), row_mask_(params, rows) {}

  // Finds where the rows' windows begin. Returns the first position that any row sees.
  // REQUIRES: called before the other functions.
  int64_t Begin() const {
    if (params_.window <= 0) {
      return 0;
    }
    for (int r = 0; r < rows_.count; ++r) {
      scratch_.visible_from[r] = row_mask_.VisibleFrom(rows_.first + r);
    }
    return row_mask_.FirstVisible();
  }

  // The prefix block at `first`. Without a window it is full, and no bits are written.
  BlockVisibility OfPrefix(int64_t first, int count) const {
    if (params_.window <= 0) {
      return BlockVisibility::kFull;
    }
    const uint64_t full = LowBits(count);
    uint64_t any = 0, all = full;
    for (int r = 0; r < rows_.count; ++r) {
      const int64_t hidden = scratch_.visible_from[r] - first;
      const uint64_t bits =
          hidden <= 0 ? full : (hidden >= count ? 0 : full & ~LowBits(static_cast<int>(hidden)));
      scratch_.visible[r] = bits;
      any |= bits;
      all &= bits;
    }
    return any == 0 ? BlockVisibility::kEmpty
                    : (all == full ? BlockVisibility::kFull : BlockVisibility::kPartial);
  }

  // The block of in-flight rows at `first`.
  BlockVisibility OfRows(int first, int count) const {
    const uint64_t full = LowBits(count);
    uint64_t any = 0, all = full;
    for (int r = 0; r < rows_.count; ++r) {
      uint64_t bits = row_mask_.RowBits(rows_.first + r, first, count);
      if (params_.window > 0) {
        for (int i = 0; i < count; ++i) {
          if (row_mask_.Position(first + i) < scratch_.visible_from[r]) {
            bits &= ~(uint64_t{1} << i);
          }
        }
      }
      scratch_.visible[r] = bits;
      any |= bits;
      all &= bits;
    }
    return any == 0 ? BlockVisibility::kEmpty
                    : (all == full ? BlockVisibility::kFull : BlockVisibility::kPartial);
  }

 private:
  const VerifyParams& params_;
  const RowChunk& rows_;
  Scratch& scratch_;
  const RowMask row_mask_;
};

}  // namespace nwor::cpu
