#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kv_interceptor/interceptor.h"
#include "session/session.h"
#include "session/session_error.h"
#include "session/session_rounds.h"
#include "session/session_store.h"
#include "session/slot_allocator.h"

// The sessions of a store: which there are, the pages they hold, the order of their use, and who
// goes to make room.
//
// Locks, in the order they are taken: a session's (several by name), then that of the rounds, then
// the table's, which is held for moments only and never while anything else is waited for.

namespace nwor {

class SessionTable;

// A session in somebody's hands: locked, and taken away neither for room nor by time until this
// goes.
class HeldSession {
 public:
  HeldSession() = default;
  HeldSession(HeldSession&&) noexcept = default;
  HeldSession& operator=(HeldSession&& other) noexcept;
  ~HeldSession() { Release(); }

  Session& operator*() const { return *session_; }
  Session* operator->() const { return session_.get(); }
  // Whether it began with this hold.
  bool started() const { return started_; }

 private:
  friend class SessionTable;
  // REQUIRES: the table's lock.
  HeldSession(SessionTable* table, std::shared_ptr<Session> session, bool started);
  void Release();

  SessionTable* table_ = nullptr;
  std::shared_ptr<Session> session_;
  std::unique_lock<std::mutex> lock_;  // of the session, so it has to go before it
  bool started_ = false;
};

// Sessions that nobody takes away while a batch takes hold of them one by one.
class SessionPins {
 public:
  SessionPins(SessionPins&& other) noexcept = default;
  SessionPins& operator=(SessionPins&&) = delete;
  ~SessionPins();

 private:
  friend class SessionTable;
  explicit SessionPins(SessionTable* table) : table_(table) {}

  SessionTable* table_;
  std::vector<std::shared_ptr<Session>> sessions_;
};

// Slots for so many tokens more.
struct PageNeed {
  Session* session;
  int64_t num_tokens;
};

// Thread-safety: every method may be called from any thread. Those that take a Session are for
// whoever holds it.
class SessionTable final : public SessionPages {
 public:
  // REQUIRES: a configuration that the store has checked. Throws Error for layers that cannot serve
  // sessions.
  SessionTable(const SessionConfig& config, const Interceptor& interceptor);
  ~SessionTable() override;

  // Waits for whoever has the session. Throws UnknownSessionError.
  HeldSession Hold(const std::string& name);
  // The same for a verify that expects `cached_len` tokens to be cached; 0 starts a session that is
  // not here, which Admit gives its place. Throws UnknownSessionError, DesyncError, CapacityError.
  HeldSession HoldOrStart(const std::string& name, int64_t cached_len);
  // Those of these sessions that are here.
  SessionPins Pin(const std::vector<std::string>& names);

  // REQUIRES: 0 <= length <= the session's.
  void CutBack(Session& session, int64_t length);
  void Fork(Session& parent, const std::string& child, std::optional<int64_t> num_tokens);
  void End(Session& session);
  // Of a session whose first verify failed: it never was.
  void Drop(Session& session);
  // At the time `now`, which the caller asked the clock for: it may throw, and nothing may here.
  void NoteUsed(Session& session, double now);
  void NoteVerified(Session& session, bool started, int64_t rows_saved, double now);
  // Takes away what has been idle too long. Returns how many.
  int64_t Sweep();

  std::vector<SessionInfo> List() const;
  SessionInfo Info(const std::string& name) const;
  SessionStoreStats stats() const;  // without the rounds'

  // Those of these sessions that start get their places, for which the oldest may go. Throws
  // CapacityError, and evicts nobody, if at one of these times they would not all fit after
  // evicting whoever is not in use. Promises no pages: others may take the room meanwhile.
  // REQUIRES: every session in the first of `times`.
  void Admit(const std::vector<std::vector<PageNeed>>& times);

  // ---- pages, for the rounds ----
  std::vector<int64_t> Extend(Session& session, int64_t num_tokens, int64_t ahead) override;
  std::vector<int64_t> Accept(Session& session, int64_t num_tokens) override;
  void Settle() override;
  std::vector<int32_t> Pages(const Session& session, int64_t first_page) override;
  std::vector<PageCopy> TakeCopies() override;

 private:
  friend class HeldSession;
  friend class SessionPins;

  // ---- under the lock ----
  std::shared_ptr<Session> Find(const std::string& name) const;
  void Add(const std::shared_ptr<Session>& session, double now);
  void Remove(Session& session);
  void Touch(Session& session, double now);
  void Evict(Session& session);
  void EvictOldest();  // REQUIRES: one that is not in use.
  // How many have to go for so many sessions more than those that have their places.
  int64_t MissingPlaces(int64_t num_coming) const;
  // Throws CapacityError unless so many are not in use.
  void CheckPlaces(const std::string& name, int64_t missing) const;
  // Evicts whom MissingPlaces counts. Throws CapacityError, and evicts nobody, if it cannot.
  void MakePlaces(const std::string& name, int64_t num_coming);
  void EndEntering(Session& session);  // it has its place, or needs none any more
  int64_t Room() const;
  CapacityError DoesNotFit(const Session& session, int64_t needed, int64_t possible,
                           const char* of_whom = "") const;
  // As if nobody were here who is not in use. What the body does to the books is undone.
  void TryWithoutIdle(const std::function<void()>& body);
  // What Admit says of pages.
  void CheckRoom(const std::vector<PageNeed>& needs);
  // Evicts the oldest until there is room for so many tokens. Throws CapacityError, and evicts
  // nobody, if all of them would not do.
  void MakeRoom(const Session& session, int64_t num_tokens);
  // Who has these pages alone would go in vain. Throws as MakeRoom does.
  std::unordered_set<int32_t> PagesToKeep(const Session& session, int64_t num_tokens);
  int64_t RemoveIdle();
  SessionInfo Describe(const Session& session, double now) const;

  const SessionConfig config_;
  const int64_t bytes_per_page_;

  mutable std::mutex mutex_;
  SlotAllocator allocator_;
  const int64_t page_limit_;
  int64_t pages_ahead_ = 0;   // promised to the batch that runs
  int64_t num_entering_ = 0;  // sessions that start and have no place yet
  std::unordered_map<std::string, std::shared_ptr<Session>> sessions_;
  std::list<Session*> order_;  // of use, the oldest first
  int64_t next_key_ = 0;
  SessionStoreStats stats_;
};

}  // namespace nwor
