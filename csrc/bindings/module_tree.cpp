#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/module.h"
#include "tree/fault.h"
#include "tree/logits_params.h"
#include "tree/topology.h"

// The Python face of draft trees that needs no tensors: shapes written down by people, and what
// status words mean. Everything else is torch ops.

namespace py = pybind11;

namespace nwor {

void BindTree(py::module_& m) {
  m.def(
      "normalize_topology",
      [](const std::vector<int32_t>& parents, bool add_root) {
        Topology topology = NormalizeTopology(parents, add_root);
        return std::pair(std::move(topology.parents), std::move(topology.source));
      },
      py::arg("parents"), py::arg("add_root") = false,
      "The parents of a tree in any order as (parents, source): root first, every parent\n"
      "before its child, and the entry given for each row, -1 for a root that was added.\n"
      "Several -1, or one with add_root, are drafts below such a root. Raises NworError\n"
      "for cycles, ranges, no root, or more than 256 rows.");
  m.def(
      "topology_from_choices",
      [](const std::vector<std::vector<int32_t>>& choices) {
        StaticTopology topology = TopologyFromChoices(choices);
        return std::tuple(std::move(topology.parents), std::move(topology.depths),
                          std::move(topology.ranks));
      },
      py::arg("choices"),
      "A fixed tree from its paths as (parents, depths, ranks): (a, b) is candidate b of\n"
      "depth 2 below candidate a of depth 1. Raises NworError unless every path's\n"
      "beginnings are paths too.");
  py::list faults;
  for (const TreeFaultText& text : kTreeFaultTexts) {
    faults.append(py::make_tuple(text.label, text.sentence));
  }
  m.attr("TREE_FAULTS") = faults;
  m.attr("SAMPLING_OPTIONS") = py::tuple(py::cast(kSamplingOptionNames));
}

}  // namespace nwor
