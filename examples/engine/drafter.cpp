#include "drafter.h"

#include "eagle3.h"

namespace engine {

void NgramDrafter::Begin(int64_t request, int64_t first_token) {
  texts_.try_emplace(request, nwor::NgramOptions{}).first->second.Append({first_token});
}

void NgramDrafter::Observe(int64_t request, const std::vector<int64_t>& tokens,
                           const at::Tensor& features) {
  texts_.at(request).Append(tokens);
}

void NgramDrafter::Retract(int64_t request, int64_t count) {
  nwor::NgramIndex& text = texts_.at(request);
  text.Truncate(text.size() - count);
}

std::vector<nwor::DraftTree> NgramDrafter::Draft(const std::vector<int64_t>& requests,
                                                 const TreeShape& shape) {
  std::vector<nwor::DraftTree> trees;
  for (const int64_t request : requests) {
    trees.push_back(texts_.at(request).Draft(shape.rows, shape.depth, shape.top_k));
  }
  return trees;
}

std::unique_ptr<Drafter> MakeDrafter(const Settings& settings, const Model& target) {
  if (!settings.speculating()) return nullptr;
  if (settings.method == Method::kNgram) return std::make_unique<NgramDrafter>();
  return std::make_unique<Eagle3Drafter>(settings.head, target);
}

}  // namespace engine
