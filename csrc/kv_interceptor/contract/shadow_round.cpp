#include "kv_interceptor/contract/shadow_round.h"

namespace nwor {
namespace {

template <typename Table>
std::optional<int64_t> Find(const Table& table, int outer, int64_t inner) {
  const auto entries = table.find(outer);
  if (entries == table.end()) return std::nullopt;
  const auto found = entries->second.find(inner);
  if (found == entries->second.end()) return std::nullopt;
  return found->second;
}

}  // namespace

ShadowRound::ShadowRound(const RoundPlan& plan, const Decision& decision)
    : open(true),
      staging(decision.stage),
      epoch(decision.epoch),
      reason(decision.reason),
      ascending_(plan.ascending) {
  int64_t row = 0;
  for (size_t request = 0; request < plan.query_lens.size(); ++request) {
    const int64_t num_rows = plan.query_lens[request], num_drafts = plan.num_drafts[request];
    const int64_t num_direct = num_rows - num_drafts, first = row;
    first_row_.push_back(first);
    num_direct_rows_.push_back(num_direct);
    num_draft_rows_ += num_drafts;
    // A chain hangs on the last row that is written directly; a tree names its parents.
    tip_.push_back(first + num_direct - 1);
    num_committed_.push_back(0);
    for (int64_t i = 0; i < num_rows; ++i, ++row) {
      request_of_.push_back(static_cast<int64_t>(request));
      const int64_t draft = i - num_direct;
      const bool tree = request < plan.parents.size() && !plan.parents[request].empty();
      if (draft < 0) {
        parent_.push_back(-1);
      } else {
        parent_.push_back(tree ? first + plan.parents[request][draft] : row - 1);
      }
    }
  }
}

bool ShadowRound::NoteStaged(int layer, int64_t row, const StagedRow& hashes) {
  const bool is_new = staged_[layer].insert_or_assign(row, hashes).second;
  if (is_new) ++staged_tokens_[row];
  return is_new;
}

const ShadowRound::StagedRow* ShadowRound::Staged(int layer, int64_t row) const {
  const auto rows = staged_.find(layer);
  if (rows == staged_.end()) return nullptr;
  const auto found = rows->second.find(row);
  return found == rows->second.end() ? nullptr : &found->second;
}

std::optional<int64_t> ShadowRound::BypassedTo(int layer, int64_t row) const {
  return Find(bypassed_, layer, row);
}

bool ShadowRound::NoteSlot(int group, int64_t row, int64_t slot) {
  const auto [recorded, is_new] = slot_of_[group].try_emplace(row, slot);
  if (is_new && slot >= 0) row_at_[group][slot] = row;
  return recorded->second == slot;
}

std::optional<int64_t> ShadowRound::SlotOf(int group, int64_t row) const {
  return Find(slot_of_, group, row);
}

int64_t ShadowRound::DraftAt(int group, int64_t slot) const {
  return Find(row_at_, group, slot).value_or(-1);
}

bool ShadowRound::ExtendsPath(int64_t request, int64_t previous_row, int64_t row) const {
  if (!IsDraft(row) || request_of_[row] != request) return false;
  return ascending_ ? row > previous_row : parent_[row] == previous_row;
}

void ShadowRound::NoteCommitted(int64_t request, int64_t row) {
  tip_[request] = row;
  ++num_committed_[request];
}

}  // namespace nwor
