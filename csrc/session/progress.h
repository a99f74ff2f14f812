#pragma once

#include <cstdint>
#include <optional>

#include "session/chunked_verify.h"
#include "session/session.h"
#include "session/session_store.h"
#include "session/session_table.h"

namespace nwor {

// One request on its way through turns.
struct Progress {
  const VerifyRequest* request = nullptr;
  HeldSession session;
  size_t new_tokens_run = 0;
  std::optional<ChunkSchedule> chunks;
  Turn turn;
  bool finished = false;
  int64_t emitted = 0;  // by earlier chunks
  VerifyResult result;

  // What is judged together with the last new token: the tree, or the chunk that is next.
  DraftTree NextTree() const;
  // Whether all of the new tokens that are left go with it.
  bool OnePass() const;
  // How many of them go next.
  int64_t NextPiece() const;

  // Sets `turn` to the tokens and the tree of the next pass. Long prompts go ahead in pieces,
  // without a tree.
  void PrepareTurn();

  // Takes what the pass left in `turn` into the result.
  void Record();
};

}  // namespace nwor
