#include "attention/cpu/kernels.h"

#include <algorithm>

#include "attention/cpu/amx.h"

namespace nwor::cpu {
namespace {

// Places parts of these sizes, each at the start of a cache line, so that no vector register spans
// two lines.
template <typename T, size_t kCount>
void PlaceParts(std::vector<T>* memory, const int64_t (&sizes)[kCount], T* (&parts)[kCount]) {
  constexpr int64_t kLine = 64 / sizeof(T);
  int64_t total = kLine;
  for (const int64_t size : sizes) {
    total += (size + kLine - 1) / kLine * kLine;
  }
  if (static_cast<int64_t>(memory->size()) < total) {
    memory->resize(total);
  }
  const int64_t past = reinterpret_cast<uintptr_t>(memory->data()) / sizeof(T) % kLine;
  T* next = memory->data() + (kLine - past) % kLine;
  for (size_t i = 0; i < kCount; ++i) {
    parts[i] = next;
    next += (sizes[i] + kLine - 1) / kLine * kLine;
  }
}

}  // namespace

void Scratch::Prepare(const RowChunk& chunk, int head_dim, bool uses_amx) {
  if (uses_amx) PrepareAmx(chunk, head_dim);
  const int64_t rows = static_cast<int64_t>(chunk.tiles()) * kTileRows;
  const int64_t head_rows = static_cast<int64_t>(chunk.head_tiles()) * kTileRows;
  const int64_t block_tokens = BlockTokens(head_dim);
  const int64_t sizes[] = {rows * head_dim, block_tokens * (head_dim + kMaxLanes),
                           head_rows * block_tokens, head_rows, head_dim};
  float* parts[5];
  PlaceParts(&floats_, sizes, parts);
  queries = parts[0];
  tokens = parts[1];
  scores = parts[2];
  decay = parts[3];
  zeros = parts[4];
  std::fill_n(zeros, head_dim, 0.0f);
  if (static_cast<int64_t>(positions_.size()) < chunk.count) {
    positions_.resize(chunk.count);
    words_.resize(chunk.count);
  }
  visible_from = positions_.data();
  visible = words_.data();
}

void Scratch::PrepareAmx(const RowChunk& chunk, int head_dim) {
  constexpr int64_t kRows = 16;
  const int64_t groups = (chunk.head_tiles() * kTileRows + kRows - 1) / kRows;
  const int64_t sizes[] = {chunk.num_heads * groups * kRows * head_dim, 2 * kRows * head_dim,
                           int64_t{kMaxBlockTokens} * head_dim, 2 * kRows * kMaxBlockTokens * 2,
                           2 * kRows * head_dim};
  uint16_t* parts[5];
  PlaceParts(&amx_words_, sizes, parts);
  pairs = parts[0];
  key_rows = parts[1];
  value_pairs = parts[2];
  weights = parts[3];
  sums = reinterpret_cast<float*>(parts[4]);
}

float* Scratch::States(int count, int tiles, int head_dim) {
  const int64_t sizes[] = {count * State::Floats(tiles, head_dim)};
  float* parts[1];
  PlaceParts(&states_, sizes, parts);
  return parts[0];
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
    if (Amx::IsAvailable() && head_dim % Amx::kChannels == 0) {
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
