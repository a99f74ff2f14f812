#include "decoder/decoder_rows_cuda.h"

#ifdef NWOR_WITH_CUDA

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/core/DeviceGuard.h>

#include "base/tensor_layout.h"
#include "decoder/gate.h"
#include "decoder/head_rotation.h"
#include "decoder/rms_norm.h"

namespace nwor {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// What the kernels of a layer share. Narrow matrices under float32 rows: products are of their
// type, and what is between products stays float32.
struct LayerTypes {
  at::ScalarType rows;
  at::ScalarType matrices;

  bool mixed() const { return rows != matrices; }
  DType row_dtype() const { return *FloatDType(rows); }
  DType matrix_dtype() const { return *FloatDType(matrices); }
};

OptionalTensor Contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

const void* Data(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

// Kernels write into it: [T, outputs], contiguous.
at::Tensor Multiply(const at::Tensor& rows, const at::Tensor& weight,
                    const OptionalTensor& bias = std::nullopt) {
  return at::linear(rows, weight, bias).contiguous();
}

// rows [T, inputs] of the matrices' type. A bias of that type is the product's own affair, as it is
// in torch's modules; one of float32 is left to the kernel behind it.
at::Tensor Project(const at::Tensor& rows, const LinearLayer& layer, const LayerTypes& types) {
  return Multiply(rows, layer.weight, types.mixed() ? std::nullopt : layer.bias);
}

OptionalTensor BiasBehind(const LinearLayer& layer, const LayerTypes& types) {
  return types.mixed() ? Contiguous(layer.bias) : std::nullopt;
}

struct Residual {
  const at::Tensor& product;  // [T, size]
  const OptionalTensor& bias;
  const at::Tensor& sums;  // [T, size]
};

// [T, size] of the matrices' type.
at::Tensor Normalize(const at::Tensor& hidden, const at::Tensor& weight, double epsilon,
                     const LayerTypes& types, const Residual* residual = nullptr) {
  const at::Tensor rows = ContiguousChannels(hidden), weights = weight.contiguous();
  at::Tensor normed = at::empty(rows.sizes(), rows.options().dtype(types.matrices));
  RmsNormParams params;
  params.rows = rows.const_data_ptr();
  params.row_stride = rows.stride(0);
  params.num_rows = rows.size(0);
  params.weight = weights.const_data_ptr();
  params.normed = normed.mutable_data_ptr();
  params.part_size = static_cast<int32_t>(weights.size(-1));
  params.parts = static_cast<int32_t>(rows.size(1) / weights.size(-1));
  params.epsilon = static_cast<float>(epsilon);
  params.row_dtype = types.row_dtype();
  params.matrix_dtype = types.matrix_dtype();
  params.stream = CurrentStream(rows.device());
  if (residual != nullptr) {
    params.product = residual->product.const_data_ptr();
    params.bias = Data(residual->bias);
    params.sums = residual->sums.mutable_data_ptr();
  }
  LaunchRmsNorm(params);
  return normed;
}

}  // namespace

std::array<at::Tensor, 3> AttentionInputsOnCuda(const at::Tensor& hidden,
                                                const AttentionInputWeights& weights,
                                                const at::Tensor& cos, const at::Tensor& sin) {
  const c10::DeviceGuard guard(hidden.device());
  const LayerTypes types{hidden.scalar_type(), weights.query.weight.scalar_type()};
  const at::Tensor normed = Normalize(hidden, weights.norm, weights.epsilon, types);
  const at::Tensor cosines = ContiguousChannels(cos), sines = ContiguousChannels(sin);
  const std::array<const LinearLayer*, 3> layers = {&weights.query, &weights.key, &weights.value};
  const std::array<OptionalTensor, 3> norms = {Contiguous(weights.query_norm),
                                               Contiguous(weights.key_norm), std::nullopt};
  std::array<OptionalTensor, 3> biases;
  std::array<at::Tensor, 3> products, results;
  HeadRotationParams params;
  for (size_t i = 0; i < layers.size(); ++i) {
    products[i] = Project(normed, *layers[i], types).unflatten(-1, {-1, cos.size(1)});
    results[i] = types.mixed() ? at::empty(products[i].sizes(), hidden.options()) : products[i];
    // Values are as they should be, unless they are to be widened.
    if (i == 2 && !types.mixed()) continue;
    biases[i] = BiasBehind(*layers[i], types);
    params.projections[i] = {products[i].const_data_ptr(),
                             Data(biases[i]),
                             Data(norms[i]),
                             results[i].mutable_data_ptr(),
                             static_cast<int32_t>(products[i].size(1)),
                             /*rotates=*/i < 2};
  }
  params.cos = cosines.const_data_ptr();
  params.sin = sines.const_data_ptr();
  params.cos_stride = cosines.stride(0);
  params.sin_stride = sines.stride(0);
  params.num_rows = static_cast<int32_t>(hidden.size(0));
  params.dim = static_cast<int32_t>(cos.size(1));
  params.epsilon = static_cast<float>(weights.epsilon);
  params.row_dtype = types.row_dtype();
  params.matrix_dtype = types.matrix_dtype();
  params.stream = CurrentStream(hidden.device());
  LaunchHeadRotation(params);
  return results;
}

at::Tensor LayerOutputOnCuda(const at::Tensor& hidden, const at::Tensor& attended,
                             const LayerOutputWeights& weights) {
  const c10::DeviceGuard guard(hidden.device());
  const LayerTypes types{hidden.scalar_type(), weights.gate.scalar_type()};
  const at::Tensor product = Project(attended.to(types.matrices), weights.attention, types);
  const OptionalTensor bias = BiasBehind(weights.attention, types);
  at::Tensor sums = at::empty(hidden.sizes(), hidden.options());
  const Residual residual{product, bias, sums};
  const at::Tensor normed = Normalize(hidden, weights.norm, weights.epsilon, types, &residual);
  const at::Tensor gate = Multiply(normed, weights.gate), up = Multiply(normed, weights.up);
  GateParams params;
  params.gate = gate.mutable_data_ptr();
  params.up = up.const_data_ptr();
  params.count = gate.numel();
  params.row_dtype = types.row_dtype();
  params.matrix_dtype = types.matrix_dtype();
  params.stream = CurrentStream(hidden.device());
  LaunchGate(params);
  // In the product's epilogue: one rounding instead of two, and a launch less.
  return types.mixed() ? sums.add_(Multiply(gate, weights.down))
                       : sums.addmm_(gate, weights.down.t());
}

}  // namespace nwor

#endif
