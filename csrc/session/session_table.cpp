#include "session/session_table.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "metrics/counters.h"

namespace nwor {
namespace {

// The layers a store can serve have one slot space.
const std::vector<Interceptor::LayerInfo>& CheckedLayers(const Interceptor& interceptor) {
  const std::vector<Interceptor::LayerInfo>& layers = interceptor.layers();
  NWOR_CHECK(!layers.empty(), "interceptor: got no bound layers, expected those of the model");
  NWOR_CHECK(interceptor.mode() == Mode::kStage,
             "interceptor: staging is switched off, but sessions need it (enable_nwor)");
  for (const Interceptor::LayerInfo& layer : layers) {
    NWOR_CHECK(layer.ready, "interceptor: got layer '", layer.name, "' ",
               layer.unsupported.empty() ? "without memory" : layer.unsupported,
               ", expected a cache that supports staging");
    NWOR_CHECK(layer.group == layers[0].group, "interceptor: got layers of cache groups ",
               layers[0].group, " and ", layer.group, ", expected one group");
  }
  return layers;
}

int64_t BytesPerPage(const std::vector<Interceptor::LayerInfo>& layers) {
  int64_t bytes = 0;
  for (const Interceptor::LayerInfo& layer : layers) {
    bytes += layer.bytes_per_token() * layer.key_cache.size(1);
  }
  return bytes;
}

void Count(Counter counter, int64_t* own) {
  Counters::Global().Add(counter, 1);
  ++*own;
}

UnknownSessionError NotHere(const std::string& session) {
  return UnknownSessionError(
      Concat("session: got '", session, "', expected one that was started and has not ended"));
}

}  // namespace

// ---- holding -----------------------------------------------------------------------------------

HeldSession::HeldSession(SessionTable* table, std::shared_ptr<Session> session, bool started)
    : table_(table), session_(std::move(session)), started_(started) {
  ++session_->users;
}

HeldSession& HeldSession::operator=(HeldSession&& other) noexcept {
  Release();
  table_ = other.table_;
  session_ = std::move(other.session_);
  lock_ = std::move(other.lock_);
  started_ = other.started_;
  return *this;
}

void HeldSession::Release() {
  if (session_ == nullptr) return;
  {
    const std::lock_guard guard(table_->mutex_);
    --session_->users;
  }
  if (lock_.owns_lock()) lock_.unlock();
  session_.reset();
}

HeldSession SessionTable::Hold(const std::string& name) {
  HeldSession held;
  {
    const std::lock_guard guard(mutex_);
    const std::shared_ptr<Session> found = Find(name);
    if (found == nullptr) throw NotHere(name);
    held = HeldSession(this, found, /*started=*/false);
  }
  held.lock_ = std::unique_lock(held->mutex);
  if (held->ended) throw NotHere(name);
  return held;
}

SessionPins::~SessionPins() {
  if (sessions_.empty()) return;
  const std::lock_guard guard(table_->mutex_);
  for (const std::shared_ptr<Session>& session : sessions_) --session->users;
}

SessionPins SessionTable::Pin(const std::vector<std::string>& names) {
  SessionPins pins(this);
  pins.sessions_.reserve(names.size());
  const std::lock_guard guard(mutex_);
  for (const std::string& name : names) {
    if (std::shared_ptr<Session> session = Find(name)) {
      ++session->users;
      pins.sessions_.push_back(std::move(session));
    }
  }
  return pins;
}

HeldSession SessionTable::HoldOrStart(const std::string& name, int64_t cached_len) {
  const double now = config_.clock();  // before anything changes
  while (true) {
    HeldSession held;
    {
      const std::lock_guard guard(mutex_);
      std::shared_ptr<Session> session = Find(name);
      const bool starts = session == nullptr;
      if (starts) {
        Count(Counter::kSessionMisses, &stats_.cache_misses);
        if (cached_len > 0) {
          throw UnknownSessionError(Concat("session '", name, "': got expected_prefix_len ",
                                           cached_len,
                                           ", but the session is not here: it ended, "
                                           "was evicted or never started; send the whole prompt"));
        }
        CheckPlaces(name, MissingPlaces(num_entering_ + 1));
        session = std::make_shared<Session>(name, next_key_++);
        allocator_.Extend(session->key, 0);
        Add(session, now);
        session->entering = true;
        ++num_entering_;
      }
      held = HeldSession(this, std::move(session), starts);
      // Before anybody else can find it: who starts a session is the first to use it.
      if (starts) held.lock_ = std::unique_lock(held->mutex, std::try_to_lock);
    }
    if (!held.started()) held.lock_ = std::unique_lock(held->mutex);
    if (held->ended) continue;  // while this one waited: look again
    if (held->length == cached_len) return held;
    {
      const std::lock_guard guard(mutex_);
      Count(Counter::kSessionDesyncs, &stats_.desyncs);
    }
    throw DesyncError(Concat("expected_prefix_len: got ", cached_len, " for session '", name,
                             "', which has ", held->length.load(),
                             " tokens cached; send that number, roll back, "
                             "or end the session and send the whole prompt"));
  }
}

// ---- what holders do ---------------------------------------------------------------------------

void SessionTable::CutBack(Session& session, int64_t length) {
  const std::lock_guard guard(mutex_);
  allocator_.Truncate(session.key, length);
  session.length = length;
  session.block_row_pages = std::min(session.block_row_pages, allocator_.num_pages(session.key));
}

void SessionTable::Fork(Session& parent, const std::string& child,
                        std::optional<int64_t> num_tokens) {
  const double now = config_.clock();
  const std::lock_guard guard(mutex_);
  NWOR_CHECK(Find(child) == nullptr, "child: got '", child,
             "', which is already a session, expected a new name");
  const int64_t length = num_tokens.value_or(parent.length);
  NWOR_CHECK(length >= 0 && length <= parent.length, "num_tokens: got ", length,
             ", expected 0 to the ", parent.length.load(), " cached tokens of '", parent.name, "'");
  MakePlaces(child, 1);
  const auto fork = std::make_shared<Session>(child, next_key_++);
  allocator_.Fork(parent.key, fork->key, length);
  fork->length = length;
  Touch(parent, now);
  Add(fork, now);
  Count(Counter::kSessionsStarted, &stats_.started);
}

void SessionTable::End(Session& session) {
  Drop(session);
  const std::lock_guard guard(mutex_);
  Count(Counter::kSessionsEnded, &stats_.ended);
}

void SessionTable::Drop(Session& session) {
  session.ended = true;
  const std::lock_guard guard(mutex_);
  Remove(session);
}

void SessionTable::NoteUsed(Session& session, double now) {
  const std::lock_guard guard(mutex_);
  Touch(session, now);
}

void SessionTable::NoteVerified(Session& session, bool started, int64_t rows_saved, double now) {
  const std::lock_guard guard(mutex_);
  Touch(session, now);
  stats_.rows_saved += rows_saved;
  started ? Count(Counter::kSessionsStarted, &stats_.started)
          : Count(Counter::kSessionHits, &stats_.cache_hits);
}

int64_t SessionTable::Sweep() {
  const std::lock_guard guard(mutex_);
  return RemoveIdle();
}

// ---- pages -------------------------------------------------------------------------------------

void SessionTable::Admit(const std::vector<std::vector<PageNeed>>& times) {
  const std::lock_guard guard(mutex_);
  for (const std::vector<PageNeed>& needs : times) CheckRoom(needs);
  std::vector<Session*> entering;
  for (const PageNeed& need : times.front()) {
    if (need.session->entering) entering.push_back(need.session);
  }
  if (entering.empty()) return;
  MakePlaces(entering.back()->name, static_cast<int64_t>(entering.size()));
  for (Session* session : entering) EndEntering(*session);
}

std::vector<int64_t> SessionTable::Extend(Session& session, int64_t num_tokens, int64_t ahead) {
  const std::lock_guard guard(mutex_);
  MakeRoom(session, num_tokens + ahead);
  const int64_t needed = allocator_.PagesToExtend(session.key, num_tokens + ahead);
  const int64_t before = allocator_.stats().held_pages;
  std::vector<int64_t> slots = allocator_.Extend(session.key, num_tokens);
  pages_ahead_ += needed - (allocator_.stats().held_pages - before);
  return slots;
}

std::vector<int64_t> SessionTable::Accept(Session& session, int64_t num_tokens) {
  const std::lock_guard guard(mutex_);
  return allocator_.Extend(session.key, num_tokens);
}

void SessionTable::Settle() {
  const std::lock_guard guard(mutex_);
  pages_ahead_ = 0;
}

std::vector<int32_t> SessionTable::Pages(const Session& session, int64_t first_page) {
  const std::lock_guard guard(mutex_);
  return allocator_.Pages(session.key, first_page);
}

std::vector<PageCopy> SessionTable::TakeCopies() {
  const std::lock_guard guard(mutex_);
  return allocator_.TakeCopies();
}

// ---- the table ---------------------------------------------------------------------------------

SessionTable::SessionTable(const SessionConfig& config, const Interceptor& interceptor)
    : config_(config),
      bytes_per_page_(BytesPerPage(CheckedLayers(interceptor))),
      allocator_(interceptor.layers()[0].key_cache.size(0),
                 interceptor.layers()[0].key_cache.size(1)),
      page_limit_(config.max_bytes == 0 ? allocator_.stats().total_pages
                                        : std::min(allocator_.stats().total_pages,
                                                   config.max_bytes / bytes_per_page_)) {
  NWOR_CHECK(page_limit_ > 0, "max_bytes: got ", config.max_bytes, ", expected at least ",
             bytes_per_page_, " bytes for one page of all layers");
}

SessionTable::~SessionTable() {
  Counters::Global().AddLiveSessions(-static_cast<int64_t>(sessions_.size()));
}

std::shared_ptr<Session> SessionTable::Find(const std::string& name) const {
  const auto found = sessions_.find(name);
  return found == sessions_.end() ? nullptr : found->second;
}

int64_t SessionTable::MissingPlaces(int64_t num_coming) const {
  if (config_.max_sessions == 0) return 0;
  const int64_t placed = static_cast<int64_t>(sessions_.size()) - num_entering_;
  return std::max<int64_t>(0, placed + num_coming - config_.max_sessions);
}

void SessionTable::CheckPlaces(const std::string& name, int64_t missing) const {
  for (auto next = order_.begin(); missing > 0; ++next) {
    if (next == order_.end()) {
      throw CapacityError(Concat("session '", name, "': there is no room, because all ",
                                 config_.max_sessions, " sessions are in use"));
    }
    if ((*next)->users == 0) --missing;
  }
}

void SessionTable::MakePlaces(const std::string& name, int64_t num_coming) {
  const int64_t missing = MissingPlaces(num_coming);
  CheckPlaces(name, missing);
  for (int64_t i = 0; i < missing; ++i) EvictOldest();
}

void SessionTable::EndEntering(Session& session) {
  if (std::exchange(session.entering, false)) --num_entering_;
}

void SessionTable::Add(const std::shared_ptr<Session>& session, double now) {
  sessions_.emplace(session->name, session);
  session->place = order_.insert(order_.end(), session.get());
  Touch(*session, now);
  Counters::Global().AddLiveSessions(1);
}

// Its pages go with it. The last reference may be the table's.
void SessionTable::Remove(Session& session) {
  EndEntering(session);
  allocator_.Free(session.key);
  order_.erase(session.place);
  Counters::Global().AddLiveSessions(-1);
  sessions_.erase(sessions_.find(session.name));
}

void SessionTable::Touch(Session& session, double now) {
  session.last_used = now;
  order_.splice(order_.end(), order_, session.place);
}

void SessionTable::EvictOldest() {
  Evict(**std::find_if(order_.begin(), order_.end(),
                       [](const Session* session) { return session->users == 0; }));
}

void SessionTable::Evict(Session& session) {
  Remove(session);
  Count(Counter::kSessionsEvicted, &stats_.evicted);
}

int64_t SessionTable::Room() const {
  return page_limit_ - allocator_.stats().held_pages - pages_ahead_;
}

CapacityError SessionTable::DoesNotFit(const Session& session, int64_t needed, int64_t possible,
                                       const char* of_whom) const {
  return CapacityError(Concat("session '", session.name, "': needs ", needed, " pages", of_whom,
                              ", expected at most ", possible, " of ", page_limit_,
                              " that are free or can be evicted"));
}

void SessionTable::TryWithoutIdle(const std::function<void()>& body) {
  const SlotAllocator::Backup before = allocator_.TakeBackup();
  try {
    for (const Session* session : order_) {
      if (session->users == 0) allocator_.Free(session->key);
    }
    body();
  } catch (...) {
    allocator_.Restore(before);
    throw;
  }
  allocator_.Restore(before);
}

void SessionTable::CheckRoom(const std::vector<PageNeed>& needs) {
  int64_t most = 0;  // forks in a batch copy a page that they share once, not each
  for (const auto& [session, num_tokens] : needs) {
    most += allocator_.PagesToExtend(session->key, num_tokens);
  }
  if (most <= Room()) return;
  TryWithoutIdle([&] {
    // What is kept ahead for the batch that runs goes back before these sessions ask.
    const int64_t possible = page_limit_ - allocator_.stats().held_pages;
    int64_t needed = 0;
    for (const auto& [session, num_tokens] : needs) {
      needed += allocator_.PagesToExtend(session->key, num_tokens);
      if (needed > possible) {
        throw DoesNotFit(*session, needed, possible,
                         needs.size() > 1 ? " with those before it in the batch" : "");
      }
      allocator_.Extend(session->key, num_tokens);
    }
  });
}

std::unordered_set<int32_t> SessionTable::PagesToKeep(const Session& session, int64_t num_tokens) {
  const int64_t needed_now = allocator_.PagesToExtend(session.key, num_tokens);
  std::unordered_set<int32_t> kept;
  for (const Session* other : order_) {
    if (other->users == 0) continue;
    const std::vector<int32_t> pages = allocator_.Pages(other->key, 0);
    kept.insert(pages.begin(), pages.end());
  }
  TryWithoutIdle([&] {
    const int64_t needed = allocator_.PagesToExtend(session.key, num_tokens);
    if (needed > Room()) throw DoesNotFit(session, needed, Room());
    // Its last page, which it has to copy only as long as idle sessions have it too.
    if (needed < needed_now) kept.erase(allocator_.Pages(session.key, 0).back());
  });
  return kept;
}

void SessionTable::MakeRoom(const Session& session, int64_t num_tokens) {
  const auto fits = [&] { return allocator_.PagesToExtend(session.key, num_tokens) <= Room(); };
  if (fits()) return;
  const std::unordered_set<int32_t> kept = PagesToKeep(session, num_tokens);
  for (auto next = order_.begin(); next != order_.end() && !fits();) {
    Session& oldest = **next++;
    if (oldest.users > 0) continue;
    const std::vector<int32_t> pages = allocator_.Pages(oldest.key, 0);
    const bool helps =
        std::any_of(pages.begin(), pages.end(), [&](int32_t page) { return !kept.contains(page); });
    if (helps) Evict(oldest);
  }
}

int64_t SessionTable::RemoveIdle() {
  if (config_.ttl_seconds == 0) return 0;
  const double now = config_.clock();
  int64_t removed = 0;
  for (auto next = order_.begin(); next != order_.end();) {
    Session& session = **next++;
    const double idle = now - session.last_used;
    if (idle < config_.ttl_seconds) break;
    const bool expired = idle >= config_.ttl_seconds;  // not if a clock has said NaN
    if (session.users > 0 || !expired) continue;
    Remove(session);
    Count(Counter::kSessionsExpired, &stats_.expired);
    ++removed;
  }
  return removed;
}

// ---- reading -----------------------------------------------------------------------------------

SessionInfo SessionTable::Describe(const Session& session, double now) const {
  return {session.name, session.length, allocator_.num_pages(session.key) * bytes_per_page_,
          now - session.last_used};
}

std::vector<SessionInfo> SessionTable::List() const {
  const std::lock_guard guard(mutex_);
  const double now = config_.clock();
  std::vector<SessionInfo> list;
  for (const Session* session : order_) list.push_back(Describe(*session, now));
  return list;
}

SessionInfo SessionTable::Info(const std::string& name) const {
  const std::lock_guard guard(mutex_);
  const std::shared_ptr<Session> found = Find(name);
  if (found == nullptr) throw NotHere(name);
  return Describe(*found, config_.clock());
}

SessionStoreStats SessionTable::stats() const {
  const std::lock_guard guard(mutex_);
  SessionStoreStats stats = stats_;
  stats.live = static_cast<int64_t>(sessions_.size());
  stats.held_bytes = allocator_.stats().held_pages * bytes_per_page_;
  stats.max_bytes = page_limit_ * bytes_per_page_;
  return stats;
}

}  // namespace nwor
