#include <algorithm>

#include "base/cuda/launch_check.h"
#include "tree/tree_links.cuh"
#include "tree/tree_params.h"

namespace nwor {
namespace {

// Follows parents up from `row`: back at `row` is a cycle, anything else a parent named too early.
__device__ TreeFault ForwardOrCycle(const int32_t* parents, int rows, int row) {
  int at = row;
  for (int hops = 0; hops < rows; ++hops) {
    at = parents[at];
    if (at == row) return TreeFault::kCycle;
    if (at < 0 || at >= rows) break;
  }
  return TreeFault::kForwardParent;
}

__device__ int64_t DescribeFault(const int32_t* parents, int rows, int row) {
  const int32_t parent = parents[row];
  TreeFault fault = TreeFault::kParentRange;
  if (row == 0) {
    fault = TreeFault::kRootParent;
  } else if (parent == -1) {
    fault = TreeFault::kSecondRoot;
  } else if (parent >= row && parent < rows) {
    fault = ForwardOrCycle(parents, rows, row);
  }
  return PackFault(fault, row, parent);
}

// One block per request, one thread per row.
__global__ void __launch_bounds__(kMaxTreeRows)
    TreeFromParentsKernel(const __grid_constant__ ParentsParams params) {
  __shared__ TreeShared shared;
  __shared__ int first_wrong;
  __shared__ int64_t fault;
  const int64_t request = blockIdx.x;
  const int row = static_cast<int>(threadIdx.x);
  const int rows = params.rows;
  const int used = params.num_rows == nullptr ? rows : params.num_rows[request];
  const bool countable = used >= 1 && used <= rows;
  ClearChildren(shared);
  if (row == 0) {
    first_wrong = rows;
    fault = countable ? 0 : PackFault(TreeFault::kRowCount, 0, used);
  }
  const bool mine = countable && row < used;
  const int32_t parent = mine ? params.parents[request * rows + row] : -1;
  shared.parents[row] = parent;
  __syncthreads();
  const bool valid = row == 0 ? parent == -1 : parent >= 0 && parent < row;
  if (mine && !valid) atomicMin(&first_wrong, row);
  __syncthreads();
  if (row == 0 && first_wrong < rows) {
    fault = DescribeFault(shared.parents, used, first_wrong);
  }
  __syncthreads();
  const int32_t prefix_len = params.prefix_lens[request];
  const int64_t wrong_prefix = PrefixFault(prefix_len);
  WriteTree(params.out, shared, request, rows, used, wrong_prefix == 0 ? prefix_len : 0,
            wrong_prefix == 0 ? fault : wrong_prefix);
}

}  // namespace

void LaunchTreeFromParents(const ParentsParams& params) {
  if (params.num_requests == 0) return;
  const int threads = (params.rows + 31) / 32 * 32;
  TreeFromParentsKernel<<<params.num_requests, threads, 0,
                          static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "tree_from_parents launch");
}

}  // namespace nwor
