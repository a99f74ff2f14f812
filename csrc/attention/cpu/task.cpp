#include "attention/cpu/task.h"

#include <algorithm>

#include "attention/cpu/matrix_unit.h"

namespace nwor::cpu {

void Scratch::Prepare(const RowChunk& chunk, int head_dim, bool matrix_unit) {
  if (matrix_unit) PrepareMatrixUnit(chunk, head_dim);
  const int64_t rows = static_cast<int64_t>(chunk.tiles()) * kTileRows;
  const int64_t head_rows = static_cast<int64_t>(chunk.head_tiles()) * kTileRows;
  const int64_t block_tokens = BlockTokens(head_dim);
  const int64_t sizes[] = {rows * head_dim, block_tokens * (head_dim + kMaxLanes),
                           head_rows * block_tokens, head_rows, head_dim};
  int64_t total = 0;
  for (const int64_t size : sizes) {
    total += size;
  }
  if (static_cast<int64_t>(floats_.size()) < total) {
    floats_.resize(total);
  }
  float* next = floats_.data();
  float** const parts[] = {&queries, &tokens, &scores, &decay, &zeros};
  for (int i = 0; i < 5; ++i) {
    *parts[i] = next;
    next += sizes[i];
  }
  std::fill_n(zeros, head_dim, 0.0f);
  if (static_cast<int64_t>(positions_.size()) < chunk.count) {
    positions_.resize(chunk.count);
    words_.resize(chunk.count);
  }
  visible_from = positions_.data();
  visible = words_.data();
}

void Scratch::PrepareMatrixUnit(const RowChunk& chunk, int head_dim) {
  constexpr int64_t kRows = 16, kLineWords = 32;  // a cache line: registers are filled by lines
  const int64_t groups = (chunk.head_tiles() * kTileRows + kRows - 1) / kRows;
  const int64_t sizes[] = {chunk.num_heads * groups * kRows * head_dim, 2 * kRows * head_dim,
                           int64_t{kMaxBlockTokens} * head_dim, 2 * kRows * kMaxBlockTokens * 2,
                           2 * kRows * head_dim};
  int64_t total = kLineWords;
  for (const int64_t size : sizes) {
    total += (size + kLineWords - 1) / kLineWords * kLineWords;
  }
  if (static_cast<int64_t>(matrix_words_.size()) < total) {
    matrix_words_.resize(total);
  }
  const auto past = reinterpret_cast<uintptr_t>(matrix_words_.data()) / 2 % kLineWords;
  uint16_t* next = matrix_words_.data() + (past == 0 ? 0 : kLineWords - past);
  uint16_t* parts[5];
  for (int i = 0; i < 5; ++i) {
    parts[i] = next;
    next += (sizes[i] + kLineWords - 1) / kLineWords * kLineWords;
  }
  pairs = parts[0];
  key_rows = parts[1];
  value_pairs = parts[2];
  weights = parts[3];
  sums = reinterpret_cast<float*>(parts[4]);
}

float* Scratch::States(int count, int tiles, int head_dim) {
  const int64_t total = count * State::Floats(tiles, head_dim);
  if (static_cast<int64_t>(states_.size()) < total) {
    states_.resize(total);
  }
  return states_.data();
}

std::vector<const Kernels*> SupportedKernels(int head_dim) {
  std::vector<const Kernels*> supported;
  const auto offer = [&](const Kernels& kernels) {
    if (head_dim % kernels.lanes == 0) {
      supported.push_back(&kernels);
    }
  };
#if defined(__aarch64__)
  offer(kNeonKernels);
#elif defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (MatrixUnit::IsAvailable() && head_dim % MatrixUnit::kChannels == 0) {
      offer(kAmxKernels);
    }
    offer(kAvx512Kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    offer(kAvx2Kernels);
  }
#endif
  offer(kGenericKernels);
  return supported;
}

}  // namespace nwor::cpu
