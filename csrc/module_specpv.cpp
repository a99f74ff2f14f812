#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "check.h"
#include "metrics/counters.h"
#include "module.h"
#include "specpv/config.h"
#include "specpv/partial_cache.h"
#include "specpv/partial_store.h"
#include "specpv/verify_policy.h"
#include "specpv/view_gather.h"

// The Python face of partial verification: its configuration, the state of requests, the policy.

namespace py = pybind11;

namespace nwor {
namespace {

Error WrongType(const char* name, const py::object& value, const char* expected) {
  std::string text;
  try {
    text = py::repr(value);
  } catch (const py::error_already_set&) {  // an integer of thousands of digits
    text = "one that cannot be printed";
  }
  return Error(Concat(name, ": got ", text, ", expected ", expected));
}

// In Python a flag is a number and a number is true or false: neither is meant.
bool ToFlag(const char* name, const py::object& value) {
  if (!py::isinstance<py::bool_>(value)) throw WrongType(name, value, "true or false");
  return value.cast<bool>();
}
int64_t ToNumber(const char* name, const py::object& value) {
  if (!py::isinstance<py::bool_>(value)) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index) PyErr_Clear();
    int overflow = 0;
    const int64_t number = index ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : 0;
    if (index && overflow == 0) return number;
  }
  throw WrongType(name, value, "an integer of 64 bits");
}
std::string ToText(const char* name, const py::object& value) {
  if (!py::isinstance<py::str>(value)) throw WrongType(name, value, "a string");
  return value.cast<std::string>();
}

// A member that is a flag or a number, and one that is an enumerator and a string in Python.
#define NWOR_FLAG(name)                                    \
  def_property(                                            \
      #name, [](const SpecPVConfig& c) { return c.name; }, \
      [](SpecPVConfig& c, const py::object& value) { c.name = ToFlag(#name, value); })
#define NWOR_NUMBER(name)                                  \
  def_property(                                            \
      #name, [](const SpecPVConfig& c) { return c.name; }, \
      [](SpecPVConfig& c, const py::object& value) { c.name = ToNumber(#name, value); })
#define NWOR_CHOICE(name, Enum)                                                        \
  def_property(                                                                        \
      #name, [](const SpecPVConfig& c) { return ChoiceName(c.name, k##Enum##Names); }, \
      [](SpecPVConfig& c, const py::object& value) {                                   \
        c.name = ParseChoice<Enum>(#name, ToText(#name, value), k##Enum##Names);       \
      })

// Sets every member given by name, then checks them together.
SpecPVConfig MakeConfig(const py::kwargs& values) {
  const py::object config = py::cast(SpecPVConfig{});
  for (const auto& [name, value] : values) {
    const auto unknown = [name = std::string(py::str(name))] {
      return Error(Concat("SpecPVConfig: got an unknown name '", name,
                          "', expected enable_specpv or specpv_*, see Settings"));
    };
    if (!py::hasattr(config, name)) throw unknown();
    try {
      py::setattr(config, name, value);
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_AttributeError)) throw unknown();  // a method's name
      throw;
    }
  }
  auto checked = config.cast<SpecPVConfig>();
  checked.Validate();
  return checked;
}

void BindConfig(py::module_& m) {
  py::class_<Budget>(m, "Budget")
      .def_readonly("block_size", &Budget::block_size)
      .def_readonly("sink_blocks", &Budget::sink_blocks)
      .def_readonly("retrieval_blocks", &Budget::retrieval_blocks)
      .def_readonly("window_blocks", &Budget::window_blocks)
      .def_readonly("tail_capacity", &Budget::tail_capacity)
      .def_readonly("max_rows", &Budget::max_rows)
      .def_property_readonly("static_tokens", &Budget::static_tokens)
      .def_property_readonly("max_view_blocks", &Budget::max_view_blocks);

  py::class_<SpecPVConfig>(m, "SpecPVConfig")
      .def(py::init(&MakeConfig))
      .NWOR_FLAG(enable_specpv)
      .NWOR_NUMBER(specpv_block_size)
      .NWOR_NUMBER(specpv_n_sink_blocks)
      .NWOR_NUMBER(specpv_n_retrieval_blocks)
      .NWOR_NUMBER(specpv_n_window_blocks)
      .NWOR_NUMBER(specpv_n_spec_tokens_buf)
      .NWOR_NUMBER(specpv_partial_threshold)
      .NWOR_NUMBER(specpv_full_refresh_interval)
      .NWOR_CHOICE(specpv_selector, Selector)
      .NWOR_CHOICE(specpv_score, Score)
      .NWOR_CHOICE(specpv_query_reduce, QueryReduce)
      .NWOR_CHOICE(specpv_group_reduce, GroupReduce)
      .NWOR_CHOICE(specpv_selection, Selection)
      .NWOR_CHOICE(specpv_storage, Storage)
      .NWOR_CHOICE(specpv_rectify, Rectify)
      .NWOR_CHOICE(specpv_budget, BudgetRule)
      .NWOR_FLAG(specpv_offload)
      .def("validate", &SpecPVConfig::Validate)
      .def("validate_for", &SpecPVConfig::ValidateFor, py::arg("page_size"), py::arg("max_rows"),
           py::arg("max_context"), py::arg("tail_capacity") = -1)
      .def(
          "budget",
          [](const SpecPVConfig& config, int64_t max_rows, int64_t prompt_tokens,
             int64_t max_new_tokens) {
            config.Validate();
            CheckMaxRows(max_rows);
            NWOR_CHECK(prompt_tokens >= 0 && max_new_tokens >= 0,
                       "prompt_tokens, max_new_tokens: ", "got ", prompt_tokens, " and ",
                       max_new_tokens, ", expected 0 or more");
            return ChooseBudget(config, max_rows, prompt_tokens, max_new_tokens);
          },
          py::arg("max_rows"), py::arg("prompt_tokens") = 0, py::arg("max_new_tokens") = 0);
}

#undef NWOR_FLAG
#undef NWOR_NUMBER
#undef NWOR_CHOICE

FullTrigger ParseTrigger(std::string_view text) {
  std::array<std::string_view, kNumFullTriggers> labels;
  for (int i = 0; i < kNumFullTriggers; ++i) labels[i] = kFullTriggerTexts[i].label;
  return ParseChoice<FullTrigger>("trigger", text, labels);
}

// A policy whose callback Python's collector sees: it is often a method of whoever holds it.
class PythonPolicy : public VerifyPolicy {
 public:
  PythonPolicy(const SpecPVConfig& config, py::object callback)
      : PythonPolicy(config, std::make_shared<py::object>(std::move(callback))) {}

  static void SetUpType(PyHeapTypeObject* heap_type) {
    PyTypeObject* const type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = Traverse;
    type->tp_clear = Clear;
  }

 private:
  using HeldCallback = std::shared_ptr<py::object>;  // by the policy's function too

  PythonPolicy(const SpecPVConfig& config, HeldCallback callback)
      : VerifyPolicy(config, MakeCallback(callback)), callback_(std::move(callback)) {}

  static PolicyCallback MakeCallback(const HeldCallback& held) {
    if (held->is_none()) return nullptr;
    return [held](const PartialCache& cache) {
      // Held here as well: the call may be what clears it.
      const auto callback = py::reinterpret_borrow<py::object>(*held);
      NWOR_CHECK(callback,
                 "callback: got a call after the garbage collector cleared the policy, expected "
                 "none");
      // The cache as Python knows it, whatever class it has there.
      return callback(py::cast(&cache, py::return_value_policy::reference)).cast<bool>();
    };
  }

  // Null as long as __init__ has not run, or when it failed.
  static PythonPolicy* Of(PyObject* self) {
    auto* const instance = reinterpret_cast<py::detail::instance*>(self);
    if (!instance->get_value_and_holder().holder_constructed()) return nullptr;
    return py::handle(self).cast<PythonPolicy*>();
  }

  static int Traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (const PythonPolicy* const policy = Of(self)) Py_VISIT(policy->callback_->ptr());
    return 0;
  }

  static int Clear(PyObject* self) {
    if (const PythonPolicy* const policy = Of(self)) *policy->callback_ = py::object();
    return 0;
  }

  const HeldCallback callback_;
};

void BindSteps(py::module_& m) {
  py::dict triggers;
  for (const FullTriggerText& text : kFullTriggerTexts) {
    triggers[py::str(text.label)] = text.sentence;
  }
  m.attr("FULL_TRIGGERS") = triggers;

  py::class_<StepDecision>(m, "StepDecision")
      .def_property_readonly(
          "kind", [](const StepDecision& d) { return ChoiceName(d.kind, kStepKindNames); })
      .def_property_readonly("trigger", [](const StepDecision& d) { return Label(d.trigger); })
      .def_readonly("num_rows", &StepDecision::num_rows)
      .def_readonly("full_len", &StepDecision::full_len)
      .def_readonly("committed_len", &StepDecision::committed_len)
      .def_readonly("prefix_len", &StepDecision::prefix_len)
      .def_readonly("refed_rows", &StepDecision::refed_rows)
      .def_readonly("view_tokens", &StepDecision::view_tokens)
      .def("__repr__", [](const StepDecision& d) {
        return Concat("StepDecision(kind='", ChoiceName(d.kind, kStepKindNames), "', trigger='",
                      Label(d.trigger), "', prefix_len=", d.prefix_len,
                      ", refed_rows=", d.refed_rows, ", num_rows=", d.num_rows, ")");
      });

  py::class_<StepOutcome>(m, "StepOutcome")
      .def_readonly("committed", &StepOutcome::committed)
      .def_readonly("emitted", &StepOutcome::emitted)
      .def_readonly("cut", &StepOutcome::cut);

  py::class_<PartialCache, std::shared_ptr<PartialCache>>(m, "PartialCache")
      .def(py::init<const SpecPVConfig&, int64_t, int64_t, int64_t>(), py::arg("config"),
           py::arg("max_rows"), py::arg("prompt_tokens") = 0, py::arg("max_new_tokens") = 0)
      .def("prefill", &PartialCache::Prefill, py::arg("num_tokens"))
      .def("finish", &PartialCache::Finish, py::arg("decision"), py::arg("accepted"),
           py::arg("disagreed") = -1)
      .def(
          "require_full",
          [](PartialCache& self, std::string_view trigger) {
            self.RequireFull(ParseTrigger(trigger));
          },
          py::arg("trigger") = "policy")
      .def("count_drift", &PartialCache::CountDrift, py::arg("rechecked"), py::arg("disagreed"))
      .def_property_readonly("full_len", &PartialCache::full_len)
      .def_property_readonly("committed_len", &PartialCache::committed_len)
      .def_property_readonly("emitted_len", &PartialCache::emitted_len)
      .def_property_readonly("tail_len", &PartialCache::tail_len)
      .def_property_readonly("anchor_len", &PartialCache::anchor_len)
      .def_property_readonly("partial_steps", &PartialCache::partial_steps)
      .def_property_readonly("selected", &PartialCache::selected)
      .def_property_readonly("view_tokens", &PartialCache::view_tokens)
      .def_property_readonly("rechecked_tokens", &PartialCache::rechecked_tokens)
      .def_property_readonly("disagreed_tokens", &PartialCache::disagreed_tokens)
      .def_property_readonly("budget", &PartialCache::budget)
      .def_property_readonly("required",
                             [](const PartialCache& self) { return Label(self.required()); })
      .def_property_readonly(
          "segments",
          [](const PartialCache& self) {
            const ViewSegments segments = self.segments();
            const int64_t full = self.full_len();
            // A context that ends within the sink has nothing behind it.
            const auto end = [&](int64_t blocks) {
              return std::min(blocks * self.budget().block_size, full);
            };
            const int64_t sink = end(segments.sink_blocks), window = end(segments.window_begin);
            py::dict tokens;
            tokens["sink"] = std::pair(int64_t{0}, sink);
            tokens["candidates"] = std::pair(sink, window);
            tokens["window"] = std::pair(window, full);
            tokens["tail"] = std::pair(full, self.committed_len());
            return tokens;
          },
          "Tokens [begin, end) of sink, candidates, window and tail.");

  py::class_<PythonPolicy>(m, "VerifyPolicy", py::custom_type_setup(&PythonPolicy::SetUpType))
      .def(py::init<const SpecPVConfig&, py::object>(), py::arg("config"),
           py::arg("callback") = py::none())
      .def("decide", &PythonPolicy::Decide, py::arg("cache"), py::arg("num_rows"));
}

std::vector<BatchEntry> ParseBatch(const py::sequence& batch) {
  std::vector<BatchEntry> entries;
  for (const py::handle item : batch) {
    if (item.is_none()) {
      entries.emplace_back();
      continue;
    }
    try {
      const auto pair = item.cast<std::pair<std::shared_ptr<StoredCache>, StepDecision>>();
      entries.push_back({pair.first, pair.second});
    } catch (const py::cast_error&) {
      throw Error(Concat("batch[", entries.size(), "]: got ", std::string(py::repr(item)),
                         ", expected (a cache of the store, its decision) or None"));
    }
  }
  return entries;
}

void BindStore(py::module_& m) {
  m.def(
      "pinned_cache",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype, const at::Device& device) {
        return PinnedCache(sizes, dtype, device);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("device"));

  py::class_<StoredCache, PartialCache, std::shared_ptr<StoredCache>>(m, "StoredCache")
      .def_property_readonly("row", &StoredCache::row)
      .def_property_readonly("summarized_blocks", &StoredCache::summarized_blocks);

  py::class_<PartialStore, std::shared_ptr<PartialStore>>(m, "_PartialStore")
      .def(
          py::init([](const SpecPVConfig& config, const std::vector<at::Tensor>& key_caches,
                      const std::vector<at::Tensor>& value_caches, int64_t max_requests,
                      int64_t max_tokens, int64_t max_rows, const std::vector<at::Tensor>& k_scales,
                      std::optional<at::ScalarType> dtype) {
            return PartialStore::Create(config, key_caches, value_caches,
                                        {max_requests, max_tokens, max_rows, dtype}, k_scales);
          }),
          py::arg("config"), py::arg("key_caches"), py::arg("value_caches"), py::kw_only(),
          py::arg("max_requests"), py::arg("max_tokens"), py::arg("max_rows"),
          py::arg("k_scales") = std::vector<at::Tensor>{}, py::arg("dtype") = py::none())
      .def("open", &PartialStore::Open, py::arg("prompt_tokens") = 0, py::arg("max_new_tokens") = 0)
      .def(
          "begin",
          [](PartialStore& self, const py::sequence& batch) { self.Begin(ParseBatch(batch)); },
          py::arg("batch"))
      .def("build_views", &PartialStore::BuildViews, py::arg("block_table"))
      .def("refresh_layer", &PartialStore::RefreshLayer, py::arg("layer"), py::arg("query"),
           py::arg("block_table"), py::arg("query_rows") = py::none())
      .def("mark_refreshed", &PartialStore::MarkRefreshed)
      .def("blocks", &PartialStore::blocks, py::arg("layer"))
      .def_property_readonly("all_blocks", &PartialStore::all_blocks)
      .def_property_readonly("num_blocks", &PartialStore::num_blocks)
      .def_property_readonly("view_lens", &PartialStore::view_lens)
      .def_property_readonly("kmax", &PartialStore::kmax)
      .def_property_readonly("kmin", &PartialStore::kmin)
      .def_property_readonly("ids", &PartialStore::ids)
      .def_property_readonly("rows", &PartialStore::rows)
      .def_property_readonly("committed_lens", &PartialStore::committed_lens)
      .def_property_readonly("num_layers", &PartialStore::num_layers)
      .def_property_readonly("free_rows", &PartialStore::free_rows)
      .def_property_readonly("bytes", &PartialStore::bytes)
      .def_property_readonly("budget", &PartialStore::budget);
}

// An engine that is not lossless, counted as long as it is there.
class LossyEngine {
 public:
  LossyEngine() { Counters::Global().AddLossyEngines(1); }
  ~LossyEngine() { Counters::Global().AddLossyEngines(-1); }
  LossyEngine(const LossyEngine&) = delete;
  LossyEngine& operator=(const LossyEngine&) = delete;
};

// For hosts that verify and draft with their own machinery and count for themselves.
void BindCounting(py::module_& m) {
  m.def(
      "count",
      [](std::string_view metric, int64_t amount) {
        const auto found =
            std::find_if(kCounterTexts.begin(), kCounterTexts.end(),
                         [metric](const CounterText& text) { return text.metric == metric; });
        NWOR_CHECK(found != kCounterTexts.end(), "metric: got '", metric,
                   "', expected a counter of the metrics' list");
        NWOR_CHECK(amount >= 0, "amount: got ", amount, ", expected 0 or more");
        Counters::Global().Add(static_cast<Counter>(found - kCounterTexts.begin()), amount);
      },
      py::arg("metric"), py::arg("amount"));
  m.def(
      "count_full_steps",
      [](std::string_view trigger, int64_t amount) {
        const auto found =
            std::find_if(kFullTriggerTexts.begin(), kFullTriggerTexts.end(),
                         [trigger](const FullTriggerText& text) { return text.label == trigger; });
        NWOR_CHECK(found != kFullTriggerTexts.end(), "trigger: got '", trigger,
                   "', expected one of FULL_TRIGGERS");
        for (int64_t i = 0; i < amount; ++i) {
          Counters::Global().AddFullStep(
              static_cast<FullTrigger>(found - kFullTriggerTexts.begin()));
        }
      },
      py::arg("trigger"), py::arg("amount"));
  py::class_<LossyEngine>(m, "LossyEngine").def(py::init<>());
  m.def(
      "count_draft_failure",
      [](std::string_view reason) {
        std::array<std::string_view, kNumDraftFailures> labels;
        for (int i = 0; i < kNumDraftFailures; ++i) labels[i] = kDraftFailureTexts[i].label;
        Counters::Global().AddDraftFailure(ParseChoice<DraftFailure>("reason", reason, labels));
      },
      py::arg("reason"));
}

}  // namespace

void BindSpecPV(py::module_& m) {
  BindCounting(m);
  BindConfig(m);
  BindSteps(m);
  BindStore(m);
}

}  // namespace nwor
