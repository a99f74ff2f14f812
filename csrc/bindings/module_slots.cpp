#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bindings/module.h"
#include "session/slot_allocator.h"

// The Python face of slots.

namespace py = pybind11;

namespace nwor {
namespace {

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

}  // namespace

void BindSlots(py::module_& m) {
  const py::class_<SlotAllocator::Backup> state(m, "AllocatorState", "What backup() remembers.");

  py::class_<SlotAllocator>(
      m, "SlotAllocator",
      "Slots of a paged cache for hosts that have no allocator of their own.\n"
      "\n"
      "A request, named by an integer or a string, holds tokens at slots page * page_size\n"
      "+ offset. Forks share pages, and one goes back when its last holder lets go. Every\n"
      "call does all it says, or raises and changes nothing: NworError for wrong use,\n"
      "CapacityError when there are not enough free pages. Not thread-safe.")
      .def(py::init<int64_t, int64_t>(), py::arg("num_pages"), py::arg("page_size"),
           "Begins with num_pages free pages of page_size slots.")
      .def(
          "extend",
          [](SlotAllocator& self, const RequestKey& request, int64_t num_tokens) {
            return ToTensor(self.Extend(request, num_tokens));
          },
          py::arg("request"), py::arg("num_tokens"),
          "Slots [num_tokens] int64 for the next tokens of a request, which starts to exist\n"
          "with its first call. Make the copies of take_copies() before writing there.")
      .def(
          "free",
          [](SlotAllocator& self, const RequestKey& request, const py::object& mask) {
            mask.is_none() ? self.Free(request) : self.Free(request, ParseMask(mask));
          },
          py::arg("request"), py::arg("mask") = py::none(),
          "Gives back all of a request, or those of its last tokens whose entry of mask, a\n"
          "bool tensor or list, is true; compact closes the holes.")
      .def("truncate", &SlotAllocator::Truncate, py::arg("request"), py::arg("length"),
           "Keeps the first length tokens.")
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
          py::arg("request"),
          "Closes a request's holes: (sources, destinations) int64 are the slots of tokens\n"
          "that the host moves in every layer, after the copies.")
      .def("fork", &SlotAllocator::Fork, py::arg("parent"), py::arg("child"),
           py::arg("num_tokens") = py::none(),
           "Starts child with the parent's first num_tokens tokens (default: all), in the same\n"
           "slots.")
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
          py::arg("parent"), py::arg("children"), py::arg("num_tokens"),
          "Forks the parent once for each child, each with slots for num_tokens tokens of its\n"
          "own: [children, num_tokens] int64.")
      .def(
          "take_copies",
          [](SlotAllocator& self) {
            std::vector<std::pair<int32_t, int32_t>> copies;
            for (const PageCopy& copy : self.TakeCopies()) {
              copies.emplace_back(copy.source, copy.destination);
            }
            return copies;
          },
          "Page copies (source, destination) asked for since the last call, in the order to\n"
          "make them, in every layer.")
      .def("backup", &SlotAllocator::TakeBackup, "Everything as it is now, for restore().")
      .def("restore", &SlotAllocator::Restore, py::arg("state"),
           "Goes back to a backup of this allocator. Copies asked for since then are\n"
           "forgotten.")
      .def("__contains__", &SlotAllocator::Contains, "Whether the request is known here.")
      .def("length", &SlotAllocator::length, py::arg("request"), "Tokens of a request.")
      .def("is_dense", &SlotAllocator::IsDense, py::arg("request"),
           "False between a free by mask that left holes and compact.")
      .def(
          "slots",
          [](const SlotAllocator& self, const RequestKey& request, int64_t first, int64_t last) {
            return ToTensor(self.Slots(request, first, last));
          },
          py::arg("request"), py::arg("first") = 0, py::arg("last") = -1,
          "Slots of tokens [first, last) as int64; last -1: the length.")
      .def("pages", &SlotAllocator::Pages, py::arg("request"), py::arg("first_page") = 0,
           "The request's pages from its first_page-th on, its row of a block table; raises\n"
           "NworError when it has holes.")
      .def_property_readonly("page_size", &SlotAllocator::page_size, "Slots of a page.")
      .def(
          "stats", [](const SlotAllocator& self) { return AllocatorStatsDict(self.stats()); },
          "Slots, pages, requests and tokens, held and free.");
}

}  // namespace nwor
