#include "kv_interceptor/commit/fault.h"

#include "base/check.h"

namespace nwor {

bool IsInputFault(CommitError error) {
  switch (error) {
    case CommitError::kCountRange:
    case CommitError::kPathRange:
    case CommitError::kNotAChain:
    case CommitError::kSlotRange:
    case CommitError::kDuplicateSlot:
      return true;
    default:
      return false;
  }
}

namespace {

// Of the first group that has no such slot: a verdict does not name the group.
int64_t LastSlot(const CommitParams& params, int64_t slot) {
  for (int g = 0; g < params.num_groups; ++g) {
    const int64_t num_slots = params.groups[g].geometry.num_slots();
    if (slot < 0 || slot >= num_slots) return num_slots - 1;
  }
  return params.groups[0].geometry.num_slots() - 1;
}

}  // namespace

std::string ExplainInputFault(const CommitVerdict& verdict, const CommitParams& params) {
  const std::string got = Concat("got ", verdict.value, " for request ", verdict.request);
  const std::string at = Concat(got, " at index ", verdict.index);
  const std::string_view label = Label(verdict.error);
  switch (verdict.error) {
    case CommitError::kCountRange:
      return Concat("counts: ", got, ", expected 0 to ", params.depth, " (", label, ")");
    case CommitError::kPathRange:
      return Concat("path: ", at, ", expected a draft row of that request (", label, ")");
    case CommitError::kNotAChain:
      return Concat("path: ", at, ", expected a child of the row before it (", label, ")");
    case CommitError::kSlotRange:
      return Concat("slots: ", at, ", expected a slot of the cache, 0 to ",
                    LastSlot(params, verdict.value), " (", label, ")");
    default:
      return Concat("slots: ", at, " again, expected each destination once (", label, ")");
  }
}

}  // namespace nwor
