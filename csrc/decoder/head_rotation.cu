#include "base/cuda/launch_check.h"
#include "base/row_op.h"
#include "decoder/head_rotation.h"
#include "decoder/row_types.cuh"

// A few lanes a head: a lane has vectors of the first half and those of the second half that they
// are rotated against, so that nothing it reads is written by another.

namespace nwor {
namespace {

constexpr int kThreads = 128;

// Of the heads of a row, how they are shared out.
struct HeadGrid {
  int32_t heads = 0;  // of all projections
  int32_t lanes = 1;  // of a head, a power of two up to 32
  bool normalizes = false;
};

// Both halves of a head at some channels, before the norm.
template <int kVector, typename Row, typename Matrix>
__device__ void LoadHalves(const Matrix* from, const Row* bias, int32_t half, float* first,
                           float* second) {
  LoadChannels<kVector>(from, first);
  LoadChannels<kVector>(from + half, second);
  if (bias == nullptr) return;
  float added[2][kVector];
  LoadChannels<kVector>(bias, added[0]);
  LoadChannels<kVector>(bias + half, added[1]);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    first[j] = Rounded<Row>(first[j] + added[0][j]);
    second[j] = Rounded<Row>(second[j] + added[1][j]);
  }
}

template <int kVector, typename Row>
__device__ void Normalize(const Row* weight, float factor, float* values) {
  float scales[kVector];
  LoadChannels<kVector>(weight, scales);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    values[j] = Rounded<Row>(scales[j] * Rounded<Row>(values[j] * factor));
  }
}

// `cos`, `sin`: of the first half. Products and their sum are rounded each, also in float32.
template <int kVector, typename Row>
__device__ void Rotate(const Row* cos, const Row* sin, int32_t half, float* first, float* second) {
  float turns[4][kVector];
  LoadChannels<kVector>(cos, turns[0]);
  LoadChannels<kVector>(cos + half, turns[1]);
  LoadChannels<kVector>(sin, turns[2]);
  LoadChannels<kVector>(sin + half, turns[3]);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float a = first[j], b = second[j];
    first[j] = __fadd_rn(Rounded<Row>(__fmul_rn(a, turns[0][j])),
                         Rounded<Row>(__fmul_rn(-b, turns[2][j])));
    second[j] =
        __fadd_rn(Rounded<Row>(__fmul_rn(b, turns[1][j])), Rounded<Row>(__fmul_rn(a, turns[3][j])));
  }
}

template <typename Row, typename Matrix, int kVector>
__global__ void __launch_bounds__(kThreads)
    HeadRotationKernel(const __grid_constant__ HeadRotationParams params, const HeadGrid grid) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % grid.lanes;
  const int32_t heads_per_block = kThreads / grid.lanes;
  const uint32_t item = blockIdx.x * heads_per_block + thread / grid.lanes;
  // Lanes without a head stay for the shuffles.
  const bool is_head = item < static_cast<uint32_t>(params.num_rows * grid.heads);
  const int64_t row = is_head ? item / grid.heads : 0;
  auto head = static_cast<int32_t>(is_head ? item % grid.heads : 0);
  int32_t index = 0;
  while (head >= params.projections[index].heads) head -= params.projections[index++].heads;
  const ProjectedHeads& own = params.projections[index];

  const int32_t half = params.dim / 2;
  const int64_t at = (row * own.heads + head) * params.dim;
  const Matrix* from = static_cast<const Matrix*>(own.from) + at;
  Row* to = static_cast<Row*>(own.to) + at;
  const Row* bias = static_cast<const Row*>(own.bias);
  if (bias != nullptr) bias += int64_t{head} * params.dim;
  const auto bias_at = [&](int32_t channel) { return bias == nullptr ? bias : bias + channel; };
  const Row* norm = static_cast<const Row*>(own.norm);
  const Row* cos = static_cast<const Row*>(params.cos) + row * params.cos_stride;
  const Row* sin = static_cast<const Row*>(params.sin) + row * params.sin_stride;

  const int32_t begin = is_head ? lane * kVector : half, step = grid.lanes * kVector;
  float first[kVector], second[kVector];
  float factor = 1.0f;
  if (grid.normalizes) {
    float squares = 0.0f;
    for (int32_t channel = begin; channel < half && norm != nullptr; channel += step) {
      LoadHalves<kVector>(from + channel, bias_at(channel), half, first, second);
#pragma unroll
      for (int j = 0; j < kVector; ++j) squares += first[j] * first[j] + second[j] * second[j];
    }
    for (int32_t distance = grid.lanes / 2; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    }
    factor = rsqrtf(squares / static_cast<float>(params.dim) + params.epsilon);
  }
  for (int32_t channel = begin; channel < half; channel += step) {
    LoadHalves<kVector>(from + channel, bias_at(channel), half, first, second);
    if (norm != nullptr) {
      Normalize<kVector>(norm + channel, factor, first);
      Normalize<kVector>(norm + half + channel, factor, second);
    }
    if (own.rotates) Rotate<kVector>(cos + channel, sin + channel, half, first, second);
    StoreChannels<kVector>(to + channel, first);
    StoreChannels<kVector>(to + half + channel, second);
  }
}

bool AllowsVectors(const HeadRotationParams& params) {
  Alignment rows, matrices;
  for (const ProjectedHeads& one : params.projections) {
    matrices.Add(one.from);
    for (const void* pointer : {one.bias, one.norm}) rows.Add(pointer);
    rows.Add(one.to);
  }
  rows.Add(params.cos);
  rows.Add(params.sin);
  rows.AddElements({params.cos_stride, params.sin_stride}, params.row_dtype);
  return params.dim % (2 * kRowVector) == 0 && rows.Allows(16) && matrices.Allows(16);
}

}  // namespace

void LaunchHeadRotation(const HeadRotationParams& params) {
  HeadGrid grid;
  for (const ProjectedHeads& one : params.projections) {
    grid.heads += one.heads;
    grid.normalizes |= one.norm != nullptr;
  }
  const bool vectors = AllowsVectors(params);
  const int32_t wanted = params.dim / 2 / (vectors ? kRowVector : 1);
  while (grid.lanes < 32 && grid.lanes < wanted) grid.lanes *= 2;
  const int64_t heads_per_block = kThreads / grid.lanes;
  const int64_t items = int64_t{params.num_rows} * grid.heads;
  const auto blocks = static_cast<unsigned>((items + heads_per_block - 1) / heads_per_block);
  WithRowTypes(params.row_dtype, params.matrix_dtype, [&](auto* row, auto* matrix) {
    using Row = std::remove_pointer_t<decltype(row)>;
    using Matrix = std::remove_pointer_t<decltype(matrix)>;
    const auto kernel =
        vectors ? HeadRotationKernel<Row, Matrix, kRowVector> : HeadRotationKernel<Row, Matrix, 1>;
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params, grid);
  });
  CheckCuda(cudaGetLastError(), "head rotation kernel");
}

}  // namespace nwor
