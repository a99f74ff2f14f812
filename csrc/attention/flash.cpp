#include "attention/flash.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "attention/flash_bounds.h"
#include "attention/flash_op.h"
#include "attention/merge_state.h"
#include "check.h"
#ifdef NWOR_WITH_CUDA
#include "attention/verify_cuda.h"
#endif

namespace nwor {
namespace {

at::Tensor EvenStarts(int64_t count, int64_t step, const at::Tensor& like) {
  return at::arange(0, (count + 1) * step, step, like.options().dtype(at::kInt));
}

// Rows of the longest request; the number of all rows is always enough. At least 2: FlashAttention
// 2 takes 1 to mean that every request has one row, and does not look at the starts.
int64_t MaxQuery(const VerifyArguments& arguments) {
  const int64_t rows = arguments.query.size(0);
  const int64_t longest = arguments.max_rows > 0 ? std::min(arguments.max_rows, rows) : rows;
  return std::max<int64_t>(longest, 2);
}

// There is room for `max_rows` rows of every request and for no more. Some may have fewer, when
// rows that belong to no request fill the batch up.
bool IsUniform(const VerifyArguments& arguments) {
  const int64_t requests = arguments.block_table.size(0);
  return requests == 1 ||
         (arguments.max_rows > 0 && arguments.max_rows * requests == arguments.query.size(0));
}

// The prefix as contiguous tokens per request, for a kernel without pages.
void GatherPages(const VerifyArguments& arguments, FlashCall* call) {
  const at::Tensor& table = arguments.block_table;
  const at::Tensor pages = table.flatten().to(at::kLong);
  const int64_t tokens = table.size(1) * arguments.key_cache.size(1);
  call->key = arguments.key_cache.index_select(0, pages).flatten(0, 1);
  call->value = arguments.value_cache.index_select(0, pages).flatten(0, 1);
  call->key_start = EvenStarts(table.size(0), tokens, arguments.prefix_lens);
  call->key_lens = arguments.prefix_lens;
  call->max_key = tokens;
}

// A batch as `rows` rows of each request: where they are in the batch, and where the batch's rows
// are among them. Rows of no request are some row or other.
struct RowPlaces {
  at::Tensor of_requests;
  at::Tensor of_batch;
};
RowPlaces PlaceRows(const at::Tensor& query_start, int64_t requests, int64_t rows) {
  const at::Tensor starts = query_start.to(at::kLong);
  const at::Tensor begins = starts.narrow(0, 0, requests), ends = starts.narrow(0, 1, requests);
  const int64_t last = requests * rows - 1;
  const at::Tensor batch = at::arange(requests * rows, begins.options());
  const at::Tensor request =
      at::searchsorted(ends, batch, /*out_int32=*/false, /*right=*/true).clamp_max(requests - 1);
  const at::Tensor within = batch.sub(begins.index_select(0, request));
  return {begins.unsqueeze(1).add(batch.narrow(0, 0, rows)).clamp(0, last).flatten(),
          request.mul(rows).add(within).clamp(0, last)};
}

// All rows and query heads of a KV head as the heads of one query token, and every (request, KV
// head) as a sequence: the kernel reads K and V once for all of them, in place.
AttentionState FoldedCompact(const VerifyArguments& arguments, const CheckedVerify& checked,
                             const FlashCall& base) {
  const at::Tensor& keys = checked.compact_keys;
  const int64_t requests = keys.size(0), kv_heads = keys.size(1), tokens = keys.size(2);
  const int64_t head_dim = keys.size(3);
  const int64_t rows = arguments.query.size(0) / requests;
  const int64_t group = arguments.query.size(1) / kv_heads;
  const RowPlaces places = PlaceRows(arguments.query_start, requests, rows);
  FlashCall call = base;
  call.query = arguments.query.index_select(0, places.of_requests)
                   .view({requests, rows, kv_heads, group, head_dim})
                   .transpose(1, 2)
                   .reshape({requests * kv_heads, rows * group, head_dim});
  call.key = keys.contiguous().view({requests * kv_heads * tokens, 1, head_dim});
  call.value = checked.compact_values.contiguous().view(call.key.sizes());
  call.query_start = EvenStarts(requests * kv_heads, 1, arguments.query_start);
  call.key_start = EvenStarts(requests * kv_heads, tokens, arguments.query_start);
  call.key_lens = arguments.compact_view->lens.repeat_interleave(kv_heads);
  call.max_query = 1;
  call.max_key = tokens;
  AttentionState state = CallTorchFlash(call);
  const auto unfold = [&](const at::Tensor& folded, at::IntArrayRef sizes) {
    return folded.transpose(1, 2).reshape(sizes).index_select(0, places.of_batch);
  };
  state.out = unfold(state.out.reshape({requests, kv_heads, rows, group, head_dim}),
                     arguments.query.sizes());
  state.lse = unfold(state.lse.reshape({requests, kv_heads, rows, group}),
                     {arguments.query.size(0), arguments.query.size(1)});
  return state;
}

AttentionState Prefix(Route route, const VerifyArguments& arguments, const CheckedVerify& checked) {
  FlashCall call;
  call.query = arguments.query;
  call.query_start = arguments.query_start;
  call.max_query = MaxQuery(arguments);
  call.scale = arguments.scale;
  call.softcap = arguments.softcap;
  if (route != Route::kTorchFlash) {
    const std::optional<FlashOp> op = FindFlashOp(route);
    NWOR_CHECK(op.has_value(), "route: got ", Name(route), ", expected a registered op");
    call.key = arguments.key_cache;
    call.value = arguments.value_cache;
    call.key_lens = arguments.prefix_lens;
    call.block_table = arguments.block_table;
    call.max_key = arguments.block_table.size(1) * arguments.key_cache.size(1);
    return CallFlashOp(*op, call);
  }
  if (!arguments.compact_view.has_value()) {
    GatherPages(arguments, &call);
    return CallTorchFlash(call);
  }
  if (IsUniform(arguments)) return FoldedCompact(arguments, checked, call);
  const at::Tensor& keys = checked.compact_keys;
  call.key = keys.transpose(1, 2).flatten(0, 1);
  call.value = checked.compact_values.transpose(1, 2).flatten(0, 1);
  call.key_start = EvenStarts(keys.size(0), keys.size(2), arguments.query_start);
  call.key_lens = arguments.compact_view->lens;
  call.max_key = keys.size(2);
  return CallTorchFlash(call);
}

// Whether our kernel can take the rows from a route that has the prefix.
bool CanTakeRows(const VerifyArguments& arguments) {
#ifndef NWOR_WITH_CUDA
  if (arguments.query.is_cuda()) return false;
#endif
  return MaxQuery(arguments) <= kPrefillRows && KernelHeadDim(arguments.query.size(2)) &&
         arguments.key_cache.size(1) % 16 == 0;
}

// A tree is for our kernel. So are chains where FlashAttention-3 has the prefix: it reads V in
// whole tiles, past a request's last row, and what is not finite there would reach the request.
bool TakesRows(Route route, const VerifyArguments& arguments) {
  return arguments.tree_mask.has_value() || (route == Route::kFlash3 && CanTakeRows(arguments));
}

// Attention of the rows among themselves.
AttentionState InFlight(Route route, const VerifyArguments& arguments) {
  if (TakesRows(route, arguments)) {
    VerifyArguments rows = arguments;
    rows.prefix_lens = at::zeros_like(arguments.prefix_lens);
    rows.compact_view.reset();
    rows.plan.reset();
    rows.route = Name(arguments.query.is_cuda() ? Route::kCuda : Route::kCpu);
    const VerifyOutputs outputs = MakeVerifyOutputs(arguments.query, /*with_lse=*/true);
    VerifyAttention(rows, outputs);
    return {outputs.out, outputs.lse};
  }
  FlashCall call;
  call.query = arguments.query;
  call.key = arguments.key;
  call.value = arguments.value;
  call.query_start = arguments.query_start;
  call.key_start = arguments.query_start;
  call.max_query = call.max_key = MaxQuery(arguments);
  call.scale = arguments.scale;
  call.softcap = arguments.softcap;
  call.causal = true;
  if (route == Route::kTorchFlash) return CallTorchFlash(call);
  const std::optional<FlashOp> op = FindFlashOp(route);
  NWOR_CHECK(op.has_value(), "route: got ", Name(route), ", expected a registered op");
  return CallFlashOp(*op, call);
}

// FlashAttention-3 is registered on every device, but has kernels for those of capability 9 alone;
// on others it ends the process.
bool HasKernels(Route route, int32_t capability) {
  return route != Route::kFlash3 || capability == 0 || capability / 10 == 9;
}

}  // namespace

int32_t ComputeCapability(at::Device device) {
#ifdef NWOR_WITH_CUDA
  if (device.is_cuda()) return QueryDeviceProps(device.index()).compute_capability;
#endif
  return 0;
}

void FindFlashRoutes(RouteAvailability* available, int32_t capability) {
  available->Set(Route::kTorchFlash, HasTorchFlash());
  for (const Route route : {Route::kFlash2, Route::kFlash3}) {
    const std::optional<FlashOp> op = FindFlashOp(route);
    available->Set(route, op.has_value() && HasKernels(route, capability));
    if (op.has_value()) available->page_multiple[static_cast<int>(route)] = op->page_multiple;
  }
}

std::string DescribeFlashRoute(Route route, int32_t capability) {
  if (route == Route::kTorchFlash) {
    return HasTorchFlash() ? "present: aten::_flash_attention_forward"
                           : "absent: this torch is built without CUDA";
  }
  const std::optional<FlashOp> op = FindFlashOp(route);
  if (op.has_value() && !HasKernels(route, capability)) {
    return "absent: " + op->name + " is for devices of compute capability 9";
  }
  if (op.has_value()) return "present: " + op->name;
  std::string text = "absent: not registered with torch:";
  for (const std::string& name : FlashOpNames(route)) text += " " + name;
  return text;
}

void FlashVerify(Route route, const VerifyArguments& arguments, const CheckedVerify& checked,
                 const VerifyOutputs& outputs) {
  // Kernels of others want what ours takes with any strides: rows with contiguous channels.
  VerifyArguments readable = WithinBounds(arguments);
  readable.query = checked.query;
  readable.key = checked.key;
  readable.value = checked.value;
  const AttentionState prefix = Prefix(route, readable, checked);
  const AttentionState rows = InFlight(route, readable);
  MergeStatesInto({prefix.out, rows.out}, {prefix.lse, rows.lse}, outputs.out, outputs.lse,
                  /*num_flash=*/1);
}

}  // namespace nwor
