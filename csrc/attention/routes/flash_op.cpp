#include "attention/routes/flash_op.h"

#include <ATen/ops/_flash_attention_forward.h>

#include <string_view>

#include "base/check.h"

namespace nwor {
namespace {

struct Candidate {
  Route route;
  const char* name;
  int32_t page_multiple;
};

// vLLM's copies take small pages; the FlashAttention-2 package wants pages of 256 tokens.
constexpr Candidate kCandidates[] = {
    {Route::kFlash3, "_vllm_fa3_C::fwd", 16},
    {Route::kFlash3, "flash_attn_3::fwd", 16},
    {Route::kFlash2, "_vllm_fa2_C::varlen_fwd", 16},
    {Route::kFlash2, "flash_attn::_flash_attn_varlen_forward", 256},
};

std::string_view WithoutUnderscore(std::string_view name) {
  return !name.empty() && name.back() == '_' ? name.substr(0, name.size() - 1) : name;
}

c10::IValue Optional(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? c10::IValue(*tensor) : c10::IValue();
}

// Sets the argument of this name from the call. False: the name is unknown.
bool SetFromCall(std::string_view name, const FlashCall& call, c10::IValue* value) {
  if (name == "q") {
    *value = call.query;
  } else if (name == "k") {
    *value = call.key;
  } else if (name == "v") {
    *value = call.value;
  } else if (name == "cu_seqlens_q") {
    *value = call.query_start;
  } else if (name == "cu_seqlens_k" && !call.block_table.has_value()) {
    *value = call.key_start;
  } else if (name == "seqused_k") {
    *value = Optional(call.key_lens);
  } else if (name == "block_table" || name == "page_table") {
    *value = Optional(call.block_table);
  } else if (name == "max_seqlen_q") {
    *value = call.max_query;
  } else if (name == "max_seqlen_k") {
    *value = call.max_key;
  } else if (name == "softmax_scale") {
    *value = call.scale;
  } else if (name == "is_causal" || name == "causal") {
    *value = call.causal;
  } else if (name == "softcap") {
    *value = call.softcap;
  } else if (name == "window_size_left" || name == "window_size_right") {
    *value = int64_t{-1};
  } else if (name == "num_splits" && call.num_splits > 0) {
    *value = call.num_splits;
  } else if (name == "cp_world_size") {
    *value = int64_t{1};
  } else {
    return false;
  }
  return true;
}

// Sets an unknown argument to its default, or to zero or none. False: it has neither.
bool SetNeutral(const c10::Argument& argument, const FlashCall& call, c10::IValue* value) {
  if (argument.default_value().has_value()) {
    *value = *argument.default_value();
    return true;
  }
  switch (argument.type()->kind()) {
    case c10::TypeKind::TensorType:
      // FlashAttention-2 requires cu_seqlens_k with pages too, but reads only its size.
      *value = call.query_start;
      return WithoutUnderscore(argument.name()) == "cu_seqlens_k";
    case c10::TypeKind::OptionalType:
      *value = c10::IValue();
      return true;
    case c10::TypeKind::IntType:
      *value = int64_t{0};
      return true;
    case c10::TypeKind::FloatType:
      *value = 0.0;
      return true;
    case c10::TypeKind::BoolType:
      *value = false;
      return true;
    default:
      return false;
  }
}

// Fills the arguments of an op. False: there is no value for one of them.
bool FillStack(const c10::FunctionSchema& schema, const FlashCall& call, torch::jit::Stack* stack) {
  for (const c10::Argument& argument : schema.arguments()) {
    c10::IValue value;
    if (!SetFromCall(WithoutUnderscore(argument.name()), call, &value) &&
        !SetNeutral(argument, call, &value)) {
      return false;
    }
    stack->push_back(std::move(value));
  }
  return true;
}

bool HasCudaKernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// Kernels return the LSE as [heads, rows].
at::Tensor RowMajorLse(const at::Tensor& lse, const FlashCall& call) {
  NWOR_CHECK(
      lse.dim() == 2 && lse.size(0) == call.query.size(1) && lse.size(1) == call.query.size(0),
      "flash attention: got an LSE of sizes ", lse.sizes(), ", expected [", call.query.size(1),
      ", ", call.query.size(0), "]");
  return lse.transpose(0, 1);
}

}  // namespace

std::vector<std::string> FlashOpNames(Route route) {
  std::vector<std::string> names;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.route == route) names.emplace_back(candidate.name);
  }
  return names;
}

std::optional<FlashOp> FindFlashOp(Route route) {
  for (const Candidate& candidate : kCandidates) {
    if (candidate.route != route) continue;
    const auto op = c10::Dispatcher::singleton().findSchema({candidate.name, ""});
    torch::jit::Stack stack;
    if (op.has_value() && HasCudaKernel(*op) && FillStack(op->schema(), FlashCall{}, &stack)) {
      return FlashOp{*op, candidate.name, candidate.page_multiple};
    }
  }
  return std::nullopt;
}

AttentionState CallFlashOp(const FlashOp& op, const FlashCall& call) {
  torch::jit::Stack stack;
  NWOR_CHECK(FillStack(op.handle.schema(), call, &stack), "route: got ", op.name,
             " with the schema ", c10::toString(op.handle.schema()),
             ", expected one whose arguments are known");
  op.handle.callBoxed(stack);
  // The op returns a list of tensors or several tensors; out and LSE come first.
  std::vector<at::Tensor> results;
  if (!stack.empty() && stack.front().isTensorList()) {
    results = stack.front().toTensorVector();
  } else {
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) results.push_back(value.toTensor());
    }
  }
  NWOR_CHECK(results.size() >= 2, "route: got ", results.size(), " results of ", op.name,
             ", expected out and LSE");
  return {results[0], RowMajorLse(results[1], call)};
}

bool HasTorchFlash() {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_flash_attention_forward", ""});
  return op.has_value() && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

AttentionState CallTorchFlash(const FlashCall& call) {
  const auto results = at::_flash_attention_forward(
      call.query, call.key, call.value, call.query_start, call.key_start, call.max_query,
      call.max_key, /*dropout_p=*/0.0, call.causal, /*return_debug_mask=*/false, call.scale,
      /*window_size_left=*/std::nullopt, /*window_size_right=*/std::nullopt, call.key_lens,
      /*alibi_slopes=*/std::nullopt);
  return {std::get<0>(results), RowMajorLse(std::get<1>(results), call)};
}

}  // namespace nwor
