#pragma once

#include <cstdint>

#include "attention/cpu/task.h"
#include "attention/cpu/visibility.h"
#include "attention/params.h"

namespace nwor::cpu {

enum class Cover : uint8_t { kNone, kSome, kAll };  // how much of a block a chunk's rows see

// Which tokens of a block the rows of a chunk see, together as a Cover and row by row as bits in
// scratch.visible, which hold until the next question.
class BlockCover {
 public:
  BlockCover(const VerifyParams& params, const RowChunk& rows, Scratch& scratch)
      : params_(params), rows_(rows), scratch_(scratch), visibility_(params, rows) {}

  // Finds where the rows' windows begin and returns where the first of them does: nothing before is
  // seen. REQUIRES: called before any block is asked for.
  int64_t Begin() const {
    if (params_.window <= 0) {
      return 0;
    }
    for (int r = 0; r < rows_.count; ++r) {
      scratch_.visible_from[r] = visibility_.VisibleFrom(rows_.first + r);
    }
    return visibility_.FirstVisible();
  }

  // The prefix block at `first`. Without a window all of it is seen, and no bits are filled.
  Cover OfPrefix(int64_t first, int count) const {
    if (params_.window <= 0) {
      return Cover::kAll;
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
    return any == 0 ? Cover::kNone : (all == full ? Cover::kAll : Cover::kSome);
  }

  // The block of in-flight rows at `first`.
  Cover OfRows(int first, int count) const {
    const uint64_t full = LowBits(count);
    uint64_t any = 0, all = full;
    for (int r = 0; r < rows_.count; ++r) {
      uint64_t bits = visibility_.RowBits(rows_.first + r, first, count);
      if (params_.window > 0) {
        for (int i = 0; i < count; ++i) {
          if (visibility_.Position(first + i) < scratch_.visible_from[r]) {
            bits &= ~(uint64_t{1} << i);
          }
        }
      }
      scratch_.visible[r] = bits;
      any |= bits;
      all &= bits;
    }
    return any == 0 ? Cover::kNone : (all == full ? Cover::kAll : Cover::kSome);
  }

 private:
  const VerifyParams& params_;
  const RowChunk& rows_;
  Scratch& scratch_;
  const Visibility visibility_;
};

}  // namespace nwor::cpu
