#include "session/session_store.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <utility>

#include "base/check.h"
#include "session/progress.h"
#include "session/session_error.h"
#include "session/session_rounds.h"
#include "session/session_table.h"

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

void CheckRequest(const VerifyRequest& request, const SessionConfig& config) {
  NWOR_CHECK(!request.session.empty(), "session: got an empty name, expected a name");
  NWOR_CHECK(!request.new_tokens.empty(), "new_tokens: got none for session '", request.session,
             "', expected at least the root");
  constexpr int64_t kMaxPrefix = std::numeric_limits<int32_t>::max();
  NWOR_CHECK(request.expected_prefix_len >= 0 && request.expected_prefix_len <= kMaxPrefix,
             "expected_prefix_len: got ", request.expected_prefix_len, ", expected 0 to ",
             kMaxPrefix);
  NWOR_CHECK(request.max_new_tokens >= 0, "max_new_tokens: got ", request.max_new_tokens,
             ", expected 0 (any number) or more");
  NWOR_CHECK(request.chunk_rows >= 0 && request.chunk_rows <= kMaxTreeRows, "chunk_rows: got ",
             request.chunk_rows, ", expected 0 (no chunks) to ", kMaxTreeRows);
  if (request.chunk_rows == 0) {
    request.tree.Validate();
  } else {
    request.tree.Validate(std::numeric_limits<int32_t>::max());
    NWOR_CHECK(request.tree.is_chain(), "chunk_rows: got ", request.chunk_rows,
               " with a tree that branches, expected a chain");
  }
  NWOR_CHECK(request.tree.tokens[0] == request.new_tokens.back(), "tree: got root token ",
             request.tree.tokens[0], ", expected the last new token ", request.new_tokens.back());
  const auto check_tokens = [&](const char* name, const std::vector<int64_t>& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      NWOR_CHECK(tokens[i] >= 0 && (config.vocab_size == 0 || tokens[i] < config.vocab_size), name,
                 ": got token ", tokens[i], " at index ", i, ", expected 0 to ",
                 config.vocab_size == 0 ? "any number" : std::to_string(config.vocab_size - 1));
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

// What an error leaves: the session as it was, or none if it began here.
void GiveUp(SessionTable& table, Progress& progress) {
  Session& session = *progress.session;
  if (progress.session.started()) {
    table.Drop(session);
  } else {
    table.CutBack(session, progress.request->expected_prefix_len);
  }
}

void Finish(SessionTable& table, Progress& progress, double now) {
  VerifyResult& result = progress.result;
  for (const int32_t row : result.accepted_rows) {
    result.tokens.push_back(progress.request->tree.tokens[row]);
  }
  result.cache_hit = !progress.session.started();
  result.length = progress.session->length;
  table.NoteVerified(*progress.session, progress.session.started(), result.rows_saved, now);
}

}  // namespace

struct SessionStore::Impl {
  Impl(SessionConfig config_in, Interceptor& interceptor, SessionForward forward,
       SessionAcceptor accept)
      : config(Checked(std::move(config_in))),
        table(config, interceptor),
        rounds(interceptor, std::move(forward), std::move(accept), table, config.max_batch,
               config.vocab_size) {}

  const SessionConfig config;
  SessionTable table;
  SessionRounds rounds;

  // What these requests need for sure at several times, whatever is accepted: the new tokens of
  // all, and those that are there in each pass beside its drafts.
  std::vector<std::vector<PageNeed>> Needs(const std::vector<Progress*>& held) const;
  // Passes over the model until every request is answered.
  void Run(const std::vector<Progress*>& held);
};

std::vector<std::vector<PageNeed>> SessionStore::Impl::Needs(
    const std::vector<Progress*>& held) const {
  const auto count = static_cast<int64_t>(held.size());
  std::vector<std::vector<PageNeed>> times(1);
  for (const Progress* progress : held) {
    const auto new_tokens = static_cast<int64_t>(progress->request->new_tokens.size());
    times[0].push_back({&*progress->session, new_tokens});
  }
  // Room for drafts is kept through a pass only: those of different passes may share it.
  for (int64_t first = 0; first < count; first += config.max_batch) {
    const int64_t last = std::min(first + config.max_batch, count);
    std::vector<PageNeed>& needs = times.emplace_back();
    for (int64_t i = 0; i < last; ++i) {
      const bool drafts = i >= first && held[i]->OnePass();
      needs.push_back(
          {&*held[i]->session, held[i]->NextPiece() + (drafts ? held[i]->NextTree().Depth() : 0)});
    }
  }
  // The drafts behind a long prompt come when everybody's first pass is over.
  for (int64_t i = 0; i < count; ++i) {
    if (held[i]->OnePass()) continue;
    std::vector<PageNeed>& needs = times.emplace_back();
    for (const Progress* other : held) needs.push_back({&*other->session, other->NextPiece()});
    needs[i].num_tokens = times[0][i].num_tokens + held[i]->NextTree().Depth();
  }
  return times;
}

void SessionStore::Impl::Run(const std::vector<Progress*>& held) {
  while (true) {
    std::vector<Turn*> turns;
    for (Progress* progress : held) {
      if (progress->finished) continue;
      progress->PrepareTurn();
      turns.push_back(&progress->turn);
    }
    if (turns.empty()) return;
    rounds.Run(turns);
    for (const Turn* turn : turns) {
      if (turn->error != nullptr) std::rethrow_exception(turn->error);
    }
    for (Progress* progress : held) {
      if (!progress->finished) progress->Record();
    }
  }
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
  SessionTable& table = impl_->table;
  // By name, so that two batches never wait for each other's sessions crosswise.
  std::map<std::string, Progress> by_name;
  for (const VerifyRequest& request : requests) {
    CheckRequest(request, impl_->config);
    NWOR_CHECK(!by_name.contains(request.session), "session: got '", request.session,
               "' twice in a batch, expected each session once");
    by_name[request.session].request = &request;
  }
  table.Sweep();

  std::vector<std::string> names;
  for (const auto& [name, progress] : by_name) names.push_back(name);
  const SessionPins pins = table.Pin(names);  // a session that starts here evicts none of them
  std::vector<Progress*> held;
  double now = 0.0;
  try {
    for (auto& [name, progress] : by_name) {
      const VerifyRequest& request = *progress.request;
      progress.session = table.HoldOrStart(name, request.expected_prefix_len);
      held.push_back(&progress);
      if (request.chunk_rows > 0) progress.chunks.emplace(request.tree.tokens, request.chunk_rows);
    }
    table.Admit(impl_->Needs(held));
    impl_->Run(held);
    now = impl_->config.clock();
  } catch (...) {
    for (Progress* progress : held) GiveUp(table, *progress);
    throw;
  }
  for (Progress* progress : held) Finish(table, *progress, now);
  std::vector<VerifyResult> results;
  for (const VerifyRequest& request : requests) {
    results.push_back(std::move(by_name[request.session].result));
  }
  return results;
}

void SessionStore::Rollback(const std::string& session, int64_t length) {
  const HeldSession held = impl_->table.Hold(session);
  NWOR_CHECK(length >= 0 && length <= held->length, "length: got ", length, " for session '",
             session, "', expected 0 to ", held->length.load());
  const double now = impl_->config.clock();  // before anything changes
  impl_->table.CutBack(*held, length);
  impl_->table.NoteUsed(*held, now);
}

void SessionStore::Fork(const std::string& parent, const std::string& child,
                        std::optional<int64_t> num_tokens) {
  NWOR_CHECK(!child.empty(), "child: got an empty name, expected a name");
  const HeldSession held = impl_->table.Hold(parent);
  impl_->table.Fork(*held, child, num_tokens);
}

void SessionStore::End(const std::string& session) {
  const HeldSession held = impl_->table.Hold(session);
  impl_->table.End(*held);
}

int64_t SessionStore::Sweep() { return impl_->table.Sweep(); }
SessionInfo SessionStore::Info(const std::string& session) const {
  return impl_->table.Info(session);
}
std::vector<SessionInfo> SessionStore::List() const { return impl_->table.List(); }

SessionStoreStats SessionStore::stats() const {
  const RoundStats rounds = impl_->rounds.stats();
  SessionStoreStats stats = impl_->table.stats();
  stats.forwards = rounds.forwards;
  stats.rows_run = rounds.rows;
  stats.largest_batch = rounds.largest_batch;
  return stats;
}

}  // namespace nwor
