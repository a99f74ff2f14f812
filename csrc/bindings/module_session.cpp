#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "bindings/module_collected.h"
#include "metrics/counters.h"
#include "session/session_error.h"
#include "session/session_store.h"
#include "specpv/config.h"

// The Python face of sessions.

namespace py = pybind11;

namespace nwor {
namespace {

void BindSessionErrors() {
  // Tried before the translator of Error, which these are kinds of.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](const char* kind, const Error& error) {
      py::set_error(py::module_::import("nwor_specpv.errors").attr(kind), error.what());
    };
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CapacityError& error) {
      raise("CapacityError", error);
    } catch (const UnknownSessionError& error) {
      raise("UnknownSessionError", error);
    } catch (const DesyncError& error) {
      raise("DesyncError", error);
    }
  });
}

// "list of int, Tensor": enough to see what a function returned instead of what it should have.
std::string Kind(const py::handle& object) {
  const auto name = [](const py::handle& one) {
    return std::string(py::str(py::type::handle_of(one).attr("__name__")));
  };
  constexpr size_t kFew = 4;
  std::string kind = name(object);
  if (!py::isinstance<py::tuple>(object) && !py::isinstance<py::list>(object)) return kind;
  const size_t length = py::len(object);
  if (length == 0 || length > kFew) return Concat(kind, " of ", length);
  const char* before = " of ";
  for (const py::handle item : object) {
    kind += before + name(item);
    before = ", ";
  }
  return kind;
}

// What the host's function `name` returned.
template <typename Result>
Result ParseReturned(const char* name, const char* expected, const py::object& returned) {
  try {
    return returned.cast<Result>();
  } catch (const py::cast_error&) {
    throw Error(Concat(name, ": got ", Kind(returned), ", expected ", expected));
  }
}

// A tensor of one request's rows, or a sequence of integers.
std::vector<int64_t> ParseRows(const char* name, const py::object& rows) {
  if (THPVariable_Check(rows.ptr())) {
    const auto given = rows.cast<at::Tensor>();
    NWOR_CHECK(c10::isIntegralType(given.scalar_type(), /*includeBool=*/false), "tree: got ", name,
               " of ", c10::toString(given.scalar_type()), ", expected integers");
    NWOR_CHECK(given.dim() == 1 || (given.dim() == 2 && given.size(0) == 1), "tree: got ", name,
               " of shape ", given.sizes(), ", expected those of one request");
    const at::Tensor host = given.to(at::kCPU, at::kLong).contiguous();
    const auto* values = host.const_data_ptr<int64_t>();
    return {values, values + host.numel()};
  }
  std::vector<int64_t> values;
  py::detail::make_caster<int64_t> value;
  bool integers = PySequence_Check(rows.ptr()) != 0;
  for (const py::handle item : integers ? rows : py::object(py::tuple())) {
    // A number without an index is no integer: it would be cut.
    integers = PyIndex_Check(item.ptr()) != 0 && value.load(item, /*convert=*/true);
    if (!integers) break;
    values.push_back(py::detail::cast_op<int64_t>(value));
  }
  NWOR_CHECK(integers, "tree: got ", name, " ", std::string(py::repr(rows)),
             ", expected integers of 64 bits");
  return values;
}

DraftTree ParseTree(const py::object& tree) {
  if (py::isinstance<DraftTree>(tree)) return tree.cast<DraftTree>();
  // A Tree of one request, as tree_from_parents makes it, or anything else with these attributes.
  if (!py::hasattr(tree, "tokens") || !py::hasattr(tree, "parents")) {
    throw Error(Concat("tree: got ", std::string(py::str(py::type::of(tree))),
                       ", expected a DraftTree or a Tree of one request"));
  }
  DraftTree parsed{ParseRows("tokens", tree.attr("tokens")), {}};
  const std::vector<int64_t> parents = ParseRows("parents", tree.attr("parents"));
  for (size_t row = 0; row < parents.size(); ++row) {
    const auto narrow = static_cast<int32_t>(parents[row]);
    NWOR_CHECK(narrow == parents[row], "parents: got ", parents[row], " for row ", row,
               ", expected ", row == 0 ? "-1, the root's" : "an earlier row");
    parsed.parents.push_back(narrow);
  }
  return parsed;
}

// A name, or a Session of nwor_specpv.session.
std::string ParseSession(const py::object& session) {
  const bool named = py::isinstance<py::str>(session);
  const py::object name = named ? session : py::getattr(session, "name", py::none());
  NWOR_CHECK(py::isinstance<py::str>(name), "session: got ", std::string(py::repr(session)),
             ", expected a name or a Session");
  return name.cast<std::string>();
}

VerifyRequest ParseRequest(const py::object& session, const py::object& tree,
                           std::vector<int64_t> new_tokens, int64_t expected_prefix_len,
                           int64_t chunk_rows, std::vector<int64_t> stop_ids,
                           int64_t max_new_tokens) {
  VerifyRequest request{ParseSession(session), {},         std::move(new_tokens),
                        expected_prefix_len,   chunk_rows, std::move(stop_ids),
                        max_new_tokens};
  if (tree.is_none()) {
    if (!request.new_tokens.empty()) request.tree.tokens = {request.new_tokens.back()};
  } else {
    request.tree = ParseTree(tree);
  }
  return request;
}

void BindSessionValues(py::module_& m) {
  py::class_<DraftTree>(
      m, "DraftTree",
      "A draft tree of one request on the host: row 0 is the root, the last emitted\n"
      "token.")
      .def(py::init(
               [](std::vector<int64_t> tokens, const std::optional<std::vector<int32_t>>& parents) {
                 DraftTree tree{std::move(tokens), parents.value_or(std::vector<int32_t>{})};
                 NWOR_CHECK(!parents || !tree.parents.empty() || tree.tokens.empty(),
                            "parents: got none, expected one for each token, or None for a chain");
                 return tree;
               }),
           py::arg("tokens"), py::arg("parents") = py::none(),
           "parents[0] is -1, and every parent comes before its child; None: a chain.")
      .def_readonly("tokens", &DraftTree::tokens, "Token ids, [R].")
      .def_property_readonly(
          "parents",
          [](const DraftTree& tree) {
            // As given, right or wrong: validate() is what judges them.
            if (!tree.parents.empty()) return tree.parents;
            std::vector<int32_t> parents;
            for (int64_t row = 0; row < tree.num_rows(); ++row) {
              parents.push_back(tree.parent(row));
            }
            return parents;
          },
          "The parent's row of each, [R]; -1 for the root.")
      .def(
          "validate", [](const DraftTree& tree) { tree.Validate(); },
          "Raises NworError naming the row that is wrong, or for more than 256 rows.")
      .def(
          "pruned",
          [](const DraftTree& tree, int64_t depth) {
            tree.Validate(std::numeric_limits<int32_t>::max());
            return tree.Pruned(depth);
          },
          py::arg("depth"), "The rows of at most this depth, in their order; the root always.")
      .def("__len__", &DraftTree::num_rows, "Rows, the root included.");

  py::class_<SessionBatch>(
      m, "SessionBatch",
      "One forward pass over B sessions with T rows, which a store hands to the host's\n"
      "model. A session's rows are its new tokens, the last of which is the root, then\n"
      "its drafts. Tensors are on the caches' device.")
      .def_readonly("sessions", &SessionBatch::sessions, "Names, [B].")
      .def_readonly("epoch", &SessionBatch::epoch, "The round's number, for Interceptor.write.")
      .def_readonly("tokens", &SessionBatch::tokens, "Token ids of all rows, [T] int64.")
      .def_readonly("positions", &SessionBatch::positions,
                    "Positions of the rows in their sequences, [T] int64.")
      .def_readonly("slot_mapping", &SessionBatch::slot_mapping,
                    "Slots of the rows, [T] int64; -1 for drafts, which hold no slots.")
      .def_readonly("query_start", &SessionBatch::query_start,
                    "Where each session's rows begin, [B + 1] int32.")
      .def_readonly("prefix_lens", &SessionBatch::prefix_lens,
                    "Tokens in the cache before these rows, [B] int32.")
      .def_readonly("block_table", &SessionBatch::block_table,
                    "Pages of the sessions, [B, max_pages] int32.")
      .def_property_readonly(
          "tree_mask",
          [](const SessionBatch& batch) -> std::optional<at::Tensor> {
            if (!batch.tree_mask.defined()) return std::nullopt;
            return batch.tree_mask;
          },
          "What draft rows see of each other as verify_attention takes it, [T, W] int64;\n"
          "None: causal.")
      .def_readonly("tree_rows", &SessionBatch::tree_rows,
                    "The batch row of each tree row, [B, R] int64; padding: that of the root.")
      .def_readonly("tree_tokens", &SessionBatch::tree_tokens,
                    "Token ids of the trees, [B, R] int64.")
      .def_readonly("tree_parents", &SessionBatch::tree_parents,
                    "The parent of each tree row, [B, R] int32; -1: the root, or padding.")
      .def_readonly("first_child", &SessionBatch::first_child,
                    "The first child of each tree row, [B, R] int32; -1: none.")
      .def_readonly("next_sibling", &SessionBatch::next_sibling,
                    "The next child of the same parent, [B, R] int32; -1: none.");

  py::class_<VerifyResult>(m, "VerifyResult", "What became of a session's verify.")
      .def_readonly("accepted_rows", &VerifyResult::accepted_rows,
                    "Accepted rows of the tree, the root excluded.")
      .def_readonly("tokens", &VerifyResult::tokens, "Their tokens.")
      .def_readonly("next_token", &VerifyResult::next_token,
                    "The correction or bonus token, or the sequence's last; not cached.")
      .def_readonly("cache_hit", &VerifyResult::cache_hit, "Whether the session was there.")
      .def_readonly("length", &VerifyResult::length,
                    "Tokens cached now: the next expected_prefix_len.")
      .def_readonly("rows_run", &VerifyResult::rows_run, "New tokens and tree rows that were run.")
      .def_readonly("rows_saved", &VerifyResult::rows_saved, "Tree rows that chunks did not run.")
      .def_property_readonly(
          "finish",
          [](const VerifyResult& r) -> std::optional<std::string> {
            if (r.finish == FinishReason::kNone) return std::nullopt;
            return std::string(Label(r.finish));
          },
          "Why next_token is the last one: 'stop' or 'length'; None: the sequence goes on.")
      .def("__repr__", [](const VerifyResult& r) {
        return Concat("VerifyResult(accepted=", r.accepted_rows.size(),
                      ", next_token=", r.next_token, ", cache_hit=", r.cache_hit ? "True" : "False",
                      ", length=", r.length, ")");
      });

  py::class_<VerifyRequest>(m, "VerifyRequest", "One session's part of SessionStore.verify_batch.")
      .def(py::init(&ParseRequest), py::arg("session"), py::arg("tree"), py::arg("new_tokens"),
           py::arg("expected_prefix_len") = 0, py::arg("chunk_rows") = 0,
           py::arg("stop_ids") = std::vector<int64_t>{}, py::arg("max_new_tokens") = 0,
           "Arguments as those of SessionStore.verify.");

  py::class_<SessionInfo>(m, "SessionInfo", "A session as its store sees it.")
      .def_readonly("session", &SessionInfo::session, "Its name.")
      .def_readonly("length", &SessionInfo::length, "Tokens cached.")
      .def_readonly("bytes", &SessionInfo::bytes, "Bytes of K/V in the pages it holds.")
      .def_readonly("idle_seconds", &SessionInfo::idle_seconds, "Seconds since it was used.");
}

py::dict StoreStatsDict(const SessionStoreStats& stats) {
  py::dict dict;
  dict["live"] = stats.live;
  dict["started"] = stats.started;
  dict["ended"] = stats.ended;
  dict["evicted"] = stats.evicted;
  dict["expired"] = stats.expired;
  dict["desyncs"] = stats.desyncs;
  dict["cache_hits"] = stats.cache_hits;
  dict["cache_misses"] = stats.cache_misses;
  dict["forwards"] = stats.forwards;
  dict["rows_run"] = stats.rows_run;
  dict["rows_saved"] = stats.rows_saved;
  dict["largest_batch"] = stats.largest_batch;
  dict["held_bytes"] = stats.held_bytes;
  dict["max_bytes"] = stats.max_bytes;
  return dict;
}

// What a host's Python function raised. A pass that fails is told to the threads of all its
// sessions, and pybind11's own exception can be raised in one thread only.
class PythonFailure : public std::exception {
 public:
  // REQUIRES: the GIL.
  explicit PythonFailure(const py::error_already_set& error)
      : value_(new py::object(error.value()), [](py::object* last) {
          const py::gil_scoped_acquire acquire;
          delete last;
        }) {}
  const char* what() const noexcept override { return "a Python function raised"; }
  void Raise() const { PyErr_SetObject(py::type::of(*value_).ptr(), value_->ptr()); }

 private:
  std::shared_ptr<py::object> value_;
};

// A Python function of the store's owner. Called, visited and let go of under the GIL.
class HostFunction {
 public:
  HostFunction(const char* name, py::function function)
      : name_(name), function_(std::move(function)) {}

  // From whichever thread leads a pass.
  template <typename Result, typename... Arguments>
  Result Call(const char* expected, Arguments&&... arguments) const {
    const py::gil_scoped_acquire acquire;
    const py::object function = function_;  // the call may be what clears it
    NWOR_CHECK(function, name_,
               ": got a call after the garbage collector cleared the store, expected none");
    const py::object result = [&] {
      try {
        return function(std::forward<Arguments>(arguments)...);
      } catch (const py::error_already_set& error) {
        throw PythonFailure(error);
      }
    }();
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      if (result.is_none()) return at::Tensor();
    }
    return ParseReturned<Result>(name_, expected, result);
  }

  int Visit(visitproc visit, void* arg) const {
    Py_VISIT(function_.ptr());
    return 0;
  }
  void Clear() { function_ = py::object(); }

 private:
  const char* name_;
  py::object function_;
};

// The last to let go of one may be any thread.
using HeldFunction = std::shared_ptr<HostFunction>;

HeldFunction Hold(const char* name, py::function function) {
  return {new HostFunction(name, std::move(function)), [](HostFunction* last) {
            const py::gil_scoped_acquire acquire;
            delete last;
          }};
}

HeldFunction HoldUnlessNone(const char* name, const py::object& function) {
  if (function.is_none()) return nullptr;
  NWOR_CHECK(py::isinstance<py::function>(function), name, ": got ", Kind(function),
             ", expected a function or None");
  return Hold(name, py::reinterpret_borrow<py::function>(function));
}

SessionForward MakeForward(const HeldFunction& forward) {
  return [forward](const SessionBatch& batch) {
    return forward->Call<at::Tensor>("a tensor of ids or logits", batch);
  };
}

SessionAcceptor MakeAcceptor(const HeldFunction& accept) {
  if (accept == nullptr) return AcceptFirstChoice;
  return [accept](const SessionBatch& batch, const at::Tensor& output) {
    using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
    auto [path, counts, next_token] =
        accept->Call<Triple>("tensors (path, counts, next_token)", batch, output);
    return Accepted{path, counts, next_token};
  };
}

std::function<double()> MakeClock(const HeldFunction& clock) {
  if (clock == nullptr) return {};
  return [clock] { return clock->Call<double>("a number of seconds"); };
}

// A store whose functions Python's collector sees: they are often methods of whoever holds it.
class PythonStore : public SessionStore {
 public:
  // The clock of `config` is `clock`.
  PythonStore(SessionConfig config, Interceptor& interceptor, HeldFunction forward,
              HeldFunction accept, HeldFunction clock)
      : SessionStore(std::move(config), interceptor, MakeForward(forward), MakeAcceptor(accept)),
        functions_{std::move(forward), std::move(accept), std::move(clock)} {}

  int VisitHeld(visitproc visit, void* arg) const {
    for (const HeldFunction& function : functions_) {
      if (function == nullptr) continue;
      if (const int stop = function->Visit(visit, arg)) return stop;
    }
    return 0;
  }
  void LetGo() {
    for (const HeldFunction& function : functions_) {
      if (function != nullptr) function->Clear();
    }
  }

 private:
  const std::array<HeldFunction, 3> functions_;
};

void BindWorkerCalls(py::module_& m) {
  m.def(
      "count_worker_call",
      [](std::string_view outcome, int64_t bytes_received, int64_t bytes_sent, double seconds,
         double wait_seconds) {
        std::array<std::string_view, kNumCallOutcomes> labels;
        for (int i = 0; i < kNumCallOutcomes; ++i) labels[i] = kCallOutcomeTexts[i].label;
        const auto parsed = ParseChoice<CallOutcome>("outcome", outcome, labels);
        Counters& counters = Counters::Global();
        const auto add_time = [&](Counter counter, double amount) {
          // A clock that goes back must not take anything away.
          if (amount > 0) counters.Add(counter, std::llround(amount * 1e6));
        };
        counters.AddWorkerCall(parsed);
        counters.Add(Counter::kWorkerBytesReceived, bytes_received);
        counters.Add(Counter::kWorkerBytesSent, bytes_sent);
        add_time(Counter::kWorkerCallTime, seconds);
        add_time(Counter::kWorkerWaitTime, wait_seconds);
      },
      py::arg("outcome"), py::arg("bytes_received"), py::arg("bytes_sent"), py::arg("seconds"),
      py::arg("wait_seconds"),
      "Counts a call of the target worker by its outcome, a label of CALL_OUTCOMES; raises\n"
      "NworError for an unknown one.");
  py::dict outcomes;
  for (const ReasonText& text : kCallOutcomeTexts) outcomes[py::str(text.label)] = text.sentence;
  m.attr("CALL_OUTCOMES") = outcomes;
}

void BindSessionStore(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const PythonFailure& failure) {
      failure.Raise();
    }
  });

  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<PythonStore>(
      m, "SessionStore", Collected<PythonStore>::Setup(),
      "The cache state of sequences, kept across rounds, so that a remote drafter sends\n"
      "only what is new.\n"
      "\n"
      "Every method may be called from any thread. A session is locked through a verify;\n"
      "verifies of other sessions that arrive while the model runs share the next forward\n"
      "pass. A call that raises has accepted and cached nothing.")
      .def(
          py::init([](Interceptor& interceptor, py::function forward, const py::object& accept,
                      int64_t max_bytes, double ttl_seconds, int64_t vocab_size, int64_t max_length,
                      int64_t max_sessions, int64_t max_batch, const py::object& clock) {
            SessionConfig config{max_bytes,    ttl_seconds, vocab_size, max_length,
                                 max_sessions, max_batch,   {}};
            HeldFunction held_clock = HoldUnlessNone("clock", clock);
            config.clock = MakeClock(held_clock);
            return std::make_unique<PythonStore>(
                std::move(config), interceptor, Hold("forward", std::move(forward)),
                HoldUnlessNone("accept", accept), std::move(held_clock));
          }),
          py::arg("interceptor"), py::arg("forward"), py::arg("accept") = py::none(), py::kw_only(),
          py::arg("max_bytes") = 0, py::arg("ttl_seconds") = 0.0, py::arg("vocab_size") = 0,
          py::arg("max_length") = 0, py::arg("max_sessions") = 0,
          py::arg("max_batch") = SessionConfig{}.max_batch, py::arg("clock") = py::none(),
          py::keep_alive<1, 2>(),
          "Takes the pages of the interceptor's layers, of one cache group, which must serve\n"
          "nobody else. forward(batch) gets a SessionBatch, writes K/V of all rows through\n"
          "the interceptor and returns ids [T] or logits [T, V] on any device; accept(batch,\n"
          "output) returns (path, counts, next_token), by default the target's first choice.\n"
          "Limits that are 0 do not limit: max_bytes of K/V (then all of the caches), idle\n"
          "ttl_seconds, vocab_size, max_length of a sequence with its drafts, max_sessions\n"
          "alive. max_batch: sessions in one pass. clock() returns seconds that never go\n"
          "back.")
      .def(
          "verify",
          [](PythonStore& self, const py::object& session, const py::object& tree,
             std::vector<int64_t> new_tokens, int64_t expected_prefix_len, int64_t chunk_rows,
             std::vector<int64_t> stop_ids, int64_t max_new_tokens) {
            const VerifyRequest request =
                ParseRequest(session, tree, std::move(new_tokens), expected_prefix_len, chunk_rows,
                             std::move(stop_ids), max_new_tokens);
            const py::gil_scoped_release release;
            return self.Verify(request);
          },
          py::arg("session"), py::arg("tree"), py::arg("new_tokens"),
          py::arg("expected_prefix_len") = 0, py::arg("chunk_rows") = 0,
          py::arg("stop_ids") = std::vector<int64_t>{}, py::arg("max_new_tokens") = 0,
          "Caches new_tokens, judges the draft tree on the last of them and commits what was\n"
          "accepted. session: a name or a Session. tree: a DraftTree, a Tree of one request,\n"
          "or None: no drafts. expected_prefix_len: tokens the client knows to be cached, 0\n"
          "starts a session. chunk_rows above 0 verifies a chain in chunks. The sequence ends\n"
          "behind the first of stop_ids, or after max_new_tokens (0: any number).\n"
          "\n"
          "Raises UnknownSessionError when the session is not here, DesyncError when it holds\n"
          "another number of tokens, CapacityError when it does not fit, NworError for wrong\n"
          "arguments, and what forward or accept raises.")
      .def("verify_batch", &SessionStore::VerifyBatch, py::arg("requests"), released,
           "Verifies several sessions, each once, in as few forward passes as max_batch\n"
           "allows; if one fails, all fail.")
      .def("rollback", &SessionStore::Rollback, py::arg("session"), py::arg("length"), released,
           "Keeps a session's first length tokens; raises UnknownSessionError when it is not\n"
           "here.")
      .def("fork", &SessionStore::Fork, py::arg("parent"), py::arg("child"),
           py::arg("num_tokens") = py::none(), released,
           "Starts child with the parent's first num_tokens cached tokens (default: all), in\n"
           "shared pages; raises NworError when the name is taken.")
      .def("end_session", &SessionStore::End, py::arg("session"), released,
           "Waits for a verify in flight, then gives back the pages; raises\n"
           "UnknownSessionError when it is not here.")
      .def("sweep", &SessionStore::Sweep, released,
           "Takes away what has been idle for ttl_seconds, as every verify does, and returns\n"
           "how many.")
      .def("info", &SessionStore::Info, py::arg("session"), released,
           "A session's length, bytes and idle time; raises UnknownSessionError when it is not\n"
           "here.")
      .def("list", &SessionStore::List, released, "All sessions, the least recently used first.")
      .def(
          "stats",
          [](const PythonStore& self) {
            const SessionStoreStats stats = [&] {
              const py::gil_scoped_release release;
              return self.stats();
            }();
            return StoreStatsDict(stats);
          },
          "Sessions, cache hits and misses, rows, forward passes and bytes of this store.");
}

}  // namespace

void BindSession(py::module_& m) {
  BindSessionErrors();
  BindSessionValues(m);
  BindSessionStore(m);
  BindWorkerCalls(m);
}

}  // namespace nwor
