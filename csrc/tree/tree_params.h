#pragma once

#include <cstdint>

#include "base/export.h"
#include "base/host_device.h"
#include "base/types.h"

// Draft trees as kernels take them: no torch, no CUDA.
//
// A tree of one request has R rows; row 0 is the root (the last emitted token). A parent comes
// before its child. W = ceil(R / 64) words of 64 bits hold one row's mask: bit j of word w is row
// 64 * w + j, set for the row itself and its ancestors.

namespace nwor {

inline constexpr int kMaxTreeRows = 256;
inline constexpr int kMaxTreeWords = kMaxTreeRows / 64;
inline constexpr int kMaxTreeSteps = 32;
inline constexpr int kMaxTreeCandidates = 4096;

// All contiguous. A request whose tree is not valid gets a tree of its root alone: every row sees
// itself, nothing has children, so that nothing below can be accepted; its status says why.
struct TreeOutputs {
  int64_t* tokens = nullptr;        // [B, R]; only written by the top-k builder
  int32_t* parents = nullptr;       // [B, R]; -1 = the root
  int64_t* positions = nullptr;     // [B, R]
  int32_t* depths = nullptr;        // [B, R]; 0 = the root
  uint64_t* mask = nullptr;         // [B, R, W]
  int32_t* first_child = nullptr;   // [B, R]; -1 = none
  int32_t* next_sibling = nullptr;  // [B, R]; -1 = none, else a later row
  int64_t* status = nullptr;        // [B]; 0 or PackFault(...)
};

struct ParentsParams {
  const int32_t* parents = nullptr;      // [B, R]
  const int32_t* prefix_lens = nullptr;  // [B]
  const int32_t* num_rows = nullptr;     // [B] rows of each request, or null: all R
  TreeOutputs out;
  int32_t num_requests = 0;
  int32_t rows = 0;
  StreamHandle stream = nullptr;
};

// A top-k drafter's steps: k candidates in step 0, k * k in each later one. Candidate ids are
// 0 .. k-1 for step 0 and k + k*k*(s-1) + a*k + b for child b of kept parent a in step s.
struct TopKParams {
  struct Step {
    const int64_t* tokens = nullptr;  // [B, k] or [B, k * k]
    const float* scores = nullptr;    // the same, the parents' multiplied in
    const int64_t* kept = nullptr;    // [B, k] at kept_stride: candidate ids of the step's parents
    int64_t kept_stride = 0;          // between requests
    // The same if the list begins with k times -1, the parents of step 0; null if it cannot.
    const int64_t* kept_after_roots = nullptr;
    int64_t kept_after_roots_stride = 0;
  };
  Step steps[kMaxTreeSteps];             // kept is not read in step 0, nor where k = 1
  const int64_t* root_tokens = nullptr;  // [B]
  const int32_t* prefix_lens = nullptr;  // [B]
  TreeOutputs out;
  int32_t num_steps = 0;
  int32_t k = 0;
  int32_t num_requests = 0;
  int32_t rows = 0;  // R, at most 1 + candidates
  StreamHandle stream = nullptr;
};

constexpr int NumCandidates(int num_steps, int k) { return k + (num_steps - 1) * k * k; }

// First candidate id of a step, and of the one after it.
constexpr int FirstCandidate(int step, int k) { return step == 0 ? 0 : k + (step - 1) * k * k; }

// The parents of a step >= 1 in one request. REQUIRES: k > 1.
NWOR_HOST_DEVICE inline const int64_t* KeptParents(const TopKParams& params, int step,
                                                   int64_t request) {
  const TopKParams::Step& first = params.steps[1];
  const TopKParams::Step& own = params.steps[step];
  const bool roots_first =
      first.kept_after_roots != nullptr && first.kept[request * first.kept_stride] == -1;
  return roots_first ? own.kept_after_roots + request * own.kept_after_roots_stride
                     : own.kept + request * own.kept_stride;
}

// One launch each on params.stream; capturable. Defined in builds with CUDA.
void LaunchTreeFromParents(const ParentsParams& params);
void LaunchTreeFromTopK(const TopKParams& params);

// The same on host memory. Faults are in out.status; nothing throws.
NWOR_EXPORT void TreeFromParentsCpu(const ParentsParams& params);
NWOR_EXPORT void TreeFromTopKCpu(const TopKParams& params);

}  // namespace nwor
