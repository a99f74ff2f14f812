#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

#include "base/export.h"

// Verify attention as a function of tensors: checks every argument, picks a route, runs it.
// csrc/ops.cpp registers it as torch ops; a C++ host calls it directly.
//
// Thread-safe, except that calls which share a plan must be ordered. Device work goes to the
// current stream; nothing waits for the device.

namespace nwor {

// A per-head selection of token blocks inside the paged cache (see PartialViewParams).
struct PartialViewTensors {
  at::Tensor blocks;      // [B, Hkv, max_blocks] int32
  at::Tensor num_blocks;  // [B] int32; -1: request b uses its whole prefix
  at::Tensor view_lens;   // [B] int32, tokens
  int64_t block_size = 0;
};

// A contiguous copy of the tokens to attend to (see CompactViewParams).
struct CompactViewTensors {
  at::Tensor keys;    // [B, Hkv, N, D], the rows' dtype
  at::Tensor values;  // likewise
  at::Tensor lens;    // [B] int32, tokens; -1: request b uses its whole prefix
};

struct VerifyArguments {
  at::Tensor query;                     // [T, Hq, D] float32 (CPU), float16, bfloat16
  at::Tensor key;                       // [T, Hkv, D]
  at::Tensor value;                     // [T, Hkv, D]
  at::Tensor key_cache;                 // [P, S, Hkv, D], the rows' dtype or float8_e4m3fn
  at::Tensor value_cache;               // likewise
  at::Tensor block_table;               // [B, max_pages] int32
  at::Tensor prefix_lens;               // [B] int32
  at::Tensor query_start;               // [B + 1] int32
  std::optional<at::Tensor> tree_mask;  // [T, W] int64
  double scale = 1.0;
  std::optional<PartialViewTensors> partial_view;
  std::optional<CompactViewTensors> compact_view;
  std::optional<at::Tensor> k_scale;  // float32, one element or [Hkv]; float8 caches only
  std::optional<at::Tensor> v_scale;
  int64_t window = 0;    // 0: none; not together with a view
  double softcap = 0.0;  // 0: none
  // Rows of the longest request, if the host knows: chooses tile and route. FlashAttention's
  // kernels rely on it. 0: taken from T and B.
  int64_t max_rows = 0;
  std::optional<at::Tensor> plan;  // of PlanVerify, for these lengths; CUDA only
  // [8] int64: what a CUDA kernel found wrong (VerifyStatus). Our kernels judge lengths in
  // the plan.
  std::optional<at::Tensor> status;
  // A route's name, "auto" or "fast" (route.h); empty: NWOR_SPECPV_ATTENTION_ROUTE, or auto.
  std::string route;
};

struct VerifyOutputs {
  at::Tensor out;  // [T, Hq, D], the rows' dtype
  at::Tensor lse;  // [T, Hq] float32, natural log; undefined: not wanted
};

// Writes `outputs`, whose tensors the caller has made. Throws nwor::Error before anything is
// written if an argument is wrong; values that live on a CUDA device are judged there (`status`).
NWOR_EXPORT void VerifyAttention(const VerifyArguments& arguments, const VerifyOutputs& outputs);

// Empty outputs of the right shape.
NWOR_EXPORT VerifyOutputs MakeVerifyOutputs(const at::Tensor& query, bool with_lse);

// Plans the work of one CUDA step, for all its layers, into `plan`: PlanBytes bytes on the device,
// 256-byte aligned, which also hold the layers' workspace. The plan then serves every call of the
// same shapes, lengths, mask, view lengths and window, ordered after it; a CUDA graph that holds
// both replays them with other lengths. On the CPU there is nothing to plan and PlanBytes is 0.
// Of the arguments, key, value and value_cache are not needed and may be undefined. Lengths are
// judged here: what is wrong with them goes to `status` of this call, and what is wrong with pages
// to that of the layers' calls; it may be the same tensor.
NWOR_EXPORT void PlanVerify(const VerifyArguments& arguments, at::Tensor plan);

// Depends on shapes and the device only. `block_size`: of the partial view, 0 without.
NWOR_EXPORT int64_t PlanBytes(const VerifyArguments& arguments, int64_t block_size = 0);

// The route of the process' latest call ("none" before the first) and why it was taken.
NWOR_EXPORT std::string LastRoute();

// What each route is here: "present", or why not. One line per route, "name: text".
NWOR_EXPORT std::string DescribeRoutes();

}  // namespace nwor
