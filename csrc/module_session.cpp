#include <ATen/ops/empty.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "module.h"
#include "session/chunked_verify.h"
#include "session/session_error.h"
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
      [](const std::vector<int64_t>& chain,
         const std::function<std::pair<int64_t, int64_t>(const ChainChunk&)>& verify,
         int64_t chunk_rows) {
        return VerifyInChunks(
            chain,
            [&](const ChainChunk& chunk) {
              const auto [accepted, next_token] = verify(chunk);
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

}  // namespace

void BindSession(py::module_& m) {
  BindSessionErrors();
  BindAllocator(m);
  BindChunks(m);
}

}  // namespace nwor
