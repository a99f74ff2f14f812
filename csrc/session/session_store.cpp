#include "session/session_store.h"

#include <algorithm>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "check.h"
#include "metrics/counters.h"
#include "session/progress.h"
#include "session/session.h"
#include "session/session_rounds.h"
#include "session/slot_allocator.h"

// Locks, in the order they are taken: a session's (several by name), then that of the rounds, then
// the store's, which is held for moments only and never while anything else is waited for.

namespace nwor {
namespace {

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

SessionConfig Checked(SessionConfig config) {
  const auto not_negative = [](const char* name, auto value) {
    NWOR_CHECK(value >= 0, name, ": got ", value, ", expected 0 or more");
  };
  not_negative("max_bytes", config.max_bytes);
  not_negative("ttl_seconds", config.ttl_seconds);
  not_negative("vocab_size", config.vocab_size);
  not_negative("max_length", config.max_length);
  not_negative("max_sessions", config.max_sessions);
  NWOR_CHECK(config.max_batch >= 1 && config.max_batch <= kMaxCommitRows, "max_batch: got ",
             config.max_batch, ", expected 1 to ", kMaxCommitRows);
  if (!config.clock) config.clock = SteadySeconds;
  return config;
}

// The layers a store can serve have one slot space.
const std::vector<Interceptor::LayerInfo>& CheckedLayers(const Interceptor& interceptor) {
  const std::vector<Interceptor::LayerInfo>& layers = interceptor.layers();
  NWOR_CHECK(!layers.empty(), "interceptor: got no bound layers, expected those of the model");
  NWOR_CHECK(interceptor.mode() == Mode::kStage,
             "interceptor: got one that is switched off, expected enable_nwor");
  for (const Interceptor::LayerInfo& layer : layers) {
    NWOR_CHECK(layer.ready, "interceptor: got layer '", layer.name, "' ",
               layer.unsupported.empty() ? "without memory" : layer.unsupported,
               ", expected caches that can be staged for");
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

}  // namespace

struct SessionStore::Impl final : SessionPages {
  Impl(SessionConfig config_in, Interceptor& interceptor, SessionForward forward,
       SessionAcceptor accept)
      : config(Checked(std::move(config_in))),
        bytes_per_page(BytesPerPage(CheckedLayers(interceptor))),
        allocator(interceptor.layers()[0].key_cache.size(0),
                  interceptor.layers()[0].key_cache.size(1)),
        page_limit(config.max_bytes == 0 ? allocator.stats().total_pages
                                         : std::min(allocator.stats().total_pages,
                                                    config.max_bytes / bytes_per_page)),
        rounds(interceptor, std::move(forward), std::move(accept), *this, config.max_batch,
               config.vocab_size) {
    NWOR_CHECK(page_limit > 0, "max_bytes: got ", config.max_bytes, ", expected at least ",
               bytes_per_page, " bytes for one page of all layers");
  }
  ~Impl() override { Counters::Global().AddLiveSessions(-static_cast<int64_t>(table.size())); }

  const SessionConfig config;
  const int64_t bytes_per_page;

  mutable std::mutex mutex;
  SlotAllocator allocator;
  const int64_t page_limit;
  int64_t pages_ahead = 0;  // promised to the batch that runs
  std::unordered_map<std::string, std::shared_ptr<Session>> table;
  std::list<Session*> order;  // of use, the oldest first
  int64_t next_key = 0;
  SessionStoreStats stats;

  SessionRounds rounds;

  // ---- pages ----
  std::vector<int64_t> Extend(Session& session, int64_t num_tokens, int64_t ahead) override;
  std::vector<int64_t> Accept(Session& session, int64_t num_tokens) override;
  void Settle() override;
  std::vector<int32_t> Pages(const Session& session, int64_t first_page) override;
  std::vector<PageCopy> TakeCopies() override;

  // ---- the table, under the store's lock ----
  std::shared_ptr<Session> Find(const std::string& name);
  std::shared_ptr<Session> Insert(const std::string& name);
  void Touch(Session& session);
  void Remove(Session& session);
  int64_t RemoveIdle();
  bool EvictOldest();

  // ---- one session, under its own lock ----
  void Leave(Session& session, std::unique_lock<std::mutex>& lock);
  void CutBack(Session& session, int64_t length);

  void Check(const VerifyRequest& request) const;
  void Enter(Progress& progress);
  void GiveUp(Progress& progress);
  void Finish(Progress& progress);
};

// ---- pages -------------------------------------------------------------------------------------

std::vector<int64_t> SessionStore::Impl::Extend(Session& session, int64_t num_tokens,
                                                int64_t ahead) {
  const std::lock_guard guard(mutex);
  const int64_t needed = allocator.PagesToExtend(session.key, num_tokens + ahead);
  const auto room = [&] { return page_limit - allocator.stats().held_pages - pages_ahead; };
  // What can never fit costs nobody else their session.
  const bool possible = allocator.num_pages(session.key) + needed <= page_limit;
  while (possible && room() < needed && EvictOldest()) {
  }
  if (room() < needed) {
    throw CapacityError(Concat("session '", session.name, "': got a need of ", needed,
                               " pages, expected at most ", room(), " of ", page_limit,
                               " that are free or can be evicted"));
  }
  const int64_t before = allocator.stats().held_pages;
  std::vector<int64_t> slots = allocator.Extend(session.key, num_tokens);
  pages_ahead += needed - (allocator.stats().held_pages - before);
  return slots;
}

std::vector<int64_t> SessionStore::Impl::Accept(Session& session, int64_t num_tokens) {
  const std::lock_guard guard(mutex);
  return allocator.Extend(session.key, num_tokens);
}

void SessionStore::Impl::Settle() {
  const std::lock_guard guard(mutex);
  pages_ahead = 0;
}

std::vector<int32_t> SessionStore::Impl::Pages(const Session& session, int64_t first_page) {
  const std::lock_guard guard(mutex);
  return allocator.Pages(session.key, first_page);
}

std::vector<PageCopy> SessionStore::Impl::TakeCopies() {
  const std::lock_guard guard(mutex);
  return allocator.TakeCopies();
}

// ---- the table ---------------------------------------------------------------------------------

std::shared_ptr<Session> SessionStore::Impl::Find(const std::string& name) {
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

std::shared_ptr<Session> SessionStore::Impl::Insert(const std::string& name) {
  if (config.max_sessions > 0 && static_cast<int64_t>(table.size()) >= config.max_sessions &&
      !EvictOldest()) {
    throw CapacityError(Concat("session '", name, "': got one more than ", config.max_sessions,
                               " sessions, all of them in use, expected room for it"));
  }
  auto session = std::make_shared<Session>(name, next_key++);
  allocator.Extend(session->key, 0);
  table.emplace(name, session);
  session->place = order.insert(order.end(), session.get());
  Touch(*session);
  Counters::Global().AddLiveSessions(1);
  return session;
}

void SessionStore::Impl::Touch(Session& session) {
  session.last_used = config.clock();
  order.splice(order.end(), order, session.place);
}

// From the table; its pages go with it. The last reference may be the table's.
void SessionStore::Impl::Remove(Session& session) {
  allocator.Free(session.key);
  order.erase(session.place);
  Counters::Global().AddLiveSessions(-1);
  table.erase(table.find(session.name));
}

int64_t SessionStore::Impl::RemoveIdle() {
  if (config.ttl_seconds == 0) return 0;
  const double now = config.clock();
  int64_t removed = 0;
  for (auto next = order.begin(); next != order.end();) {
    Session& session = **next++;
    if (now - session.last_used < config.ttl_seconds) break;
    if (session.users > 0) continue;
    Remove(session);
    Count(Counter::kSessionsExpired, &stats.expired);
    ++removed;
  }
  return removed;
}

bool SessionStore::Impl::EvictOldest() {
  const auto oldest = std::find_if(order.begin(), order.end(),
                                   [](const Session* session) { return session->users == 0; });
  if (oldest == order.end()) return false;
  Remove(**oldest);
  Count(Counter::kSessionsEvicted, &stats.evicted);
  return true;
}

void SessionStore::Impl::Leave(Session& session, std::unique_lock<std::mutex>& lock) {
  {
    const std::lock_guard guard(mutex);
    --session.users;
  }
  lock.unlock();
}

void SessionStore::Impl::CutBack(Session& session, int64_t length) {
  const std::lock_guard guard(mutex);
  allocator.Truncate(session.key, length);
  session.length = length;
  session.block_row_pages = std::min(session.block_row_pages, allocator.num_pages(session.key));
}

// ---- verify ------------------------------------------------------------------------------------

void SessionStore::Impl::Check(const VerifyRequest& request) const {
  NWOR_CHECK(!request.session.empty(), "session: got an empty name, expected a name");
  NWOR_CHECK(!request.new_tokens.empty(), "new_tokens: got none for session '", request.session,
             "', expected the root at least");
  NWOR_CHECK(request.expected_prefix_len >= 0, "expected_prefix_len: got ",
             request.expected_prefix_len, ", expected 0 or more");
  NWOR_CHECK(request.max_new_tokens >= 0, "max_new_tokens: got ", request.max_new_tokens,
             ", expected 0 (any number) or more");
  NWOR_CHECK(request.chunk_rows >= 0 && request.chunk_rows <= kMaxTreeRows, "chunk_rows: got ",
             request.chunk_rows, ", expected 0 (no chunks) to ", kMaxTreeRows);
  if (request.chunk_rows == 0) {
    request.tree.Validate();
  } else {
    NWOR_CHECK(request.tree.num_rows() >= 1, "tree: got no rows, expected a root at least");
    const auto& [tokens, parents] = request.tree;
    const bool chain =
        parents.empty() || (parents.size() == tokens.size() && request.tree.is_chain());
    NWOR_CHECK(chain, "chunk_rows: got ", request.chunk_rows,
               " with a tree that branches, expected a chain");
  }
  NWOR_CHECK(request.tree.tokens[0] == request.new_tokens.back(), "tree: got root token ",
             request.tree.tokens[0], ", expected the last new token ", request.new_tokens.back());
  const auto check_tokens = [&](const char* name, const std::vector<int64_t>& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      NWOR_CHECK(tokens[i] >= 0 && (config.vocab_size == 0 || tokens[i] < config.vocab_size), name,
                 ": got token ", tokens[i], " at index ", i, ", expected 0 to ",
                 config.vocab_size == 0 ? "any" : std::to_string(config.vocab_size - 1));
    }
  };
  check_tokens("new_tokens", request.new_tokens);
  check_tokens("tree", request.tree.tokens);
  const int64_t length = request.expected_prefix_len +
                         static_cast<int64_t>(request.new_tokens.size()) +
                         request.tree.num_drafts();
  if (config.max_length > 0 && length > config.max_length) {
    throw CapacityError(Concat("session '", request.session, "': got a length of ", length,
                               " with its drafts, expected at most ", config.max_length));
  }
}

void SessionStore::Impl::Enter(Progress& progress) {
  const VerifyRequest& request = *progress.request;
  while (true) {
    {
      const std::lock_guard guard(mutex);
      progress.session = Find(request.session);
      progress.created = progress.session == nullptr;
      if (progress.created) {
        Count(Counter::kSessionMisses, &stats.cache_misses);
        if (request.expected_prefix_len > 0) {
          throw UnknownSessionError(Concat("session '", request.session, "': got ",
                                           request.expected_prefix_len,
                                           " tokens expected to be cached, but it is not here "
                                           "(ended, evicted or never started); expected the whole "
                                           "prompt"));
        }
        progress.session = Insert(request.session);
      }
      ++progress.session->users;
    }
    progress.lock = std::unique_lock(progress.session->mutex);
    if (!progress.session->ended) break;
    Leave(*progress.session, progress.lock);  // it ended while this one waited: look again
  }
  progress.length_before = progress.session->length;
  if (!progress.created && progress.length_before != request.expected_prefix_len) {
    {
      const std::lock_guard guard(mutex);
      Count(Counter::kSessionDesyncs, &stats.desyncs);
    }
    Leave(*progress.session, progress.lock);
    throw DesyncError(Concat("expected_prefix_len: got ", request.expected_prefix_len,
                             " for session '", request.session, "', which has ",
                             progress.length_before,
                             " tokens cached; expected that, a rollback, "
                             "or the end of the session and the whole prompt"));
  }
  if (request.chunk_rows > 0) {
    progress.chunks.emplace(request.tree.tokens, request.chunk_rows);
  }
}

void SessionStore::Impl::GiveUp(Progress& progress) {
  Session& session = *progress.session;
  if (progress.created) {
    const std::lock_guard guard(mutex);
    session.ended = true;
    Remove(session);
  } else {
    CutBack(session, progress.length_before);
  }
  Leave(session, progress.lock);
}

void SessionStore::Impl::Finish(Progress& progress) {
  VerifyResult& result = progress.result;
  for (const int32_t row : result.accepted_rows) {
    result.tokens.push_back(progress.request->tree.tokens[row]);
  }
  result.cache_hit = !progress.created;
  result.length = progress.session->length;
  {
    const std::lock_guard guard(mutex);
    Touch(*progress.session);
    stats.rows_saved += result.rows_saved;
    result.cache_hit ? Count(Counter::kSessionHits, &stats.cache_hits)
                     : Count(Counter::kSessionsStarted, &stats.started);
  }
  Leave(*progress.session, progress.lock);
}

SessionStore::SessionStore(SessionConfig config, Interceptor& interceptor, SessionForward forward,
                           SessionAcceptor accept) {
  NWOR_CHECK(forward != nullptr && accept != nullptr,
             "forward, accept: got nothing, expected functions");
  impl_ =
      std::make_unique<Impl>(std::move(config), interceptor, std::move(forward), std::move(accept));
}

SessionStore::~SessionStore() = default;

VerifyResult SessionStore::Verify(const VerifyRequest& request) {
  return VerifyBatch({request}).front();
}

std::vector<VerifyResult> SessionStore::VerifyBatch(const std::vector<VerifyRequest>& requests) {
  // By name, so that two batches never wait for each other's sessions crosswise.
  std::map<std::string, Progress> by_name;
  for (const VerifyRequest& request : requests) {
    impl_->Check(request);
    NWOR_CHECK(!by_name.contains(request.session), "session: got '", request.session,
               "' twice in a batch, expected each session once");
    by_name[request.session].request = &request;
  }
  {
    const std::lock_guard guard(impl_->mutex);
    impl_->RemoveIdle();
  }

  std::vector<Progress*> entered;
  try {
    for (auto& [name, progress] : by_name) {
      impl_->Enter(progress);
      entered.push_back(&progress);
    }
    while (true) {
      std::vector<Turn*> turns;
      for (Progress* progress : entered) {
        if (progress->finished) continue;
        progress->PrepareTurn();
        turns.push_back(&progress->turn);
      }
      if (turns.empty()) break;
      impl_->rounds.Run(turns);
      for (const Turn* turn : turns) {
        if (turn->error != nullptr) std::rethrow_exception(turn->error);
      }
      for (Progress* progress : entered) {
        if (!progress->finished) progress->Record();
      }
    }
  } catch (...) {
    for (Progress* progress : entered) impl_->GiveUp(*progress);
    throw;
  }
  for (Progress* progress : entered) impl_->Finish(*progress);
  std::vector<VerifyResult> results;
  for (const VerifyRequest& request : requests) {
    results.push_back(std::move(by_name[request.session].result));
  }
  return results;
}

// ---- the rest ----------------------------------------------------------------------------------

namespace {

UnknownSessionError NotHere(const std::string& session) {
  return UnknownSessionError(
      Concat("session: got '", session, "', expected one that was started and has not ended"));
}

}  // namespace

void SessionStore::Rollback(const std::string& session, int64_t length) {
  std::shared_ptr<Session> found;
  {
    const std::lock_guard guard(impl_->mutex);
    found = impl_->Find(session);
    if (found == nullptr) throw NotHere(session);
    ++found->users;
  }
  std::unique_lock lock(found->mutex);
  const bool ended = found->ended;
  const int64_t now = found->length;
  const bool fits = length >= 0 && length <= now;
  if (!ended && fits) impl_->CutBack(*found, length);
  impl_->Leave(*found, lock);
  if (ended) throw NotHere(session);
  NWOR_CHECK(fits, "length: got ", length, " for session '", session, "', expected 0 to ", now);
}

void SessionStore::Fork(const std::string& parent, const std::string& child,
                        std::optional<int64_t> num_tokens) {
  NWOR_CHECK(!child.empty(), "child: got an empty name, expected a name");
  std::shared_ptr<Session> found;
  {
    const std::lock_guard guard(impl_->mutex);
    found = impl_->Find(parent);
    if (found == nullptr) throw NotHere(parent);
    NWOR_CHECK(impl_->Find(child) == nullptr, "child: got '", child,
               "', which is a session already, expected a new name");
    ++found->users;
  }
  std::unique_lock lock(found->mutex);
  try {
    const std::lock_guard guard(impl_->mutex);
    if (found->ended) throw NotHere(parent);
    NWOR_CHECK(impl_->Find(child) == nullptr, "child: got '", child,
               "', which is a session already, expected a new name");
    const int64_t length = num_tokens.value_or(found->length);
    NWOR_CHECK(length >= 0 && length <= found->length, "num_tokens: got ", length,
               ", expected 0 to the ", found->length.load(), " cached tokens of '", parent, "'");
    const std::shared_ptr<Session> fork = impl_->Insert(child);
    impl_->allocator.Free(fork->key);
    impl_->allocator.Fork(found->key, fork->key, length);
    fork->length = length;
    Count(Counter::kSessionsStarted, &impl_->stats.started);
  } catch (...) {
    impl_->Leave(*found, lock);
    throw;
  }
  impl_->Leave(*found, lock);
}

void SessionStore::End(const std::string& session) {
  std::shared_ptr<Session> found;
  {
    const std::lock_guard guard(impl_->mutex);
    found = impl_->Find(session);
    if (found == nullptr) throw NotHere(session);
    ++found->users;
  }
  std::unique_lock lock(found->mutex);
  const bool ended = found->ended;
  if (!ended) {
    found->ended = true;
    const std::lock_guard guard(impl_->mutex);
    impl_->Remove(*found);
    Count(Counter::kSessionsEnded, &impl_->stats.ended);
  }
  impl_->Leave(*found, lock);
  if (ended) throw NotHere(session);
}

int64_t SessionStore::Sweep() {
  const std::lock_guard guard(impl_->mutex);
  return impl_->RemoveIdle();
}

std::vector<SessionInfo> SessionStore::List() const {
  const std::lock_guard guard(impl_->mutex);
  const double now = impl_->config.clock();
  std::vector<SessionInfo> list;
  for (const Session* session : impl_->order) {
    list.push_back({session->name, session->length,
                    impl_->allocator.num_pages(session->key) * impl_->bytes_per_page,
                    now - session->last_used});
  }
  return list;
}

SessionInfo SessionStore::Info(const std::string& session) const {
  const std::lock_guard guard(impl_->mutex);
  const std::shared_ptr<Session> found = impl_->Find(session);
  if (found == nullptr) throw NotHere(session);
  return {found->name, found->length,
          impl_->allocator.num_pages(found->key) * impl_->bytes_per_page,
          impl_->config.clock() - found->last_used};
}

SessionStoreStats SessionStore::stats() const {
  const RoundStats rounds = impl_->rounds.stats();
  const std::lock_guard guard(impl_->mutex);
  SessionStoreStats stats = impl_->stats;
  stats.live = static_cast<int64_t>(impl_->table.size());
  stats.forwards = rounds.forwards;
  stats.rows_run = rounds.rows;
  stats.largest_batch = rounds.largest_batch;
  stats.held_bytes = impl_->allocator.stats().held_pages * impl_->bytes_per_page;
  stats.max_bytes = impl_->page_limit * impl_->bytes_per_page;
  return stats;
}

}  // namespace nwor
