#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "module.h"
#include "specpv/config.h"

// The Python face of partial verification: its configuration, the state of requests, the policy.

namespace py = pybind11;

namespace nwor {
namespace {

// A member that is a number or a flag, and one that is an enumerator and a string in Python.
#define NWOR_PLAIN(name) def_readwrite(#name, &SpecPVConfig::name)
#define NWOR_CHOICE(name, Enum)                                                        \
  def_property(                                                                        \
      #name, [](const SpecPVConfig& c) { return ChoiceName(c.name, k##Enum##Names); }, \
      [](SpecPVConfig& c, std::string_view text) {                                     \
        c.name = ParseChoice<Enum>(#name, text, k##Enum##Names);                       \
      })

// Sets every member given by name, then checks them together.
SpecPVConfig MakeConfig(const py::kwargs& values) {
  const py::object config = py::cast(SpecPVConfig{});
  for (const auto& [name, value] : values) {
    if (!py::hasattr(config, name)) {
      throw Error(Concat("SpecPVConfig: got an unknown name '", std::string(py::str(name)),
                         "', expected enable_specpv or specpv_*, see Settings"));
    }
    try {
      py::setattr(config, name, value);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      throw Error(Concat(std::string(py::str(name)), ": got ", std::string(py::repr(value)),
                         ", expected a value of its type"));
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
      .def_property_readonly("static_tokens", &Budget::static_tokens)
      .def_property_readonly("max_view_blocks", &Budget::max_view_blocks);

  py::class_<SpecPVConfig>(m, "SpecPVConfig")
      .def(py::init(&MakeConfig))
      .NWOR_PLAIN(enable_specpv)
      .NWOR_PLAIN(specpv_block_size)
      .NWOR_PLAIN(specpv_n_sink_blocks)
      .NWOR_PLAIN(specpv_n_retrieval_blocks)
      .NWOR_PLAIN(specpv_n_window_blocks)
      .NWOR_PLAIN(specpv_n_spec_tokens_buf)
      .NWOR_PLAIN(specpv_partial_threshold)
      .NWOR_PLAIN(specpv_full_refresh_interval)
      .NWOR_CHOICE(specpv_selector, Selector)
      .NWOR_CHOICE(specpv_score, Score)
      .NWOR_CHOICE(specpv_query_reduce, QueryReduce)
      .NWOR_CHOICE(specpv_group_reduce, GroupReduce)
      .NWOR_CHOICE(specpv_selection, Selection)
      .NWOR_CHOICE(specpv_storage, Storage)
      .NWOR_CHOICE(specpv_rectify, Rectify)
      .NWOR_CHOICE(specpv_budget, BudgetRule)
      .NWOR_PLAIN(specpv_offload)
      .def("validate", &SpecPVConfig::Validate)
      .def("validate_for", &SpecPVConfig::ValidateFor, py::arg("page_size"), py::arg("max_rows"),
           py::arg("max_context"), py::arg("tail_capacity") = -1)
      .def(
          "budget",
          [](const SpecPVConfig& config, int64_t max_rows, int64_t prompt_tokens,
             int64_t max_new_tokens) {
            config.Validate();
            NWOR_CHECK(max_rows >= 1, "max_rows: got ", max_rows, ", expected at least 1");
            NWOR_CHECK(prompt_tokens >= 0 && max_new_tokens >= 0,
                       "prompt_tokens, max_new_tokens: ", "got ", prompt_tokens, " and ",
                       max_new_tokens, ", expected 0 or more");
            return ChooseBudget(config, max_rows, prompt_tokens, max_new_tokens);
          },
          py::arg("max_rows"), py::arg("prompt_tokens") = 0, py::arg("max_new_tokens") = 0);
}

#undef NWOR_PLAIN
#undef NWOR_CHOICE

}  // namespace

void BindSpecPV(py::module_& m) { BindConfig(m); }

}  // namespace nwor
