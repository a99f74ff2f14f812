#include "session/chunked_verify.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "metrics/counters.h"

namespace nwor {

ChunkSchedule::ChunkSchedule(std::vector<int64_t> chain, int64_t chunk_rows)
    : chain_(std::move(chain)), chunk_rows_(chunk_rows) {
  NWOR_CHECK(!chain_.empty(), "chain: got no rows, expected at least a root");
  NWOR_CHECK(chunk_rows >= 1, "chunk_rows: got ", chunk_rows, ", expected 1 or more");
  Open(0);
}

void ChunkSchedule::Open(int64_t row) {
  const auto num_rows = static_cast<int64_t>(chain_.size());
  const int64_t end = std::min(row + chunk_rows_, num_rows);
  chunk_ = {row, {chain_.begin() + row, chain_.begin() + end}, std::nullopt};
  if (end < num_rows) chunk_.next_draft = chain_[end];
}

void ChunkSchedule::Report(const ChunkVerdict& verdict) {
  const auto rows = static_cast<int64_t>(chunk_.tokens.size());
  const int64_t end = chunk_.first_row + rows;
  const int64_t judged = rows - 1 + (chunk_.next_draft ? 1 : 0);
  NWOR_CHECK(verdict.accepted >= 0 && verdict.accepted <= judged, "accepted: got ",
             verdict.accepted, " for the chunk of rows ", chunk_.first_row, " to ", end - 1,
             ", expected 0 to ", judged);
  Counters::Global().Add(Counter::kChunkRows, rows);
  result_.accepted += verdict.accepted;
  if (chunk_.next_draft && verdict.accepted == judged) return Open(end);
  done_ = true;
  result_.next_token = verdict.next_token;
  result_.rows_saved = static_cast<int64_t>(chain_.size()) - end;
  Counters::Global().Add(Counter::kChunkRowsSaved, result_.rows_saved);
}

}  // namespace nwor
