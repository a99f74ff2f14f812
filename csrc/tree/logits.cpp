#include "tree/logits.h"

#include <ATen/ops/empty.h>

#include <array>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "tree/arguments.h"
#include "tree/fault.h"
#include "tree/logits_params.h"
#include "tree/probability.h"
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace nwor {
namespace {

// What each of kSamplingOptionNames may be.
constexpr std::array<const char*, 7> kOptionRanges = {
    "0 or more, finite",   "0 or more",       "more than 0, at most 1", "0 .. 1",
    "more than 0, finite", "a finite number", "a finite number"};

std::string OptionValue(const SamplingOptions& all, int option, int64_t b) {
  const std::array<const float*, 7> floats = {all.temperature,
                                              nullptr,
                                              all.top_p,
                                              all.min_p,
                                              all.repetition_penalty,
                                              all.frequency_penalty,
                                              all.presence_penalty};
  return option == 1 ? std::to_string(all.top_k[b]) : Concat(floats[option][b]);
}

void ThrowFaults(const LogitsParams& params) {
  for (int64_t b = 0; b < params.num_requests; ++b) {
    const int64_t word = params.status[b];
    if (word == 0) continue;
    const int64_t row = word >> 8 & 0xFFFFFF;
    const auto option = static_cast<int>(word >> 32) - 1;
    if (static_cast<TreeFault>(word & 0xFF) == TreeFault::kParameter) {
      throw Error(Concat(kSamplingOptionNames[option], "[", b, "]: got ",
                         OptionValue(params.options, option, b), ", expected ",
                         kOptionRanges[option]));
    }
    throw Error(Concat("logits[", b, ", ", row,
                       "]: got NaN, +infinity or no possible token, expected numbers or -infinity "
                       "with one token possible at least (bitmask included)"));
  }
}

class Arguments {
 public:
  Arguments(int64_t batch, at::Device device) : batch_(batch), device_(device) {}

  const float* Floats(const std::optional<at::Tensor>& tensor, const char* name) {
    if (!tensor.has_value()) return nullptr;
    held_.push_back(FloatArgument(*tensor, name, {batch_}, device_));
    return static_cast<const float*>(held_.back().const_data_ptr());
  }
  const void* Integers(const std::optional<at::Tensor>& tensor, const char* name,
                       at::ScalarType dtype, std::initializer_list<int64_t> sizes) {
    if (!tensor.has_value()) return nullptr;
    held_.push_back(IntegerArgument(*tensor, name, dtype, sizes, device_));
    return held_.back().const_data_ptr();
  }
  void Hold(const at::Tensor& tensor) { held_.push_back(tensor); }

 private:
  const int64_t batch_;
  const at::Device device_;
  std::vector<at::Tensor> held_;  // keeps converted copies alive until the launch
};

}  // namespace

at::Tensor TargetProbs(const TargetProbsArguments& arguments) {
  const at::Tensor& logits = arguments.logits;
  const at::Device device = logits.device();
  NWOR_CHECK(logits.dim() == 3, "logits: got sizes ", logits.sizes(),
             ", expected [requests, rows, vocabulary]");
  const int64_t batch = logits.size(0);
  const int64_t rows = logits.size(1);
  const int64_t vocabulary = logits.size(2);
  CheckTreeRows(rows, "logits");
  NWOR_CHECK(vocabulary >= 1 && vocabulary <= kMaxVocabulary, "logits: got a vocabulary of ",
             vocabulary, ", expected 1 .. ", kMaxVocabulary);
  Arguments held(batch, device);
  LogitsParams params;
  params.dtype = RowDType(logits, "logits");
  params.options.temperature = held.Floats(arguments.temperature, "temperature");
  params.options.top_k =
      static_cast<const int32_t*>(held.Integers(arguments.top_k, "top_k", at::kInt, {batch}));
  params.options.top_p = held.Floats(arguments.top_p, "top_p");
  params.options.min_p = held.Floats(arguments.min_p, "min_p");
  params.options.repetition_penalty =
      held.Floats(arguments.repetition_penalty, "repetition_penalty");
  params.options.frequency_penalty = held.Floats(arguments.frequency_penalty, "frequency_penalty");
  params.options.presence_penalty = held.Floats(arguments.presence_penalty, "presence_penalty");
  params.output_counts = static_cast<const int32_t*>(
      held.Integers(arguments.output_counts, "output_counts", at::kInt, {batch, vocabulary}));
  if (arguments.prompt_mask.has_value()) {
    const at::Tensor& mask = *arguments.prompt_mask;
    NWOR_CHECK(mask.scalar_type() == at::kBool && mask.dim() == 2 && mask.size(0) == batch &&
                   mask.size(1) == vocabulary,
               "prompt_mask: got ", Describe(mask), ", expected [", batch, ", ", vocabulary,
               "] Bool");
    CheckDevice(mask, "prompt_mask", device);
    const at::Tensor readable = mask.contiguous();
    held.Hold(readable);
    params.prompt_mask = static_cast<const uint8_t*>(readable.const_data_ptr());
  }
  NWOR_CHECK(arguments.tokens.has_value() == arguments.parents.has_value(), "parents: got ",
             arguments.parents.has_value() ? "a tensor" : "nothing",
             ", expected tokens and parents together");
  params.tokens = static_cast<const int64_t*>(
      held.Integers(arguments.tokens, "tokens", at::kLong, {batch, rows}));
  params.parents = static_cast<const int32_t*>(
      held.Integers(arguments.parents, "parents", at::kInt, {batch, rows}));
  if (arguments.bitmask.has_value()) {
    const int64_t words = (vocabulary + 31) / 32;
    const at::Tensor& mask = *arguments.bitmask;
    NWOR_CHECK(mask.dim() == 3 && mask.size(0) == batch && mask.size(1) == rows &&
                   mask.size(2) == words && mask.scalar_type() == at::kInt,
               "bitmask: got ", Describe(mask), ", expected [", batch, ", ", rows, ", ", words,
               "] Int");
    CheckDevice(mask, "bitmask", device);
    const at::Tensor readable = ContiguousChannels(mask);
    held.Hold(readable);
    params.bitmask = static_cast<const int32_t*>(readable.const_data_ptr());
    params.bitmask_batch = readable.stride(0);
    params.bitmask_row = readable.stride(1);
  }
  params.status = StatusArgument(arguments.status, batch, device);
  const at::Tensor out = at::empty({batch, rows, vocabulary}, logits.options().dtype(at::kFloat));
  params.logits = logits.const_data_ptr();
  params.batch_stride = logits.stride(0);
  params.row_stride = logits.stride(1);
  params.token_stride = logits.stride(2);
  params.out = static_cast<float*>(out.mutable_data_ptr());
  params.num_requests = static_cast<int32_t>(batch);
  params.rows = static_cast<int32_t>(rows);
  params.vocabulary = static_cast<int32_t>(vocabulary);
  params.stream = CurrentStream(device);
  if (arguments.status.has_value()) arguments.status->zero_();
  if (device.is_cpu()) {
    std::vector<int64_t> status(batch);
    params.status = status.data();
    TargetProbsCpu(params);
    ThrowFaults(params);
    return out;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  if (batch > 0) LaunchTargetProbs(params);
#endif
  return out;
}

}  // namespace nwor
