#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "bindings/module.h"
#include "drafters/ngram_index.h"
#include "drafters/ngram_trials.h"

// The Python face of drafters that need no model.

namespace py = pybind11;

namespace nwor {

void BindDrafters(py::module_& m) {
  const NgramOptions defaults;
  py::class_<NgramIndex>(
      m, "NgramIndex",
      "What followed the last tokens of one growing text where they stood before: drafts\n"
      "without a model.")
      .def(py::init([](int64_t min_tokens, int64_t max_tokens, int64_t max_matches) {
             return NgramIndex({min_tokens, max_tokens, max_matches});
           }),
           py::arg("min_tokens") = defaults.min_tokens, py::arg("max_tokens") = defaults.max_tokens,
           py::arg("max_matches") = defaults.max_matches,
           "Fewer than min_tokens in common are no match, more than max_tokens are not told\n"
           "apart, and at most max_matches places are looked at. Raises NworError unless 1 <=\n"
           "min_tokens <= max_tokens <= 16 and 1 <= max_matches <= 256.")
      .def("append", &NgramIndex::Append, py::arg("tokens"), "Adds tokens to the text's end.")
      .def("truncate", &NgramIndex::Truncate, py::arg("length"),
           "Takes back what was added last, to a text of length tokens; raises NworError for\n"
           "more than it has.")
      .def("draft", &NgramIndex::Draft, py::arg("rows"), py::arg("depth"), py::arg("top_k"),
           "A tree below the text's last token: at most rows rows, depth drafts in a row and\n"
           "top_k children of a row; the root alone if nothing matches.")
      .def("lookup", &NgramIndex::Lookup, py::arg("drafts"), py::arg("count"),
           "Up to count tokens that followed the last tokens of the text and of drafts, which\n"
           "are no part of it, the last time these stood in the text; the longest match\n"
           "counts.")
      .def_property_readonly("last", &NgramIndex::last,
                             "The text's last token; raises NworError when there is none.")
      .def("__len__", &NgramIndex::size, "Tokens of the text.");

  py::class_<NgramTrials>(
      m, "NgramTrials",
      "How many tokens lookups would have guessed right in a text that grows. A trial is a lookup\n"
      "and what comes after it, up to the first token that was not guessed.")
      .def(py::init([](int64_t min_tokens, int64_t max_tokens, int64_t limit,
                       const std::vector<int64_t>& text) {
             return NgramTrials({min_tokens, max_tokens}, limit, text);
           }),
           py::arg("min_tokens"), py::arg("max_tokens"), py::arg("limit"), py::arg("text"),
           "min_tokens and max_tokens as of an NgramIndex; lookups guess at most limit tokens.")
      .def("follow", &NgramTrials::Follow, py::arg("tokens"), "Adds tokens to the text's end.")
      .def(
          "moments",
          [](const NgramTrials& trials, int64_t most) {
            const NgramTrials::Moments found = trials.Right(most);
            return std::tuple(found.count, found.mean, found.variance);
          },
          py::arg("most"),
          "Number of the latest trials, mean and variance of their right guesses if lookups\n"
          "guessed at most `most` tokens.")
      .def_property_readonly("trials", &NgramTrials::trials,
                             "Right guesses of the latest trials that are over.")
      .def_property_readonly("right", &NgramTrials::right,
                             "Right guesses of the trial that is not over.")
      .def("__len__", &NgramTrials::size, "Tokens of the text.");
}

}  // namespace nwor
