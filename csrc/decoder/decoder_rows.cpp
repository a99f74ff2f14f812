#include "decoder/decoder_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <span>
#include <vector>

#include "check.h"
#include "linear/cpu/kernels.h"
#include "linear/strips.h"

namespace nwor {
namespace {

void CheckMatrix(const char* name, const at::Tensor& weight, int64_t inputs) {
  NWOR_CHECK(weight.dim() == 2 && weight.size(1) == inputs, name, ": got sizes ", weight.sizes(),
             ", expected [outputs, ", inputs, "]");
}

void CheckVector(const char* name, const std::optional<at::Tensor>& vector, int64_t size) {
  if (!vector.has_value()) return;
  NWOR_CHECK(vector->dim() == 1 && vector->size(0) == size, name, ": got sizes ", vector->sizes(),
             ", expected [", size, "]");
}

void CheckLayer(const char* name, const LinearLayer& layer, int64_t inputs) {
  CheckMatrix(name, layer.weight, inputs);
  CheckVector(name, layer.bias, layer.weight.size(0));
}

// Of one type and device with `hidden`, so that either path may take them.
void CheckAlike(const at::Tensor& hidden, std::initializer_list<std::optional<at::Tensor>> others) {
  for (const std::optional<at::Tensor>& other : others) {
    if (!other.has_value()) continue;
    NWOR_CHECK(other->scalar_type() == hidden.scalar_type() && other->device() == hidden.device(),
               "hidden: got ", hidden.scalar_type(), " on ", hidden.device().str(), ", expected ",
               other->scalar_type(), " on ", other->device().str(), " as the weights");
  }
}

bool IsPlain(std::initializer_list<std::optional<at::Tensor>> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const std::optional<at::Tensor>& one) {
    return !one.has_value() ||
           (one->device().is_cpu() && one->scalar_type() == at::kFloat && one->is_contiguous());
  });
}

const float* Data(const at::Tensor& tensor) { return tensor.const_data_ptr<float>(); }

const float* Data(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<float>() : nullptr;
}

// ---- rows on the CPU --------------------------------------------------------------------------

// Several sums at once, always the same ones: the compiler may use vectors, the order is fixed.
float SumOfSquares(const float* values, int64_t size) {
  constexpr int kSums = 16;
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= size; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += values[i + j] * values[i + j];
  }
  for (int j = 0; i < size; ++i, ++j) sums[j] += values[i] * values[i];
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

// `out` may be `values`.
void Normalize(const float* values, const float* weight, int64_t size, double epsilon, float* out) {
  const float mean = SumOfSquares(values, size) / static_cast<float>(size);
  const float factor = 1.0f / std::sqrt(mean + static_cast<float>(epsilon));
  for (int64_t i = 0; i < size; ++i) out[i] = values[i] * factor * weight[i];
}

void AddTo(float* values, const float* more, int64_t size) {
  for (int64_t i = 0; i < size; ++i) values[i] += more[i];
}

void Rotate(float* values, const float* cos, const float* sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = values[i], second = values[i + half];
    values[i] = first * cos[i] - second * sin[i];
    values[i + half] = second * cos[i + half] + first * sin[i + half];
  }
}

// [rows, depth] of floats times several matrices of that depth.
struct Products {
  const float* x;
  int64_t rows;
  int64_t depth;
  std::vector<const float*> weights;
  std::vector<int64_t> outputs;
  std::vector<float*> outs;  // [rows, outputs]

  void Multiply(size_t matrix, int64_t first, int64_t last) const {
    cpu::LinearTask task;
    task.x = x;
    task.rows = rows;
    task.depth = depth;
    task.weight = weights[matrix];
    task.first = first;
    task.last = last;
    task.out = outs[matrix];
    task.out_stride = outputs[matrix];
    cpu::ChooseLinearKernels().linear(task);
  }

  void MultiplyAll() const {
    ForStrips(outputs, depth, [this](size_t matrix, int64_t first, int64_t last) {
      Multiply(matrix, first, last);
    });
  }
};

std::array<at::Tensor, 3> AttentionInputsOnCpu(const at::Tensor& hidden,
                                               const AttentionInputWeights& weights,
                                               const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t rows = hidden.size(0), size = hidden.size(1), dim = cos.size(1);
  at::Tensor normed = at::empty_like(hidden);
  for (int64_t r = 0; r < rows; ++r) {
    Normalize(Data(hidden) + r * size, Data(weights.norm), size, weights.epsilon,
              normed.mutable_data_ptr<float>() + r * size);
  }
  const std::array<const LinearLayer*, 3> layers = {&weights.query, &weights.key, &weights.value};
  std::array<at::Tensor, 3> results;
  Products products{Data(normed), rows, size, {}, {}, {}};
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t outputs = layers[i]->weight.size(0);
    results[i] = at::empty({rows, outputs / dim, dim}, hidden.options());
    products.weights.push_back(Data(layers[i]->weight));
    products.outputs.push_back(outputs);
    products.outs.push_back(results[i].mutable_data_ptr<float>());
  }
  products.MultiplyAll();
  const std::array<const float*, 3> norms = {Data(weights.query_norm), Data(weights.key_norm),
                                             nullptr};
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t heads = products.outputs[i] / dim;
    for (int64_t r = 0; r < rows; ++r) {
      float* row = products.outs[i] + r * products.outputs[i];
      if (layers[i]->bias.has_value()) AddTo(row, Data(layers[i]->bias), products.outputs[i]);
      for (int64_t h = 0; h < heads && i < 2; ++h) {
        float* head = row + h * dim;
        if (norms[i] != nullptr) Normalize(head, norms[i], dim, weights.epsilon, head);
        Rotate(head, Data(cos) + r * dim, Data(sin) + r * dim, dim);
      }
    }
  }
  return results;
}

at::Tensor LayerOutputOnCpu(const at::Tensor& hidden, const at::Tensor& attended,
                            const LayerOutputWeights& weights) {
  const int64_t rows = hidden.size(0), size = hidden.size(1);
  const int64_t intermediate = weights.gate.size(0);
  at::Tensor out = at::empty_like(hidden);
  float* sums = out.mutable_data_ptr<float>();
  Products{Data(attended), rows, attended.size(1), {Data(weights.attention.weight)}, {size}, {sums}}
      .MultiplyAll();
  at::Tensor space = at::empty({rows, 2 * size + 2 * intermediate}, hidden.options());
  float* normed = space.mutable_data_ptr<float>();
  float* gate = normed + rows * size;
  float* up = gate + rows * intermediate;
  float* down = up + rows * intermediate;
  for (int64_t r = 0; r < rows; ++r) {
    float* row = sums + r * size;
    if (weights.attention.bias.has_value()) AddTo(row, Data(weights.attention.bias), size);
    AddTo(row, Data(hidden) + r * size, size);
    Normalize(row, Data(weights.norm), size, weights.epsilon, normed + r * size);
  }
  const Products gated{
      normed,    rows, size, {Data(weights.gate), Data(weights.up)}, {intermediate, intermediate},
      {gate, up}};
  // A strip of gates and its strip of ups together: what they give is multiplied where it lies.
  ForStrips({&intermediate, 1}, 2 * size, [&](size_t, int64_t first, int64_t last) {
    gated.Multiply(0, first, last);
    gated.Multiply(1, first, last);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * intermediate + first;
      cpu::ChooseLinearKernels().gate(gate + at, up + at, last - first);
    }
  });
  Products{gate, rows, intermediate, {Data(weights.down)}, {size}, {down}}.MultiplyAll();
  AddTo(sums, down, rows * size);
  return out;
}

// ---- everywhere -------------------------------------------------------------------------------

at::Tensor NormalizeAnywhere(const at::Tensor& values, const at::Tensor& weight, double epsilon) {
  const at::Tensor wide = values.to(at::kFloat);
  const at::Tensor mean = wide.square().mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(mean + epsilon)).to(values.scalar_type());
}

at::Tensor RotateAnywhere(const at::Tensor& values, const at::Tensor& cos, const at::Tensor& sin) {
  const std::vector<at::Tensor> halves = values.chunk(2, -1);
  const at::Tensor turned = at::cat({-halves[1], halves[0]}, -1);
  return values * cos.unsqueeze(1) + turned * sin.unsqueeze(1);
}

}  // namespace

std::array<at::Tensor, 3> AttentionInputs(const at::Tensor& hidden,
                                          const AttentionInputWeights& weights,
                                          const at::Tensor& cos, const at::Tensor& sin) {
  NWOR_CHECK(hidden.dim() == 2, "hidden: got ", hidden.dim(), " dimensions, expected [rows, size]");
  const int64_t rows = hidden.size(0), size = hidden.size(1);
  NWOR_CHECK(cos.dim() == 2 && cos.size(0) == rows && cos.size(1) > 0 && cos.size(1) % 2 == 0,
             "cos: got sizes ", cos.sizes(), ", expected [", rows, ", an even head size]");
  NWOR_CHECK(sin.sizes() == cos.sizes(), "sin: got sizes ", sin.sizes(), ", expected ", cos.sizes(),
             " as cos");
  const int64_t dim = cos.size(1);
  CheckVector("norm", weights.norm, size);
  CheckVector("query_norm", weights.query_norm, dim);
  CheckVector("key_norm", weights.key_norm, dim);
  CheckLayer("query", weights.query, size);
  CheckLayer("key", weights.key, size);
  CheckLayer("value", weights.value, size);
  for (const LinearLayer* layer : {&weights.query, &weights.key, &weights.value}) {
    NWOR_CHECK(layer->weight.size(0) % dim == 0, "weight: got ", layer->weight.size(0),
               " outputs, expected a multiple of the head size ", dim);
  }
  const std::initializer_list<std::optional<at::Tensor>> all = {weights.norm,
                                                                weights.query.weight,
                                                                weights.query.bias,
                                                                weights.key.weight,
                                                                weights.key.bias,
                                                                weights.value.weight,
                                                                weights.value.bias,
                                                                weights.query_norm,
                                                                weights.key_norm,
                                                                cos,
                                                                sin};
  CheckAlike(hidden, all);
  if (IsPlain(all) && IsPlain({hidden}) && rows > 0) {
    return AttentionInputsOnCpu(hidden, weights, cos, sin);
  }
  const at::Tensor normed = NormalizeAnywhere(hidden, weights.norm, weights.epsilon);
  const auto project = [&](const LinearLayer& layer) {
    return at::linear(normed, layer.weight, layer.bias).unflatten(-1, {-1, dim});
  };
  at::Tensor query = project(weights.query), key = project(weights.key);
  if (weights.query_norm) query = NormalizeAnywhere(query, *weights.query_norm, weights.epsilon);
  if (weights.key_norm) key = NormalizeAnywhere(key, *weights.key_norm, weights.epsilon);
  return {RotateAnywhere(query, cos, sin), RotateAnywhere(key, cos, sin), project(weights.value)};
}

at::Tensor LayerOutput(const at::Tensor& hidden, const at::Tensor& attended,
                       const LayerOutputWeights& weights) {
  NWOR_CHECK(hidden.dim() == 2, "hidden: got ", hidden.dim(), " dimensions, expected [rows, size]");
  const int64_t rows = hidden.size(0), size = hidden.size(1);
  NWOR_CHECK(attended.dim() == 2 && attended.size(0) == rows, "attended: got sizes ",
             attended.sizes(), ", expected [", rows, ", heads * head size]");
  CheckLayer("attention", weights.attention, attended.size(1));
  NWOR_CHECK(weights.attention.weight.size(0) == size, "attention: got ",
             weights.attention.weight.size(0), " outputs, expected ", size);
  CheckVector("norm", weights.norm, size);
  CheckMatrix("gate", weights.gate, size);
  NWOR_CHECK(weights.up.sizes() == weights.gate.sizes(), "up: got sizes ", weights.up.sizes(),
             ", expected ", weights.gate.sizes(), " as gate");
  CheckMatrix("down", weights.down, weights.gate.size(0));
  NWOR_CHECK(weights.down.size(0) == size, "down: got ", weights.down.size(0),
             " outputs, expected ", size);
  const std::initializer_list<std::optional<at::Tensor>> all = {attended,
                                                                weights.attention.weight,
                                                                weights.attention.bias,
                                                                weights.norm,
                                                                weights.gate,
                                                                weights.up,
                                                                weights.down};
  CheckAlike(hidden, all);
  if (IsPlain(all) && IsPlain({hidden}) && rows > 0) {
    return LayerOutputOnCpu(hidden, attended, weights);
  }
  const at::Tensor sums =
      hidden + at::linear(attended, weights.attention.weight, weights.attention.bias);
  const at::Tensor normed = NormalizeAnywhere(sums, weights.norm, weights.epsilon);
  const at::Tensor gated =
      at::silu(at::linear(normed, weights.gate)) * at::linear(normed, weights.up);
  return sums + at::linear(gated, weights.down);
}

}  // namespace nwor
