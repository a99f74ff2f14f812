#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "module.h"
#include "session/chunked_verify.h"
#include "session/session_error.h"
#include "session/session_store.h"
#include "session/slot_allocator.h"

// The Python face of slots and sessions.

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

at::Tensor ToTensor(const std::vector<int64_t>& values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::memcpy(tensor.mutable_data_ptr(), values.data(), values.size() * sizeof(int64_t));
  return tensor;
}

// A list of flags or a bool tensor.
std::vector<bool> ParseMask(const py::object& mask) {
  if (THPVariable_Check(mask.ptr())) {
    const auto tensor = mask.cast<at::Tensor>();
    NWOR_CHECK(tensor.scalar_type() == at::kBool && tensor.dim() == 1, "mask: got ",
               c10::toString(tensor.scalar_type()), " with ", tensor.dim(),
               " dimensions, expected bool with 1");
    const at::Tensor host = tensor.cpu().contiguous();
    const auto* flags = static_cast<const bool*>(host.const_data_ptr());
    return std::vector<bool>(flags, flags + host.numel());
  }
  try {
    return mask.cast<std::vector<bool>>();
  } catch (const py::cast_error&) {
    throw Error(Concat("mask: got ", std::string(py::repr(mask)),
                       ", expected a bool tensor, a list of bools, or None"));
  }
}

py::dict AllocatorStatsDict(const AllocatorStats& stats) {
  py::dict dict;
  dict["total_slots"] = stats.total_slots;
  dict["free_slots"] = stats.free_slots;
  dict["held_slots"] = stats.held_slots;
  dict["total_pages"] = stats.total_pages;
  dict["free_pages"] = stats.free_pages;
  dict["held_pages"] = stats.held_pages;
  dict["shared_pages"] = stats.shared_pages;
  dict["requests"] = stats.requests;
  dict["tokens"] = stats.tokens;
  dict["pending_copies"] = stats.pending_copies;
  return dict;
}

void BindAllocator(py::module_& m) {
  const py::class_<SlotAllocator::Backup> state(m, "AllocatorState", "What backup() remembers.");

  py::class_<SlotAllocator>(m, "SlotAllocator")
      .def(py::init<int64_t, int64_t>(), py::arg("num_pages"), py::arg("page_size"))
      .def(
          "extend",
          [](SlotAllocator& self, const RequestKey& request, int64_t num_tokens) {
            return ToTensor(self.Extend(request, num_tokens));
          },
          py::arg("request"), py::arg("num_tokens"))
      .def(
          "free",
          [](SlotAllocator& self, const RequestKey& request, const py::object& mask) {
            mask.is_none() ? self.Free(request) : self.Free(request, ParseMask(mask));
          },
          py::arg("request"), py::arg("mask") = py::none())
      .def("truncate", &SlotAllocator::Truncate, py::arg("request"), py::arg("length"))
      .def(
          "compact",
          [](SlotAllocator& self, const RequestKey& request) {
            std::vector<int64_t> sources, destinations;
            for (const SlotMove& move : self.Compact(request)) {
              sources.push_back(move.source);
              destinations.push_back(move.destination);
            }
            return std::pair(ToTensor(sources), ToTensor(destinations));
          },
          py::arg("request"))
      .def("fork", &SlotAllocator::Fork, py::arg("parent"), py::arg("child"),
           py::arg("num_tokens") = py::none())
      .def(
          "branch",
          [](SlotAllocator& self, const RequestKey& parent, const std::vector<RequestKey>& children,
             int64_t num_tokens) {
            std::vector<int64_t> flat;
            for (const auto& slots : self.Branch(parent, children, num_tokens)) {
              flat.insert(flat.end(), slots.begin(), slots.end());
            }
            return ToTensor(flat).view({static_cast<int64_t>(children.size()), num_tokens});
          },
          py::arg("parent"), py::arg("children"), py::arg("num_tokens"))
      .def("take_copies",
           [](SlotAllocator& self) {
             std::vector<std::pair<int32_t, int32_t>> copies;
             for (const PageCopy& copy : self.TakeCopies()) {
               copies.emplace_back(copy.source, copy.destination);
             }
             return copies;
           })
      .def("backup", &SlotAllocator::TakeBackup)
      .def("restore", &SlotAllocator::Restore, py::arg("state"))
      .def("__contains__", &SlotAllocator::Contains)
      .def("length", &SlotAllocator::length, py::arg("request"))
      .def("is_dense", &SlotAllocator::IsDense, py::arg("request"))
      .def(
          "slots",
          [](const SlotAllocator& self, const RequestKey& request, int64_t first, int64_t last) {
            return ToTensor(self.Slots(request, first, last));
          },
          py::arg("request"), py::arg("first") = 0, py::arg("last") = -1)
      .def("pages", &SlotAllocator::Pages, py::arg("request"), py::arg("first_page") = 0)
      .def_property_readonly("page_size", &SlotAllocator::page_size)
      .def("stats", [](const SlotAllocator& self) { return AllocatorStatsDict(self.stats()); });
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

void BindChunks(py::module_& m) {
  py::class_<ChainChunk>(m, "ChainChunk")
      .def_readonly("first_row", &ChainChunk::first_row)
      .def_readonly("tokens", &ChainChunk::tokens)
      .def_readonly("next_draft", &ChainChunk::next_draft);
  py::class_<ChunkedResult>(m, "ChunkedResult")
      .def_readonly("accepted", &ChunkedResult::accepted)
      .def_readonly("next_token", &ChunkedResult::next_token)
      .def_readonly("chunks", &ChunkedResult::chunks)
      .def_readonly("rows_run", &ChunkedResult::rows_run)
      .def_readonly("rows_saved", &ChunkedResult::rows_saved);
  m.def(
      "verify_in_chunks",
      [](const std::vector<int64_t>& chain, const py::function& verify, int64_t chunk_rows) {
        return VerifyInChunks(
            chain,
            [&](const ChainChunk& chunk) {
              const auto [accepted, next_token] = ParseReturned<std::pair<int64_t, int64_t>>(
                  "verify", "integers (accepted, next_token)", verify(chunk));
              return ChunkVerdict{accepted, next_token};
            },
            chunk_rows);
      },
      py::arg("chain"), py::arg("verify"), py::arg("chunk_rows") = kDefaultChunkRows,
      "Verifies a chain (root first) in chunks; verify(chunk) returns (accepted, next_token).");
  m.def(
      "judge_greedy",
      [](const ChainChunk& chunk, const std::vector<int64_t>& target_ids) {
        const ChunkVerdict verdict = JudgeGreedy(chunk, target_ids);
        return std::pair(verdict.accepted, verdict.next_token);
      },
      py::arg("chunk"), py::arg("target_ids"));
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
  py::class_<DraftTree>(m, "DraftTree")
      .def(py::init(
               [](std::vector<int64_t> tokens, const std::optional<std::vector<int32_t>>& parents) {
                 DraftTree tree{std::move(tokens), parents.value_or(std::vector<int32_t>{})};
                 NWOR_CHECK(!parents || !tree.parents.empty() || tree.tokens.empty(),
                            "parents: got none, expected one for each token, or None for a chain");
                 return tree;
               }),
           py::arg("tokens"), py::arg("parents") = py::none())
      .def_readonly("tokens", &DraftTree::tokens)
      .def_property_readonly("parents",
                             [](const DraftTree& tree) {
                               // As given, right or wrong: validate() is what judges them.
                               if (!tree.parents.empty()) return tree.parents;
                               std::vector<int32_t> parents;
                               for (int64_t row = 0; row < tree.num_rows(); ++row) {
                                 parents.push_back(tree.parent(row));
                               }
                               return parents;
                             })
      .def("validate", [](const DraftTree& tree) { tree.Validate(); })
      .def("__len__", &DraftTree::num_rows);

  py::class_<SessionBatch>(m, "SessionBatch")
      .def_readonly("sessions", &SessionBatch::sessions)
      .def_readonly("epoch", &SessionBatch::epoch)
      .def_readonly("tokens", &SessionBatch::tokens)
      .def_readonly("positions", &SessionBatch::positions)
      .def_readonly("slot_mapping", &SessionBatch::slot_mapping)
      .def_readonly("query_start", &SessionBatch::query_start)
      .def_readonly("prefix_lens", &SessionBatch::prefix_lens)
      .def_readonly("block_table", &SessionBatch::block_table)
      .def_property_readonly("tree_mask",
                             [](const SessionBatch& batch) -> std::optional<at::Tensor> {
                               if (!batch.tree_mask.defined()) return std::nullopt;
                               return batch.tree_mask;
                             })
      .def_readonly("tree_rows", &SessionBatch::tree_rows)
      .def_readonly("tree_tokens", &SessionBatch::tree_tokens)
      .def_readonly("tree_parents", &SessionBatch::tree_parents)
      .def_readonly("first_child", &SessionBatch::first_child)
      .def_readonly("next_sibling", &SessionBatch::next_sibling);

  py::class_<VerifyResult>(m, "VerifyResult")
      .def_readonly("accepted_rows", &VerifyResult::accepted_rows)
      .def_readonly("tokens", &VerifyResult::tokens)
      .def_readonly("next_token", &VerifyResult::next_token)
      .def_readonly("cache_hit", &VerifyResult::cache_hit)
      .def_readonly("length", &VerifyResult::length)
      .def_readonly("rows_run", &VerifyResult::rows_run)
      .def_readonly("rows_saved", &VerifyResult::rows_saved)
      .def_property_readonly("finish",
                             [](const VerifyResult& r) -> std::optional<std::string> {
                               if (r.finish == SessionFinish::kNone) return std::nullopt;
                               return r.finish == SessionFinish::kStop ? "stop" : "length";
                             })
      .def("__repr__", [](const VerifyResult& r) {
        return Concat("VerifyResult(accepted=", r.accepted_rows.size(),
                      ", next_token=", r.next_token, ", cache_hit=", r.cache_hit ? "True" : "False",
                      ", length=", r.length, ")");
      });

  py::class_<VerifyRequest>(m, "VerifyRequest")
      .def(py::init(&ParseRequest), py::arg("session"), py::arg("tree"), py::arg("new_tokens"),
           py::arg("expected_prefix_len") = 0, py::arg("chunk_rows") = 0,
           py::arg("stop_ids") = std::vector<int64_t>{}, py::arg("max_new_tokens") = 0);

  py::class_<SessionInfo>(m, "SessionInfo")
      .def_readonly("session", &SessionInfo::session)
      .def_readonly("length", &SessionInfo::length)
      .def_readonly("bytes", &SessionInfo::bytes)
      .def_readonly("idle_seconds", &SessionInfo::idle_seconds);
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

  static void SetUpType(PyHeapTypeObject* heap_type) {
    PyTypeObject* const type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = Traverse;
    type->tp_clear = Clear;
  }

 private:
  // Null as long as __init__ has not run, or when it failed.
  static PythonStore* Of(PyObject* self) {
    auto* const instance = reinterpret_cast<py::detail::instance*>(self);
    if (!instance->get_value_and_holder().holder_constructed()) return nullptr;
    return py::handle(self).cast<PythonStore*>();
  }

  static int Traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const PythonStore* const store = Of(self);
    if (store == nullptr) return 0;
    for (const HeldFunction& function : store->functions_) {
      if (function == nullptr) continue;
      if (const int stop = function->Visit(visit, arg)) return stop;
    }
    return 0;
  }

  static int Clear(PyObject* self) {
    const PythonStore* const store = Of(self);
    if (store == nullptr) return 0;
    for (const HeldFunction& function : store->functions_) {
      if (function != nullptr) function->Clear();
    }
    return 0;
  }

  const std::array<HeldFunction, 3> functions_;
};

void BindStore(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const PythonFailure& failure) {
      failure.Raise();
    }
  });

  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<PythonStore>(m, "SessionStore", py::custom_type_setup(&PythonStore::SetUpType))
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
          py::keep_alive<1, 2>())
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
          py::arg("stop_ids") = std::vector<int64_t>{}, py::arg("max_new_tokens") = 0)
      .def("verify_batch", &SessionStore::VerifyBatch, py::arg("requests"), released)
      .def("rollback", &SessionStore::Rollback, py::arg("session"), py::arg("length"), released)
      .def("fork", &SessionStore::Fork, py::arg("parent"), py::arg("child"),
           py::arg("num_tokens") = py::none(), released)
      .def("end_session", &SessionStore::End, py::arg("session"), released)
      .def("sweep", &SessionStore::Sweep, released)
      .def("info", &SessionStore::Info, py::arg("session"), released)
      .def("list", &SessionStore::List, released)
      .def("stats", [](const PythonStore& self) {
        const SessionStoreStats stats = [&] {
          const py::gil_scoped_release release;
          return self.stats();
        }();
        return StoreStatsDict(stats);
      });
}

}  // namespace

void BindSession(py::module_& m) {
  BindSessionErrors();
  BindAllocator(m);
  BindChunks(m);
  BindSessionValues(m);
  BindStore(m);
}

}  // namespace nwor
