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
#include <initializer_list>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "decoder/decoder_rows_cuda.h"
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

void CheckLayer(const std::string& name, const LinearLayer& layer, int64_t inputs) {
  CheckMatrix(name.c_str(), layer.weight, inputs);
  CheckVector(Concat(name, "_bias").c_str(), layer.bias, layer.weight.size(0));
}

struct Named {
  const char* name;
  std::optional<at::Tensor> tensor;
};
using Tensors = std::initializer_list<Named>;

bool AreAlike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

// Vectors are of one type with `hidden`, matrices of one among themselves: hidden's, or half of
// its size where hidden is float32. Of each the first is always there.
void CheckAlike(const at::Tensor& hidden, Tensors vectors, Tensors matrices) {
  const auto check = [](const Named& one, const Named& other) {
    if (!one.tensor.has_value()) return;
    NWOR_CHECK(AreAlike(*one.tensor, *other.tensor), one.name, ": got ",
               c10::toString(one.tensor->scalar_type()), " on ", one.tensor->device().str(),
               ", expected ", c10::toString(other.tensor->scalar_type()), " on ",
               other.tensor->device().str(), " as ", other.name);
  };
  const at::ScalarType own = hidden.scalar_type();
  NWOR_CHECK(own == at::kDouble || FloatDType(own).has_value(), "hidden: got ", c10::toString(own),
             ", expected float32, float64, float16 or bfloat16");
  const Named rows{"hidden", hidden};
  const Named &vector = *vectors.begin(), &matrix = *matrices.begin();
  if (AreAlike(*vector.tensor, *matrix.tensor)) check(rows, vector);  // one against many
  for (const Named& one : vectors) check(one, rows);
  const bool mixed = own == at::kFloat && FloatDType(matrix.tensor->scalar_type()).has_value() &&
                     matrix.tensor->device() == hidden.device();
  for (const Named& one : matrices) check(one, mixed ? matrix : rows);
}

// What the CPU's own loops take, once rows and vectors are dense. How those lie must not decide it:
// a row of wider ones is dense alone and not beside others, and has the same bits.
bool IsForLoops(const at::Tensor& hidden, Tensors matrices) {
  return hidden.device().is_cpu() && hidden.scalar_type() == at::kFloat && hidden.size(0) > 0 &&
         std::all_of(matrices.begin(), matrices.end(),
                     [](const Named& matrix) { return matrix.tensor->is_contiguous(); });
}

std::optional<at::Tensor> Dense(const std::optional<at::Tensor>& vector) {
  return vector.has_value() ? std::optional(vector->contiguous()) : std::nullopt;
}

LinearLayer Dense(const LinearLayer& layer) { return {layer.weight, Dense(layer.bias)}; }

AttentionInputWeights Dense(const AttentionInputWeights& weights) {
  return {weights.norm.contiguous(), weights.epsilon,      Dense(weights.query),
          Dense(weights.key),        Dense(weights.value), Dense(weights.query_norm),
          Dense(weights.key_norm)};
}

LayerOutputWeights Dense(LayerOutputWeights weights) {
  weights.attention = Dense(weights.attention);
  weights.norm = weights.norm.contiguous();
  return weights;
}

#ifdef NWOR_WITH_CUDA
// What the CUDA kernels take: any layout, nothing empty, products whose values an int32 counts.
bool IsForKernels(const at::Tensor& hidden, Tensors vectors, Tensors matrices) {
  constexpr int64_t kMostValues = int64_t{1} << 29;  // three projections are counted together
  const auto filled = [](const Named& one) {
    return !one.tensor.has_value() || one.tensor->numel() > 0;
  };
  const auto fits = [&](const Named& one) {
    return filled(one) && hidden.size(0) * one.tensor->size(0) <= kMostValues;
  };
  return hidden.is_cuda() && FloatDType(hidden.scalar_type()).has_value() && hidden.numel() > 0 &&
         std::all_of(vectors.begin(), vectors.end(), filled) &&
         std::all_of(matrices.begin(), matrices.end(), fits);
}
#endif

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
  DType dtype;  // of the matrices
  std::vector<const void*> weights;
  std::vector<int64_t> outputs;
  std::vector<float*> outs;  // [rows, outputs]

  void Multiply(size_t matrix, int64_t first, int64_t last) const {
    cpu::LinearTask task;
    task.x = x;
    task.rows = rows;
    task.depth = depth;
    task.weight = weights[matrix];
    task.dtype = dtype;
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
  const int64_t part = weights.norm.size(-1);
  for (int64_t at = 0; at < rows * size; at += part) {
    Normalize(Data(hidden) + at, Data(weights.norm) + at % size, part, weights.epsilon,
              normed.mutable_data_ptr<float>() + at);
  }
  const std::array<const LinearLayer*, 3> layers = {&weights.query, &weights.key, &weights.value};
  std::array<at::Tensor, 3> results;
  const DType dtype = *FloatDType(weights.query.weight.scalar_type());
  Products products{Data(normed), rows, size, dtype, {}, {}, {}};
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t outputs = layers[i]->weight.size(0);
    results[i] = at::empty({rows, outputs / dim, dim}, hidden.options());
    products.weights.push_back(layers[i]->weight.const_data_ptr());
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
  const DType dtype = *FloatDType(weights.gate.scalar_type());
  const at::Tensor& first = weights.attention.weight;
  Products{Data(attended), rows, attended.size(1), dtype, {first.const_data_ptr()}, {size}, {sums}}
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
  const Products gated{normed,
                       rows,
                       size,
                       dtype,
                       {weights.gate.const_data_ptr(), weights.up.const_data_ptr()},
                       {intermediate, intermediate},
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
  Products{gate, rows, intermediate, dtype, {weights.down.const_data_ptr()}, {size}, {down}}
      .MultiplyAll();
  AddTo(sums, down, rows * size);
  return out;
}

// ---- everywhere -------------------------------------------------------------------------------

at::Tensor NormalizeAnywhere(const at::Tensor& values, const at::Tensor& weight, double epsilon) {
  const at::Tensor wide = values.scalar_type() == at::kDouble ? values : values.to(at::kFloat);
  const at::Tensor parts = wide.unflatten(-1, {-1, weight.size(-1)});
  const at::Tensor mean = parts.square().mean(-1, /*keepdim=*/true);
  const at::Tensor normed = (parts * at::rsqrt(mean + epsilon)).to(values.scalar_type());
  return (weight * normed).flatten(-2);
}

at::Tensor LinearAnywhere(const at::Tensor& rows, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias = std::nullopt) {
  if (rows.scalar_type() == weight.scalar_type()) return at::linear(rows, weight, bias);
  const at::Tensor out = at::linear(rows.to(weight.scalar_type()), weight).to(rows.scalar_type());
  return bias.has_value() ? out + *bias : out;
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
  NWOR_CHECK((weights.norm.dim() == 1 || weights.norm.dim() == 2) && weights.norm.numel() == size,
             "norm: got sizes ", weights.norm.sizes(), ", expected [", size, "] or [parts, ", size,
             " / parts]");
  CheckVector("query_norm", weights.query_norm, dim);
  CheckVector("key_norm", weights.key_norm, dim);
  CheckLayer("query", weights.query, size);
  CheckLayer("key", weights.key, size);
  CheckLayer("value", weights.value, size);
  const Tensors vectors = {{"norm", weights.norm},
                           {"query_bias", weights.query.bias},
                           {"key_bias", weights.key.bias},
                           {"value_bias", weights.value.bias},
                           {"query_norm", weights.query_norm},
                           {"key_norm", weights.key_norm},
                           {"cos", cos},
                           {"sin", sin}};
  const Tensors matrices = {{"query", weights.query.weight},
                            {"key", weights.key.weight},
                            {"value", weights.value.weight}};
  for (const auto& [name, weight] : matrices) {
    NWOR_CHECK(weight->size(0) % dim == 0, name, ": got ", weight->size(0),
               " outputs, expected a multiple of the head size ", dim);
  }
  NWOR_CHECK(weights.value.weight.size(0) == weights.key.weight.size(0), "value: got ",
             weights.value.weight.size(0), " outputs, expected ", weights.key.weight.size(0),
             " as key");
  CheckAlike(hidden, vectors, matrices);
  if (IsForLoops(hidden, matrices)) {
    return AttentionInputsOnCpu(hidden.contiguous(), Dense(weights), cos.contiguous(),
                                sin.contiguous());
  }
#ifdef NWOR_WITH_CUDA
  if (IsForKernels(hidden, vectors, matrices)) {
    return AttentionInputsOnCuda(hidden, weights, cos, sin);
  }
#endif
  const at::Tensor normed = NormalizeAnywhere(hidden, weights.norm, weights.epsilon);
  const auto project = [&](const LinearLayer& layer) {
    return LinearAnywhere(normed, layer.weight, layer.bias).unflatten(-1, {-1, dim});
  };
  at::Tensor query = project(weights.query), key = project(weights.key);
  if (weights.query_norm) query = NormalizeAnywhere(query, *weights.query_norm, weights.epsilon);
  if (weights.key_norm) key = NormalizeAnywhere(key, *weights.key_norm, weights.epsilon);
  return {RotateAnywhere(query, cos, sin).contiguous(), RotateAnywhere(key, cos, sin).contiguous(),
          project(weights.value).contiguous()};
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
  const Tensors vectors = {
      {"attended", attended}, {"attention_bias", weights.attention.bias}, {"norm", weights.norm}};
  const Tensors matrices = {{"attention", weights.attention.weight},
                            {"gate", weights.gate},
                            {"up", weights.up},
                            {"down", weights.down}};
  CheckAlike(hidden, vectors, matrices);
  if (IsForLoops(hidden, matrices)) {
    return LayerOutputOnCpu(hidden.contiguous(), attended.contiguous(), Dense(weights));
  }
#ifdef NWOR_WITH_CUDA
  if (IsForKernels(hidden, vectors, matrices)) return LayerOutputOnCuda(hidden, attended, weights);
#endif
  const at::Tensor sums =
      hidden + LinearAnywhere(attended, weights.attention.weight, weights.attention.bias);
  const at::Tensor normed = NormalizeAnywhere(sums, weights.norm, weights.epsilon);
  const at::Tensor gated =
      at::silu(LinearAnywhere(normed, weights.gate)) * LinearAnywhere(normed, weights.up);
  return (sums + LinearAnywhere(gated, weights.down)).contiguous();
}

}  // namespace nwor
