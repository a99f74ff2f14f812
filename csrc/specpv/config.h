#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/export.h"

// What users configure of partial verification, under the names they type in YAML, JSON, Python and
// the environment, and what follows from it for one request.

namespace nwor {

// Which tokens a partial step sees besides the tail: sink, retrieved blocks, window.
enum class Selector : uint8_t { kSpecPV, kStreaming, kSliding, kQuest };
inline constexpr std::array<std::string_view, 4> kSelectorNames = {"specpv", "streaming", "sliding",
                                                                   "quest"};
// How a block is scored. kAuto: quest for the selector quest, specpv for every other.
enum class Score : uint8_t { kAuto, kSpecPV, kQuest };
inline constexpr std::array<std::string_view, 3> kScoreNames = {"auto", "specpv", "quest"};
enum class QueryReduce : uint8_t { kMean, kMax, kLast };
inline constexpr std::array<std::string_view, 3> kQueryReduceNames = {"mean", "max", "last"};
enum class GroupReduce : uint8_t { kMean, kMax };
inline constexpr std::array<std::string_view, 2> kGroupReduceNames = {"mean", "max"};
enum class Selection : uint8_t { kPerHead, kShared };
inline constexpr std::array<std::string_view, 2> kSelectionNames = {"per_head", "shared"};
enum class Storage : uint8_t { kPaged, kCompact };
inline constexpr std::array<std::string_view, 2> kStorageNames = {"paged", "compact"};
enum class SpecPVMode : uint8_t { kRectify, kRefresh, kLossless };
inline constexpr std::array<std::string_view, 3> kSpecPVModeNames = {"rectify", "refresh",
                                                                     "lossless"};
enum class BudgetRule : uint8_t { kFixed, kAdaptive };
inline constexpr std::array<std::string_view, 2> kBudgetRuleNames = {"fixed", "adaptive"};

// The enumerator that `text` names. Throws Error naming the key, what was got and all that is
// valid.
template <typename Enum, size_t kCount>
Enum ParseChoice(std::string_view key, std::string_view text,
                 const std::array<std::string_view, kCount>& names) {
  std::string valid;
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
    valid += Concat(i == 0 ? "'" : ", '", names[i], "'");
  }
  throw Error(Concat(key, ": got '", text, "', expected one of ", valid));
}
template <typename Enum, size_t kCount>
std::string_view ChoiceName(Enum value, const std::array<std::string_view, kCount>& names) {
  return names[static_cast<size_t>(value)];
}

inline constexpr int64_t kMaxBlockSize = 1024;

// Members are called as users type them.
struct NWOR_EXPORT SpecPVConfig {
  bool enable_specpv = false;
  int64_t specpv_block_size = 16;            // tokens; divides the page size
  int64_t specpv_n_sink_blocks = 2;          // blocks at the start that are always seen
  int64_t specpv_n_retrieval_blocks = 256;   // blocks chosen by score
  int64_t specpv_n_window_blocks = 8;        // blocks before the tail that are always seen
  int64_t specpv_n_spec_tokens_buf = 20;     // room in the tail beyond the rows of one tree
  int64_t specpv_partial_threshold = 0;      // no partial step up to this many tokens of context
  int64_t specpv_full_refresh_interval = 0;  // partial steps between full ones at most; 0: any
  Selector specpv_selector = Selector::kSpecPV;
  Score specpv_score = Score::kAuto;
  QueryReduce specpv_query_reduce = QueryReduce::kMean;
  GroupReduce specpv_group_reduce = GroupReduce::kMean;
  Selection specpv_selection = Selection::kPerHead;
  Storage specpv_storage = Storage::kPaged;
  SpecPVMode specpv_mode = SpecPVMode::kRectify;
  BudgetRule specpv_budget = BudgetRule::kFixed;
  bool specpv_offload = false;  // the full cache lives in host memory; needs compact storage

  // Each value in its range, and those that must fit each other. Throws Error.
  void Validate() const;

  // Whether it fits an engine: its page size, the rows of its largest tree (the root included), the
  // longest context. tail_capacity: tokens an engine has set aside for the tail itself, -1 = ours.
  // Throws Error with the numbers.
  void ValidateFor(int64_t page_size, int64_t max_rows, int64_t max_context,
                   int64_t tail_capacity = -1) const;

  Score score() const;  // never kAuto
};

// What a request may see, in blocks, and what follows from it in tokens.
struct NWOR_EXPORT Budget {
  int64_t block_size = 16;
  int64_t sink_blocks = 0;
  int64_t retrieval_blocks = 0;
  int64_t window_blocks = 0;
  int64_t tail_capacity = 0;  // tokens
  int64_t max_rows = 1;       // of a tree

  int64_t sink_tokens() const { return sink_blocks * block_size; }
  int64_t window_tokens() const { return window_blocks * block_size; }
  // Tokens of sink, retrieved blocks and window: a context no longer than this is seen whole.
  int64_t static_tokens() const {
    return (sink_blocks + retrieval_blocks + window_blocks) * block_size;
  }
  // Blocks of the longest view. The window begins at or before a block's start, the tail ends
  // within one; between them lie the rows that the last full step committed and, in lossless mode,
  // the tail that it confirmed.
  int64_t max_view_blocks() const {
    return sink_blocks + retrieval_blocks + window_blocks + 2 +
           (2 * tail_capacity + max_rows + block_size - 1) / block_size;
  }
};

// Tokens of the longest context, and rows of the largest tree: devices count them in int32, whole
// blocks of them included.
inline constexpr int64_t kMaxContextTokens = (int64_t{1} << 31) - kMaxBlockSize;

// The blocks that retrieval may choose when the budget is adaptive: an eighth of the blocks that
// the request will have at its end (prompt and new tokens), at least as many as the window and one,
// at most specpv_n_retrieval_blocks. So a short request is not seen whole just because the budget
// is large.
inline constexpr int64_t kAdaptiveShare = 8;

// Throws Error unless it is 1 to kMaxContextTokens.
NWOR_EXPORT void CheckMaxRows(int64_t max_rows);

// The budget of one request. Selectors without a segment have none of its blocks.
// REQUIRES: config is valid; CheckMaxRows passes; lengths are not negative.
NWOR_EXPORT Budget ChooseBudget(const SpecPVConfig& config, int64_t max_rows,
                                int64_t prompt_tokens = 0, int64_t max_new_tokens = 0);

}  // namespace nwor
