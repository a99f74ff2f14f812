#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <vector>

#include "kv_interceptor/interceptor.h"
#include "session/session.h"
#include "session/session_batch.h"
#include "session/slot_allocator.h"

// Forward passes over turns of many threads.
//
// Whoever brings turns while no pass runs leads one: it takes everybody's waiting turns, runs the
// model and tells the others. So while the model runs, the next batch gathers by itself.

namespace nwor {

// Pages for the sessions, behind the store's lock.
class SessionPages {
 public:
  virtual ~SessionPages() = default;
  // Slots for direct.size() tokens; room for `ahead` more is there at Commit. May evict others.
  virtual std::vector<int64_t> Extend(Session& session, int64_t num_tokens, int64_t ahead) = 0;
  // Slots for accepted tokens, out of the room ahead.
  virtual std::vector<int64_t> Accept(Session& session, int64_t num_tokens) = 0;
  // The batch is over: no room is kept ahead any more.
  virtual void Settle() = 0;
  virtual std::vector<int32_t> Pages(const Session& session, int64_t first_page) = 0;
  virtual std::vector<PageCopy> TakeCopies() = 0;
};

struct RoundStats {
  int64_t forwards = 0;
  int64_t rows = 0;
  int64_t largest_batch = 0;
};

// Thread-safety: Run and stats may be called from any thread.
class SessionRounds {
 public:
  SessionRounds(Interceptor& interceptor, SessionForward forward, SessionAcceptor accept,
                SessionPages& pages, int64_t max_batch, int64_t vocab_size);

  // Returns when all turns are done; what went wrong is in each. The sessions' lengths have grown
  // by what was cached. REQUIRES: the caller holds the sessions' locks; no session twice.
  void Run(std::span<Turn* const> turns);

  RoundStats stats() const;

 private:
  void Lead(const std::vector<Turn*>& turns);
  using Slots = std::span<const std::vector<int64_t>>;  // of each turn's direct tokens
  void RunParts(std::span<Turn* const> turns, Slots slots);
  // False: these turns have too many drafts for one pass, and nothing was done.
  bool RunBatch(std::span<Turn* const> turns, Slots slots);
  SessionBatch Describe(std::span<Turn* const> turns, Slots slots);
  at::Tensor BlockTable(std::span<Turn* const> turns);
  void RefreshBlockRow(Session& session);
  void CopyPages();
  void CheckAllLayersWrote() const;
  void ReadAcceptance(const Accepted& acceptance, std::span<Turn* const> turns) const;
  void Commit(std::span<Turn* const> turns);

  Interceptor& interceptor_;
  const SessionForward forward_;
  const SessionAcceptor accept_;
  SessionPages& pages_;
  const size_t max_batch_;
  const int64_t vocab_size_;
  const at::Device device_;
  // Draft rows that staging was found not to take. Of whoever leads.
  int64_t too_many_drafts_ = std::numeric_limits<int64_t>::max();

  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool leading_ = false;
  std::deque<Turn*> waiting_;
  RoundStats stats_;
};

}  // namespace nwor
