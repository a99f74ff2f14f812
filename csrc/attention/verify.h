#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

#include "base/export.h"

// Verify attention on tensors: the attention of one verification step and one layer. A call checks
// its arguments, chooses a route (routes/route.h) and runs it: our CPU kernels (cpu/), our CUDA
// kernels (cuda/), or a FlashAttention kernel for the prefix (routes/flash.h) merged with the
// in-flight rows (merge/). bindings/ops.cpp registers it as torch ops; a C++ host calls it
// directly. params.h says what a row attends to.
//
// Thread-safe, except that calls which share a plan must be ordered. Device work is enqueued on the
// current stream; nothing waits for the device.

namespace nwor {

// A selection of token blocks in the paged cache for each KV head (see PartialViewParams).
struct PartialViewTensors {
  at::Tensor blocks;      // [B, Hkv, max_blocks] int32
  at::Tensor num_blocks;  // [B] int32; -1: request b uses its whole prefix
  at::Tensor view_lens;   // [B] int32, tokens
  int64_t block_size = 0;
};

// A contiguous copy of the tokens to attend to (see CompactViewParams).
struct CompactViewTensors {
  at::Tensor keys;    // [B, Hkv, N, D], the rows' dtype
  at::Tensor values;  // as keys
  at::Tensor lens;    // [B] int32, tokens; -1: request b uses its whole prefix
};

struct VerifyArguments {
  at::Tensor query;                     // [T, Hq, D] float32 (CPU), float16, bfloat16
  at::Tensor key;                       // [T, Hkv, D]
  at::Tensor value;                     // [T, Hkv, D]
  at::Tensor key_cache;                 // [P, S, Hkv, D], the rows' dtype or float8_e4m3fn
  at::Tensor value_cache;               // as key_cache
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
  // Rows of the longest request; chooses the row tile and the route. Our kernels are correct with
  // any value; FlashAttention's need an upper bound. 0: unknown, T / B is used.
  int64_t max_rows = 0;
  std::optional<at::Tensor> plan;  // from PlanVerify, for these lengths; CUDA only
  // CUDA, with a plan: the plan, the block table, the view, `status` and the tokens of the prefix
  // were written by launches that had ended when the launch ahead of this call began, and that one
  // writes none of them. They are then read while it still runs; query, key, value and masks are
  // not. Staging leaves prefixes alone, so it may be on where projections, rotations and writes of
  // the layer run ahead. It must be off behind PlanVerify, a commit, whatever makes a view, and
  // where a prefill of the same step writes pages of another request's prefix (shared prefixes).
  bool prefix_ready = false;
  // [8] int64: the first error that a CUDA kernel found (VerifyStatus in cuda/verify.h). With a
  // plan, lengths are checked in PlanVerify.
  std::optional<at::Tensor> status;
  // "auto" or the name of a route (routes/route.h). Empty: NWOR_SPECPV_ATTENTION_ROUTE, or
  // "auto".
  std::string route;
};

struct VerifyOutputs {
  at::Tensor out;  // [T, Hq, D], the rows' dtype
  at::Tensor lse;  // [T, Hq] float32, natural log; undefined: not computed
};

// Computes attention into `outputs`, which the caller has allocated. `out` must not overlap itself
// or any input. Throws nwor::Error on a wrong argument before anything is written. Values in index
// tensors on a CUDA device are checked on the device and reported in `status`.
NWOR_EXPORT void VerifyAttention(const VerifyArguments& arguments, const VerifyOutputs& outputs);

// Allocates outputs of the right shape, uninitialised.
NWOR_EXPORT VerifyOutputs MakeVerifyOutputs(const at::Tensor& query, bool with_lse);

// Plans the work of one CUDA step, once for all layers, into `plan`: PlanBytes bytes on the device,
// 256-byte aligned, which also hold the layers' workspace. The plan is valid for all later calls
// with the same shapes, lengths, mask, view lengths, window and max_rows. A CUDA graph that holds
// the plan and the layers can be replayed with other lengths. On the CPU there is nothing to plan:
// PlanBytes is 0. key, value and value_cache are not used and may be undefined. Wrong lengths are
// reported in `status` of this call, wrong pages in `status` of the layers' calls; both may be the
// same tensor.
NWOR_EXPORT void PlanVerify(const VerifyArguments& arguments, at::Tensor plan);

// Bytes of a plan. Depends only on shapes and the device. `block_size`: of the partial view; 0:
// none.
NWOR_EXPORT int64_t PlanBytes(const VerifyArguments& arguments, int64_t block_size = 0);

// The route of this process' latest call and why it was chosen; "none" before the first call.
NWOR_EXPORT std::string LastRoute();

// The routes of this process, one line each: "name: present", or why it is absent.
NWOR_EXPORT std::string DescribeRoutes();

}  // namespace nwor
