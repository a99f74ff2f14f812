#include "tree/topology.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "tree/tree_params.h"

namespace nwor {
namespace {

// Depth of every node, by walking up until one whose depth is known. Finds cycles.
std::vector<int32_t> DepthsOf(const std::vector<int32_t>& parents) {
  constexpr int32_t kUnknown = -1, kOnTheWay = -2;
  std::vector<int32_t> depths(parents.size(), kUnknown);
  std::vector<int32_t> trail;
  for (size_t node = 0; node < parents.size(); ++node) {
    auto at = static_cast<int32_t>(node);
    while (at >= 0 && depths[at] == kUnknown) {
      depths[at] = kOnTheWay;
      trail.push_back(at);
      at = parents[at];
    }
    NWOR_CHECK(at < 0 || depths[at] != kOnTheWay, "parents[", at, "]: got ", parents[at],
               ", expected a parent that is no descendant (node ", at, " is its own ancestor)");
    int32_t depth = at < 0 ? -1 : depths[at];
    for (; !trail.empty(); trail.pop_back()) depths[trail.back()] = ++depth;
  }
  return depths;
}

}  // namespace

Topology NormalizeTopology(const std::vector<int32_t>& parents, bool add_root) {
  const auto count = static_cast<int32_t>(parents.size());
  int32_t num_roots = 0;
  for (int32_t node = 0; node < count; ++node) {
    NWOR_CHECK(parents[node] >= -1 && parents[node] < count, "parents[", node, "]: got ",
               parents[node], ", expected -1 .. ", count - 1);
    num_roots += parents[node] == -1 ? 1 : 0;
  }
  const std::vector<int32_t> depths = DepthsOf(parents);
  const bool added = add_root || num_roots != 1;
  NWOR_CHECK(count > 0 || add_root, "parents: got no nodes, expected at least one");
  const int32_t rows = count + (added ? 1 : 0);
  NWOR_CHECK(rows <= kMaxTreeRows, "parents: got ", rows, " rows with the root, expected at most ",
             kMaxTreeRows);

  // The order given already has parents first, mostly; where not, depth does it.
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  const bool ordered = [&] {
    for (int32_t node = 0; node < count; ++node) {
      if (parents[node] >= node) return false;
    }
    return true;
  }();
  if (!ordered) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return depths[a] < depths[b]; });
  }
  Topology topology;
  if (added) {
    topology.parents.push_back(-1);
    topology.source.push_back(-1);
  }
  std::vector<int32_t> row_of(count);
  for (const int32_t node : order) {
    row_of[node] = static_cast<int32_t>(topology.parents.size());
    const int32_t above = added ? 0 : -1;
    topology.parents.push_back(parents[node] < 0 ? above : row_of[parents[node]]);
    topology.source.push_back(node);
  }
  return topology;
}

}  // namespace nwor
