#pragma once

#include <optional>
#include <vector>

#include "drafters/eagle3_head.h"
#include "drafters/ngram_index.h"
#include "model.h"
#include "settings.h"

// Who proposes drafts: an EAGLE3 head, or the request's own text where the last tokens stood
// before. A wrong proposal costs time and never changes the output.

namespace engine {

// What is remembered of a request.
struct DraftState {
  nwor::NgramIndex text{nwor::NgramOptions{}};
  nwor::Eagle3Head::State head;
};

class Drafter {
 public:
  // Throws nwor::Error when the head is for another target.
  Drafter(const Settings& settings, const Model& target);

  // Layers of the target whose outputs Observe gets.
  std::vector<int64_t> feature_layers() const {
    return head_ ? head_->shape().feature_layers : std::vector<int64_t>();
  }

  // Rows that were run and stand: `tokens[i]` follows row i, whose features are features[i]. The
  // last of `tokens` is the next root.
  void Observe(DraftState* state, const std::vector<int64_t>& tokens,
               const at::Tensor& features) const;

  // Takes the last `count` observed tokens back, with their rows.
  void Retract(DraftState* state, int64_t count) const;

  // A tree for each request, below its last token; the root alone where nothing is proposed.
  std::vector<nwor::DraftTree> Draft(const std::vector<const DraftState*>& states) const;

 private:
  const Settings& settings_;
  std::optional<nwor::Eagle3Head> head_;  // none: n-grams
};

}  // namespace engine
