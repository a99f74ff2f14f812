#include "base/cuda/launch_check.h"
#include "tree/cut_params.h"
#include "tree/fault.h"
#include "tree/tree_params.h"

namespace nwor {
namespace {

// One block per request, a thread to each token of its run.
__global__ void __launch_bounds__(kMaxTreeRows)
    CutPathKernel(const __grid_constant__ CutParams params) {
  __shared__ int first_wrong;
  __shared__ int first_stop;
  const int64_t request = blockIdx.x;
  const int rows = params.rows;
  const int i = static_cast<int>(threadIdx.x);
  const int64_t index = request * rows + i;
  const int count = params.counts[request];
  const int64_t next = params.next_token[request];
  const bool countable = count >= 0 && count < rows;
  if (i == 0) first_wrong = first_stop = rows;
  const int row = countable && i < count ? params.path[index] : -1;
  __syncthreads();
  const bool on_path = countable && i < count;
  if (on_path && (row < 0 || row >= rows)) atomicMin(&first_wrong, i);
  __syncthreads();
  int64_t fault = 0;
  if (!countable) {
    fault = PackFault(TreeFault::kPath, 0, count);
  } else if (first_wrong < rows) {
    fault = PackFault(TreeFault::kPath, first_wrong + 1, params.path[request * rows + first_wrong]);
  }

  int64_t length = fault != 0 || next < 0 ? 0 : count + 1;
  auto reason = FinishReason::kNone;
  if (fault == 0 && params.max_new_tokens != nullptr && params.max_new_tokens[request] <= length) {
    length = max(params.max_new_tokens[request], int64_t{0});
    reason = FinishReason::kLength;
  }
  if (fault == 0 && params.keep != nullptr && params.keep[request] >= 0 &&
      params.keep[request] <= length) {
    length = params.keep[request];
    reason = FinishReason::kCallback;
  }
  int64_t token = -1;
  if (i < length) {
    token = i < count ? params.tokens[request * rows + row] : next;
    const int64_t* stops = params.stop_ids + request * params.stop_stride;
    bool stop = false;
    for (int s = 0; s < params.num_stop_ids; ++s) stop |= token >= 0 && stops[s] == token;
    if (stop) atomicMin(&first_stop, i);
  }
  __syncthreads();
  if (first_stop < length) {
    length = first_stop + 1;
    reason = FinishReason::kStop;
  }
  if (i < rows) {
    params.emitted[index] = i < length ? token : -1;
    params.out_path[index] = i < length - 1 ? row : -1;
  }
  if (length > 0 ? i == length - 1 : i == 0) {
    params.out_counts[request] = length > 0 ? static_cast<int32_t>(length - 1) : 0;
    params.out_next_token[request] = length > 0 ? token : -1;
    params.num_emitted[request] = static_cast<int32_t>(length);
    params.finish[request] = static_cast<int32_t>(reason);
    if (params.status != nullptr) params.status[request] = fault;
  }
}

}  // namespace

void LaunchCutPath(const CutParams& params) {
  CutPathKernel<<<params.num_requests, (params.rows + 31) / 32 * 32, 0,
                  static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "cut_path launch");
}

}  // namespace nwor
