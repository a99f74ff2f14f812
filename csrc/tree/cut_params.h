#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/types.h"

// Cutting an accepted run where a sequence ends, as kernels take it: no torch, no CUDA.

namespace nwor {

// Why a sequence ends with this round.
enum class FinishReason : int32_t { kNone, kStop, kLength, kCallback };
inline constexpr std::array<std::string_view, 4> kFinishReasonNames = {"", "stop", "length",
                                                                       "callback"};

// All contiguous.
struct CutParams {
  const int64_t* tokens = nullptr;      // [B, R]
  const int32_t* path = nullptr;        // [B, R]
  const int32_t* counts = nullptr;      // [B]
  const int64_t* next_token = nullptr;  // [B]; negative: the request accepted nothing at all
  const int64_t* stop_ids = nullptr;    // [num_stop_ids] or [B, num_stop_ids]; negative = none
  int64_t stop_stride = 0;              // between requests
  int32_t num_stop_ids = 0;
  const int64_t* max_new_tokens = nullptr;  // [B] how many may still be emitted, or null
  const int32_t* keep = nullptr;            // [B] emit that many and end, -1 = no opinion, or null
  int32_t* out_path = nullptr;              // [B, R]
  int32_t* out_counts = nullptr;            // [B]
  int64_t* out_next_token = nullptr;        // [B]; -1 = nothing is emitted
  int64_t* emitted = nullptr;               // [B, R], -1 padded
  int32_t* num_emitted = nullptr;           // [B]
  int32_t* finish = nullptr;                // [B] FinishReason
  int64_t* status = nullptr;                // [B] or null
  int32_t num_requests = 0;
  int32_t rows = 0;
  StreamHandle stream = nullptr;
};

// One launch on params.stream; capturable. Defined in builds with CUDA.
void LaunchCutPath(const CutParams& params);

// The same on host memory. Faults are in status, which must be there; nothing throws.
void CutPathCpu(const CutParams& params);

}  // namespace nwor
