#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings/ops.h"
#include "tree/acceptance.h"
#include "tree/likeliest.h"
#include "tree/logits.h"
#include "tree/tree.h"

// The torch ops of draft trees, acceptance and what surrounds it.

namespace nwor {
namespace {

using TreeTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using AcceptedTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// tokens are left out: they are the caller's, or returned beside these.
TreeTensors Flatten(const Tree& tree) {
  return {tree.parents,     tree.positions,    tree.depths, tree.mask,
          tree.first_child, tree.next_sibling, tree.status};
}

AcceptedTensors Flatten(const Accepted& accepted) {
  return {accepted.path, accepted.counts, accepted.next_token};
}

TreeTensors FakeTree(const at::Tensor& like, const c10::SymInt& batch, const c10::SymInt& rows) {
  const auto i32 = like.options().dtype(at::kInt);
  const auto i64 = like.options().dtype(at::kLong);
  const auto make = [&](at::SymIntArrayRef sizes, const at::TensorOptions& options) {
    return at::empty_symint(sizes, options);
  };
  return {make({batch, rows}, i32), make({batch, rows}, i64),
          make({batch, rows}, i32), make({batch, rows, (rows + 63) / 64}, i64),
          make({batch, rows}, i32), make({batch, rows}, i32),
          make({batch}, i64)};
}

AcceptedTensors FakeAccepted(const at::Tensor& tokens) {
  const auto i32 = tokens.options().dtype(at::kInt);
  const auto batch = tokens.sym_size(0);
  return {at::empty_symint({batch, tokens.sym_size(1)}, i32), at::empty_symint({batch}, i32),
          at::empty_symint({batch}, i32.dtype(at::kLong))};
}

TreeTensors TreeFromParentsOp(const at::Tensor& parents, const at::Tensor& prefix_lens,
                              const OptionalTensor& num_rows) {
  return WithTorchErrors([&]() -> TreeTensors {
    return Flatten(TreeFromParents(parents, prefix_lens, std::nullopt, num_rows));
  });
}

TreeTensors TreeFromParentsFake(const at::Tensor& parents, const at::Tensor& prefix_lens,
                                const OptionalTensor& num_rows) {
  return FakeTree(parents, parents.sym_size(0), parents.sym_size(1));
}

using TopKTensors = decltype(std::tuple_cat(std::tuple<at::Tensor>(), TreeTensors()));

TopKTensors TreeFromTopKOp(const std::vector<at::Tensor>& token_steps,
                           const std::vector<at::Tensor>& score_steps,
                           const std::vector<at::Tensor>& parent_steps,
                           const at::Tensor& root_tokens, const at::Tensor& prefix_lens,
                           int64_t num_rows) {
  return WithTorchErrors([&]() -> TopKTensors {
    const Tree tree =
        TreeFromTopK(token_steps, score_steps, parent_steps, root_tokens, prefix_lens, num_rows);
    return std::tuple_cat(std::tuple(tree.tokens), Flatten(tree));
  });
}

TopKTensors TreeFromTopKFake(const std::vector<at::Tensor>& token_steps,
                             const std::vector<at::Tensor>& score_steps,
                             const std::vector<at::Tensor>& parent_steps,
                             const at::Tensor& root_tokens, const at::Tensor& prefix_lens,
                             c10::SymInt num_rows) {
  const c10::SymInt rows = std::move(num_rows);
  const auto batch = root_tokens.sym_size(0);
  return std::tuple_cat(
      std::tuple(at::empty_symint({batch, rows}, root_tokens.options().dtype(at::kLong))),
      FakeTree(root_tokens, batch, rows));
}

AcceptedTensors AcceptGreedyOp(const at::Tensor& tokens, const at::Tensor& target_ids,
                               const at::Tensor& first_child, const at::Tensor& next_sibling,
                               const OptionalTensor& status) {
  return WithTorchErrors([&]() -> AcceptedTensors {
    return Flatten(AcceptGreedy(tokens, target_ids, first_child, next_sibling, status));
  });
}

AcceptedTensors AcceptSamplingOp(const at::Tensor& tokens, const at::Tensor& target_probs,
                                 const at::Tensor& first_child, const at::Tensor& next_sibling,
                                 const at::Tensor& coins, const at::Tensor& final_coins,
                                 double threshold_single, double threshold_acc,
                                 const OptionalTensor& status) {
  return WithTorchErrors([&]() -> AcceptedTensors {
    return Flatten(AcceptSampling(tokens, target_probs, first_child, next_sibling, coins,
                                  final_coins, threshold_single, threshold_acc, status));
  });
}

AcceptedTensors AcceptChainSamplingOp(const at::Tensor& tokens, const at::Tensor& target_probs,
                                      const OptionalTensor& draft_probs, const at::Tensor& coins,
                                      const at::Tensor& final_coins,
                                      const OptionalTensor& num_drafts,
                                      const OptionalTensor& status) {
  return WithTorchErrors([&]() -> AcceptedTensors {
    return Flatten(AcceptChainSampling(tokens, target_probs, draft_probs, coins, final_coins,
                                       num_drafts, status));
  });
}

// The fakes of all acceptances: the shapes follow from the first argument, tokens.
template <typename... Rest>
AcceptedTensors AcceptFake(const at::Tensor& tokens, Rest... rest) {
  return FakeAccepted(tokens);
}

std::tuple<at::Tensor, at::Tensor> MakeCoinsOp(const at::Tensor& seeds, const at::Tensor& positions,
                                               int64_t num_rows) {
  return WithTorchErrors([&]() -> std::tuple<at::Tensor, at::Tensor> {
    const Coins coins = MakeCoins(seeds, positions, num_rows);
    return {coins.accept, coins.final};
  });
}

std::tuple<at::Tensor, at::Tensor> MakeCoinsFake(const at::Tensor& seeds,
                                                 const at::Tensor& positions,
                                                 c10::SymInt num_rows) {
  const auto options = seeds.options().dtype(at::kFloat);
  const auto batch = seeds.sym_size(0);
  return {at::empty_symint({batch, std::move(num_rows)}, options),
          at::empty_symint({batch}, options)};
}

at::Tensor TargetProbsOp(const at::Tensor& logits, const OptionalTensor& temperature,
                         const OptionalTensor& top_k, const OptionalTensor& top_p,
                         const OptionalTensor& min_p, const OptionalTensor& repetition_penalty,
                         const OptionalTensor& frequency_penalty,
                         const OptionalTensor& presence_penalty,
                         const OptionalTensor& output_counts, const OptionalTensor& prompt_mask,
                         const OptionalTensor& tokens, const OptionalTensor& parents,
                         const OptionalTensor& bitmask, const OptionalTensor& status) {
  return WithTorchErrors([&]() -> at::Tensor {
    return TargetProbs({logits, temperature, top_k, top_p, min_p, repetition_penalty,
                        frequency_penalty, presence_penalty, output_counts, prompt_mask, tokens,
                        parents, bitmask, status});
  });
}

template <typename... Rest>
at::Tensor TargetProbsFake(const at::Tensor& logits, Rest... rest) {
  return at::empty_symint(logits.sym_sizes(), logits.options().dtype(at::kFloat));
}

std::tuple<at::Tensor, at::Tensor> LikeliestTokensOp(const at::Tensor& logits, int64_t count) {
  return WithTorchErrors([&]() -> std::tuple<at::Tensor, at::Tensor> {
    const Likeliest found = LikeliestTokens(logits, count);
    return {found.tokens, found.log_probs};
  });
}

std::tuple<at::Tensor, at::Tensor> LikeliestTokensFake(const at::Tensor& logits,
                                                       c10::SymInt count) {
  std::vector<c10::SymInt> sizes = logits.sym_sizes().vec();
  TORCH_CHECK_VALUE(!sizes.empty(), "logits: got sizes [], expected [.., vocabulary]");
  sizes.back() = std::move(count);
  return {at::empty_symint(sizes, logits.options().dtype(at::kLong)),
          at::empty_symint(sizes, logits.options().dtype(at::kFloat))};
}

}  // namespace

#define NWOR_TREE_RESULT "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
#define NWOR_ACCEPTED "(Tensor, Tensor, Tensor)"

void RegisterTreeSchemas(torch::Library& library) {
  library.def(
      "tree_from_parents(Tensor parents, Tensor prefix_lens, Tensor? num_rows=None) "
      "-> " NWOR_TREE_RESULT);
  library.def(
      "tree_from_topk(Tensor[] token_steps, Tensor[] score_steps, Tensor[] parent_steps, "
      "Tensor root_tokens, Tensor prefix_lens, SymInt num_rows) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "accept_greedy(Tensor tokens, Tensor target_ids, Tensor first_child, Tensor next_sibling, "
      "Tensor(a!)? status=None) -> " NWOR_ACCEPTED);
  library.def(
      "accept_sampling(Tensor tokens, Tensor target_probs, Tensor first_child, "
      "Tensor next_sibling, Tensor coins, Tensor final_coins, float threshold_single=1.0, "
      "float threshold_acc=1.0, Tensor(a!)? status=None) -> " NWOR_ACCEPTED);
  library.def(
      "accept_chain_sampling(Tensor tokens, Tensor target_probs, Tensor? draft_probs, "
      "Tensor coins, Tensor final_coins, Tensor? num_drafts=None, Tensor(a!)? status=None) "
      "-> " NWOR_ACCEPTED);
  library.def("make_coins(Tensor seeds, Tensor positions, SymInt num_rows) -> (Tensor, Tensor)");
  library.def(
      "target_probs(Tensor logits, Tensor? temperature=None, Tensor? top_k=None, "
      "Tensor? top_p=None, Tensor? min_p=None, Tensor? repetition_penalty=None, "
      "Tensor? frequency_penalty=None, Tensor? presence_penalty=None, "
      "Tensor? output_counts=None, Tensor? prompt_mask=None, Tensor? tokens=None, "
      "Tensor? parents=None, Tensor? bitmask=None, Tensor(a!)? status=None) -> Tensor");
  library.def("likeliest_tokens(Tensor logits, SymInt count) -> (Tensor, Tensor)");
}

void RegisterTreeKernels(torch::Library& library) {
  library.impl("tree_from_parents", &TreeFromParentsOp);
  library.impl("tree_from_topk", &TreeFromTopKOp);
  library.impl("accept_greedy", &AcceptGreedyOp);
  library.impl("accept_sampling", &AcceptSamplingOp);
  library.impl("accept_chain_sampling", &AcceptChainSamplingOp);
  library.impl("make_coins", &MakeCoinsOp);
  library.impl("target_probs", &TargetProbsOp);
  library.impl("likeliest_tokens", &LikeliestTokensOp);
}

void RegisterTreeFakes(torch::Library& library) {
  using T = const at::Tensor&;
  using O = const OptionalTensor&;
  library.impl("tree_from_parents", FakeKernel<&TreeFromParentsFake>());
  library.impl("tree_from_topk", FakeKernel<&TreeFromTopKFake>());
  library.impl("accept_greedy", FakeKernel<&AcceptFake<T, T, T, O>>());
  library.impl("accept_sampling", FakeKernel<&AcceptFake<T, T, T, T, T, double, double, O>>());
  library.impl("accept_chain_sampling", FakeKernel<&AcceptFake<T, O, T, T, O, O>>());
  library.impl("make_coins", FakeKernel<&MakeCoinsFake>());
  library.impl("target_probs",
               FakeKernel<&TargetProbsFake<O, O, O, O, O, O, O, O, O, O, O, O, O>>());
  library.impl("likeliest_tokens", FakeKernel<&LikeliestTokensFake>());
}

}  // namespace nwor
