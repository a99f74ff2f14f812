#include "drafter.h"

#include "weights.h"

namespace nwor {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Eagle3Shape, hidden, intermediate, num_heads, num_kv_heads,
                                   head_dim, target_vocabulary, feature_layers, window, rope_theta,
                                   norm_epsilon)

}  // namespace nwor

namespace engine {

// Heads are as `python -m nwor_specpv.train.eagle3` makes them; the package has one for SmolLM2.
Drafter::Drafter(const Settings& settings, const Model& target) : settings_(settings) {
  if (settings.method != Method::kEagle3) return;
  Weights weights(settings.head);
  InFile(settings.head, "not an EAGLE3 head", [&] {
    const Json json = Json::parse(weights.metadata().at("eagle3").get<std::string>());
    // On a CPU every row costs time: the rarer half of the vocabulary and improbable rows are left
    // out, and products are in 16 bits.
    nwor::Eagle3Options options;
    if (target.embedding().is_cpu()) options = {8192, 0.05, at::kBFloat16};
    head_.emplace(json.get<nwor::Eagle3Shape>(), weights.TakeAll(), target.embedding(),
                  target.output(), options);
    for (const int64_t layer : feature_layers()) {
      NWOR_CHECK(layer >= 0 && layer < target.config().num_layers, "reads layer ", layer,
                 ", expected 0 to ", target.config().num_layers - 1);
    }
  });
}

void Drafter::Observe(DraftState* state, const std::vector<int64_t>& tokens,
                      const at::Tensor& features) const {
  head_ ? head_->Observe(&state->head, tokens, features) : state->text.Append(tokens);
}

void Drafter::Retract(DraftState* state, int64_t count) const {
  head_ ? head_->Retract(&state->head, count) : state->text.Truncate(state->text.size() - count);
}

std::vector<nwor::DraftTree> Drafter::Draft(const std::vector<const DraftState*>& states) const {
  const int64_t rows = settings_.tree_rows, depth = settings_.tree_depth;
  std::vector<const nwor::Eagle3Head::State*> heads;
  std::vector<nwor::DraftTree> trees;
  for (const DraftState* state : states) {
    heads.push_back(&state->head);
    if (!head_) trees.push_back(state->text.Draft(rows, depth, settings_.tree_top_k));
  }
  return head_ ? head_->Draft(heads, rows, depth, settings_.tree_top_k) : trees;
}

}  // namespace engine
