#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/export.h"
#include "kv_interceptor/interceptor.h"
#include "session/draft_tree.h"
#include "session/session.h"
#include "session/session_batch.h"
#include "session/session_error.h"

// Sessions: the cache state of sequences, kept in the target's process across rounds, so that a
// remote drafter sends only what is new.
//
// A session holds the K/V of its first `length` tokens. A verify brings the tokens behind them (the
// prompt, later the last correction or bonus token) and a draft tree on the last one; accepted
// drafts are committed where they belong, rejected ones never were in the cache. So rolling back a
// chain is a change of length, accepting a path through a tree is its commit, and no pass over the
// prefix ever happens.

namespace nwor {

struct SessionConfig {
  int64_t max_bytes = 0;     // of K/V, over all sessions; 0: all of the bound caches
  double ttl_seconds = 0;    // idle sessions go after this; 0: never
  int64_t vocab_size = 0;    // token ids are checked against it; 0: only against being negative
  int64_t max_length = 0;    // of a sequence, drafts included; 0: what the caches hold
  int64_t max_sessions = 0;  // alive at once; 0: any number
  int64_t max_batch = 64;    // sessions in one forward pass
  // Seconds that never go back; empty: the steady clock.
  std::function<double()> clock;
};

struct VerifyRequest {
  std::string session;
  DraftTree tree;                   // its root is the last new token
  std::vector<int64_t> new_tokens;  // behind the cached ones; one at least
  // Tokens of this sequence the client knows to be cached. 0 starts a session.
  int64_t expected_prefix_len = 0;
  // Above 0: a chain is verified in chunks of so many rows (see chunked_verify.h).
  int64_t chunk_rows = 0;
  // Where the sequence ends: behind the first of these tokens, or after so many new ones (0: any
  // number). Accepted drafts behind the end are neither cached nor returned.
  std::vector<int64_t> stop_ids = {};
  int64_t max_new_tokens = 0;
};

struct VerifyResult {
  std::vector<int32_t> accepted_rows;  // of the tree, root excluded
  std::vector<int64_t> tokens;         // theirs
  int64_t next_token = -1;             // the correction or bonus token, or the last; not cached
  bool cache_hit = false;              // the session was there
  int64_t length = 0;                  // cached now: the next expected_prefix_len
  int64_t rows_run = 0;                // new tokens and tree rows
  int64_t rows_saved = 0;              // by chunks
  // Why next_token is the sequence's last one, if it is.
  FinishReason finish = FinishReason::kNone;
};

struct SessionInfo {
  std::string session;
  int64_t length = 0;
  int64_t bytes = 0;
  double idle_seconds = 0;
};

struct SessionStoreStats {
  int64_t live = 0;
  int64_t started = 0;
  int64_t ended = 0;
  int64_t evicted = 0;  // for room
  int64_t expired = 0;  // by time
  int64_t desyncs = 0;
  int64_t cache_hits = 0;
  int64_t cache_misses = 0;
  int64_t forwards = 0;
  int64_t rows_run = 0;
  int64_t rows_saved = 0;
  int64_t largest_batch = 0;  // sessions in one forward pass
  int64_t held_bytes = 0;
  int64_t max_bytes = 0;
};

// Thread-safety: every method may be called from any thread. A session is locked through a verify:
// a second one of the same session waits. Verifies of other sessions that arrive while the model
// runs share the next forward pass. The model, the acceptor and the interceptor are called by one
// thread at a time, though not always the same.
//
// Errors leave sessions as they were: one that throws has accepted nothing and cached nothing.
class NWOR_EXPORT SessionStore {
 public:
  // Takes the pages of the layers bound to `interceptor`, which must outlive the store and serve
  // nobody else. REQUIRES: layers of one cache group, staging enabled.
  SessionStore(SessionConfig config, Interceptor& interceptor, SessionForward forward,
               SessionAcceptor accept = AcceptFirstChoice);
  ~SessionStore();
  SessionStore(const SessionStore&) = delete;
  SessionStore& operator=(const SessionStore&) = delete;

  // Throws UnknownSessionError when tokens are expected to be cached and the session is not here,
  // DesyncError when it is and holds another number of tokens, CapacityError when it does not fit
  // after evicting what may be evicted, Error for wrong arguments, and what the model throws.
  VerifyResult Verify(const VerifyRequest& request);

  // Several sessions, in as few forward passes as max_batch allows. If one request is wrong or one
  // fails, all fail. REQUIRES: no session twice.
  std::vector<VerifyResult> VerifyBatch(const std::vector<VerifyRequest>& requests);

  // Keeps the first `length` tokens. Its time does not depend on the session's length.
  void Rollback(const std::string& session, int64_t length);

  // A new session with the first tokens of another (default: all), which share their pages.
  void Fork(const std::string& parent, const std::string& child,
            std::optional<int64_t> num_tokens = std::nullopt);

  // Waits for a verify in flight, then gives back the pages. Throws UnknownSessionError the second
  // time.
  void End(const std::string& session);

  // Takes away what has been idle for ttl_seconds and is not in use; every verify does so too.
  // Returns how many.
  int64_t Sweep();

  SessionInfo Info(const std::string& session) const;
  std::vector<SessionInfo> List() const;  // the least recently used first
  SessionStoreStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nwor
