#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tree/fault.h"
#include "tree/tree_params.h"

namespace nwor {
namespace {

// One request's part of the outputs.
TreeOutputs Of(const TreeOutputs& out, int64_t request, int64_t rows) {
  TreeOutputs one = out;
  const int64_t words = (rows + 63) / 64;
  if (one.tokens != nullptr) one.tokens += request * rows;
  one.parents += request * rows;
  one.positions += request * rows;
  one.depths += request * rows;
  one.mask += request * rows * words;
  one.first_child += request * rows;
  one.next_sibling += request * rows;
  one.status += request;
  return one;
}

// Follows parents up from `row`: back at `row` is a cycle, anything else a parent named too early.
TreeFault ForwardOrCycle(const int32_t* parents, int rows, int row) {
  int at = row;
  for (int hops = 0; hops < rows; ++hops) {
    at = parents[at];
    if (at == row) return TreeFault::kCycle;
    if (at < 0 || at >= rows) break;
  }
  return TreeFault::kForwardParent;
}

int64_t FindFault(const int32_t* parents, int rows) {
  if (parents[0] != -1) return PackFault(TreeFault::kRootParent, 0, parents[0]);
  for (int row = 1; row < rows; ++row) {
    const int32_t parent = parents[row];
    if (parent >= 0 && parent < row) continue;
    TreeFault fault = TreeFault::kParentRange;
    if (parent == -1) fault = TreeFault::kSecondRoot;
    if (parent >= row && parent < rows) fault = ForwardOrCycle(parents, rows, row);
    return PackFault(fault, row, parent);
  }
  return 0;
}

// Everything that follows from valid parents of the first `used` rows. Rows beyond see nothing.
void Finish(const TreeOutputs& out, int used, int rows, int64_t prefix_len) {
  const int words = (rows + 63) / 64;
  std::fill_n(out.first_child, rows, -1);
  std::fill_n(out.next_sibling, rows, -1);
  std::fill_n(out.mask, static_cast<int64_t>(rows) * words, 0);
  std::array<int32_t, kMaxTreeRows> last_child;
  last_child.fill(-1);
  for (int row = 0; row < rows; ++row) {
    const int32_t parent = row < used ? out.parents[row] : -1;
    out.parents[row] = parent;
    out.depths[row] = parent < 0 ? 0 : out.depths[parent] + 1;
    out.positions[row] = prefix_len + out.depths[row];
    if (row >= used) continue;
    uint64_t* mask = out.mask + static_cast<int64_t>(row) * words;
    if (parent >= 0) {
      std::copy_n(out.mask + static_cast<int64_t>(parent) * words, words, mask);
      (last_child[parent] < 0 ? out.first_child[parent] : out.next_sibling[last_child[parent]]) =
          row;
      last_child[parent] = row;
    }
    mask[row / 64] |= uint64_t{1} << (row % 64);
  }
}

// What an invalid request gets: rows that see themselves and lead nowhere.
void FinishAlone(const TreeOutputs& out, int rows, int32_t prefix_len) {
  const int words = (rows + 63) / 64;
  std::fill_n(out.parents, rows, -1);
  Finish(out, 0, rows, PrefixFault(prefix_len) == 0 ? prefix_len : 0);
  for (int row = 0; row < rows; ++row) {
    out.mask[static_cast<int64_t>(row) * words + row / 64] = uint64_t{1} << (row % 64);
  }
}

struct Candidate {
  float score;
  int32_t id;
};

// The candidates of one request with the scores they compete with, or a fault.
int64_t Collect(const TopKParams& params, int64_t request, std::vector<Candidate>* candidates,
                std::vector<int32_t>* parents) {
  const int k = params.k;
  for (int step = 0; step < params.num_steps; ++step) {
    const int first = FirstCandidate(step, k);
    const int count = step == 0 ? k : k * k;
    const TopKParams::Step& in = params.steps[step];
    for (int i = 0; i < count; ++i) {
      float score = in.scores[request * count + i];
      if (std::isnan(score)) return PackFault(TreeFault::kScore, 0, first + i);
      int32_t parent = -1;
      if (step > 0) {
        const int64_t kept = k == 1 ? step - 1 : KeptParents(params, step, request)[i / k];
        if (kept < FirstCandidate(step - 1, k) || kept >= first) {
          return PackFault(TreeFault::kKeptRange, 0, Saturate(kept));
        }
        parent = static_cast<int32_t>(kept);
        // A child never outranks its parent: the best of the batch are closed under parents, since
        // equal scores go by id and a parent's is the smaller one.
        score = std::min(score, (*candidates)[parent].score);
      }
      candidates->push_back({score, first + i});
      parents->push_back(parent);
    }
  }
  return 0;
}

void BuildFromTopK(const TopKParams& params, int64_t request) {
  const TreeOutputs out = Of(params.out, request, params.rows);
  const int total = NumCandidates(params.num_steps, params.k);
  std::vector<Candidate> candidates;
  std::vector<int32_t> parents;
  candidates.reserve(total);
  parents.reserve(total);
  *out.status = PrefixFault(params.prefix_lens[request]);
  if (*out.status == 0) *out.status = Collect(params, request, &candidates, &parents);
  std::fill_n(out.tokens, params.rows, 0);
  out.tokens[0] = params.root_tokens[request];
  if (*out.status != 0) return FinishAlone(out, params.rows, params.prefix_lens[request]);

  const auto chosen_end = candidates.begin() + (params.rows - 1);
  std::nth_element(candidates.begin(), chosen_end, candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.score != b.score ? a.score > b.score : a.id < b.id;
                   });
  std::sort(candidates.begin(), chosen_end,
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  std::vector<int32_t> row_of(total, -1);
  out.parents[0] = -1;
  for (int row = 1; row < params.rows; ++row) {
    const int32_t id = candidates[row - 1].id;
    row_of[id] = row;
    out.parents[row] = parents[id] < 0 ? 0 : row_of[parents[id]];
    const int step = id < params.k ? 0 : 1 + (id - params.k) / (params.k * params.k);
    const int count = step == 0 ? params.k : params.k * params.k;
    out.tokens[row] =
        params.steps[step].tokens[request * count + id - FirstCandidate(step, params.k)];
  }
  Finish(out, params.rows, params.rows, params.prefix_lens[request]);
}

}  // namespace

void TreeFromParentsCpu(const ParentsParams& params) {
  for (int64_t request = 0; request < params.num_requests; ++request) {
    const TreeOutputs out = Of(params.out, request, params.rows);
    const int32_t* parents = params.parents + request * params.rows;
    const int used = params.num_rows == nullptr ? params.rows : params.num_rows[request];
    *out.status = PrefixFault(params.prefix_lens[request]);
    if (*out.status == 0) {
      *out.status = used < 1 || used > params.rows ? PackFault(TreeFault::kRowCount, 0, used)
                                                   : FindFault(parents, used);
    }
    if (*out.status != 0) {
      FinishAlone(out, params.rows, params.prefix_lens[request]);
      continue;
    }
    std::copy_n(parents, used, out.parents);
    Finish(out, used, params.rows, params.prefix_lens[request]);
  }
}

void TreeFromTopKCpu(const TopKParams& params) {
  for (int64_t request = 0; request < params.num_requests; ++request) {
    BuildFromTopK(params, request);
  }
}

}  // namespace nwor
