#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache.h"
#include "model.h"
#include "session/draft_tree.h"
#include "specpv/partial_store.h"

// One forward pass over the rows of a batch, and what of it is cached. A round of the library:
//
//   Begin    tells the interceptor which rows are drafts
//   Run      per layer: K/V written (drafts staged), views refreshed, attention
//   Commit   accepted drafts to the cache, in all layers or in none

namespace engine {

// One sequence from its admission to its end. After its prompt, `tokens` ends with the root: the
// last token, whose K/V is not cached yet.
struct Request {
  int64_t index = 0;  // among the prompts; also its key in the allocator
  std::vector<int64_t> tokens;
  int64_t prompt_len = 0;
  int64_t cached = 0;  // tokens in the cache
  int64_t shown = 0;   // tokens that are final; fewer than all in mode lossless only
  int64_t place = -1;  // in the batch
  int64_t seed = 0;
  std::string finish;
  std::shared_ptr<nwor::StoredCache> partial;  // its state under partial verification

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  bool prefilling() const { return size() == prompt_len; }  // it has no token of its own yet
};

// A request's rows in a round: `fed` before the root, then the tree, its root first. `fed` is a
// piece of the prompt, or a tail that a full step runs again.
struct Part {
  Request* request = nullptr;
  int64_t prefix_len = 0;  // tokens before the first row
  std::vector<int64_t> fed;
  nwor::DraftTree tree;
  std::optional<nwor::StepDecision> decision;  // of partial verification
  bool wants_logits = true;                    // of the tree's rows
  bool wants_fed_logits = false;
  int64_t begin = 0;        // its first row in the batch
  int64_t logit_begin = 0;  // its first row among those with logits

  int64_t num_fed() const { return static_cast<int64_t>(fed.size()); }
  int64_t num_rows() const { return num_fed() + tree.num_rows(); }
  int64_t root_logits() const { return logit_begin + (wants_fed_logits ? num_fed() : 0); }
};

class Round {
 public:
  // `parts` are in the order of their requests' places, of which the batch has `places`. `store`:
  // partial verification, or null.
  Round(PagedCache& cache, std::vector<Part> parts, int64_t places, nwor::PartialStore* store);

  // Nothing: the round is open. Else why its drafts cannot be staged; nothing was changed then but
  // slots that roots will use.
  std::optional<std::string> Begin();

  void Run(const Model& model, const std::vector<int64_t>& feature_layers);

  // paths[i]: accepted rows of part i's tree, without the root. Throws nwor::Error when the commit
  // is refused; nothing is cached then.
  void Commit(const std::vector<std::vector<int64_t>>& paths);

  const std::vector<Part>& parts() const { return parts_; }
  const at::Tensor& logits() const { return logits_; }      // [wanted rows, vocabulary]
  const at::Tensor& features() const { return features_; }  // [T, ..]
  const std::vector<nwor::Violation>& violations() const { return violations_; }

 private:
  void PlaceRows();
  void BuildMask();
  at::Tensor Attend(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value);

  PagedCache& cache_;
  std::vector<Part> parts_;
  const int64_t places_;
  nwor::PartialStore* const store_;
  nwor::RoundPlan plan_;
  // On the device, for all layers.
  at::Tensor tokens_, positions_, slots_, block_table_, prefix_lens_, query_start_, tree_rows_;
  at::Tensor wanted_, attention_plan_;
  std::optional<at::Tensor> mask_;
  int64_t max_rows_ = 0;
  bool refreshing_ = false;
  at::Tensor logits_, features_;
  std::vector<nwor::Violation> violations_;
};

// [values.size()] on the device.
at::Tensor ToDevice(const std::vector<int64_t>& values, at::Device device,
                    at::ScalarType dtype = at::kLong);

}  // namespace engine
