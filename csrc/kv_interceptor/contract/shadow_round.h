#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kv_interceptor/contract/cache_hash.h"
#include "kv_interceptor/interceptor.h"

// What the engine's own calls say one round is, kept apart from the interceptor's books: which rows
// are drafts, what each layer was given for them, where they were headed, what was accepted.

namespace nwor {

class ShadowRound {
 public:
  ShadowRound() = default;
  ShadowRound(const RoundPlan& plan, const Decision& decision);

  int64_t num_rows() const { return static_cast<int64_t>(request_of_.size()); }
  int64_t num_requests() const { return static_cast<int64_t>(first_row_.size()); }
  int64_t num_draft_rows() const { return num_draft_rows_; }
  bool Contains(int64_t row) const { return row >= 0 && row < num_rows(); }
  bool IsDraft(int64_t row) const { return Contains(row) && parent_[row] >= 0; }
  int64_t RequestOf(int64_t row) const { return request_of_[row]; }
  int64_t FirstRow(int64_t request) const { return first_row_[request]; }
  int64_t NumDirectRows(int64_t request) const { return num_direct_rows_[request]; }

  // Draft rows that a layer staged.
  struct StagedRow {
    SlotHash staged;  // as staging must hold it
    SlotHash cached;  // as its cache slot must hold it once accepted
  };
  // True when this (layer, row) is new in the round; a later row replaces the bytes.
  bool NoteStaged(int layer, int64_t row, const StagedRow& hashes);
  const StagedRow* Staged(int layer, int64_t row) const;
  int64_t NumStagedTokens() const { return static_cast<int64_t>(staged_tokens_.size()); }

  // A draft row that a layer left to the engine, and where the engine put it.
  void NoteBypassed(int layer, int64_t row, int64_t slot) { bypassed_[layer][row] = slot; }
  std::optional<int64_t> BypassedTo(int layer, int64_t row) const;

  // The first layer of a group to name a row's slot decides it; false when a later one disagrees.
  bool NoteSlot(int group, int64_t row, int64_t slot);
  std::optional<int64_t> SlotOf(int group, int64_t row) const;
  // The draft row headed for a slot, or -1.
  int64_t DraftAt(int group, int64_t slot) const;

  // Whether a path entry is a draft of its request that hangs on the one before it, or may.
  bool ExtendsPath(int64_t request, int64_t previous_row, int64_t row) const;
  // The row the next accepted draft of a request must be a child of.
  int64_t Tip(int64_t request) const { return tip_[request]; }
  void NoteCommitted(int64_t request, int64_t row);
  int64_t NumCommitted(int64_t request) const { return num_committed_[request]; }
  // False when a row of the round was committed there before.
  bool NoteDestination(int group, int64_t slot) { return destinations_[group].insert(slot).second; }

  bool open = false;
  bool staging = false;
  bool slot_mismatch = false;  // two layers of a group disagreed
  bool committed = false;      // a commit of this round wrote something
  int64_t epoch = 0;
  BypassReason reason = BypassReason::kNone;

 private:
  bool ascending_ = false;  // parents are not known
  int64_t num_draft_rows_ = 0;
  std::vector<int64_t> request_of_;       // [T]
  std::vector<int64_t> parent_;           // [T] row of the parent, -1 = not a draft
  std::vector<int64_t> first_row_;        // [B]
  std::vector<int64_t> num_direct_rows_;  // [B]
  std::vector<int64_t> tip_;              // [B]
  std::vector<int64_t> num_committed_;    // [B]
  std::map<int, std::unordered_set<int64_t>> destinations_;                 // by group
  std::unordered_map<int, std::unordered_map<int64_t, StagedRow>> staged_;  // layer -> row
  std::unordered_map<int, std::unordered_map<int64_t, int64_t>> bypassed_;  // layer -> row
  std::unordered_map<int64_t, int> staged_tokens_;                          // row -> layers
  std::map<int, std::unordered_map<int64_t, int64_t>> slot_of_;             // group -> row -> slot
  std::map<int, std::unordered_map<int64_t, int64_t>> row_at_;              // group -> slot -> row
};

}  // namespace nwor
