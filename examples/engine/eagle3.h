#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <filesystem>
#include <map>
#include <vector>

#include "decoder/decoder_rows.h"
#include "drafter.h"
#include "model.h"

// Drafts with an EAGLE3 head: one decoder layer over features of the target. An entry of its cache
// is a row's features with the token that follows the row; its output guesses the token after, and
// takes the place of features when a tree grows further down.

namespace engine {

class Eagle3Drafter final : public Drafter {
 public:
  // A head as `python -m nwor_specpv.train.eagle3` makes them, and as the package has one for
  // SmolLM2-135M-Instruct. Throws nwor::Error when it is for another target.
  Eagle3Drafter(const std::filesystem::path& file, const Model& target);

  std::vector<int64_t> feature_layers() const override { return feature_layers_; }
  void Begin(int64_t request, int64_t first_token) override { requests_[request] = {}; }
  void Observe(int64_t request, const std::vector<int64_t>& tokens,
               const at::Tensor& features) override;
  void Retract(int64_t request, int64_t count) override;
  std::vector<nwor::DraftTree> Draft(const std::vector<int64_t>& requests,
                                     const TreeShape& shape) override;
  void End(int64_t request) override { requests_.erase(request); }

 private:
  struct State {
    at::Tensor keys, values;  // [entries, Hkv, D], the latest ones
    int64_t position = 0;     // of the next entry
    int64_t root = 0;         // the last token
    at::Tensor hidden;        // [hidden]: output of the last entry
  };
  struct Guesses {
    at::Tensor tokens, scores;  // [.., count]: ids of the target, logarithms of probabilities
  };

  std::array<at::Tensor, 3> Project(const at::Tensor& tokens, const at::Tensor& hidden,
                                    const at::Tensor& positions) const;
  Guesses Guess(const at::Tensor& hidden, int64_t count) const;

  std::vector<int64_t> feature_layers_;
  int64_t window_ = 0;  // entries that an entry sees at most
  double epsilon_ = 0;
  double least_ = 0;  // rows that score less are left out
  at::Tensor frequencies_, feature_norm_, fuse_, norm_, to_target_, output_, embedding_;
  nwor::AttentionInputWeights inputs_;
  nwor::LayerOutputWeights outputs_;
  std::map<int64_t, State> requests_;
};

}  // namespace engine
