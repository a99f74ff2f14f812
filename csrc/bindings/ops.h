#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "base/check.h"

// What the parts of ops.cpp share. A part defines its subsystem's schemas, kernels and fakes;
// ops.cpp registers them.

namespace nwor {

using OptionalTensor = std::optional<at::Tensor>;

// torch knows its own exception types: Error becomes ValueError in Python, and nwor_specpv.ops
// turns that into NworError.
template <typename Function>
decltype(auto) WithTorchErrors(Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// torch calls the fake kernel of an op as soon as one argument has no data. Tensors of several
// devices are a mistake there too: what would be returned has never been computed.
void CheckOneDevice(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

template <auto Fake>
void CallFake(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  CheckOneDevice(op, *stack);
  static const c10::KernelFunction kernel =
      c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(Fake));
  kernel.callBoxed(op, keys, stack);
}

template <auto Fake>
torch::CppFunction FakeKernel() {
  return torch::CppFunction::makeFromBoxedFunction<&CallFake<Fake>>();
}

// ops_decoder.cpp
void RegisterDecoderSchemas(torch::Library& library);
void RegisterDecoderKernels(torch::Library& library);
void RegisterDecoderFakes(torch::Library& library);

// ops_drafters.cpp
void RegisterDraftersSchemas(torch::Library& library);
void RegisterDraftersKernels(torch::Library& library);
void RegisterDraftersFakes(torch::Library& library);

// ops_tree.cpp
void RegisterTreeSchemas(torch::Library& library);
void RegisterTreeKernels(torch::Library& library);
void RegisterTreeFakes(torch::Library& library);

}  // namespace nwor
