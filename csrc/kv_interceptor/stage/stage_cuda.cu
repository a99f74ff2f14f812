#include <algorithm>

#include "base/cuda/launch_check.h"
#include "kv_interceptor/stage/stage.h"
#include "kv_interceptor/stage/stage_row.cuh"

namespace nwor {
namespace {

constexpr int kMaxThreads = 512;  // along one row
constexpr int kMinThreads = 128;  // of one block: short rows share it

// Block: rows along y, vectors of a row along x. Grid: rows along x, K and V along y.
template <RowOp op>
__global__ void __launch_bounds__(kMaxThreads)
    StageKernel(const __grid_constant__ StageTable table) {
  const int32_t row = static_cast<int32_t>(blockIdx.x * blockDim.y + threadIdx.y);
  if (row >= table.num_rows) return;
  StageRow<op>(table, row, blockIdx.y, threadIdx.x, blockDim.x);
}

}  // namespace

void LaunchStage(const StageParams& params) {
  const CacheGeometry& geometry = params.cache.geometry;
  NWOR_CHECK(params.dtype != DType::kFloat8E4M3, "key: got rows of ", Name(params.dtype),
             ", expected float32, float16 or bfloat16");
  NWOR_CHECK(geometry.dtype == params.dtype || geometry.dtype == DType::kFloat8E4M3,
             "key_cache: got ", Name(geometry.dtype), ", expected ", Name(params.dtype),
             " as the rows, or float8_e4m3fn");
  if (params.num_rows == 0 || geometry.num_heads == 0 || geometry.head_dim == 0) return;

  const RowOp op = ChooseStageOp(params);
  const StageTable table = MakeStageTable(params, op);
  const int threads = std::min(table.shape.vectors_per_row, kMaxThreads);
  const int rows_per_block = std::max(1, kMinThreads / threads);
  const dim3 grid((params.num_rows + rows_per_block - 1) / rows_per_block, 2);
  const dim3 block(threads, rows_per_block);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  DispatchRowOp(op, [&](auto choice) {
    StageKernel<decltype(choice)::value><<<grid, block, 0, stream>>>(table);
  });
  CheckCuda(cudaGetLastError(), "stage kernel");
}

}  // namespace nwor
