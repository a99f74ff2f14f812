#pragma once

#include <cstddef>
#include <cstdint>

#include "base/export.h"
#include "base/types.h"

// The inner loops of partial verification on the CPU, compiled once per instruction set (see
// attention/simd.h) and chosen at run time.

namespace nwor::cpu {

inline constexpr int kMaxHeadDim = 512;
inline constexpr int kMaxScoreRows = 4096;  // queries * query heads of one KV head

// Channelwise extremes of `count` rows of `head_dim` elements, each multiplied by `scale`. A NaN
// counts for nothing: a channel without a number has -inf and inf.
struct ExtremesTask {
  const std::byte* const* rows = nullptr;
  int32_t count = 0;
  int32_t head_dim = 0;
  DType row_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  float scale = 1.0f;
  void* kmax = nullptr;
  void* kmin = nullptr;
};

// Scores of consecutive blocks of one head. Queries are packed channel by channel, padded with zero
// rows to a multiple of the lanes: row r of channel c at [c * padded_rows + r], r = head * queries
// + query. Score of a row is max(upper . kmax, lower . kmin), or their sum, in which a zero of the
// row is nothing to a bound that is infinite. In a maximum NaN gives way to any number.
struct ScoreTask {
  const float* upper = nullptr;
  const float* lower = nullptr;  // the same as upper for the score specpv
  int32_t padded_rows = 0;
  int32_t num_queries = 0;          // rows of one query head
  int32_t num_groups = 0;           // query heads
  bool add = false;                 // sum instead of maximum
  bool query_max = false;           // maximum over queries instead of the sum
  bool group_max = false;           // maximum over query heads instead of the sum
  const std::byte* kmax = nullptr;  // the first block's channels
  const std::byte* kmin = nullptr;
  int64_t kmax_stride_bytes = 0;  // from block to block
  int64_t kmin_stride_bytes = 0;
  DType dtype = DType::kFloat32;
  int32_t head_dim = 0;
  int32_t num_blocks = 0;
  float* scores = nullptr;  // [num_blocks]
};

struct SpecPVKernels {
  const char* name;
  int lanes;
  void (*extremes)(const ExtremesTask&);
  void (*score)(const ScoreTask&);
};

extern NWOR_EXPORT const SpecPVKernels kGenericSpecPVKernels;
#if defined(__aarch64__)
extern NWOR_EXPORT const SpecPVKernels kNeonSpecPVKernels;
#elif defined(__x86_64__)
extern NWOR_EXPORT const SpecPVKernels kAvx2SpecPVKernels;
extern NWOR_EXPORT const SpecPVKernels kAvx512SpecPVKernels;
#endif

// The best this machine has.
NWOR_EXPORT const SpecPVKernels& ChooseSpecPVKernels();

}  // namespace nwor::cpu
