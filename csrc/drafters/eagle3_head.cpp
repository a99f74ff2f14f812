#include "drafters/eagle3_head.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "base/check.h"
#include "linear/linear_rows.h"
#include "tree/tree.h"

namespace nwor {
namespace {

// Entries kept beyond the window, for Retract.
constexpr int64_t kSpareEntries = 512;

// query [r, Hq, D] over entries [n, Hkv, D] -> [r, Hq * D]; bias [r, n] or none.
at::Tensor Attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                  const std::optional<at::Tensor>& bias) {
  const int64_t groups = query.size(1) / keys.size(1);
  const auto heads_first = [](const at::Tensor& side) { return side.transpose(0, 1).unsqueeze(0); };
  const at::Tensor out = at::scaled_dot_product_attention(
      heads_first(query), heads_first(keys.repeat_interleave(groups, 1)),
      heads_first(values.repeat_interleave(groups, 1)), bias);
  return out.squeeze(0).transpose(0, 1).flatten(1);
}

// Request b of tensors [B, ..].
std::vector<at::Tensor> Only(std::vector<at::Tensor> steps, int64_t b) {
  for (at::Tensor& step : steps) step = step.slice(0, b, b + 1);
  return steps;
}

}  // namespace

Eagle3Head::Eagle3Head(const Eagle3Shape& shape, std::map<std::string, at::Tensor> weights,
                       const at::Tensor& embedding, const at::Tensor& output,
                       const Eagle3Options& options)
    : shape_(shape),
      least_(options.min_probability > 0 ? std::log(options.min_probability)
                                         : -std::numeric_limits<double>::infinity()),
      embedding_(embedding) {
  const int64_t hidden = shape.hidden, vocabulary = shape.target_vocabulary;
  const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads, dim = shape.head_dim;
  for (const int64_t size : {hidden, vocabulary, shape.intermediate, kv_heads, dim, shape.window}) {
    NWOR_CHECK(size >= 1, "shape: got a size of ", size, ", expected 1 or more");
  }
  NWOR_CHECK(heads >= 1 && heads % kv_heads == 0 && dim % 2 == 0 && !shape.feature_layers.empty(),
             "shape: got ", heads, " heads, ", kv_heads, " KV heads of ", dim, " channels and ",
             shape.feature_layers.size(), " feature layers");
  for (const at::Tensor* matrix : {&embedding, &output}) {
    NWOR_CHECK(matrix->sizes() == at::IntArrayRef({vocabulary, hidden}), "embedding, output: got ",
               matrix->sizes(), ", expected ", at::IntArrayRef({vocabulary, hidden}),
               ": the head is for another target");
  }
  NWOR_CHECK(options.draft_vocabulary >= 0 && options.min_probability < 1,
             "options: got draft_vocabulary ", options.draft_vocabulary, " and min_probability ",
             options.min_probability, ", expected 0 or more, and less than 1");
  const at::Device device = embedding.device();
  const at::ScalarType dtype = options.dtype.value_or(embedding.scalar_type());
  const auto take = [&](const char* name, at::IntArrayRef sizes) {
    const auto found = weights.find(name);
    NWOR_CHECK(found != weights.end(), "weights: no tensor ", name, ", expected one of sizes ",
               sizes);
    const at::Tensor tensor = found->second;
    NWOR_CHECK(sizes.empty() || tensor.sizes() == sizes, "weights: ", name, " has sizes ",
               tensor.sizes(), ", expected ", sizes);
    weights.erase(found);
    // Products may be in 16 bits; norms are in float32.
    return tensor.to(device, std::string_view(name).ends_with("norm") ? at::kFloat : dtype);
  };
  const auto layers = static_cast<int64_t>(shape.feature_layers.size());
  feature_norm_ = take("feature_norm", {layers, hidden});
  fuse_ = take("fuse", {hidden, layers * hidden});
  norm_ = take("norm", {hidden});
  inputs_.norm = at::stack({take("token_norm", {hidden}), take("hidden_norm", {hidden})});
  inputs_.epsilon = outputs_.epsilon = shape.norm_epsilon;
  const auto qkv = take("query_key_value", {(heads + 2 * kv_heads) * dim, 2 * hidden})
                       .split_with_sizes({heads * dim, kv_heads * dim, kv_heads * dim});
  inputs_.query.weight = qkv[0];
  inputs_.key.weight = qkv[1];
  inputs_.value.weight = qkv[2];
  outputs_.attention.weight = take("attention_output", {hidden, heads * dim});
  outputs_.norm = take("mlp_norm", {hidden});
  const auto gate_up = take("gate_up", {2 * shape.intermediate, hidden}).chunk(2);
  outputs_.gate = gate_up[0];
  outputs_.up = gate_up[1];
  outputs_.down = take("down", {hidden, shape.intermediate});
  const auto ids = weights.find("draft_to_target");  // the most frequent first
  NWOR_CHECK(ids != weights.end() && ids->second.dim() == 1 && ids->second.numel() > 0,
             "weights: no tensor draft_to_target, expected one of any length");
  to_target_ = ids->second.to(at::kLong);
  weights.erase(ids);
  if (options.draft_vocabulary > 0) to_target_ = to_target_.slice(0, 0, options.draft_vocabulary);
  NWOR_CHECK(to_target_.min().item<int64_t>() >= 0 && to_target_.max().item<int64_t>() < vocabulary,
             "weights: draft_to_target has ids outside the vocabulary of ", vocabulary);
  to_target_ = to_target_.to(device);
  NWOR_CHECK(weights.empty(), "weights: got a tensor ", weights.begin()->first,
             ", which this head does not have");
  output_ = output.index_select(0, to_target_).to(dtype);
  const at::Tensor steps = at::arange(0, dim, 2, at::kDouble) / dim;
  frequencies_ =
      at::pow(at::scalar_tensor(shape.rope_theta, at::kDouble), -steps).to(at::kFloat).to(device);
}

at::Tensor Eagle3Head::Index(const std::vector<int64_t>& values) const {
  return at::tensor(values, at::TensorOptions(at::kLong)).to(embedding_.device());
}

// Of the head's layer only the last row's output is needed.
void Eagle3Head::Observe(State* state, const std::vector<int64_t>& tokens,
                         const at::Tensor& features) const {
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t width = feature_norm_.numel();
  NWOR_CHECK(count >= 1 && features.sizes() == at::IntArrayRef({count, width}), "features: got ",
             features.sizes(), " for ", count, " tokens, expected ",
             at::IntArrayRef({count, width}), ", one row at least");
  const at::Tensor parts = features.to(at::kFloat).unflatten(1, feature_norm_.sizes());
  const at::Tensor normed =
      at::rms_norm(parts, {shape_.hidden}, std::nullopt, shape_.norm_epsilon) * feature_norm_;
  const at::Tensor hidden = LinearRows(normed.flatten(1), fuse_);
  const at::Tensor positions = at::arange(state->position, state->position + count,
                                          at::TensorOptions(embedding_.device()).dtype(at::kLong));
  const auto [query, key, value] = Project(Index(tokens), hidden, positions);
  const int64_t window = shape_.window;
  const auto append = [&](const at::Tensor& entries, const at::Tensor& more) {
    const at::Tensor all = entries.defined() ? at::cat({entries, more}) : more;
    return all.slice(0, -(window + kSpareEntries)).contiguous();
  };
  state->keys = append(state->keys, key);
  state->values = append(state->values, value);
  state->position += count;
  state->root = tokens.back();
  const at::Tensor attended = Attend(query.slice(0, count - 1), state->keys.slice(0, -window),
                                     state->values.slice(0, -window), std::nullopt);
  state->hidden = LayerOutput(hidden.slice(0, count - 1), attended, outputs_).squeeze(0);
}

void Eagle3Head::Retract(State* state, int64_t count) const {
  NWOR_CHECK(count >= 0 && count <= state->position, "count: got ", count, ", expected 0 to ",
             state->position, ", the rows that were observed");
  if (count == 0) return;
  const int64_t kept = std::max<int64_t>(0, state->keys.size(0) - count);
  state->keys = state->keys.slice(0, 0, kept);
  state->values = state->values.slice(0, 0, kept);
  state->position -= count;
  state->root = -1;
}

// Tokens with the features of the rows before them, or with outputs of the head.
std::array<at::Tensor, 3> Eagle3Head::Project(const at::Tensor& tokens, const at::Tensor& hidden,
                                              const at::Tensor& positions) const {
  const at::Tensor angles = at::outer(positions.to(at::kFloat), frequencies_).repeat({1, 2});
  const at::Tensor rows = at::cat({embedding_.index_select(0, tokens).to(at::kFloat), hidden}, 1);
  return AttentionInputs(rows, inputs_, angles.cos(), angles.sin());
}

Eagle3Head::Guesses Eagle3Head::Guess(const at::Tensor& hidden, int64_t count) const {
  const at::Tensor normed = at::rms_norm(hidden, {shape_.hidden}, norm_, shape_.norm_epsilon);
  const at::Tensor scores = at::log_softmax(LinearRows(normed, output_).to(at::kFloat), -1);
  const auto [best, index] = scores.topk(count, -1);
  return {to_target_.take(index), best};
}

// Nothing below a candidate scores more than it does: whether none of `best` [B, k], the last
// depth's, could have a child among the rows that are taken in the end.
bool Eagle3Head::Complete(const std::vector<at::Tensor>& scores, const at::Tensor& best,
                          int64_t rows) const {
  if (rows < 2) return true;
  const at::Tensor all = at::cat(scores, 1);
  at::Tensor bar = at::full_like(best.select(1, 0), least_);
  if (all.size(1) >= rows - 1) {
    bar = std::get<0>(all.topk(rows - 1, 1)).select(1, rows - 2).clamp_min(least_);
  }
  return best.amax(1).lt(bar).all().item<bool>();
}

std::vector<DraftTree> Eagle3Head::Draft(std::span<const State* const> states, int64_t rows,
                                         int64_t depth, int64_t top_k) const {
  NWOR_CHECK(rows >= 1 && depth >= 1 && depth <= 32 && top_k >= 1, "tree: got ", rows, " rows, ",
             depth, " deep, of top ", top_k, ", expected 1 or more, depth 32 at most");
  if (states.empty()) return {};
  std::vector<at::Tensor> outputs, keys, values;
  for (const State* state : states) {
    NWOR_CHECK(state->root >= 0, "state: nothing was observed, expected a row at least");
    outputs.push_back(state->hidden);
    keys.push_back(state->keys.slice(0, -shape_.window));
    values.push_back(state->values.slice(0, -shape_.window));
  }
  const auto batch = static_cast<int64_t>(states.size());
  const int64_t width = std::min(top_k, to_target_.size(0));
  const auto options = at::TensorOptions(embedding_.device());
  at::Tensor hidden = at::stack(outputs);  // [B, hidden]
  Guesses best = Guess(hidden, width);     // [B, k]: the candidates that grow further
  // What TreeFromTopK takes: candidates of every depth, and which of them grew.
  std::vector<at::Tensor> tokens = {best.tokens}, scores = {best.scores}, parents;
  at::Tensor kept = at::arange(width, options.dtype(at::kLong)).expand({batch, width});
  hidden = hidden.unsqueeze(1).expand({batch, width, -1});
  // Which of the tree's own entries a candidate sees: those above it and itself.
  at::Tensor seen = at::zeros({batch, width, 0}, options.dtype(at::kBool));
  const at::Tensor own = at::eye(width, options).to(at::kBool).expand({batch, width, width});
  for (int64_t ahead = 0; ahead + 1 < depth && !Complete(scores, best.scores, rows); ++ahead) {
    seen = at::cat({seen, own}, 2);
    std::vector<int64_t> positions;
    for (const State* state : states) {
      positions.insert(positions.end(), width, state->position + ahead);
    }
    const at::Tensor flat = hidden.flatten(0, 1);
    const auto [query, key, value] = Project(best.tokens.flatten(), flat, Index(positions));
    std::vector<at::Tensor> attended;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t first = b * width, last = first + width;
      keys[b] = at::cat({keys[b], key.slice(0, first, last)});
      values[b] = at::cat({values[b], value.slice(0, first, last)});
      const at::Tensor bias = at::zeros({width, keys[b].size(0)}, options.dtype(at::kFloat));
      bias.slice(1, keys[b].size(0) - seen.size(2))
          .masked_fill_(seen[b].logical_not(), -std::numeric_limits<float>::infinity());
      attended.push_back(Attend(query.slice(0, first, last), keys[b], values[b], bias));
    }
    hidden = LayerOutput(flat, at::cat(attended), outputs_).unflatten(0, {batch, width});
    const Guesses more = Guess(hidden, width);  // [B, k, k]
    tokens.push_back(more.tokens.flatten(1));
    scores.push_back((more.scores + best.scores.unsqueeze(2)).flatten(1));
    parents.push_back(kept);
    const auto [chosen, index] = scores.back().topk(width, 1);
    best = {tokens.back().gather(1, index), chosen};
    const at::Tensor above = at::floor_divide(index, width).unsqueeze(2);
    hidden = hidden.gather(1, above.expand({batch, width, hidden.size(2)}));
    seen = seen.gather(1, above.expand({batch, width, seen.size(2)}));
    kept = index + width + width * width * ahead;
  }
  std::vector<DraftTree> trees;
  const at::Tensor worth = at::cat(scores, 1).ge(least_).sum(1).to(at::kCPU);
  for (int64_t b = 0; b < batch; ++b) {
    const Tree tree = TreeFromTopK(
        Only(tokens, b), Only(scores, b), Only(parents, b), Index({states[b]->root}),
        at::zeros({1}, options.dtype(at::kInt)), std::min(rows, worth[b].item<int64_t>() + 1));
    const at::Tensor ids = tree.tokens.to(at::kCPU), above = tree.parents.to(at::kCPU);
    trees.push_back({{ids.data_ptr<int64_t>(), ids.data_ptr<int64_t>() + ids.numel()},
                     {above.data_ptr<int32_t>(), above.data_ptr<int32_t>() + above.numel()}});
  }
  return trees;
}

}  // namespace nwor
