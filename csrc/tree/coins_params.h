#pragma once

#include <cstdint>

#include "base/types.h"

namespace nwor {

struct CoinsParams {
  const int64_t* seeds = nullptr;      // [B]
  const int64_t* positions = nullptr;  // [B]
  float* accept = nullptr;             // [B, R]
  float* final = nullptr;              // [B]
  int32_t num_requests = 0;
  int32_t rows = 0;
  StreamHandle stream = nullptr;
};

// One launch on params.stream; capturable. Defined in builds with CUDA.
void LaunchMakeCoins(const CoinsParams& params);

}  // namespace nwor
