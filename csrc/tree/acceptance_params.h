#pragma once

#include <cstdint>

#include "base/types.h"

// Acceptance as kernels take it: no torch, no CUDA. Index tensors are contiguous; probabilities
// have any strides.

namespace nwor {

// What every acceptance returns. All contiguous.
struct AcceptOutputs {
  int32_t* path = nullptr;        // [B, R] accepted draft rows, -1 padded
  int32_t* counts = nullptr;      // [B]
  int64_t* next_token = nullptr;  // [B] correction or bonus token
  int64_t* status = nullptr;      // [B] or null; a request with a fault accepts nothing, token -1
};

struct TreeLinks {
  const int32_t* first_child = nullptr;   // [B, R]; null: chains, row i + 1 below row i
  const int32_t* next_sibling = nullptr;  // [B, R]
  const int32_t* num_drafts = nullptr;    // [B] drafts of each chain, or null: R - 1
};

struct GreedyParams {
  const int64_t* tokens = nullptr;      // [B, R]
  const int64_t* target_ids = nullptr;  // [B, R] the target's argmax at each row
  TreeLinks links;
  AcceptOutputs out;
  int32_t num_requests = 0;
  int32_t rows = 0;
  StreamHandle stream = nullptr;
};

// Rows of probabilities: token v of row r of request b at b*batch + r*row + v*token.
struct ProbabilityRows {
  const float* data = nullptr;
  int64_t batch = 0;
  int64_t row = 0;
  int64_t token = 1;
};

enum class AcceptRule : int32_t {
  kTarget,  // siblings share a coin over the target's mass
  kDraft,   // chains: min(1, p / q), q in draft_probs
};

struct SamplingParams {
  AcceptRule rule = AcceptRule::kTarget;
  const int64_t* tokens = nullptr;  // [B, R]
  ProbabilityRows target;           // [B, R, V]
  ProbabilityRows draft;            // [B, R-1 or more, V], kDraft only: row i drew row i + 1
  TreeLinks links;
  const float* coins = nullptr;        // [B, R], one per depth
  const float* final_coins = nullptr;  // [B]
  double threshold_single = 1.0;
  double threshold_acc = 1.0;
  AcceptOutputs out;
  int32_t num_requests = 0;
  int32_t rows = 0;
  int32_t vocabulary = 0;
  void* workspace = nullptr;  // CUDA: SamplingWorkspaceBytes(...) bytes, need not be cleared
  StreamHandle stream = nullptr;
};

// Tokens of a row that are summed together; the draw looks at one such piece twice.
inline constexpr int kTileTokens = 1024;
constexpr int NumTiles(int vocabulary) { return (vocabulary + kTileTokens - 1) / kTileTokens; }

int64_t SamplingWorkspaceBytes(int num_requests, int vocabulary);

// On params.stream, capturable; greedy in one launch, sampling in two. Defined in builds with CUDA.
void LaunchAcceptGreedy(const GreedyParams& params);
void LaunchAcceptSampling(const SamplingParams& params);
// The second of its two launches.
void LaunchSampleDraw(const SamplingParams& params);

// The same on host memory. Faults are in out.status, which must be there; nothing throws.
void AcceptGreedyCpu(const GreedyParams& params);
void AcceptSamplingCpu(const SamplingParams& params);

}  // namespace nwor
