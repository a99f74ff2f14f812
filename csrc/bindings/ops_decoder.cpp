#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "bindings/ops.h"
#include "decoder/decoder_rows.h"
#include "linear/linear_rows.h"

// The torch ops of linear layers and of the decoder layers they are in.

namespace nwor {
namespace {

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor LinearRowsOp(const at::Tensor& input, const at::Tensor& weight,
                        const OptionalTensor& bias) {
  return WithTorchErrors([&]() -> at::Tensor { return LinearRows(input, weight, bias); });
}

at::Tensor LinearRowsFake(const at::Tensor& input, const at::Tensor& weight,
                          const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(input.dim() >= 1 && weight.dim() == 2, "input, weight: got ", input.dim(),
                    " and ", weight.dim(), " dimensions, expected 1 or more and 2");
  TORCH_CHECK_VALUE(input.sym_size(-1) == weight.sym_size(1), "weight: got ", weight.sym_size(1),
                    " inputs, expected ", input.sym_size(-1));
  std::vector<c10::SymInt> sizes = input.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, input.options());
}

ThreeTensors AttentionInputsOp(const at::Tensor& hidden, const at::Tensor& cos,
                               const at::Tensor& sin, const at::Tensor& norm, double epsilon,
                               const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const OptionalTensor& query_bias,
                               const OptionalTensor& key_bias, const OptionalTensor& value_bias,
                               const OptionalTensor& query_norm, const OptionalTensor& key_norm) {
  return WithTorchErrors([&]() -> ThreeTensors {
    const AttentionInputWeights weights{
        norm,       epsilon, {query, query_bias}, {key, key_bias}, {value, value_bias},
        query_norm, key_norm};
    auto [q, k, v] = AttentionInputs(hidden, weights, cos, sin);
    return {q, k, v};
  });
}

ThreeTensors AttentionInputsFake(const at::Tensor& hidden, const at::Tensor& cos,
                                 const at::Tensor& sin, const at::Tensor& norm, double epsilon,
                                 const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value, const OptionalTensor& query_bias,
                                 const OptionalTensor& key_bias, const OptionalTensor& value_bias,
                                 const OptionalTensor& query_norm, const OptionalTensor& key_norm) {
  TORCH_CHECK_VALUE(hidden.dim() == 2, "hidden: got ", hidden.dim(),
                    " dimensions, expected [rows, size]");
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.sym_size(1) > 0 && cos.sym_size(1) % 2 == 0,
                    "cos: got sizes ", cos.sym_sizes(), ", expected [rows, an even head size]");
  const c10::SymInt dim = cos.sym_size(1);
  const auto rows_of = [&](const char* name, const at::Tensor& weight) {
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(0) % dim == 0 &&
                          weight.sym_size(1) == hidden.sym_size(1),
                      name, ": got sizes ", weight.sym_sizes(), ", expected [a multiple of ", dim,
                      ", ", hidden.sym_size(1), "]");
    return at::empty_symint({hidden.sym_size(0), weight.sym_size(0) / dim, dim}, hidden.options());
  };
  TORCH_CHECK_VALUE(value.sym_size(0) == key.sym_size(0), "value: got ", value.sym_size(0),
                    " outputs, expected ", key.sym_size(0), " as key");
  return {rows_of("query", query), rows_of("key", key), rows_of("value", value)};
}

at::Tensor LayerOutputOp(const at::Tensor& hidden, const at::Tensor& attended,
                         const at::Tensor& attention, const OptionalTensor& attention_bias,
                         const at::Tensor& norm, double epsilon, const at::Tensor& gate,
                         const at::Tensor& up, const at::Tensor& down) {
  return WithTorchErrors([&]() -> at::Tensor {
    return LayerOutput(hidden, attended,
                       {{attention, attention_bias}, norm, epsilon, gate, up, down});
  });
}

at::Tensor LayerOutputFake(const at::Tensor& hidden, const at::Tensor& attended,
                           const at::Tensor& attention, const OptionalTensor& attention_bias,
                           const at::Tensor& norm, double epsilon, const at::Tensor& gate,
                           const at::Tensor& up, const at::Tensor& down) {
  return at::empty_symint(hidden.sym_sizes(), hidden.options());
}

}  // namespace

void RegisterDecoderSchemas(torch::Library& library) {
  library.def("linear_rows(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def(
      "attention_inputs(Tensor hidden, Tensor cos, Tensor sin, Tensor norm, float epsilon, "
      "Tensor query, Tensor key, Tensor value, Tensor? query_bias=None, Tensor? key_bias=None, "
      "Tensor? value_bias=None, Tensor? query_norm=None, Tensor? key_norm=None) "
      "-> (Tensor, Tensor, Tensor)");
  library.def(
      "layer_output(Tensor hidden, Tensor attended, Tensor attention, Tensor? attention_bias, "
      "Tensor norm, float epsilon, Tensor gate, Tensor up, Tensor down) -> Tensor");
}

void RegisterDecoderKernels(torch::Library& library) {
  library.impl("linear_rows", &LinearRowsOp);
  library.impl("attention_inputs", &AttentionInputsOp);
  library.impl("layer_output", &LayerOutputOp);
}

void RegisterDecoderFakes(torch::Library& library) {
  library.impl("linear_rows", FakeKernel<&LinearRowsFake>());
  library.impl("attention_inputs", FakeKernel<&AttentionInputsFake>());
  library.impl("layer_output", FakeKernel<&LayerOutputFake>());
}

}  // namespace nwor
