#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "tree/fault.h"
#include "tree/logits_params.h"
#include "tree/run_end.h"

// The Python face of draft trees that needs no tensors: where a run ends, and what status words
// mean. Everything else is torch ops.

namespace py = pybind11;

namespace nwor {

void BindTree(py::module_& m) {
  m.def(
      "find_run_end",
      [](const std::vector<int64_t>& run, const std::set<int64_t>& stop_ids, int64_t room) {
        const RunEnd end = FindRunEnd(run, std::vector(stop_ids.begin(), stop_ids.end()), room);
        std::optional<std::string> finish;
        if (end.finish != FinishReason::kNone) finish = Label(end.finish);
        return std::pair(end.num_tokens, finish);
      },
      py::arg("run"), py::arg("stop_ids"), py::arg("room"),
      "How many tokens of a run are emitted, and why the sequence ends there: with a token\n"
      "of stop_ids ('stop'), after room tokens ('length'), or None: it goes on.");
  py::list faults;
  for (const ReasonText& text : kTreeFaultTexts) {
    faults.append(py::make_tuple(text.label, text.sentence));
  }
  m.attr("TREE_FAULTS") = faults;
  m.attr("SAMPLING_OPTIONS") = py::tuple(py::cast(kSamplingOptionNames));
}

}  // namespace nwor
