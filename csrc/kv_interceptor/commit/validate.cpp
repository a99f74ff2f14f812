#include <vector>

#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/path.h"
#include "kv_interceptor/stage/slot_set.h"

namespace nwor {
namespace {

CommitVerdict CheckRound(const CommitParams& params) {
  if (params.round_status != nullptr && params.round_status[kStatusCode] != 0) {
    return {static_cast<CommitError>(params.round_status[kStatusCode]),
            params.round_status[kStatusRequest], params.round_status[kStatusIndex],
            params.round_status[kStatusValue]};
  }
  // Words are max(digest) and max(~digest) = ~min(digest) over the ranks.
  if (params.agreement != nullptr && params.agreement[0] != ~params.agreement[1]) {
    return {CommitError::kRankDisagreement, 0, 0, params.agreement[0]};
  }
  return {};
}

// Room for a request's rows in its compact view, and the slot of the row that is not staged.
CommitVerdict CheckTail(const CommitParams& params, int32_t request) {
  const CommitTail& tail = params.tail;
  if (tail.keys == nullptr || tail.begin[request] < 0) return {};
  const int64_t root = tail.root_slots[request];
  const int64_t end = tail.FirstRow(request) + params.counts[request];
  if (end > tail.capacity) return {CommitError::kTailFull, request, 0, end};
  if (root >= params.groups[0].geometry.num_slots()) {
    return {CommitError::kSlotRange, request, 0, root};
  }
  return {};
}

// One accepted entry: its row, its link to the entry before it, its destination in every group.
CommitVerdict CheckEntry(const CommitParams& params, int32_t request, int32_t index,
                         int32_t previous, std::vector<SlotSet>& seen) {
  const auto fault = [&](CommitError error, int64_t value) {
    return CommitVerdict{error, request, index, value};
  };
  const int64_t at = int64_t{request} * params.depth + index;
  const int32_t row = StagingRow(params, request, index);
  if (row < 0) return fault(CommitError::kPathRange, params.path[at]);
  const bool linked = params.parents == nullptr ? row > previous : params.parents[row] == previous;
  if (!linked) return fault(CommitError::kNotAChain, params.path[at]);
  for (int group = 0; group < params.num_groups; ++group) {
    const int64_t slot = DestinationSlot(params, group, request, index, row);
    if (slot < 0 || slot >= params.groups[group].geometry.num_slots()) {
      return fault(CommitError::kSlotRange, slot);
    }
    if (!seen[group].Insert(slot)) return fault(CommitError::kDuplicateSlot, slot);
  }
  return {};
}

}  // namespace

CommitVerdict ValidateCommit(const CommitParams& params) {
  if (const CommitVerdict verdict = CheckRound(params); verdict.error != CommitError::kOk) {
    return verdict;
  }
  thread_local std::vector<SlotSet> seen(kMaxCommitGroups);
  for (int group = 0; group < params.num_groups; ++group) {
    seen[group].Reset(int64_t{params.num_requests} * params.depth);
  }
  for (int32_t request = 0; request < params.num_requests; ++request) {
    const int32_t count = params.counts[request];
    if (count < 0 || count > params.depth) {
      return {CommitError::kCountRange, request, 0, count};
    }
    const CommitVerdict room = CheckTail(params, request);
    if (room.error != CommitError::kOk) return room;
    int32_t previous = params.tips == nullptr ? -1 : params.tips[request];
    for (int32_t index = 0; index < count; ++index) {
      const CommitVerdict verdict = CheckEntry(params, request, index, previous, seen);
      if (verdict.error != CommitError::kOk) return verdict;
      previous = StagingRow(params, request, index);
    }
  }
  return {};
}

}  // namespace nwor
