#include "session/draft_tree.h"

#include <algorithm>

#include "base/check.h"

namespace nwor {

void DraftTree::Validate(int64_t most_rows) const {
  NWOR_CHECK(num_rows() >= 1, "tree: got no rows, expected at least a root");
  NWOR_CHECK(num_rows() <= most_rows, "tree: got ", num_rows(), " rows, expected at most ",
             most_rows);
  NWOR_CHECK(parents.empty() || parents.size() == tokens.size(), "parents: got ", parents.size(),
             " rows, expected ", tokens.size(), " as tokens, or none for a chain");
  for (int64_t row = 0; row < num_rows(); ++row) {
    const int32_t above = parent(row);
    NWOR_CHECK(row == 0 ? above == -1 : above >= 0 && above < row, "parents: got ", above,
               " for row ", row, ", expected ",
               row == 0 ? "-1, the root's" : "an earlier row, one root only");
  }
}

bool DraftTree::is_chain() const {
  for (int64_t row = 1; row < num_rows(); ++row) {
    if (parent(row) != row - 1) return false;
  }
  return true;
}

std::vector<int32_t> DraftTree::Depths() const {
  std::vector<int32_t> depths(tokens.size(), 0);
  for (int64_t row = 1; row < num_rows(); ++row) depths[row] = depths[parent(row)] + 1;
  return depths;
}

int32_t DraftTree::Depth() const {
  const std::vector<int32_t> depths = Depths();
  return *std::max_element(depths.begin(), depths.end());
}

DraftTree DraftTree::Pruned(int64_t depth) const {
  const std::vector<int32_t> depths = Depths();
  DraftTree pruned{{tokens[0]}, {-1}};
  std::vector<int32_t> place(tokens.size(), 0);  // of each row that is kept
  for (int64_t row = 1; row < num_rows(); ++row) {
    if (depths[row] > depth) continue;
    place[row] = static_cast<int32_t>(pruned.num_rows());
    pruned.tokens.push_back(tokens[row]);
    pruned.parents.push_back(place[parent(row)]);
  }
  return pruned;
}

}  // namespace nwor
