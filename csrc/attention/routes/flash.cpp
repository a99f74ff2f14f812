#include "attention/routes/flash.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "attention/merge/merge_rows.h"
#include "attention/merge/merge_state.h"
#include "attention/routes/flash_bounds.h"
#include "attention/routes/flash_op.h"
#include "attention/routes/flash_rows.h"
#include "base/check.h"
#ifdef NWOR_WITH_CUDA
#include "attention/cuda/verify.h"
#endif

namespace nwor {
namespace {

at::Tensor EvenStarts(int64_t count, int64_t step, const at::Tensor& like) {
  return at::arange(0, (count + 1) * step, step, like.options().dtype(at::kInt));
}

// Rows of the longest request; the number of all rows is a safe bound. At least 2: FlashAttention-2
// takes 1 to mean that every request has one row, and ignores the starts.
int64_t MaxQuery(const VerifyArguments& arguments) {
  const int64_t rows = arguments.query.size(0);
  const int64_t longest = arguments.max_rows > 0 ? std::min(arguments.max_rows, rows) : rows;
  return std::max<int64_t>(longest, 2);
}

// Rows per request if the batch is packed to the same number for each; 0 if that number is unknown
// or would add too many rows of padding.
int64_t RowsToPack(const VerifyArguments& arguments) {
  constexpr int64_t kMaxPadding = 4;
  const int64_t total = arguments.query.size(0), requests = arguments.block_table.size(0);
  const int64_t rows = requests == 1 ? total : std::min(arguments.max_rows, total);
  return requests * rows <= kMaxPadding * total ? rows : 0;
}

AttentionState EmptyState(const at::Tensor& query) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const auto options = query.options().dtype(at::kFloat);
  return {at::zeros_like(query), at::full({query.size(0), query.size(1)}, kNothing, options)};
}

// Copies the prefix to contiguous tokens per request, for a kernel without pages.
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

// A batch as `rows` rows of each request: the batch row of each of these rows, and the reverse.
// Rows that a request does not have, and rows that belong to no request, map to some valid row.
struct RowIndices {
  at::Tensor of_requests;  // [requests * rows]
  at::Tensor of_batch;     // [T]
};
RowIndices IndexRows(const VerifyArguments& arguments, int64_t requests, int64_t rows) {
  const at::Tensor starts = arguments.query_start.to(at::kLong);
  const at::Tensor begins = starts.narrow(0, 0, requests);
  const int64_t total = arguments.query.size(0);
  const at::Tensor batch = at::arange(total, begins.options());
  const at::Tensor request = RequestOfRows(starts, total);
  const at::Tensor within = batch.sub(begins.index_select(0, request)).clamp(0, rows - 1);
  const at::Tensor each = at::arange(rows, begins.options());
  return {begins.unsqueeze(1).add(each).clamp(0, total - 1).flatten(),
          request.mul(rows).add(within)};
}

// Attention to a compact view with packed GQA: all rows and query heads of a KV head become the
// heads of one query token, and every (request, KV head) a sequence. The kernel reads K and V once,
// in place.
AttentionState PackedCompact(const VerifyArguments& arguments, const CheckedVerify& checked,
                             const FlashCall& base, int64_t rows) {
  const at::Tensor& keys = checked.compact_keys;
  const int64_t requests = keys.size(0), kv_heads = keys.size(1), tokens = keys.size(2);
  const int64_t head_dim = keys.size(3);
  const int64_t heads = arguments.query.size(1), group = heads / kv_heads;
  const RowIndices indices = IndexRows(arguments, requests, rows);
  FlashCall call = base;
  call.query = arguments.query.index_select(0, indices.of_requests)
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
  const auto unpack = [&](const at::Tensor& packed, at::IntArrayRef sizes) {
    return packed.transpose(1, 2).reshape(sizes).index_select(0, indices.of_batch);
  };
  state.out = unpack(state.out.reshape({requests, kv_heads, rows, group, head_dim}),
                     {requests * rows, heads, head_dim});
  state.lse =
      unpack(state.lse.reshape({requests, kv_heads, rows, group}), {requests * rows, heads});
  return state;
}

// FlashAttention-2 writes the LSE of a request with an empty prefix in pages to the offset it would
// have if all requests had as many rows as the longest one: over that of others, or out of bounds.
// So such a request gets one token, and its rows an LSE of -infinity.
AttentionState CallFlash2(const FlashOp& op, FlashCall call) {
  const at::Tensor lens = *call.key_lens;
  call.key_lens = lens.clamp_min(1);
  AttentionState state = CallFlashOp(op, call);
  const at::Tensor request = RequestOfRows(call.query_start, call.query.size(0));
  const at::Tensor empty = lens.eq(0).index_select(0, request).unsqueeze(1);
  state.lse = state.lse.masked_fill(empty, -std::numeric_limits<float>::infinity());
  return state;
}

// What the calls for the prefix and for the rows have in common.
FlashCall RowsCall(const VerifyArguments& arguments, bool only_prefill) {
  FlashCall call;
  call.query = arguments.query;
  call.query_start = arguments.query_start;
  call.max_query = MaxQuery(arguments);
  call.scale = arguments.scale;
  call.softcap = arguments.softcap;
  // A prefill fills the device with its rows, and a number of splits would depend on the batch.
  const bool one_request = arguments.block_table.size(0) == 1;
  const int64_t known = one_request ? arguments.query.size(0) : arguments.max_rows;
  if (only_prefill || known > kPrefillRows) call.num_splits = 1;
  return call;
}

AttentionState AttendPrefix(Route route, const VerifyArguments& arguments,
                            const CheckedVerify& checked, bool only_prefill) {
  const bool in_pages = !arguments.compact_view.has_value();
  if (in_pages && (arguments.key_cache.size(0) == 0 || arguments.block_table.size(1) == 0)) {
    return EmptyState(arguments.query);
  }
  if (!in_pages && checked.compact_keys.size(2) == 0) return EmptyState(arguments.query);
  FlashCall call = RowsCall(arguments, only_prefill);
  if (route != Route::kTorchFlash) {
    const std::optional<FlashOp> op = FindFlashOp(route);
    NWOR_CHECK(op.has_value(), "route: got ", Name(route), ", expected a registered op");
    call.key = arguments.key_cache;
    call.value = arguments.value_cache;
    call.key_lens = arguments.prefix_lens;
    call.block_table = arguments.block_table;
    call.max_key = arguments.block_table.size(1) * arguments.key_cache.size(1);
    return route == Route::kFlash2 ? CallFlash2(*op, call) : CallFlashOp(*op, call);
  }
  if (in_pages) {
    GatherPages(arguments, &call);
    return CallTorchFlash(call);
  }
  const int64_t packed = RowsToPack(arguments);
  if (packed > 0) return PackedCompact(arguments, checked, call, packed);
  const at::Tensor& keys = checked.compact_keys;
  call.key = keys.transpose(1, 2).flatten(0, 1);
  call.value = checked.compact_values.transpose(1, 2).flatten(0, 1);
  call.key_start = EvenStarts(keys.size(0), keys.size(2), arguments.query_start);
  call.key_lens = arguments.compact_view->lens;
  call.max_key = keys.size(2);
  return CallTorchFlash(call);
}

// MergeRows computes trees. It also computes chains if FlashAttention-3 has the prefix, whose
// kernel would need K and V to be padded (PadRows); many rows are worth that.
bool UsesMergeRows(Route route, const VerifyArguments& arguments) {
  if (arguments.tree_mask.has_value()) return true;
#ifndef NWOR_WITH_CUDA
  if (arguments.query.is_cuda()) return false;
#endif
  return route == Route::kFlash3 && MaxQuery(arguments) <= kPrefillRows;
}

// Adds the rows to their attention to the prefix. Requests whose `out` MergeRows would refuse do
// not come here: routes other than torch_flash for chains need aligned memory.
void MergeInFlight(const VerifyArguments& arguments, const AttentionState& prefix,
                   const VerifyOutputs& outputs) {
  MergeRowsArguments rows;
  rows.query = arguments.query;
  rows.key = arguments.key;
  rows.value = arguments.value;
  rows.prefix_out = prefix.out;
  rows.prefix_lse = prefix.lse;
  rows.query_start = arguments.query_start;
  rows.tree_mask = arguments.tree_mask;
  rows.scale = arguments.scale;
  rows.softcap = arguments.softcap;
  MergeRows(rows, outputs.out, outputs.lse);
}

// Attention of the rows of chains among themselves.
AttentionState AttendInFlight(Route route, const VerifyArguments& arguments, bool only_prefill) {
  FlashCall call = RowsCall(arguments, only_prefill);
  call.key = arguments.key;
  call.value = arguments.value;
  call.key_start = arguments.query_start;
  call.max_key = call.max_query;
  call.causal = true;
  if (route == Route::kFlash3) {
    const PaddedRows rows = PadRows(arguments, only_prefill);
    call.key = rows.key;
    call.value = rows.value;
    call.key_start = rows.start;
    call.key_lens = rows.lens;
  }
  if (route == Route::kTorchFlash) return CallTorchFlash(call);
  const std::optional<FlashOp> op = FindFlashOp(route);
  NWOR_CHECK(op.has_value(), "route: got ", Name(route), ", expected a registered op");
  return CallFlashOp(*op, call);
}

// FlashAttention-3 is registered on every device but only has kernels for compute capability 9; on
// others it ends the process.
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
    return "absent: " + op->name + " needs a device of compute capability 9";
  }
  if (op.has_value()) return "present: " + op->name;
  std::string text = "absent: not registered with torch:";
  for (const std::string& name : FlashOpNames(route)) text += " " + name;
  return text;
}

void FlashVerify(Route route, const VerifyArguments& arguments, const CheckedVerify& checked,
                 const VerifyOutputs& outputs, bool only_prefill) {
  // FlashAttention needs rows with contiguous channels.
  VerifyArguments clamped = ClampToBounds(arguments);
  clamped.query = checked.query;
  clamped.key = checked.key;
  clamped.value = checked.value;
  if (only_prefill) {
    clamped.prefix_lens =
        at::where(IsPrefill(clamped.query_start), clamped.prefix_lens, at::Scalar(0));
  }
  const AttentionState prefix = AttendPrefix(route, clamped, checked, only_prefill);
  if (UsesMergeRows(route, clamped)) return MergeInFlight(clamped, prefix, outputs);
  const AttentionState rows = AttendInFlight(route, clamped, only_prefill);
  MergeStatesInto({prefix.out, rows.out}, {prefix.lse, rows.lse}, outputs.out, outputs.lse,
                  /*num_flash=*/1);
}

}  // namespace nwor
