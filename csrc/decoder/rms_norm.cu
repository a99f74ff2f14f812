#include <algorithm>

#include "base/cuda/launch_check.h"
#include "base/row_op.h"
#include "decoder/rms_norm.h"
#include "decoder/row_types.cuh"

// One thread block a row, or a part of one. Where a thread has one vector of it (hidden sizes up to
// 8192), that stays in registers between the sum of squares and the division.

namespace nwor {
namespace {

constexpr int kMaxThreads = 1024;

__device__ float WarpSum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// The same bits in every thread, and for every launch of this many threads.
__device__ float BlockSum(float value) {
  __shared__ float sums[kMaxThreads / 32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int warps = static_cast<int>(blockDim.x / 32);
  value = WarpSum(value);
  if (warps == 1) return value;
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  return WarpSum(lane < warps ? sums[lane] : 0.0f);
}

template <int kVector>
__device__ float SquareSum(const float* values) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum += values[j] * values[j];
  return sum;
}

template <typename Row, typename Matrix, int kVector>
__global__ void __launch_bounds__(kMaxThreads)
    RmsNormKernel(const __grid_constant__ RmsNormParams params) {
  const int64_t row = blockIdx.x / params.parts;
  const int32_t part = static_cast<int32_t>(blockIdx.x % params.parts);
  const int32_t size = params.part_size;
  const int64_t in_row = int64_t{part} * size;
  const int64_t dense = row * params.parts * size + in_row;
  const Row* rows = static_cast<const Row*>(params.rows) + row * params.row_stride + in_row;
  const Row* weight = static_cast<const Row*>(params.weight) + in_row;
  const Row* bias = static_cast<const Row*>(params.bias);
  const Matrix* product = static_cast<const Matrix*>(params.product);
  Row* sums = static_cast<Row*>(params.sums);
  Matrix* normed = static_cast<Matrix*>(params.normed) + dense;
  if (bias != nullptr) bias += in_row;
  if (product != nullptr) {
    product += dense;
    sums += dense;
  }

  const auto take = [&](int32_t channel, float* values) {
    LoadChannels<kVector>(rows + channel, values);
    if (product == nullptr) return;
    float more[kVector];
    LoadChannels<kVector>(product + channel, more);
    if (bias != nullptr) {
      float added[kVector];
      LoadChannels<kVector>(bias + channel, added);
#pragma unroll
      for (int j = 0; j < kVector; ++j) more[j] = Rounded<Row>(more[j] + added[j]);
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[j] = Rounded<Row>(values[j] + more[j]);
    StoreChannels<kVector>(sums + channel, values);
  };
  const auto give = [&](int32_t channel, const float* values, const float* scales, float factor) {
    float results[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      results[j] = Rounded<Row>(scales[j] * Rounded<Row>(values[j] * factor));
    }
    StoreChannels<kVector>(normed + channel, results);
  };

  const int32_t first = static_cast<int32_t>(threadIdx.x) * kVector;
  const int32_t step = static_cast<int32_t>(blockDim.x) * kVector;
  float held[kVector], held_scales[kVector];
  float squares = 0.0f;
  if (first < size) {
    LoadChannels<kVector>(weight + first, held_scales);  // on its way while the sum is made
    take(first, held);
    squares = SquareSum<kVector>(held);
  }
  for (int32_t channel = first + step; channel < size; channel += step) {
    float values[kVector];
    take(channel, values);
    squares += SquareSum<kVector>(values);
  }
  const float mean = BlockSum(squares) / static_cast<float>(size);
  const float factor = rsqrtf(mean + params.epsilon);
  if (first < size) give(first, held, held_scales, factor);
  const Row* again = product == nullptr ? rows : sums;  // what this thread itself has stored
  for (int32_t channel = first + step; channel < size; channel += step) {
    float values[kVector], scales[kVector];
    LoadChannels<kVector>(again + channel, values);
    LoadChannels<kVector>(weight + channel, scales);
    give(channel, values, scales, factor);
  }
}

bool AllowsVectors(const RmsNormParams& params) {
  Alignment rows, matrices;
  for (const void* pointer : {params.rows, params.bias, params.weight}) rows.Add(pointer);
  rows.Add(params.sums);
  rows.AddElements({params.row_stride}, params.row_dtype);
  matrices.Add(params.product);
  matrices.Add(params.normed);
  return params.part_size % kRowVector == 0 && rows.Allows(16) && matrices.Allows(16);
}

}  // namespace

void LaunchRmsNorm(const RmsNormParams& params) {
  const bool vectors = AllowsVectors(params);
  const int32_t wanted = params.part_size / (vectors ? kRowVector : 1);
  const int threads = std::min(kMaxThreads, (wanted + 31) / 32 * 32);
  const auto blocks = static_cast<unsigned>(params.num_rows * params.parts);
  WithRowTypes(params.row_dtype, params.matrix_dtype, [&](auto* row, auto* matrix) {
    using Row = std::remove_pointer_t<decltype(row)>;
    using Matrix = std::remove_pointer_t<decltype(matrix)>;
    const auto kernel =
        vectors ? RmsNormKernel<Row, Matrix, kRowVector> : RmsNormKernel<Row, Matrix, 1>;
    kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  });
  CheckCuda(cudaGetLastError(), "rms norm kernel");
}

}  // namespace nwor
