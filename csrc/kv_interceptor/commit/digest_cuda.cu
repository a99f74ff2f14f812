#include <algorithm>

#include "base/cuda/launch_check.h"
#include "kv_interceptor/commit/digest.h"
#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/commit/table.cuh"

namespace nwor {
namespace {

constexpr int kDigestThreads = 512;

// One block: a batch has a few thousand entries at most. The digest is a sum, so threads may add in
// any order.
__global__ void __launch_bounds__(kDigestThreads)
    DigestKernel(const __grid_constant__ BatchTable batch, int64_t* digest) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  unsigned long long share = 0;
  for (int32_t position = threadIdx.x; position < batch.num_positions; position += kDigestThreads) {
    const Entry entry = LoadEntry(batch, position);
    if (entry.index == 0) share += DigestCount(entry.request, entry.count);
    if (entry.index >= min(entry.count, batch.depth)) continue;
    const int32_t row = StagingRow(batch, entry.request, entry.path_entry);
    for (int g = 0; g < batch.num_groups; ++g) {
      const GroupTable& group = batch.groups[g];
      const int64_t slot =
          group.slots != nullptr || row >= 0 ? DestinationSlot(group, position, row) : -1;
      share += DigestEntry(entry.request, entry.index, g, entry.path_entry, slot);
    }
  }
  for (int step = 16; step > 0; step /= 2) share += __shfl_xor_sync(0xffffffff, share, step);
  if (threadIdx.x % 32 == 0) atomicAdd(&sum, share);
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool refuses = batch.round_status != nullptr && batch.round_status[kStatusCode] != 0;
    digest[0] = refuses ? kDigestRefusal : static_cast<int64_t>(sum);
    digest[1] = refuses ? kDigestRefusal : ~static_cast<int64_t>(sum);
  }
}

}  // namespace

void LaunchCommitDigest(const CommitParams& params, int64_t* digest) {
  CheckCommitParams(params);
  DigestKernel<<<1, kDigestThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(
      MakeBatchTable(params), digest);
  CheckCuda(cudaGetLastError(), "commit digest kernel");
}

}  // namespace nwor
