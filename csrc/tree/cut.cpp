#include "tree/cut.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "tree/arguments.h"
#include "tree/cut_params.h"
#include "tree/fault.h"
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace nwor {
namespace {

// One request on the host.
void CutOne(const CutParams& params, int64_t request) {
  const int64_t rows = params.rows;
  const int32_t* path = params.path + request * rows;
  const int64_t* tokens = params.tokens + request * rows;
  const int32_t count = params.counts[request];
  const int64_t next = params.next_token[request];
  int32_t* out_path = params.out_path + request * rows;
  int64_t* emitted = params.emitted + request * rows;
  std::fill_n(out_path, rows, -1);
  std::fill_n(emitted, rows, -1);
  params.out_counts[request] = 0;
  params.out_next_token[request] = -1;
  params.num_emitted[request] = 0;
  params.finish[request] = static_cast<int32_t>(FinishReason::kNone);
  params.status[request] = 0;
  if (count < 0 || count >= rows) {
    params.status[request] = PackFault(TreeFault::kPath, 0, count);
    return;
  }
  for (int32_t i = 0; i < count; ++i) {
    if (path[i] >= 0 && path[i] < rows) continue;
    params.status[request] = PackFault(TreeFault::kPath, i + 1, path[i]);
    return;
  }
  const auto token_at = [&](int64_t i) { return i < count ? tokens[path[i]] : next; };
  int64_t length = next < 0 ? 0 : count + 1;
  auto reason = FinishReason::kNone;
  if (params.max_new_tokens != nullptr && params.max_new_tokens[request] <= length) {
    length = std::max<int64_t>(params.max_new_tokens[request], 0);
    reason = FinishReason::kLength;
  }
  if (params.keep != nullptr && params.keep[request] >= 0 && params.keep[request] <= length) {
    length = params.keep[request];
    reason = FinishReason::kCallback;
  }
  const int64_t* stops = params.stop_ids + request * params.stop_stride;
  for (int64_t i = 0; i < length; ++i) {
    const int64_t token = token_at(i);
    emitted[i] = token;
    if (token >= 0 &&
        std::find(stops, stops + params.num_stop_ids, token) != stops + params.num_stop_ids) {
      length = i + 1;
      reason = FinishReason::kStop;
    }
  }
  params.num_emitted[request] = static_cast<int32_t>(length);
  params.finish[request] = static_cast<int32_t>(reason);
  if (length == 0) return;
  std::copy_n(path, length - 1, out_path);
  params.out_counts[request] = static_cast<int32_t>(length - 1);
  params.out_next_token[request] = token_at(length - 1);
}

void ThrowFaults(const CutParams& params) {
  for (int64_t b = 0; b < params.num_requests; ++b) {
    if (params.status[b] == 0) continue;
    const int64_t entry = params.status[b] >> 8 & 0xFFFFFF;
    const int64_t value = params.status[b] >> 32;
    NWOR_CHECK(entry != 0, "counts[", b, "]: got ", value, ", expected 0 .. ", params.rows - 1);
    throw Error(Concat("path[", b, ", ", entry - 1, "]: got ", value, ", expected a row, 0 .. ",
                       params.rows - 1));
  }
}

}  // namespace

void CutPathCpu(const CutParams& params) {
  for (int64_t request = 0; request < params.num_requests; ++request) CutOne(params, request);
}

Cut CutPath(const at::Tensor& tokens, const at::Tensor& path, const at::Tensor& counts,
            const at::Tensor& next_token, const std::optional<at::Tensor>& stop_ids,
            const std::optional<at::Tensor>& max_new_tokens, const std::optional<at::Tensor>& keep,
            const std::optional<at::Tensor>& status) {
  const at::Device device = tokens.device();
  const at::Tensor ids = IntegerArgument(tokens, "tokens", at::kLong, {-1, -1}, device);
  const int64_t batch = ids.size(0);
  const int64_t rows = ids.size(1);
  CheckTreeRows(rows, "tokens");
  const at::Tensor taken = IntegerArgument(path, "path", at::kInt, {batch, rows}, device);
  const at::Tensor count = IntegerArgument(counts, "counts", at::kInt, {batch}, device);
  const at::Tensor next = IntegerArgument(next_token, "next_token", at::kLong, {batch}, device);
  at::Tensor stops, limits, kept;
  CutParams params;
  if (stop_ids.has_value()) {
    stops = stop_ids->dim() == 2
                ? IntegerArgument(*stop_ids, "stop_ids", at::kLong, {batch, -1}, device)
                : IntegerArgument(*stop_ids, "stop_ids", at::kLong, {-1}, device);
    params.stop_ids = static_cast<const int64_t*>(stops.const_data_ptr());
    params.num_stop_ids = static_cast<int32_t>(stops.size(-1));
    params.stop_stride = stops.dim() == 2 ? stops.size(1) : 0;
  }
  if (max_new_tokens.has_value()) {
    limits = IntegerArgument(*max_new_tokens, "max_new_tokens", at::kLong, {batch}, device);
    params.max_new_tokens = static_cast<const int64_t*>(limits.const_data_ptr());
  }
  if (keep.has_value()) {
    kept = IntegerArgument(*keep, "keep", at::kInt, {batch}, device);
    params.keep = static_cast<const int32_t*>(kept.const_data_ptr());
  }
  params.status = StatusArgument(status, batch, device);
  const auto i32 = at::TensorOptions().dtype(at::kInt).device(device);
  const auto i64 = i32.dtype(at::kLong);
  const Cut cut{at::empty({batch, rows}, i32), at::empty({batch}, i32), at::empty({batch}, i64),
                at::empty({batch, rows}, i64), at::empty({batch}, i32), at::empty({batch}, i32)};
  params.tokens = static_cast<const int64_t*>(ids.const_data_ptr());
  params.path = static_cast<const int32_t*>(taken.const_data_ptr());
  params.counts = static_cast<const int32_t*>(count.const_data_ptr());
  params.next_token = static_cast<const int64_t*>(next.const_data_ptr());
  params.out_path = static_cast<int32_t*>(cut.path.mutable_data_ptr());
  params.out_counts = static_cast<int32_t*>(cut.counts.mutable_data_ptr());
  params.out_next_token = static_cast<int64_t*>(cut.next_token.mutable_data_ptr());
  params.emitted = static_cast<int64_t*>(cut.emitted.mutable_data_ptr());
  params.num_emitted = static_cast<int32_t*>(cut.num_emitted.mutable_data_ptr());
  params.finish = static_cast<int32_t*>(cut.finish.mutable_data_ptr());
  params.num_requests = static_cast<int32_t>(batch);
  params.rows = static_cast<int32_t>(rows);
  params.stream = CurrentStream(device);
  if (device.is_cpu()) {
    const at::Tensor own = at::empty({batch}, i64);
    params.status = static_cast<int64_t*>(own.mutable_data_ptr());
    CutPathCpu(params);
    ThrowFaults(params);
    if (status.has_value()) status->zero_();
    return cut;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  if (batch > 0) LaunchCutPath(params);
#endif
  return cut;
}

}  // namespace nwor
