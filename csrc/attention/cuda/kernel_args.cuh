#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"
#include "attention/plan.h"

// What the sm_80 and the sm_90a kernel have in common: the kernel parameter, and the work tile as
// it lies in shared memory.

namespace nwor {

// Division of 0 <= n < 2^31 by a number found at run time, as a multiplication.
struct FastDivisor {
  uint32_t value = 1, factor = 0x80000001u, shift = 31;

  static FastDivisor Of(int value) {
    FastDivisor d;
    d.value = value;
    while ((1ull << (d.shift - 31)) < d.value) ++d.shift;
    d.factor = static_cast<uint32_t>((1ull << d.shift) / d.value + 1);
    return d;
  }
  __device__ int Quotient(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift);
  }
};

// The kernel parameter of a launch.
struct VerifyArgs {
  CUtensorMap maps[4];  // K and V of the pages, then of the compact view; sm_90a only
  VerifyParams params;
  const PlanHeader* plan;
  const WorkTile* work_tiles;     // the queue
  const WorkTile* split_outputs;  // first work tile of each output tile with partial results
  SchedulerCounters* counters;
  float2* states;  // [slots, row_tile] max and sum of partial results
  float* outputs;  // [slots, row_tile, head_dim]
  FastDivisor page_tokens, block_tokens, blocks_per_page, group;
  int32_t stages, prefetch_stages, raw_stages;
  int32_t max_slots;
  int32_t row_tile;  // rows of a slot
};

// The launches of one combination of types and head size: defined in launch.cuh.
template <typename T, bool kFloat8, int kHeadDim>
struct VerifyLauncher {
  static void Launch(const VerifyArgs& args, const VerifyConfig& config);
  // Whether the sm_90a kernel was built for the current device.
  static bool HasWarpgroupKernel();
};

// Where the prefix tokens of a work tile lie: base pointers, strides in bytes, and its row of the
// page table.
struct PagedKv {
  const char* keys;
  const char* values;
  int64_t key_page, value_page;
  int64_t key_token, value_token;
  const int32_t* page_table;  // ids of pages, or of a partial view's blocks; null: contiguous
  FastDivisor unit_tokens;    // tokens of a page or block
  FastDivisor units_per_page;
  int64_t num_pages;
};

// What a CTA knows about the launch. It is read before the CTA fetches a work tile.
struct LaunchCounts {
  int num_work_tiles = 0;
  int num_split_outputs = 0;  // output tiles with partial results
  int max_partials = 0;       // the most of one output tile
  uint32_t fetch_base = 0;    // see SchedulerCounters
  uint32_t launch = 0;

  __device__ void Read(const VerifyArgs& args) {
    ReadPlan(args);
    ReadCounters(args);
  }
  __device__ void ReadPlan(const VerifyArgs& args) {
    num_work_tiles = args.plan->num_work_tiles;
    num_split_outputs = args.plan->num_split_outputs;
    max_partials = args.plan->max_partials;
  }
  // The launch before this one must have ended.
  __device__ void ReadCounters(const VerifyArgs& args) {
    fetch_base = args.counters->fetch_base;
    launch = args.counters->launch;
  }
};

// What follows a work tile.
struct QueueEnd {
  LaunchCounts counts;
  int32_t next_work_tile;
  uint32_t ticket;  // of the combine; SharedWorkTile::plan is then that of the output tile
};

// The current work tile, in shared memory.
struct SharedWorkTile {
  WorkTile plan;
  union {
    PagedKv kv;
    QueueEnd queue;  // once the tokens are no longer needed
  };
  int32_t is_end;         // the queue is empty: this is no work tile
  float prefix_scale;     // of a raw score, in log2 units: scale, key scale and log2(e)
  float in_flight_scale;  // the same for in-flight rows, which are not quantised
  float value_scale;
  float cap_inner;  // softcap: cap_outer * tanh(x), x = cap_inner * scaled score / 2, log2 units
  float cap_outer;  // 0: no softcap
};

}  // namespace nwor
