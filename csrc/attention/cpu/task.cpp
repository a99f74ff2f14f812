#include "attention/cpu/task.h"

#include <algorithm>

namespace nwor::cpu {

void Scratch::Prepare(const RowChunk& chunk, int head_dim) {
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
