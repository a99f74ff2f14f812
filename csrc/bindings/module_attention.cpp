#include <torch/csrc/utils/pybind.h>

#include "attention/merge/merge_rows.h"
#include "attention/verify.h"
#include "bindings/module.h"
#include "kv_interceptor/interceptor.h"

// Python bindings of attention besides its torch ops: routes, plan sizes, and functions that take
// an interceptor.

namespace py = pybind11;

namespace nwor {
namespace {

void MergeAndWriteRowsOfLayer(Interceptor& interceptor, const std::string& layer,
                              const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& prefix_out,
                              const at::Tensor& prefix_lse, const at::Tensor& query_start,
                              double scale, const at::Tensor& out, double softcap,
                              int64_t rows_per_request, const std::optional<at::Tensor>& tree_mask,
                              bool overlaps) {
  MergeRowsArguments arguments{query,       key,       value, prefix_out, prefix_lse,
                               query_start, tree_mask, scale, softcap,    rows_per_request};
  arguments.rows_ready = overlaps;
  arguments.ordered = !overlaps;
  std::optional<DeferredWrite> write = interceptor.TakeDeferred(layer);
  try {
    MergeAndWriteRows(arguments, out, {}, write.has_value() ? &write->params : nullptr);
  } catch (...) {
    if (write.has_value()) interceptor.ReturnDeferred(layer, std::move(*write));
    throw;
  }
}

}  // namespace

void BindAttention(py::module_& m) {
  m.def("last_attention_route", &LastRoute,
        "The route of this process' latest verify attention and why it was chosen;\n"
        "'none' before the first.");
  m.def("attention_routes", &DescribeRoutes,
        "The routes of this process, one line each: 'name: present', or why it is absent.");
  m.def(
      "verify_plan_bytes",
      [](const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& block_table,
         const at::Tensor& prefix_lens, const at::Tensor& query_start, int64_t block_size,
         int64_t max_rows) {
        VerifyArguments arguments;
        arguments.query = query;
        arguments.key_cache = key_cache;
        arguments.block_table = block_table;
        arguments.prefix_lens = prefix_lens;
        arguments.query_start = query_start;
        arguments.max_rows = max_rows;
        return PlanBytes(arguments, block_size);
      },
      py::arg("query"), py::arg("key_cache"), py::arg("block_table"), py::arg("prefix_lens"),
      py::arg("query_start"), py::arg("block_size") = 0, py::arg("max_rows") = 0,
      "Bytes of a plan of verify attention for these shapes on this device; 0 on the CPU.\n"
      "block_size: of the partial view; 0: none.");
  m.def("merge_and_write_rows", &MergeAndWriteRowsOfLayer, py::arg("interceptor"), py::arg("layer"),
        py::arg("query"), py::arg("key"), py::arg("value"), py::arg("prefix_out"),
        py::arg("prefix_lse"), py::arg("query_start"), py::arg("scale"), py::arg("out"),
        py::arg("softcap") = 0.0, py::arg("rows_per_request") = 0,
        py::arg("tree_mask") = py::none(), py::arg("overlaps") = false,
        "merge_rows, and the layer's deferred write (Interceptor.write with\n"
        "defer=True) in the same launch. With overlaps it may begin on CUDA while the\n"
        "previous launch, the attention to the prefix, still runs: query, key and value\n"
        "must have been written before that began, and it must end after all before it.");
}

}  // namespace nwor
