#pragma once

#include <cstdint>

#include "attention/heuristics.h"
#include "attention/params.h"
#include "attention/tile_shape.h"

// What the planner leaves for the attention kernel, as it lies in device memory. Plain data.
//
// A request's prefix span is cut into leaves (SplitRequest). Each leaf's (max, sum, output) is
// computed from a fresh state; leaves are folded in ascending order into groups (LeafGroup),
// groups into the result; the in-flight rows belong to the last leaf. A work item is a leaf, a
// group or the whole request, for one KV head and row tile; the fold tree is the same.

namespace nwor {

// Where a request's prefix tokens lie.
enum class TokenSource : int32_t { kPages, kBlocks, kCompact };

// Where the first leaf begins, of a request whose rows see nothing before `token_begin`: leaves
// start on whole steps.
constexpr int32_t LeafOrigin(int32_t token_begin) { return token_begin / 32 * 32; }

struct PlanHeader {
  int32_t num_items = 0;
  int32_t num_split_pairs = 0;  // pairs whose items leave partial results
  int32_t max_parts = 0;        // of a pair
  int32_t unused[61] = {};
};

// What a request asks of the queue under the chosen grain.
struct PlanDemand {
  int32_t item_tokens;  // the longest of its items: the queue's sort key
  int32_t items;
  int32_t slots;
  int32_t split_pairs;
  int32_t parts;  // of a pair
};

// The planner's own notes on a request.
struct PlanRequest {
  int32_t num_rows;
  int32_t prefix_tokens;
  int32_t token_begin;  // the first prefix token that some row sees: beyond 0 with a window
  TokenSource source;
  int32_t leaf_tokens;
  int32_t num_leaves;
  int32_t query_start;
  int32_t leaves_per_item;  // 1, LeafGroup, or all
  PlanDemand demand;
  int64_t work;  // tokens of all its pairs

  constexpr int32_t span() const { return prefix_tokens - LeafOrigin(token_begin); }
};

struct PlanItem {
  int32_t request;  // -1: nothing to do, in the entries up to one per CTA
  int32_t kv_head;
  int32_t row_begin;  // packed rows [row_begin, row_begin + num_rows) of the request
  int32_t num_rows;
  int32_t query_start;
  int32_t request_rows;
  int32_t prefix_tokens;
  TokenSource source;
  int32_t token_begin;
  int32_t leaf_tokens;
  int32_t num_leaves;  // of the request
  int32_t leaf_begin;  // leaves [leaf_begin, leaf_end) are this item's
  int32_t leaf_end;
  int32_t slot;       // of this item's partial result; the pair's slots are consecutive; -1: none
  int32_t pair;       // among those that leave partial results, or -1
  int32_t num_parts;  // items of the pair

  // Of the pair's items, the last one excepted. REQUIRES: num_parts > 1.
  constexpr int32_t leaves_per_part() const {
    return num_parts == num_leaves ? 1 : LeafGroup(num_leaves);
  }
};

static_assert(sizeof(PlanHeader) == 256 && sizeof(PlanRequest) == 64 && sizeof(PlanItem) == 64);

// State that CTAs share. The planner clears it once; afterwards every launch leaves it ready for
// the next one: the CTA that asks for an item last, when the launch before is long over, prepares
// the counters of the launch after.
struct WorkCounters {
  uint32_t fetches;     // items asked for, by all launches: one per item processed
  uint32_t fetch_base;  // of them before the current launch
  uint32_t launch;      // its number
  uint32_t unused[29];
  struct {
    uint32_t started;  // CTAs that have their first item
    uint32_t done;     // items
    uint32_t tickets;  // shares of the combine that have been taken
    uint32_t unused[13];
  } round[2];  // by the parity of the launch
};
static_assert(sizeof(WorkCounters) == 256);

constexpr int64_t Align256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Byte offsets into the plan and into the workspace.
struct PlanOffsets {
  int64_t requests = sizeof(PlanHeader);
  int64_t items = 0;
  int64_t pairs = 0;  // [max_pairs] the first item of each pair that leaves partial results
  int64_t end = 0;
};
constexpr PlanOffsets LocatePlan(int32_t num_requests, const VerifyConfig& config) {
  PlanOffsets at;
  at.items = at.requests + Align256(int64_t{sizeof(PlanRequest)} * num_requests);
  at.pairs = at.items + Align256(int64_t{sizeof(PlanItem)} * config.max_items);
  at.end = at.pairs + Align256(int64_t{sizeof(PlanItem)} * config.max_pairs);
  return at;
}

// Behind the planned slots every CTA has some of its own, for items that fold several leaves: a
// group and the total.
inline constexpr int32_t kOwnSlots = 2;

struct WorkspaceOffsets {
  int64_t states = sizeof(WorkCounters);  // [slots, row_tile, 2] max (log2 units) and sum
  int64_t outputs = 0;                    // [slots, row_tile, head_dim]
  int64_t end = 0;
};
constexpr WorkspaceOffsets LocateWorkspace(int32_t head_dim, const VerifyConfig& config) {
  const int64_t slots = int64_t{config.max_slots} + int64_t{kOwnSlots} * config.num_ctas;
  WorkspaceOffsets at;
  at.outputs = at.states + Align256(slots * config.row_tile * 2 * 4);
  at.end = at.outputs + Align256(slots * config.row_tile * head_dim * 4);
  return at;
}

}  // namespace nwor
