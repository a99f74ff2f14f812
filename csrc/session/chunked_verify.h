#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/export.h"

// Chunked verification of a long draft chain: the next chunk is run only if everything before it
// was accepted, so rows behind the first rejection are never run.
//
// A chunk is a round like any other. Its first row is a token known to be accepted (the root, or a
// draft that the chunk before has just accepted), so it plays the root: written directly, while the
// chunk's other rows are staged and committed by themselves. The last row's output already judges
// the draft behind the chunk; that draft opens the next one.

namespace nwor {

struct ChainChunk {
  int64_t first_row;                  // of the chain; row 0 is the root
  std::vector<int64_t> tokens;        // its rows, the first one accepted already
  std::optional<int64_t> next_draft;  // the draft behind the chunk, if the chain goes on
};

// What became of a chunk: how many of tokens[1], tokens[2], .., next_draft were accepted in a row,
// and the target's token behind the last of them: a correction, or a bonus. When next_draft was
// accepted too there is none yet, and next_token is not read.
struct ChunkVerdict {
  int64_t accepted;
  int64_t next_token;
};

struct ChunkedResult {
  int64_t accepted = 0;  // drafts
  int64_t next_token = -1;
  int64_t rows_saved = 0;  // of the chain's rows
};

// The chunks of one chain, one after the other. The outcome is that of one pass over all rows.
// Counts rows run and saved.
//
// Thread-safety: none.
class NWOR_EXPORT ChunkSchedule {
 public:
  // REQUIRES: a root; chunk_rows >= 1.
  ChunkSchedule(std::vector<int64_t> chain, int64_t chunk_rows);

  bool done() const { return done_; }
  // The chunk to run now. REQUIRES: not done.
  const ChainChunk& chunk() const { return chunk_; }
  // What became of it; there is a next one, or the chain is done.
  void Report(const ChunkVerdict& verdict);
  const ChunkedResult& result() const { return result_; }

 private:
  void Open(int64_t row);

  const std::vector<int64_t> chain_;
  const int64_t chunk_rows_;
  ChainChunk chunk_;
  ChunkedResult result_;
  bool done_ = false;
};

}  // namespace nwor
