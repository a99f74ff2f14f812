#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "session/draft_tree.h"
#include "tree/run_end.h"

// What a store keeps of one sequence, and one sequence's share of a forward pass.

namespace nwor {

// Lives as long as somebody uses it; the table only knows those that have not ended.
struct Session {
  Session(std::string session_name, int64_t request_key)
      : name(std::move(session_name)), key(request_key) {}

  const std::string name;
  const int64_t key;  // of its slots; a name may come back, a key does not

  // Held through a verify, a rollback and the end.
  std::mutex mutex;
  // Written by whoever holds the lock, or works for the one who does.
  bool ended = false;
  std::atomic<int64_t> length{0};  // tokens whose K/V is cached
  at::Tensor block_row;            // int32 on the caches' device, its first pages valid
  int64_t block_row_pages = 0;

  // Guarded by the store's lock.
  int users = 0;          // who hold the session's lock or wait for it
  bool entering = false;  // it has started and has no place yet
  double last_used = 0;
  std::list<Session*>::iterator place;  // in the order of use
};

// One session's rows of one forward pass.
struct Turn {
  Session* session = nullptr;
  std::vector<int64_t> direct;  // tokens to cache in any case; the last one is the tree's root
  DraftTree tree;
  bool prompt_only = false;       // a piece of a prompt: what the target says is not looked at
  std::vector<int64_t> stop_ids;  // the sequence ends behind the first of these
  int64_t max_new_tokens = 0;     // or after so many; 0: any number

  // Filled by the pass.
  std::vector<int32_t> accepted;  // rows of the tree
  int64_t next_token = -1;
  FinishReason finish = FinishReason::kNone;
  std::exception_ptr error;
  bool done = false;

  int64_t num_rows() const { return static_cast<int64_t>(direct.size()) + tree.num_drafts(); }
  // Rows before the root.
  int64_t num_leading() const { return static_cast<int64_t>(direct.size()) - 1; }

  // Where the sequence ends inside the accepted run, the token there becomes the next one and what
  // follows is dropped.
  void CutAtTheEnd() {
    if (prompt_only) return;
    std::vector<int64_t> run;
    for (const int32_t row : accepted) run.push_back(tree.tokens[row]);
    run.push_back(next_token);
    const RunEnd end = FindRunEnd(run, stop_ids, max_new_tokens > 0 ? max_new_tokens : INT64_MAX);
    finish = end.finish;
    accepted.resize(end.num_tokens - 1);
    next_token = run[end.num_tokens - 1];
  }
};

}  // namespace nwor
