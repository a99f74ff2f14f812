#include "verdict.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/check.h"
#include "tree/acceptance.h"
#include "tree/logits.h"
#include "tree/tree.h"

namespace engine {
namespace {

// The trees of some parts side by side, padded to the largest, and where their logits are.
struct Trees {
  nwor::Tree tree;
  at::Tensor logit_rows;  // [B, R]
};

// with_tail: a tail that was run again is part of the tree: a chain above its root.
Trees BuildTrees(const std::vector<const Part*>& parts, bool with_tail, at::Device device) {
  const auto tail_of = [&](const Part& part) {
    return with_tail && part.wants_fed_logits ? part.num_fed() : 0;
  };
  int64_t rows = 0;
  for (const Part* part : parts) rows = std::max(rows, tail_of(*part) + part->tree.num_rows());
  std::vector<int64_t> tokens, parents, logit_rows, prefixes, counts;
  for (const Part* part : parts) {
    const int64_t tail = tail_of(*part);
    const int64_t count = tail + part->tree.num_rows();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t in_tree = std::min(row, count - 1) - tail;
      tokens.push_back(in_tree < 0 ? part->fed[row] : part->tree.tokens[in_tree]);
      parents.push_back(in_tree <= 0 ? row - 1 : tail + part->tree.parent(in_tree));
      logit_rows.push_back(part->root_logits() + in_tree);
    }
    prefixes.push_back(part->prefix_len + part->num_fed() - tail);
    counts.push_back(count);
  }
  const std::vector<int64_t> sizes = {static_cast<int64_t>(parts.size()), rows};
  return {nwor::TreeFromParents(
              ToDevice(parents, device, at::kInt).view(sizes), ToDevice(prefixes, device, at::kInt),
              ToDevice(tokens, device).view(sizes), ToDevice(counts, device, at::kInt)),
          ToDevice(logit_rows, device).view(sizes)};
}

std::vector<int64_t> ToHost(const at::Tensor& tensor) {
  const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
  return {host.data_ptr<int64_t>(), host.data_ptr<int64_t>() + host.numel()};
}

// Accepted rows of request b, and the token after them.
Verdict Read(const nwor::Accepted& accepted, int64_t b) {
  Verdict verdict;
  verdict.next_token = accepted.next_token[b].item<int64_t>();
  NWOR_CHECK(verdict.next_token >= 0, "logits: got NaN, infinity or no token to choose from");
  verdict.path = ToHost(accepted.path[b].slice(0, 0, accepted.counts[b].item<int64_t>()));
  return verdict;
}

// A tail and the tree below it are one tree, and one walk judges both.
Verdict SplitAtRoot(Verdict verdict, int64_t tail) {
  const auto root = std::upper_bound(verdict.path.begin(), verdict.path.end(), tail);
  verdict.confirmed = root - verdict.path.begin();
  verdict.whole = verdict.confirmed == tail;
  verdict.path.erase(verdict.path.begin(), root);
  for (int64_t& row : verdict.path) row -= tail;
  return verdict;
}

at::Tensor Probabilities(const at::Tensor& logits, const Sampling& sampling) {
  const auto each = [&](double value, at::ScalarType dtype) {
    return at::full({logits.size(0)}, value, at::TensorOptions(logits.device()).dtype(dtype));
  };
  nwor::TargetProbsArguments arguments{.logits = logits};
  if (sampling.temperature != 1.0) arguments.temperature = each(sampling.temperature, at::kFloat);
  if (sampling.top_k > 0) arguments.top_k = each(static_cast<double>(sampling.top_k), at::kInt);
  if (sampling.top_p < 1.0) arguments.top_p = each(sampling.top_p, at::kFloat);
  return nwor::TargetProbs(arguments);
}

// The target's token after each of the rows [B, R]. A sampled one depends on its row's logits, its
// request's seed and its position alone: drafts are accepted where they are what plain sampling
// gives, and never change a text.
at::Tensor ChooseTokens(const at::Tensor& logits, const Trees& trees,
                        const std::vector<const Part*>& parts, const Sampling& sampling) {
  if (sampling.greedy()) return logits.argmax(-1).take(trees.logit_rows);
  const at::Tensor rows = trees.logit_rows.flatten();
  const int64_t count = rows.numel();
  std::vector<int64_t> seeds;
  for (const Part* part : parts) seeds.push_back(part->request->seed);
  const at::Tensor own =
      ToDevice(seeds, logits.device()).repeat_interleave(trees.logit_rows.size(1));
  const nwor::Coins coins =
      nwor::MakeCoins(own, trees.tree.positions.flatten() + 1, /*num_rows=*/1);
  const at::Tensor leaf = at::full({count, 1}, -1, own.options().dtype(at::kInt));
  const nwor::Accepted drawn =
      nwor::AcceptSampling(at::zeros({count, 1}, own.options()),
                           Probabilities(logits.index_select(0, rows).unsqueeze(1), sampling), leaf,
                           leaf, coins.accept, coins.final);
  return drawn.next_token.view(trees.logit_rows.sizes());
}

}  // namespace

std::vector<Verdict> Judge(const Round& round, const Sampling& sampling, bool lossless) {
  std::vector<Verdict> verdicts(round.parts().size());
  std::vector<const Part*> parts;
  std::vector<size_t> index;
  for (size_t i = 0; i < verdicts.size(); ++i) {
    if (!round.parts()[i].wants_logits) continue;
    parts.push_back(&round.parts()[i]);
    index.push_back(i);
  }
  if (parts.empty()) return verdicts;
  const at::Tensor& logits = round.logits();
  const Trees trees = BuildTrees(parts, lossless, logits.device());
  const nwor::Tree& tree = trees.tree;
  const nwor::Accepted accepted =
      nwor::AcceptGreedy(tree.tokens, ChooseTokens(logits, trees, parts, sampling),
                         tree.first_child, tree.next_sibling);
  for (size_t b = 0; b < parts.size(); ++b) {
    Verdict& verdict = verdicts[index[b]] = Read(accepted, static_cast<int64_t>(b));
    const Part& part = *parts[b];
    if (!part.wants_fed_logits) continue;
    const int64_t tail = part.num_fed();
    if (lossless) {
      verdict = SplitAtRoot(verdict, tail);
    } else if (sampling.greedy()) {
      std::vector<int64_t> said(part.fed.begin() + 1, part.fed.end());
      said.push_back(part.tree.tokens[0]);
      const at::Tensor told = logits.slice(0, part.logit_begin, part.logit_begin + tail).argmax(-1);
      verdict.disagreed = told.ne(ToDevice(said, logits.device())).sum().item<int64_t>();
    }
  }
  return verdicts;
}

}  // namespace engine
