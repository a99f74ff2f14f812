#pragma once

#include <cstdint>

#include "attention/heuristics.h"
#include "attention/params.h"

// The plan of a step: the scheduler metadata that the planner (cuda/plan.cu) writes and the
// attention kernels read, as it lies in device memory. Plain data; thread-safe.
//
// A request's prefix is divided into splits (SplitRequest). Each split's (max, sum, output) starts
// from an empty softmax state. Splits are merged in ascending order into groups (SplitsPerGroup),
// and groups into the result; the in-flight rows belong to the last split. A work tile is one
// split, one group or all splits of an output tile (one request, KV head and row tile). If an
// output tile has several work tiles, each leaves a partial result in a slot of the workspace, and
// the combine (cuda/combine.cuh) merges them in the same order. So the granularity never changes a
// bit.

namespace nwor {

// Where a request's prefix tokens lie.
enum class TokenSource : int32_t { kPages, kBlocks, kCompact };

// Where the first split begins if no row sees a token before `token_begin` (sliding window): splits
// start at multiples of a step.
constexpr int32_t SplitOrigin(int32_t token_begin) { return token_begin / 32 * 32; }

struct PlanHeader {
  int32_t num_work_tiles = 0;
  int32_t num_split_outputs = 0;  // output tiles whose work tiles leave partial results
  int32_t max_partials = 0;       // the most partial results of one output tile
  int32_t unused[61] = {};
};

// What a request needs at its chosen granularity.
struct PlanDemand {
  int32_t work_tile_tokens;  // of its longest work tile: the queue's sort key
  int32_t work_tiles;
  int32_t slots;
  int32_t split_outputs;
  int32_t partials;  // per output tile
};

// What the planner knows about a request.
struct PlanRequest {
  int32_t num_rows;
  int32_t prefix_tokens;
  int32_t token_begin;  // the first prefix token that some row sees; above 0 only with a window
  TokenSource source;
  int32_t split_tokens;
  int32_t num_splits;
  int32_t query_start;
  int32_t splits_per_work_tile;  // 1, SplitsPerGroup or num_splits
  PlanDemand demand;
  int64_t work;  // tokens of all its output tiles

  constexpr int32_t span() const { return prefix_tokens - SplitOrigin(token_begin); }
};

struct WorkTile {
  int32_t request;  // -1: nothing to do. The queue has at least one entry per CTA
  int32_t kv_head;
  int32_t row_begin;  // packed rows [row_begin, row_begin + num_rows) of the request
  int32_t num_rows;
  int32_t query_start;
  int32_t request_rows;
  int32_t prefix_tokens;
  TokenSource source;
  int32_t token_begin;
  int32_t split_tokens;
  int32_t num_splits;   // of the request
  int32_t split_begin;  // this work tile has splits [split_begin, split_end)
  int32_t split_end;
  int32_t slot;          // of its partial result, or -1; an output tile's slots are consecutive
  int32_t output_tile;   // index among those with partial results, or -1
  int32_t num_partials;  // work tiles of the output tile

  // Splits of each of the output tile's work tiles; the last one may have fewer.
  // REQUIRES: num_partials > 1.
  constexpr int32_t splits_per_partial() const {
    return num_partials == num_splits ? 1 : SplitsPerGroup(num_splits);
  }
};

static_assert(sizeof(PlanHeader) == 256 && sizeof(PlanRequest) == 64 && sizeof(WorkTile) == 64);

// Counters that CTAs share. The planner clears them once. Afterwards every launch leaves them ready
// for the next one: the CTA that fetches last prepares the counters of the following launch, when
// the previous launch is long over.
struct SchedulerCounters {
  uint32_t fetches;     // fetches of all launches: one per processed work tile
  uint32_t fetch_base;  // fetches before the current launch
  uint32_t launch;      // number of the current launch
  uint32_t unused[29];
  struct {
    uint32_t started;  // CTAs that have their first work tile
    uint32_t done;     // finished work tiles
    uint32_t tickets;  // units of the combine that have been taken
    uint32_t unused[13];
  } per_launch[2];  // by the parity of the launch
};
static_assert(sizeof(SchedulerCounters) == 256);

constexpr int64_t Align256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Byte offsets into the plan and into the workspace.
struct PlanOffsets {
  int64_t requests = sizeof(PlanHeader);
  int64_t work_tiles = 0;     // [max_work_tiles] the queue
  int64_t split_outputs = 0;  // [max_output_tiles] first work tile of each output with partials
  int64_t end = 0;
};
constexpr PlanOffsets LocatePlan(int32_t num_requests, const VerifyConfig& config) {
  PlanOffsets at;
  at.work_tiles = at.requests + Align256(int64_t{sizeof(PlanRequest)} * num_requests);
  at.split_outputs = at.work_tiles + Align256(int64_t{sizeof(WorkTile)} * config.max_work_tiles);
  at.end = at.split_outputs + Align256(int64_t{sizeof(WorkTile)} * config.max_output_tiles);
  return at;
}

// After the planned slots every CTA has scratch slots for work tiles that merge several splits: one
// for the group's running output and one for the request's.
inline constexpr int32_t kScratchSlotsPerCta = 2;

struct WorkspaceOffsets {
  int64_t states = sizeof(SchedulerCounters);  // [slots, row_tile, 2] max (log2 units) and sum
  int64_t outputs = 0;                         // [slots, row_tile, head_dim]
  int64_t end = 0;
};
constexpr WorkspaceOffsets LocateWorkspace(int32_t head_dim, const VerifyConfig& config) {
  const int64_t slots = int64_t{config.max_slots} + int64_t{kScratchSlotsPerCta} * config.max_ctas;
  WorkspaceOffsets at;
  at.outputs = at.states + Align256(slots * config.row_tile * 2 * 4);
  at.end = at.outputs + Align256(slots * config.row_tile * head_dim * 4);
  return at;
}

}  // namespace nwor
