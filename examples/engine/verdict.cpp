#include "verdict.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "base/check.h"
#include "tree/acceptance.h"
#include "tree/logits.h"
#include "tree/tree.h"

namespace engine {
namespace {

// The coins of a tail that is judged again: above every number of cuts, which are the other salts.
constexpr int64_t kTailSalt = 1 << 20;

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

// Greedy: a tail and the tree below it are one tree, and one walk judges both.
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

// Sampling: tokens of the tail were drawn from what a view gave (tail_probs). Each stands with
// probability min(1, p / q); only if all do, the tree's verdict counts.
Verdict Confirm(const Round& round, const Part& part, const Sampling& sampling, Verdict tree,
                const at::Tensor& final_coin) {
  const at::Device device = round.logits().device();
  const int64_t tail = part.num_fed();
  std::vector<int64_t> chain = part.fed;
  chain.push_back(part.tree.tokens[0]);
  const at::Tensor fed = round.logits().slice(0, part.logit_begin, part.logit_begin + tail);
  const at::Tensor probs = at::cat(
      {Probabilities(fed.unsqueeze(0), sampling), tree.probs.slice(0, 0, 1).unsqueeze(0)}, 1);
  const Request& request = *part.request;
  const nwor::Coins coins =
      nwor::MakeCoins(ToDevice({FoldSeed(FoldSeed(request.seed, request.cuts), kTailSalt)}, device),
                      ToDevice({part.prefix_len + 1}, device), tail + 1);
  const nwor::Accepted judged = nwor::AcceptChainSampling(
      ToDevice(chain, device).unsqueeze(0), probs, at::stack(request.tail_probs).unsqueeze(0),
      coins.accept, final_coin);
  Verdict verdict = Read(judged, 0);
  tree.confirmed = static_cast<int64_t>(verdict.path.size());
  tree.whole = tree.confirmed == tail;
  if (!tree.whole) {
    tree.path.clear();
    tree.next_token = verdict.next_token;
  }
  return tree;
}

}  // namespace

int64_t FoldSeed(int64_t seed, int64_t salt) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  return static_cast<int64_t>(static_cast<uint64_t>(seed) + static_cast<uint64_t>(salt) * kGolden);
}

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
  const at::Device device = logits.device();
  const Trees trees = BuildTrees(parts, lossless && sampling.greedy(), device);
  const nwor::Tree& tree = trees.tree;
  if (sampling.greedy()) {
    const at::Tensor ids = logits.argmax(-1);
    const nwor::Accepted accepted = nwor::AcceptGreedy(tree.tokens, ids.take(trees.logit_rows),
                                                       tree.first_child, tree.next_sibling);
    for (size_t b = 0; b < parts.size(); ++b) {
      Verdict& verdict = verdicts[index[b]] = Read(accepted, static_cast<int64_t>(b));
      const Part& part = *parts[b];
      if (!part.wants_fed_logits) continue;
      const int64_t tail = part.num_fed();
      if (lossless) {
        verdict = SplitAtRoot(verdict, tail);
      } else {
        std::vector<int64_t> said(part.fed.begin() + 1, part.fed.end());
        said.push_back(part.tree.tokens[0]);
        const at::Tensor told = ids.slice(0, part.logit_begin, part.logit_begin + tail);
        verdict.disagreed = told.ne(ToDevice(said, device)).sum().item<int64_t>();
      }
    }
    return verdicts;
  }
  const at::Tensor probs = Probabilities(
      logits.index_select(0, trees.logit_rows.flatten()).unflatten(0, trees.logit_rows.sizes()),
      sampling);
  std::vector<int64_t> seeds;
  for (const Part* part : parts) {
    seeds.push_back(FoldSeed(part->request->seed, part->request->cuts));
  }
  const nwor::Coins coins = nwor::MakeCoins(ToDevice(seeds, device),
                                            tree.positions.select(1, 0) + 1, tree.tokens.size(1));
  const nwor::Accepted accepted = nwor::AcceptSampling(
      tree.tokens, probs, tree.first_child, tree.next_sibling, coins.accept, coins.final);
  for (size_t b = 0; b < parts.size(); ++b) {
    const auto at = static_cast<int64_t>(b);
    Verdict& verdict = verdicts[index[b]] = Read(accepted, at);
    verdict.probs = probs[at];
    if (lossless && parts[b]->wants_fed_logits) {
      verdict = Confirm(round, *parts[b], sampling, verdict, coins.final.slice(0, at, at + 1));
    }
  }
  return verdicts;
}

}  // namespace engine
