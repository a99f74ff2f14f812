#include "base/cuda/launch_check.h"
#include "base/row_op.h"
#include "decoder/gate.h"
#include "decoder/row_types.cuh"

namespace nwor {
namespace {

constexpr int kThreads = 256;

template <typename Row, typename Matrix, int kVector>
__global__ void __launch_bounds__(kThreads) GateKernel(const __grid_constant__ GateParams params) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  if (at >= params.count) return;
  Matrix* gate = static_cast<Matrix*>(params.gate) + at;
  float gates[kVector], ups[kVector];
  LoadChannels<kVector>(gate, gates);
  LoadChannels<kVector>(static_cast<const Matrix*>(params.up) + at, ups);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float opened = Rounded<Row>(gates[j] / (1.0f + expf(-gates[j])));
    gates[j] = Rounded<Row>(opened * ups[j]);
  }
  StoreChannels<kVector>(gate, gates);
}

}  // namespace

void LaunchGate(const GateParams& params) {
  Alignment both;
  both.Add(params.gate);
  both.Add(params.up);
  const bool vectors = params.count % kRowVector == 0 && both.Allows(16);
  const int64_t per_block = int64_t{kThreads} * (vectors ? kRowVector : 1);
  const auto blocks = static_cast<unsigned>((params.count + per_block - 1) / per_block);
  WithRowTypes(params.row_dtype, params.matrix_dtype, [&](auto* row, auto* matrix) {
    using Row = std::remove_pointer_t<decltype(row)>;
    using Matrix = std::remove_pointer_t<decltype(matrix)>;
    const auto kernel = vectors ? GateKernel<Row, Matrix, kRowVector> : GateKernel<Row, Matrix, 1>;
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  });
  CheckCuda(cudaGetLastError(), "gate kernel");
}

}  // namespace nwor
