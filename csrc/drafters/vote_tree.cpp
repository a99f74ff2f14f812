#include "drafters/vote_tree.h"

#include <algorithm>

namespace nwor {

VoteTree::VoteTree(int64_t root_token) { nodes_.push_back({root_token, 0, -1, 0, -1, -1}); }

int32_t VoteTree::Child(int32_t parent, int64_t token) {
  int32_t last = -1;
  for (int32_t child = nodes_[parent].first_child; child >= 0; child = nodes_[child].next_sibling) {
    if (nodes_[child].token == token) return child;
    last = child;
  }
  const auto made = static_cast<int32_t>(nodes_.size());
  nodes_.push_back({token, 0, parent, nodes_[parent].depth + 1, -1, -1});
  (last < 0 ? nodes_[parent].first_child : nodes_[last].next_sibling) = made;
  return made;
}

void VoteTree::Add(const std::vector<int64_t>& continuation, int64_t weight) {
  int32_t node = 0;
  for (const int64_t token : continuation) {
    node = Child(node, token);
    nodes_[node].votes += weight;
  }
}

void VoteTree::MarkBestChildren(int32_t parent, int64_t top_k, std::vector<bool>& wanted) const {
  std::vector<int32_t> children;
  for (int32_t child = nodes_[parent].first_child; child >= 0; child = nodes_[child].next_sibling) {
    children.push_back(child);
  }
  std::stable_sort(children.begin(), children.end(), [this](int32_t one, int32_t other) {
    return nodes_[one].votes > nodes_[other].votes;
  });
  const auto kept = std::min<size_t>(children.size(), static_cast<size_t>(top_k));
  for (size_t i = 0; i < kept; ++i) wanted[children[i]] = true;
}

DraftTree VoteTree::Best(int64_t rows, int64_t top_k) const {
  // A row is wanted if it is among the best children of a wanted row: parents are looked at first.
  std::vector<bool> wanted(nodes_.size(), false);
  wanted[0] = true;
  std::vector<int32_t> order;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    if (!wanted[node]) continue;
    if (node > 0) order.push_back(static_cast<int32_t>(node));
    MarkBestChildren(static_cast<int32_t>(node), top_k, wanted);
  }
  // No row has more votes than its parent, so what is taken is a tree.
  std::stable_sort(order.begin(), order.end(), [this](int32_t one, int32_t other) {
    if (nodes_[one].votes != nodes_[other].votes) return nodes_[one].votes > nodes_[other].votes;
    return nodes_[one].depth < nodes_[other].depth;
  });
  order.resize(std::min<size_t>(order.size(), static_cast<size_t>(rows - 1)));
  std::sort(order.begin(), order.end());
  DraftTree tree{{nodes_[0].token}, {-1}};
  std::vector<int32_t> row_of(nodes_.size(), 0);
  for (const int32_t node : order) {
    row_of[node] = static_cast<int32_t>(tree.tokens.size());
    tree.tokens.push_back(nodes_[node].token);
    tree.parents.push_back(row_of[nodes_[node].parent]);
  }
  return tree;
}

}  // namespace nwor
