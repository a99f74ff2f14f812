#include "specpv/config.h"

#include <algorithm>

namespace nwor {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 31;

void CheckRange(const char* key, int64_t value, int64_t low, int64_t high) {
  NWOR_CHECK(value >= low && value <= high, key, ": got ", value, ", expected ", low, " to ", high);
}

// What makes a view as long as it is, by the keys that say so.
std::string DescribeView(const SpecPVConfig& config, const Budget& budget) {
  const int64_t configured = config.specpv_n_retrieval_blocks;
  std::string name = Concat("specpv_n_retrieval_blocks: got ", configured);
  if (budget.retrieval_blocks == 0) {
    name =
        Concat("specpv_selector: got '", ChoiceName(config.specpv_selector, kSelectorNames), "'");
  } else if (budget.retrieval_blocks != configured) {
    name += Concat(", of which an adaptive budget has ", budget.retrieval_blocks, " at least");
  }
  return Concat(name, " (with ", budget.sink_blocks, " sink and ", budget.window_blocks,
                " window blocks of ", budget.block_size, " tokens a view of ",
                budget.static_tokens(), " tokens)");
}

}  // namespace

void CheckMaxRows(int64_t max_rows) {
  NWOR_CHECK(max_rows >= 1 && max_rows <= kMaxContextTokens, "max_rows: got ", max_rows,
             ", expected 1 to ", kMaxContextTokens, ", the root of a tree included");
}

void SpecPVConfig::Validate() const {
  CheckRange("specpv_block_size", specpv_block_size, 1, kMaxBlockSize);
  CheckRange("specpv_n_sink_blocks", specpv_n_sink_blocks, 0, kMaxBlocks);
  CheckRange("specpv_n_retrieval_blocks", specpv_n_retrieval_blocks, 0, kMaxBlocks);
  CheckRange("specpv_n_window_blocks", specpv_n_window_blocks, 0, kMaxBlocks);
  CheckRange("specpv_n_spec_tokens_buf", specpv_n_spec_tokens_buf, 0, kMaxTokens);
  CheckRange("specpv_partial_threshold", specpv_partial_threshold, 0, kMaxTokens);
  CheckRange("specpv_full_refresh_interval", specpv_full_refresh_interval, 0, kMaxTokens);
  const int64_t seen = ChooseBudget(*this, 1).static_tokens();
  NWOR_CHECK(seen > 0, "specpv_selector: got '", ChoiceName(specpv_selector, kSelectorNames),
             "' with ", specpv_n_sink_blocks, " sink, ", specpv_n_retrieval_blocks,
             " retrieval and ", specpv_n_window_blocks,
             " window blocks, expected at least one block that it sees");
  NWOR_CHECK(!specpv_offload || specpv_storage == Storage::kCompact,
             "specpv_offload: got true with specpv_storage 'paged', expected 'compact': a cache in "
             "host memory cannot be read page by page");
}

void SpecPVConfig::ValidateFor(int64_t page_size, int64_t max_rows, int64_t max_context,
                               int64_t tail_capacity) const {
  Validate();
  NWOR_CHECK(page_size >= 1, "page_size: got ", page_size, ", expected at least 1");
  CheckMaxRows(max_rows);
  NWOR_CHECK(page_size % specpv_block_size == 0, "specpv_block_size: got ", specpv_block_size,
             ", expected a divisor of the page size ", page_size);
  const Budget budget = ChooseBudget(*this, max_rows);
  const int64_t capacity = tail_capacity < 0 ? budget.tail_capacity : tail_capacity;
  NWOR_CHECK(capacity >= max_rows, "tail_capacity: got ", capacity, " tokens, expected at least ",
             max_rows, ", the rows of one tree");
  NWOR_CHECK(budget.static_tokens() < max_context, DescribeView(*this, budget),
             ", expected a view shorter than the longest context ", max_context,
             ": no step could be partial");
  NWOR_CHECK(specpv_partial_threshold < max_context, "specpv_partial_threshold: got ",
             specpv_partial_threshold, ", expected less than the longest context ", max_context,
             ": no step could be partial");
}

Score SpecPVConfig::score() const {
  if (specpv_score != Score::kAuto) return specpv_score;
  return specpv_selector == Selector::kQuest ? Score::kQuest : Score::kSpecPV;
}

Budget ChooseBudget(const SpecPVConfig& config, int64_t max_rows, int64_t prompt_tokens,
                    int64_t max_new_tokens) {
  const bool sinks =
      config.specpv_selector == Selector::kSpecPV || config.specpv_selector == Selector::kStreaming;
  const bool retrieves =
      config.specpv_selector == Selector::kSpecPV || config.specpv_selector == Selector::kQuest;
  Budget budget;
  budget.block_size = config.specpv_block_size;
  budget.sink_blocks = sinks ? config.specpv_n_sink_blocks : 0;
  budget.retrieval_blocks = retrieves ? config.specpv_n_retrieval_blocks : 0;
  budget.window_blocks = config.specpv_n_window_blocks;
  budget.tail_capacity = config.specpv_n_spec_tokens_buf + max_rows;
  budget.max_rows = max_rows;
  if (config.specpv_budget == BudgetRule::kAdaptive && retrieves) {
    const int64_t tokens =
        std::min(prompt_tokens, kMaxContextTokens) + std::min(max_new_tokens, kMaxContextTokens);
    const int64_t blocks = (tokens + budget.block_size - 1) / budget.block_size;
    const int64_t share = (blocks + kAdaptiveShare - 1) / kAdaptiveShare;
    budget.retrieval_blocks = std::min(std::max({share, config.specpv_n_window_blocks, int64_t{1}}),
                                       budget.retrieval_blocks);
  }
  return budget;
}

}  // namespace nwor
