#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "drafters/ngram_index.h"
#include "model.h"
#include "session/draft_tree.h"
#include "settings.h"

// Who proposes drafts. A wrong proposal costs time and never changes the output.

namespace engine {

class Drafter {
 public:
  virtual ~Drafter() = default;

  // Layers of the target whose outputs Observe gets.
  virtual std::vector<int64_t> feature_layers() const { return {}; }

  virtual void Begin(int64_t request, int64_t first_token) = 0;

  // Rows that were run and stand: `tokens[i]` follows row i, whose features are features[i]. The
  // last of `tokens` is the next root.
  virtual void Observe(int64_t request, const std::vector<int64_t>& tokens,
                       const at::Tensor& features) = 0;

  // Takes the last `count` observed tokens back, with their rows.
  virtual void Retract(int64_t request, int64_t count) = 0;

  // A tree for each request, below its last token; the root alone where nothing is proposed.
  virtual std::vector<nwor::DraftTree> Draft(const std::vector<int64_t>& requests,
                                             const TreeShape& shape) = 0;

  virtual void End(int64_t request) = 0;
};

// What followed the last tokens where they stood before in the request's own text.
class NgramDrafter final : public Drafter {
 public:
  void Begin(int64_t request, int64_t first_token) override;
  void Observe(int64_t request, const std::vector<int64_t>& tokens,
               const at::Tensor& features) override;
  void Retract(int64_t request, int64_t count) override;
  std::vector<nwor::DraftTree> Draft(const std::vector<int64_t>& requests,
                                     const TreeShape& shape) override;
  void End(int64_t request) override { texts_.erase(request); }

 private:
  std::map<int64_t, nwor::NgramIndex> texts_;
};

// The one that the settings ask for; null for none. Throws nwor::Error when it does not fit.
std::unique_ptr<Drafter> MakeDrafter(const Settings& settings, const Model& target);

}  // namespace engine
