#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "module.h"
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
      py::arg("parents"), py::arg("add_root") = false);
  m.def(
      "topology_from_choices",
      [](const std::vector<std::vector<int32_t>>& choices) {
        StaticTopology topology = TopologyFromChoices(choices);
        return std::tuple(std::move(topology.parents), std::move(topology.depths),
                          std::move(topology.ranks));
      },
      py::arg("choices"));
  py::list faults;
  for (const TreeFaultText& text : kTreeFaultTexts) {
    faults.append(py::make_tuple(text.label, text.sentence));
  }
  m.attr("TREE_FAULTS") = faults;
  m.attr("SAMPLING_OPTIONS") = py::tuple(py::cast(kSamplingOptionNames));
}

}  // namespace nwor
