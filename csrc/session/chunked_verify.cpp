#include "session/chunked_verify.h"

#include <algorithm>

#include "check.h"
#include "metrics/counters.h"

namespace nwor {

ChunkedResult VerifyInChunks(std::span<const int64_t> chain, const ChunkVerifier& verify,
                             int64_t chunk_rows) {
  const auto num_rows = static_cast<int64_t>(chain.size());
  NWOR_CHECK(num_rows >= 1, "chain: got no rows, expected a root at least");
  NWOR_CHECK(chunk_rows >= 1, "chunk_rows: got ", chunk_rows, ", expected 1 or more");
  ChunkedResult result;
  int64_t row = 0;
  while (true) {
    const int64_t end = std::min(row + chunk_rows, num_rows);
    ChainChunk chunk{row, {chain.begin() + row, chain.begin() + end}, std::nullopt};
    if (end < num_rows) chunk.next_draft = chain[end];
    const int64_t judged = end - row - 1 + (chunk.next_draft ? 1 : 0);
    Counters::Global().Add(Counter::kChunkRows, end - row);
    const ChunkVerdict verdict = verify(chunk);
    NWOR_CHECK(verdict.accepted >= 0 && verdict.accepted <= judged, "accepted: got ",
               verdict.accepted, " for the chunk of rows ", row, " to ", end - 1,
               ", expected 0 to ", judged);
    ++result.chunks;
    result.rows_run = end;
    result.accepted += verdict.accepted;
    if (!chunk.next_draft || verdict.accepted < judged) {
      result.next_token = verdict.next_token;
      break;
    }
    row = end;
  }
  result.rows_saved = num_rows - result.rows_run;
  Counters::Global().Add(Counter::kChunkRowsSaved, result.rows_saved);
  return result;
}

ChunkVerdict JudgeGreedy(const ChainChunk& chunk, std::span<const int64_t> target_ids) {
  const size_t num_rows = chunk.tokens.size();
  NWOR_CHECK(target_ids.size() == num_rows, "target_ids: got ", target_ids.size(),
             ", expected one for each of the chunk's ", num_rows, " rows");
  for (size_t row = 0; row + 1 < num_rows; ++row) {
    if (target_ids[row] != chunk.tokens[row + 1]) {
      return {static_cast<int64_t>(row), target_ids[row]};
    }
  }
  const auto accepted = static_cast<int64_t>(num_rows) - 1;
  const bool goes_on = chunk.next_draft && *chunk.next_draft == target_ids.back();
  return {accepted + (goes_on ? 1 : 0), target_ids.back()};
}

}  // namespace nwor
