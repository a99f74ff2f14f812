#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/check.h"
#include "kv_interceptor/contract/cache_hash.h"
#include "kv_interceptor/contract/contract_checker.h"
#include "kv_interceptor/contract/shadow_round.h"

// The checker's books since the last snapshot. contract_checker.cpp keeps them as calls pass,
// report.cpp compares them with the caches and the interceptor's own counts.

namespace nwor {

// What a slot of one layer must hold instead of what the snapshot saw.
struct Expectation {
  enum class Kind { kDirectRow, kAcceptedRow } kind = Kind::kDirectRow;
  SlotHash hash;
  int64_t row = -1;
  int64_t token = -1;  // numbers accepted drafts over all layers
};

// The books of one layer since the snapshot.
struct LayerBooks {
  const void* key_data = nullptr;  // which memory the snapshot was of
  CacheHashes before;
  std::unordered_map<int64_t, Expectation> expected;
  std::unordered_set<int64_t> foreign;  // the engine wrote there itself
  std::unordered_set<int64_t> refused;  // destinations of commits that wrote nothing
};

// The slots of a write in flight, to tell its effects from everybody else's.
struct PendingWrite {
  int layer = -1;
  std::vector<int64_t> slots;  // in range only
  std::vector<SlotHash> before;
};

struct RequestState {
  int64_t num_tokens = 0, num_pages = 0, page_size = 0;
};
struct RequestBooks {
  RequestState first, last;
  bool told_again = false;
};

struct ContractChecker::Impl {
  explicit Impl(Interceptor& watched) : interceptor(watched) {}

  Interceptor& interceptor;
  bool watching = false;
  std::vector<Violation> found;  // by calls, since the last report
  std::vector<LayerBooks> layers;
  ShadowRound round;
  std::optional<PendingWrite> pending;

  Interceptor::Stats stats_before;
  int64_t num_staged_tokens = 0;   // of rounds that are over
  int64_t num_stage_outcomes = 0;  // writes that staged a draft
  int64_t num_tokens_accepted = 0;
  bool only_disabled = true;  // every round and write since the snapshot was switched off
  std::set<BypassReason> reasons_seen;
  std::optional<int64_t> last_commit_epoch;
  bool last_receipt_lost = false;  // the host was told and ends the requests

  std::map<int64_t, RequestBooks> requests;
  std::optional<int64_t> free_slots_first, free_slots_last;

  template <typename... Parts>
  void Report(const char* rule, const std::string& layer, int64_t slot, const Parts&... detail) {
    found.push_back({rule, layer, slot, Concat(detail...)});
  }

  std::vector<Violation> TakeReport();

  const Interceptor::LayerInfo& Info(int layer) const { return interceptor.layers()[layer]; }

  // A layer without memory has no bytes to watch.
  bool IsReady(int layer) const { return Info(layer).layout.key != nullptr; }

  int FindLayer(const std::string& name) const {
    const auto& all = interceptor.layers();
    for (size_t layer = 0; layer < std::min(all.size(), layers.size()); ++layer) {
      if (all[layer].name == name) return static_cast<int>(layer);
    }
    return -1;
  }

  // Layers bound since the snapshot are unknown to it; a rebound one has other memory.
  void RequireSnapshot() const {
    NWOR_CHECK(watching, "checker: there is no snapshot; call snapshot first");
    const auto& all = interceptor.layers();
    NWOR_CHECK(all.size() == layers.size(), "checker: got ", all.size(), " bound layers, expected ",
               layers.size(), " as at the snapshot");
    for (size_t layer = 0; layer < all.size(); ++layer) {
      NWOR_CHECK(all[layer].layout.key == layers[layer].key_data, "checker: layer '",
                 all[layer].name, "' has other memory than at the snapshot; take a new snapshot");
    }
  }

  void Expect(int layer, int64_t slot, const Expectation& expectation) {
    layers[layer].expected[slot] = expectation;
    layers[layer].foreign.erase(slot);
  }
  void Disown(int layer, int64_t slot) {
    layers[layer].expected.erase(slot);
    layers[layer].foreign.insert(slot);
  }

  void CheckWriteOutcome(const WriteCall& call, const Outcome& outcome, int layer);
  void CheckStagedWrite(const WriteCall& call, const Outcome& outcome, int layer,
                        const std::vector<int64_t>& rows, const std::vector<int64_t>& slots);
  void CheckUntouched(int layer, const char* rule, const char* why);
  void CheckBytes(bool before_commit);
  void CheckStagingBytes();
  void CheckCounts();
  void CheckHostBooks();
  void CheckEmitted(const std::vector<int64_t>& emitted);
  void NoteCommit(const CommitCall& call, const Receipt& receipt);
};

}  // namespace nwor
