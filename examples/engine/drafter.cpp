#include "drafter.h"

namespace engine {

void NgramDrafter::Begin(int64_t request, int64_t first_token) {
  texts_.erase(request);
  texts_.try_emplace(request, nwor::NgramOptions{}).first->second.Append({first_token});
}

void NgramDrafter::Observe(int64_t request, const std::vector<int64_t>& tokens,
                           const at::Tensor& features) {
  texts_.at(request).Append(tokens);
}

void NgramDrafter::Retract(int64_t request, int64_t count) {
  nwor::NgramIndex& text = texts_.at(request);
  text.Truncate(text.size() - count);
}

std::vector<nwor::DraftTree> NgramDrafter::Draft(const std::vector<int64_t>& requests,
                                                 const TreeShape& shape) {
  std::vector<nwor::DraftTree> trees;
  for (const int64_t request : requests) {
    trees.push_back(texts_.at(request).Draft(shape.rows, shape.depth, shape.top_k));
  }
  return trees;
}

nwor::DraftTree Pruned(const nwor::DraftTree& tree, int64_t depth) {
  const std::vector<int32_t> depths = tree.Depths();
  nwor::DraftTree kept{{tree.tokens[0]}, {-1}};
  std::vector<int32_t> place(tree.num_rows(), 0);
  for (int64_t row = 1; row < tree.num_rows(); ++row) {
    if (depths[row] > depth) continue;
    place[row] = static_cast<int32_t>(kept.num_rows());
    kept.tokens.push_back(tree.tokens[row]);
    kept.parents.push_back(place[tree.parent(row)]);
  }
  return kept;
}

}  // namespace engine
