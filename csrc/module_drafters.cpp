#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "drafters/ngram_index.h"
#include "module.h"

// The Python face of drafters that need no model.

namespace py = pybind11;

namespace nwor {

void BindDrafters(py::module_& m) {
  const NgramOptions defaults;
  py::class_<NgramIndex>(m, "NgramIndex")
      .def(py::init([](int64_t min_tokens, int64_t max_tokens, int64_t max_matches) {
             return NgramIndex({min_tokens, max_tokens, max_matches});
           }),
           py::arg("min_tokens") = defaults.min_tokens, py::arg("max_tokens") = defaults.max_tokens,
           py::arg("max_matches") = defaults.max_matches)
      .def("append", &NgramIndex::Append, py::arg("tokens"))
      .def("truncate", &NgramIndex::Truncate, py::arg("length"))
      .def("draft", &NgramIndex::Draft, py::arg("rows"), py::arg("depth"), py::arg("top_k"))
      .def("__len__", &NgramIndex::size);
}

}  // namespace nwor
