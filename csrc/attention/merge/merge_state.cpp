#include "attention/merge/merge_state.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/parallel.h"
#include "base/tensor_layout.h"

namespace nwor {
namespace {

// Merges one row and head. Weights come first, so that the channel loops are plain sums.
template <typename State, typename Out>
void MergeRow(const MergeParams& params, int64_t row, int64_t head) {
  float weights[kMaxMergeStates];
  float max = kEmptyLse;
  for (int i = 0; i < params.num_states; ++i) {
    const MergeState& state = params.states[i];
    weights[i] =
        state.LseOf(state.lse[row * state.lse_strides.row + head * state.lse_strides.head]);
    max = std::max(max, weights[i]);
  }
  const float base = max == kEmptyLse ? 0.0f : max;
  float sum = 0.0f;
  for (int i = 0; i < params.num_states; ++i) {
    weights[i] = std::exp(weights[i] - base);
    sum += weights[i];
  }
  Out* out =
      static_cast<Out*>(params.out) + row * params.out_strides.row + head * params.out_strides.head;
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  constexpr int kChunk = 64;
  for (int d = 0; d < params.head_dim; d += kChunk) {
    const int count = std::min(kChunk, params.head_dim - d);
    float total[kChunk] = {};
    for (int i = 0; i < params.num_states; ++i) {
      if (weights[i] == 0.0f) continue;
      const MergeState& state = params.states[i];
      const State* from = static_cast<const State*>(state.out) + row * state.out_strides.row +
                          head * state.out_strides.head + d;
      for (int c = 0; c < count; ++c) total[c] += weights[i] * static_cast<float>(from[c]);
    }
    for (int c = 0; c < count; ++c) out[d + c] = static_cast<Out>(total[c] * inverse);
  }
  if (params.lse != nullptr) {
    params.lse[row * params.num_heads + head] = sum == 0.0f ? kEmptyLse : base + std::log(sum);
  }
}

template <typename State, typename Out>
void MergeAs(const MergeParams& params) {
  constexpr int64_t kRowsPerTake = 64;
  const int64_t total = static_cast<int64_t>(params.num_rows) * params.num_heads;
  std::atomic<int64_t> next{0};
  RunOnTorchThreads(1 + total / (4 * kRowsPerTake), [&] {
    for (int64_t begin = next.fetch_add(kRowsPerTake); begin < total;
         begin = next.fetch_add(kRowsPerTake)) {
      for (int64_t i = begin; i < std::min(begin + kRowsPerTake, total); ++i) {
        MergeRow<State, Out>(params, i / params.num_heads, i % params.num_heads);
      }
    }
  });
}

template <typename Out>
void MergeInto(const MergeParams& params) {
  switch (params.state_dtype) {
    case DType::kFloat16:
      return MergeAs<c10::Half, Out>(params);
    case DType::kBFloat16:
      return MergeAs<c10::BFloat16, Out>(params);
    default:
      return MergeAs<float, Out>(params);
  }
}

void CheckStates(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& lses) {
  NWOR_CHECK(!outs.empty(), "outs: got no states, expected at least one");
  NWOR_CHECK(outs.size() == lses.size(), "lses: got ", lses.size(), " states, expected ",
             outs.size(), " as outs");
  const at::Tensor& first = outs[0];
  NWOR_CHECK(first.dim() == 3 && first.size(2) > 0, "outs[0]: got sizes ", first.sizes(),
             ", expected [rows, heads, channels] with at least one channel");
  RowDType(first, "outs[0]");
  NWOR_CHECK(first.numel() <= std::numeric_limits<int32_t>::max() * int64_t{256} &&
                 first.size(0) <= std::numeric_limits<int32_t>::max(),
             "outs[0]: got sizes ", first.sizes(), ", expected fewer rows");
  for (size_t i = 0; i < outs.size(); ++i) {
    NWOR_CHECK(outs[i].sizes() == first.sizes() && outs[i].scalar_type() == first.scalar_type(),
               "outs[", i, "]: got ", Describe(outs[i]), ", expected ", Describe(first),
               " as outs[0]");
    NWOR_CHECK(lses[i].dim() == 2 && lses[i].size(0) == first.size(0) &&
                   lses[i].size(1) == first.size(1) && lses[i].scalar_type() == at::kFloat,
               "lses[", i, "]: got ", Describe(lses[i]), ", expected [", first.size(0), ", ",
               first.size(1), "] Float");
    CheckDevice(outs[i], Concat("outs[", i, "]").c_str(), first.device());
    CheckDevice(lses[i], Concat("lses[", i, "]").c_str(), first.device());
  }
}

void MergeGroup(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& lses,
                const at::Tensor& out, const at::Tensor& lse, size_t num_flash) {
  MergeParams params;
  params.num_states = static_cast<int32_t>(outs.size());
  std::vector<at::Tensor> readable;  // keeps copies alive until the launch
  for (size_t i = 0; i < outs.size(); ++i) {
    readable.push_back(ContiguousChannels(outs[i]));
    params.states[i] = {readable.back().const_data_ptr(),
                        static_cast<const float*>(lses[i].const_data_ptr()),
                        {readable.back().stride(0), readable.back().stride(1)},
                        {lses[i].stride(0), lses[i].stride(1)},
                        i < num_flash};
  }
  params.out = out.mutable_data_ptr();
  params.out_strides = {out.stride(0), out.stride(1)};
  if (lse.defined()) params.lse = static_cast<float*>(lse.mutable_data_ptr());
  params.num_rows = static_cast<int32_t>(out.size(0));
  params.num_heads = static_cast<int32_t>(out.size(1));
  params.head_dim = static_cast<int32_t>(out.size(2));
  params.state_dtype = RowDType(outs[0], "outs");
  params.out_dtype = RowDType(out, "out");
  if (out.numel() == 0) return;
  if (out.device().is_cpu()) return MergeStatesCpu(params);
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(out.device());
  params.stream = CurrentStream(out.device());
  LaunchMergeStates(params);
#else
  CurrentStream(out.device());  // throws: this build has no CUDA
#endif
}

}  // namespace

void MergeStatesCpu(const MergeParams& params) {
  switch (params.out_dtype) {
    case DType::kFloat16:
      return MergeInto<c10::Half>(params);
    case DType::kBFloat16:
      return MergeInto<c10::BFloat16>(params);
    default:
      return MergeInto<float>(params);
  }
}

void MergeStatesInto(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& lses,
                     const at::Tensor& out, const at::Tensor& lse, size_t num_flash) {
  CheckStates(outs, lses);
  if (outs.size() <= kMaxMergeStates) return MergeGroup(outs, lses, out, lse, num_flash);
  std::vector<at::Tensor> merged_outs, merged_lses;
  for (size_t begin = 0; begin < outs.size(); begin += kMaxMergeStates) {
    const size_t end = std::min(outs.size(), begin + kMaxMergeStates);
    merged_outs.push_back(at::empty(outs[0].sizes(), outs[0].options().dtype(at::kFloat)));
    merged_lses.push_back(at::empty(lses[0].sizes(), lses[0].options()));
    MergeGroup({outs.begin() + begin, outs.begin() + end},
               {lses.begin() + begin, lses.begin() + end}, merged_outs.back(), merged_lses.back(),
               0);
  }
  MergeStatesInto(merged_outs, merged_lses, out, lse);
}

std::pair<at::Tensor, at::Tensor> MergeStates(const std::vector<at::Tensor>& outs,
                                              const std::vector<at::Tensor>& lses) {
  CheckStates(outs, lses);
  const at::Tensor out = at::empty(outs[0].sizes(), outs[0].options());
  const at::Tensor lse = at::empty(lses[0].sizes(), lses[0].options());
  MergeStatesInto(outs, lses, out, lse);
  return {out, lse};
}

}  // namespace nwor
