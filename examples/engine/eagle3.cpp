#include "eagle3.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "linear/linear_rows.h"
#include "target.h"
#include "tree/tree.h"
#include "weights.h"

namespace engine {
namespace {

// On a CPU every row costs time: the rarer half of the vocabulary and rows that the head gives less
// than this probability are left out.
constexpr int64_t kCpuVocabulary = 8192;
constexpr double kCpuProbability = 0.05;
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

}  // namespace

Eagle3Drafter::Eagle3Drafter(const std::filesystem::path& file, const Model& target) {
  Weights weights(file);
  const ModelConfig& model = target.config();
  int64_t heads = 0, kv_heads = 0, dim = 0, wide = 0, vocabulary = 0, hidden = 0;
  double theta = 0;
  InFile(file, "not an EAGLE3 head", [&] {
    const Json shape = Json::parse(weights.metadata().at("eagle3").get<std::string>());
    heads = shape.at("num_heads"), kv_heads = shape.at("num_kv_heads"), dim = shape.at("head_dim");
    wide = shape.at("intermediate"), vocabulary = shape.at("target_vocabulary");
    hidden = shape.at("hidden"), window_ = shape.at("window");
    theta = shape.at("rope_theta"), epsilon_ = shape.at("norm_epsilon");
    feature_layers_ = shape.at("feature_layers").get<std::vector<int64_t>>();
    NWOR_CHECK(vocabulary == model.vocabulary && hidden == model.hidden, "a head for vocabulary ",
               vocabulary, " and hidden size ", hidden, ", expected one for this model, which has ",
               model.vocabulary, " and ", model.hidden);
    for (const int64_t layer : feature_layers_) {
      NWOR_CHECK(layer >= 0 && layer < model.num_layers, "reads layer ", layer, ", expected 0 to ",
                 model.num_layers - 1);
    }
  });
  const auto layers = static_cast<int64_t>(feature_layers_.size());
  const at::Device device = target.embedding().device();
  const bool cpu = device.is_cpu();
  // Products in 16 bits, norms in float32.
  const at::ScalarType dtype = cpu ? at::kBFloat16 : target.embedding().scalar_type();
  const auto take = [&](const char* name, const std::vector<int64_t>& sizes) {
    const bool norm = std::string_view(name).ends_with("norm");
    return weights.Take(name, sizes).to(device, norm ? at::kFloat : dtype);
  };
  feature_norm_ = take("feature_norm", {layers, hidden});
  fuse_ = take("fuse", {hidden, layers * hidden});
  norm_ = take("norm", {hidden});
  const at::Tensor both = at::stack({take("token_norm", {hidden}), take("hidden_norm", {hidden})});
  const auto qkv = take("query_key_value", {(heads + 2 * kv_heads) * dim, 2 * hidden})
                       .split_with_sizes({heads * dim, kv_heads * dim, kv_heads * dim});
  inputs_ = {.norm = both,
             .epsilon = epsilon_,
             .query = {qkv[0], {}},
             .key = {qkv[1], {}},
             .value = {qkv[2], {}},
             .query_norm = {},
             .key_norm = {}};
  const auto gate_up = take("gate_up", {2 * wide, hidden}).chunk(2);
  outputs_.attention.weight = take("attention_output", {hidden, heads * dim});
  outputs_.norm = take("mlp_norm", {hidden});
  outputs_.epsilon = epsilon_;
  outputs_.gate = gate_up[0];
  outputs_.up = gate_up[1];
  outputs_.down = take("down", {hidden, wide});
  to_target_ = weights.Take("draft_to_target", {-1}).to(at::kLong);  // the most frequent first
  if (cpu) to_target_ = to_target_.slice(0, 0, kCpuVocabulary);
  NWOR_CHECK(to_target_.numel() > 0 && to_target_.min().item<int64_t>() >= 0 &&
                 to_target_.max().item<int64_t>() < vocabulary,
             file.string(), ": draft_to_target has ids outside the vocabulary of ", vocabulary);
  to_target_ = to_target_.to(device);
  weights.ExpectNoneLeft();
  embedding_ = target.embedding();
  output_ = target.output().index_select(0, to_target_).to(dtype);
  least_ = cpu ? std::log(kCpuProbability) : -std::numeric_limits<double>::infinity();
  const at::Tensor steps = at::arange(0, dim, 2, at::kDouble) / dim;
  frequencies_ = at::pow(at::scalar_tensor(theta, at::kDouble), -steps).to(at::kFloat).to(device);
}

// Entries of rows that stand. Of the head's layer only the last row's output is needed.
void Eagle3Drafter::Observe(int64_t request, const std::vector<int64_t>& tokens,
                            const at::Tensor& features) {
  State& state = requests_.at(request);
  const auto count = static_cast<int64_t>(tokens.size());
  const at::Device device = embedding_.device();
  const at::Tensor parts = features.to(at::kFloat).unflatten(1, feature_norm_.sizes());
  const at::Tensor normed =
      at::rms_norm(parts, {parts.size(2)}, std::nullopt, epsilon_) * feature_norm_;
  const at::Tensor hidden = nwor::LinearRows(normed.flatten(1), fuse_);
  const at::Tensor positions = at::arange(state.position, state.position + count,
                                          at::TensorOptions(device).dtype(at::kLong));
  const auto [query, key, value] = Project(ToDevice(tokens, device), hidden, positions);
  const auto append = [&](const at::Tensor& entries, const at::Tensor& more) {
    const at::Tensor all = entries.defined() ? at::cat({entries, more}) : more;
    return all.slice(0, -(window_ + kSpareEntries)).contiguous();
  };
  state.keys = append(state.keys, key);
  state.values = append(state.values, value);
  state.position += count;
  state.root = tokens.back();
  const at::Tensor attended = Attend(query.slice(0, count - 1), state.keys.slice(0, -window_),
                                     state.values.slice(0, -window_), std::nullopt);
  state.hidden = nwor::LayerOutput(hidden.slice(0, count - 1), attended, outputs_).squeeze(0);
}

void Eagle3Drafter::Retract(int64_t request, int64_t count) {
  State& state = requests_.at(request);
  const int64_t kept = std::max<int64_t>(0, state.keys.size(0) - count);
  state.keys = state.keys.slice(0, 0, kept);
  state.values = state.values.slice(0, 0, kept);
  state.position -= count;
}

// Tokens with the features of the rows before them, or with outputs of the head.
std::array<at::Tensor, 3> Eagle3Drafter::Project(const at::Tensor& tokens, const at::Tensor& hidden,
                                                 const at::Tensor& positions) const {
  const auto [cos, sin] = Rotation(positions, frequencies_, at::kFloat);
  const at::Tensor rows = at::cat({embedding_.index_select(0, tokens).to(at::kFloat), hidden}, 1);
  return nwor::AttentionInputs(rows, inputs_, cos, sin);
}

Eagle3Drafter::Guesses Eagle3Drafter::Guess(const at::Tensor& hidden, int64_t count) const {
  const at::Tensor normed = at::rms_norm(hidden, {hidden.size(-1)}, norm_, epsilon_);
  const at::Tensor scores = at::log_softmax(nwor::LinearRows(normed, output_).to(at::kFloat), -1);
  const auto [best, index] = scores.topk(count, -1);
  return {to_target_.take(index), best};
}

std::vector<nwor::DraftTree> Eagle3Drafter::Draft(const std::vector<int64_t>& requests,
                                                  const TreeShape& shape) {
  std::vector<const State*> states;
  std::vector<at::Tensor> outputs, keys, values;
  for (const int64_t request : requests) {
    const State& state = requests_.at(request);
    states.push_back(&state);
    outputs.push_back(state.hidden);
    keys.push_back(state.keys.slice(0, -window_));
    values.push_back(state.values.slice(0, -window_));
  }
  const auto batch = static_cast<int64_t>(states.size());
  const int64_t width = std::min(shape.top_k, to_target_.size(0));
  at::Tensor hidden = at::stack(outputs);  // [B, hidden]
  Guesses best = Guess(hidden, width);     // [B, k]: the candidates that grow further
  // What TreeFromTopK takes: candidates of every depth, and which of them grew.
  std::vector<at::Tensor> tokens = {best.tokens}, scores = {best.scores}, parents;
  const auto options = at::TensorOptions(hidden.device());
  at::Tensor kept = at::arange(width, options.dtype(at::kLong)).expand({batch, width});
  hidden = hidden.unsqueeze(1).expand({batch, width, -1});
  // Which of the tree's own entries a candidate sees: those above it and itself.
  at::Tensor seen = at::zeros({batch, width, 0}, options.dtype(at::kBool));
  const at::Tensor own = at::eye(width, options).to(at::kBool).expand({batch, width, width});
  for (int64_t depth = 1; depth < shape.depth; ++depth) {
    // Nothing below a candidate scores more than it: stop when none could become a row.
    const at::Tensor all = at::cat(scores, 1);
    const int64_t most = std::min(shape.rows - 1, all.size(1));
    const at::Tensor worst = std::get<0>(all.topk(most, 1)).select(1, most - 1);
    const at::Tensor bar =
        all.size(1) < shape.rows - 1 ? at::full_like(worst, least_) : worst.clamp_min(least_);
    if (best.scores.amax(1).lt(bar).all().item<bool>()) break;
    seen = at::cat({seen, own}, 2);
    std::vector<int64_t> positions;
    for (const State* state : states) {
      positions.insert(positions.end(), width, state->position + depth - 1);
    }
    const at::Tensor flat = hidden.flatten(0, 1);
    const auto [query, key, value] =
        Project(best.tokens.flatten(), flat, ToDevice(positions, hidden.device()));
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
    hidden = nwor::LayerOutput(flat, at::cat(attended), outputs_).unflatten(0, {batch, width});
    const Guesses more = Guess(hidden, width);  // [B, k, k]
    tokens.push_back(more.tokens.flatten(1));
    scores.push_back((more.scores + best.scores.unsqueeze(2)).flatten(1));
    parents.push_back(kept);
    const auto [chosen, index] = scores.back().topk(width, 1);
    best = {tokens.back().gather(1, index), chosen};
    const at::Tensor above = at::floor_divide(index, width).unsqueeze(2);
    hidden = hidden.gather(1, above.expand({batch, width, hidden.size(2)}));
    seen = seen.gather(1, above.expand({batch, width, seen.size(2)}));
    kept = index + width + width * width * (depth - 1);
  }
  std::vector<nwor::DraftTree> trees;
  const at::Tensor worth = at::cat(scores, 1).ge(least_).sum(1);
  for (int64_t b = 0; b < batch; ++b) {
    const auto one = [b](std::vector<at::Tensor> steps) {
      for (at::Tensor& step : steps) step = step.slice(0, b, b + 1);
      return steps;
    };
    const nwor::Tree tree = nwor::TreeFromTopK(one(tokens), one(scores), one(parents),
                                               ToDevice({states[b]->root}, hidden.device()),
                                               at::zeros({1}, options.dtype(at::kInt)),
                                               std::min(shape.rows, worth[b].item<int64_t>() + 1));
    const at::Tensor ids = tree.tokens.to(at::kCPU), above = tree.parents.to(at::kCPU);
    trees.push_back({{ids.data_ptr<int64_t>(), ids.data_ptr<int64_t>() + ids.numel()},
                     {above.data_ptr<int32_t>(), above.data_ptr<int32_t>() + above.numel()}});
  }
  return trees;
}

}  // namespace engine
