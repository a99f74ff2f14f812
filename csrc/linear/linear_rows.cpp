#include "linear/linear_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <vector>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "linear/cpu/kernels.h"
#include "linear/strips.h"

namespace nwor {
namespace {

void CheckArguments(const at::Tensor& input, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias) {
  NWOR_CHECK(weight.dim() == 2, "weight: got ", weight.dim(), " dimensions, expected [N, K]");
  NWOR_CHECK(input.dim() >= 1 && input.size(-1) == weight.size(1), "input: got sizes ",
             input.sizes(), ", expected the last one ", weight.size(1));
  const bool mixed =
      input.scalar_type() == at::kFloat && FloatDType(weight.scalar_type()).has_value();
  NWOR_CHECK(mixed || input.scalar_type() == weight.scalar_type(), "input: got ",
             c10::toString(input.scalar_type()), ", expected ", c10::toString(weight.scalar_type()),
             " as weight");
  NWOR_CHECK(input.device() == weight.device(), "input: got device ", input.device().str(),
             ", expected ", weight.device().str(), " as weight");
  if (!bias.has_value()) return;
  NWOR_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "bias: got sizes ", bias->sizes(),
             ", expected [", weight.size(0), "]");
  NWOR_CHECK(bias->scalar_type() == weight.scalar_type() && bias->device() == weight.device(),
             "bias: got ", c10::toString(bias->scalar_type()), " on ", bias->device().str(),
             ", expected ", c10::toString(weight.scalar_type()), " on ", weight.device().str(),
             " as weight");
}

void Run(const cpu::LinearTask& all, int64_t outputs) {
  const cpu::LinearKernels& kernels = cpu::ChooseLinearKernels();
  ForStrips({&outputs, 1}, all.depth, [&](size_t, int64_t first, int64_t last) {
    cpu::LinearTask task = all;
    task.first = first;
    task.last = last;
    kernels.linear(task);
  });
}

}  // namespace

at::Tensor LinearRows(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias) {
  CheckArguments(input, weight, bias);
  const std::optional<DType> dtype = FloatDType(weight.scalar_type());
  if (!input.device().is_cpu() || !dtype || !weight.is_contiguous()) {
    return at::linear(input.to(weight.scalar_type()), weight, bias).to(input.scalar_type());
  }
  const at::Tensor rows = input.to(at::kFloat).contiguous();
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  at::Tensor out = at::empty(sizes, input.options().dtype(at::kFloat));
  cpu::LinearTask task;
  task.x = rows.const_data_ptr<float>();
  task.depth = weight.size(1);
  task.rows = task.depth > 0 ? rows.numel() / task.depth : 0;
  task.weight = weight.const_data_ptr();
  task.dtype = *dtype;
  task.out = out.mutable_data_ptr<float>();
  task.out_stride = weight.size(0);
  if (task.depth == 0) {
    out.zero_();
  } else if (task.rows > 0) {
    Run(task, weight.size(0));
  }
  if (bias.has_value()) out.add_(*bias);
  return out.to(input.scalar_type());
}

}  // namespace nwor
