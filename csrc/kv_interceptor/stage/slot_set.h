#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace nwor {

// A set of non-negative numbers (slots, rows) that keeps its memory between uses.
class SlotSet {
 public:
  void Reset(int64_t max_entries) {
    const auto size = std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(8, max_entries)) * 2);
    table_.assign(size, kEmpty);
  }

  // False when it is there already. REQUIRES: fewer insertions than Reset was told.
  bool Insert(int64_t number) {
    const uint64_t mask = table_.size() - 1;
    for (uint64_t at = (static_cast<uint64_t>(number) * 0x9e3779b97f4a7c15ULL) >> 32;; ++at) {
      int64_t& entry = table_[at & mask];
      if (entry == number) return false;
      if (entry == kEmpty) {
        entry = number;
        return true;
      }
    }
  }

 private:
  static constexpr int64_t kEmpty = -1;
  std::vector<int64_t> table_;
};

}  // namespace nwor
