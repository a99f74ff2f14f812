#include <torch/csrc/utils/pybind.h>

#include "attention/merge/merge_rows.h"
#include "attention/verify.h"
#include "bindings/module.h"
#include "kv_interceptor/interceptor.h"

// The Python face of attention beside its torch ops: routes, sizes of plans, and what needs an
// interceptor.

namespace py = pybind11;

namespace nwor {
namespace {

void MergeRowsOfLayer(Interceptor& interceptor, const std::string& layer, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value, const at::Tensor& prefix_out,
                      const at::Tensor& prefix_lse, const at::Tensor& query_start, double scale,
                      const at::Tensor& out, double softcap, int64_t rows_per_request) {
  std::optional<DeferredWrite> write = interceptor.TakeDeferred(layer);
  try {
    MergeRows({query, key, value, prefix_out, prefix_lse, query_start, std::nullopt, scale, softcap,
               rows_per_request, /*rows_ready=*/true},
              out, {}, write.has_value() ? &write->params : nullptr);
  } catch (...) {
    if (write.has_value()) interceptor.ReturnDeferred(layer, std::move(*write));
    throw;
  }
}

}  // namespace

void BindAttention(py::module_& m) {
  m.def("last_attention_route", &LastRoute,
        "The route of the process' latest verify attention ('none' before the first) and\n"
        "why it was taken.");
  m.def("attention_routes", &DescribeRoutes,
        "What each route is here, a line for each: 'name: present', or why not.");
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
      "Bytes that a plan of verify attention takes for these shapes on this device, 0 on\n"
      "the CPU; block_size is that of the partial view, 0 without.");
  m.def("merge_rows_of_layer", &MergeRowsOfLayer, py::arg("interceptor"), py::arg("layer"),
        py::arg("query"), py::arg("key"), py::arg("value"), py::arg("prefix_out"),
        py::arg("prefix_lse"), py::arg("query_start"), py::arg("scale"), py::arg("out"),
        py::arg("softcap") = 0.0, py::arg("rows_per_request") = 0,
        "merge_rows for chains, with the layer's deferred write in the same launch. On CUDA query, "
        "key and value must have been written before the launch ahead of it, the attention to the "
        "prefix, began.");
}

}  // namespace nwor
