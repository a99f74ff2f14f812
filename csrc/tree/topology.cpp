#include "tree/topology.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

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

std::string PathText(const std::vector<int32_t>& path) {
  std::string text = "(";
  for (size_t i = 0; i < path.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(path[i]);
  return text + ")";
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

StaticTopology TopologyFromChoices(const std::vector<std::vector<int32_t>>& choices) {
  NWOR_CHECK(choices.size() < kMaxTreeRows, "choices: got ", choices.size(),
             " paths, expected at most ", kMaxTreeRows - 1);
  std::vector<size_t> order(choices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return choices[a].size() != choices[b].size() ? choices[a].size() < choices[b].size()
                                                  : choices[a] < choices[b];
  });
  std::map<std::vector<int32_t>, int32_t> row_of = {{{}, 0}};
  StaticTopology topology{{-1}, {0}, {-1}};
  for (const size_t choice : order) {
    const std::vector<int32_t>& path = choices[choice];
    NWOR_CHECK(!path.empty(), "choices[", choice,
               "]: got an empty path, expected one rank or more");
    NWOR_CHECK(path.back() >= 0, "choices[", choice, "]: got ", PathText(path),
               ", expected ranks of 0 or more");
    const auto parent = row_of.find({path.begin(), path.end() - 1});
    NWOR_CHECK(parent != row_of.end(), "choices[", choice, "]: got ", PathText(path),
               " without its parent, expected ", PathText({path.begin(), path.end() - 1}),
               " among the choices");
    const auto row = static_cast<int32_t>(topology.parents.size());
    NWOR_CHECK(row_of.emplace(path, row).second, "choices[", choice, "]: got ", PathText(path),
               " twice, expected each path once");
    topology.parents.push_back(parent->second);
    topology.depths.push_back(static_cast<int32_t>(path.size()));
    topology.ranks.push_back(path.back());
  }
  return topology;
}

}  // namespace nwor
