#pragma once

#include <cstdint>
#include <vector>

#include "base/export.h"

// Trees as people and drafters write them down, put into the one form everything else takes: row 0
// the root, every parent before its child. Host only; no state, thread-safe.

namespace nwor {

struct Topology {
  std::vector<int32_t> parents;  // [R]; parents[0] = -1
  std::vector<int32_t> source;   // [R]; the entry given for the row, -1 = a root that was added
};

// `parents`: one entry per node, the index of its parent or -1, in any order. With one -1 that node
// is the root; with several, each is a draft below a root that is added (the last emitted token).
// add_root says that the only -1 is a draft, too. Rows keep the order given as far as parents come
// first. Throws nwor::Error naming the node for cycles, ranges, no root, or more than 256 rows.
NWOR_EXPORT Topology NormalizeTopology(const std::vector<int32_t>& parents, bool add_root = false);

}  // namespace nwor
