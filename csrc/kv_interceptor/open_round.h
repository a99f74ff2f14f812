#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "kv_interceptor/interceptor.h"
#include "kv_interceptor/round.h"

// A round while it is open, and what outlives it.

namespace nwor {

// What commits of a round have done to the counters on the GPU.
enum class DeviceCommits : uint8_t {
  kNone,      // no commit has run; the host settles the round
  kInChunks,  // chunks were committed and may have moved tips; the last commit settles the round
  kSettled,   // the last commit has settled the round
};

// From Begin to the commit or abort that ends the round.
struct OpenRound {
  int64_t epoch = 0;
  RoundPlan plan;
  RoundTables rows;
  bool staging = false;    // drafts are staged; otherwise every row is written directly
  bool capturing = false;  // its writes are only being captured in a CUDA graph
  at::Tensor status;       // faults that its writes found on the device; only when staging

  std::map<std::string, DeferredWrite> deferred;  // by layer: writes that wait for their caller
  // On the CPU: where its chunks went, by group of the commit; empty: there was none.
  std::vector<std::unordered_set<int64_t>> committed_slots;
  DeviceCommits device_commits = DeviceCommits::kNone;
};

// The round before. The next one takes over its tables where both are alike.
struct EndedRound {
  RoundPlan plan;
  RoundTables rows;
  bool staging = false;
  // With graph_rows: its last commit has left tips and status as the next round wants them.
  bool clean = false;
};

// With graph_rows: memory that every round uses, because captured graphs know its address, and what
// those graphs do.
struct GraphMemory {
  enum class Captured : uint8_t { kNothing, kDirectRounds, kStagedRounds };

  at::Tensor tables;
  at::Tensor status;
  Captured captured = Captured::kNothing;  // kStagedRounds: at least one of the rounds was staged
  // There was no memory for staging when a round with drafts was captured: that graph stages
  // nothing, so no round may be staged that it could be replayed in.
  bool lack_memory = false;
};

}  // namespace nwor
