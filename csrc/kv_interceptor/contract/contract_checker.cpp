#include "kv_interceptor/contract/contract_checker.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/tensor_layout.h"
#include "kv_interceptor/contract/books.h"

namespace nwor {
namespace {

std::vector<int64_t> OnHost(const at::Tensor& tensor) {
  const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
  const auto* data = host.const_data_ptr<int64_t>();
  return {data, data + host.numel()};
}

bool IsReadable(const at::Tensor& tensor) {
  return tensor.defined() && !IsFake(tensor) && HasStorage(tensor);
}

}  // namespace

// ---- writes ------------------------------------------------------------------------------------

// The slots of the write in flight must be as before it.
void ContractChecker::Impl::CheckUntouched(int layer, const char* rule, const char* why) {
  const std::vector<SlotHash> after = HashSlots(Info(layer), pending->slots);
  for (size_t i = 0; i < after.size(); ++i) {
    if (after[i] != pending->before[i]) {
      Report(rule, Info(layer).name, pending->slots[i], why);
    }
  }
}

void ContractChecker::Impl::CheckStagedWrite(const WriteCall& call, const Outcome& outcome,
                                             int layer, const std::vector<int64_t>& rows,
                                             const std::vector<int64_t>& slots) {
  const Interceptor::LayerInfo& info = Info(layer);
  const RowHashes hashes = HashRows(info, call.key, call.value);
  const bool stages = outcome.action == Action::kStage;
  const std::vector<int32_t> stage_rows = interceptor.round().stage_rows;
  int64_t num_new = 0, num_drafts = 0;
  std::unordered_set<int64_t> direct_slots;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows[i], slot = slots[i];
    if (!round.Contains(row)) continue;  // padding, which a write with graph_rows ignores
    const bool draft = round.open && round.IsDraft(row);
    const bool has_stage_row =
        row < static_cast<int64_t>(stage_rows.size()) && stage_rows[row] >= 0;
    if (stages && draft) {
      if (!has_stage_row) {
        Report("C3", info.name, slot, "draft row ", row, " was given no staging row");
      }
      ++num_drafts;
      num_new += round.NoteStaged(layer, row, {hashes.staged[i], hashes.cached[i]}) ? 1 : 0;
      if (!round.NoteSlot(info.group, row, slot)) {
        round.slot_mismatch = true;
        // On a GPU the slots are compared on the device and the commit refuses.
        if (info.key_cache.device().is_cpu()) {
          Report("N2", info.name, slot, "row ", row, " was staged with another slot than in the ",
                 "layer before: ", *round.SlotOf(info.group, row));
        }
      }
      continue;
    }
    if (draft && round.staging) {
      Report("C3", info.name, slot, "draft row ", row, " was written to the cache directly");
    }
    if (stages && has_stage_row) {
      Report("N4", info.name, slot, "row ", row, " is no draft but has staging row ",
             stage_rows[row]);
    }
    if (slot >= 0) {
      Expect(layer, slot, {Expectation::Kind::kDirectRow, hashes.cached[i], row, -1});
      direct_slots.insert(slot);
    }
  }
  if (stages && outcome.staged_rows != num_new) {
    Report("N3", info.name, -1, "the write says it staged ", outcome.staged_rows,
           " new rows, expected ", num_new);
  }
  if (stages && num_new > 0 && !round.staging) {
    Report("N13", info.name, -1, "rows were staged in a round that was not to be staged");
  }
  if (num_drafts > 0) ++num_stage_outcomes;

  // Now what the write did to its slots: direct rows are there, all others as they were.
  const std::vector<SlotHash> after = HashSlots(info, pending->slots);
  for (size_t i = 0; i < after.size(); ++i) {
    const int64_t slot = pending->slots[i];
    if (direct_slots.count(slot) != 0) {
      if (after[i] != layers[layer].expected[slot].hash) {
        Report("N4", info.name, slot, "row ", layers[layer].expected[slot].row,
               " was to be written directly, and its slot does not hold it after the write");
      }
    } else if (after[i] != pending->before[i]) {
      Report("C8", info.name, slot, "staging changed the cache");
    }
  }
}

void ContractChecker::Impl::CheckWriteOutcome(const WriteCall& call, const Outcome& outcome,
                                              int layer) {
  const Interceptor::LayerInfo& info = Info(layer);
  const bool disabled = interceptor.mode() == Mode::kDisabled;
  only_disabled = only_disabled && disabled;
  if (outcome.reason != BypassReason::kNone) reasons_seen.insert(outcome.reason);
  if (disabled && outcome.action != Action::kBypass) {
    Report("C7", info.name, -1, "a write was not left to the engine although switched off");
  }
  const std::vector<int64_t> slots = OnHost(call.slot_mapping);
  std::vector<int64_t> rows(slots.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = call.rows.has_value() ? call.rows->at(i) : static_cast<int64_t>(i);
  }
  if (outcome.action != Action::kBypass) {
    CheckStagedWrite(call, outcome, layer, rows, slots);
    return;
  }
  CheckUntouched(layer, disabled ? "C7" : "C10",
                 "the write was left to the engine, and the cache changed all the same");
  // Nobody writes the rows of a round that is over.
  if (outcome.reason == BypassReason::kStaleRound) return;
  for (const int64_t slot : pending->slots) Disown(layer, slot);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (round.IsDraft(rows[i])) round.NoteBypassed(layer, rows[i], slots[i]);
  }
}

// ---- commit ------------------------------------------------------------------------------------

void ContractChecker::Impl::NoteCommit(const CommitCall& call, const Receipt& receipt) {
  // A round that was not staged has its drafts in the cache already.
  const bool wrote = round.staging && receipt.ok();
  last_commit_epoch = receipt.epoch;
  last_receipt_lost = !receipt.ok();  // on a GPU the status alone says so
  if (receipt.degraded != BypassReason::kNone) reasons_seen.insert(receipt.degraded);

  std::set<int> groups;
  for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
    if (IsReady(layer)) groups.insert(Info(layer).group);  // commit takes slots for these only
  }
  const int64_t depth = call.path.dim() == 2 ? call.path.size(1) : 0;
  const std::vector<int64_t> path = OnHost(call.path), counts = OnHost(call.counts);
  std::vector<std::vector<int64_t>> given;
  for (const at::Tensor& slots : call.slots) given.push_back(OnHost(slots));

  int64_t num_accepted = 0;
  for (int64_t request = 0; request < static_cast<int64_t>(counts.size()); ++request) {
    if (counts[request] < 0 || counts[request] > depth || request >= round.num_requests()) {
      if (wrote) Report("N7", "", -1, "a commit with count ", counts[request], " was carried out");
      continue;
    }
    for (int64_t index = 0; index < counts[request]; ++index, ++num_accepted) {
      const int64_t at = request * depth + index;
      const int64_t row =
          path[at] + (call.rows == RowSpace::kRequest ? round.FirstRow(request) : 0);
      if (wrote && !round.ExtendsPath(request, round.Tip(request), row)) {
        Report("C6", "", -1, "request ", request, " committed row ", row,
               ", which is no accepted draft after row ", round.Tip(request));
      }
      if (wrote && round.Contains(row)) round.NoteCommitted(request, row);
      const int64_t token = num_tokens_accepted++;
      size_t group_idx = 0;
      for (const int group : groups) {
        const int64_t slot =
            group_idx < given.size() ? given[group_idx][at] : round.SlotOf(group, row).value_or(-1);
        ++group_idx;
        if (wrote && !round.NoteDestination(group, slot)) {
          Report("N7", "", slot, "two accepted rows were committed to one slot");
        }
        for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
          const auto& info = Info(layer);
          if (info.group != group || !IsReady(layer)) continue;
          if (slot < 0 || slot >= info.layout.geometry.num_slots()) {
            if (wrote) Report("N7", info.name, slot, "row ", row, " was committed to no slot");
            continue;
          }
          const ShadowRound::StagedRow* staged = round.Staged(layer, row);
          if (!wrote) {
            layers[layer].refused.insert(slot);
          } else if (staged == nullptr) {
            // The engine's own write is the commit of a layer that fell back, if it went there.
            if (round.BypassedTo(layer, row) == slot) continue;
            Report("C11", info.name, slot, "row ", row,
                   " was committed, and this layer has not staged it");
          } else {
            Expect(layer, slot, {Expectation::Kind::kAcceptedRow, staged->cached, row, token});
          }
        }
      }
    }
  }
  round.committed = round.committed || (wrote && num_accepted > 0);
  if (wrote && num_accepted > 0 && round.slot_mismatch) {
    Report("N2", "", -1, "a round whose layers gave different slots was committed");
  }
  if (receipt.committed_tokens() != (wrote ? num_accepted : 0)) {
    Report("N7", "", -1, "the receipt counts ", receipt.committed_tokens(), " tokens, expected ",
           wrote ? num_accepted : 0);
  }
}

// ---- the class ---------------------------------------------------------------------------------

ContractChecker::ContractChecker(Interceptor& interceptor)
    : impl_(std::make_unique<Impl>(interceptor)) {
  interceptor.SetObserver(this);
}

ContractChecker::~ContractChecker() {
  // Another may have taken its place.
  if (impl_->interceptor.observer() == this) impl_->interceptor.SetObserver(nullptr);
}

void ContractChecker::Snapshot() {
  NWOR_CHECK(!impl_->interceptor.round().open,
             "snapshot: a round is open; take the snapshot before begin");
  Interceptor& interceptor = impl_->interceptor;
  impl_ = std::make_unique<Impl>(interceptor);
  for (const Interceptor::LayerInfo& info : interceptor.layers()) {
    const bool ready = info.layout.key != nullptr;
    impl_->layers.push_back({info.layout.key, ready ? HashCache(info) : CacheHashes{}, {}, {}, {}});
  }
  impl_->stats_before = interceptor.stats();
  impl_->watching = true;
}

void ContractChecker::TellRequest(int64_t request, int64_t num_tokens, int64_t num_pages,
                                  int64_t page_size) {
  NWOR_CHECK(page_size > 0, "page_size: got ", page_size, ", expected a positive number");
  const RequestState state{num_tokens, num_pages, page_size};
  const auto [books, is_new] = impl_->requests.try_emplace(request);
  if (is_new) books->second.first = state;
  books->second.last = state;
  books->second.told_again = !is_new;
}

void ContractChecker::TellFreeSlots(int64_t free_slots) {
  if (!impl_->free_slots_first.has_value()) impl_->free_slots_first = free_slots;
  impl_->free_slots_last = free_slots;
}

std::vector<Violation> ContractChecker::VerifyStaged() {
  impl_->RequireSnapshot();
  impl_->CheckBytes(/*before_commit=*/true);
  impl_->CheckStagingBytes();
  return impl_->TakeReport();
}

std::vector<Violation> ContractChecker::Verify(const Receipt* receipt,
                                               const std::vector<int64_t>& emitted) {
  impl_->RequireSnapshot();
  if (receipt != nullptr && impl_->last_commit_epoch != receipt->epoch) {
    impl_->Report("C5", "", -1, "the receipt is of round ", receipt->epoch,
                  ", and no commit of it was seen last");
  }
  impl_->CheckBytes(/*before_commit=*/false);
  impl_->CheckCounts();
  impl_->CheckHostBooks();
  impl_->CheckEmitted(emitted);
  return impl_->TakeReport();
}

void ContractChecker::AfterBegin(const RoundPlan& plan, const Decision& decision) {
  if (!impl_->watching) return;
  impl_->round = ShadowRound(plan, decision);
  impl_->only_disabled = impl_->only_disabled && impl_->interceptor.mode() == Mode::kDisabled;
  if (decision.reason != BypassReason::kNone) impl_->reasons_seen.insert(decision.reason);
  if (decision.stage && impl_->interceptor.mode() == Mode::kDisabled) {
    impl_->Report("C7", "", -1, "a round is staged although switched off");
  }
}

void ContractChecker::BeforeWrite(const WriteCall& call) {
  impl_->pending.reset();
  if (!impl_->watching || !IsReadable(call.slot_mapping)) return;
  if (call.slot_mapping.dim() != 1 || !at::isIntegralType(call.slot_mapping.scalar_type(), false)) {
    return;
  }
  PendingWrite pending;
  pending.layer = impl_->FindLayer(call.layer);
  if (pending.layer < 0 || !impl_->IsReady(pending.layer)) return;
  const Interceptor::LayerInfo& info = impl_->Info(pending.layer);
  for (const int64_t slot : OnHost(call.slot_mapping)) {
    if (slot >= 0 && slot < info.layout.geometry.num_slots()) pending.slots.push_back(slot);
  }
  pending.before = HashSlots(info, pending.slots);
  impl_->pending = std::move(pending);
}

void ContractChecker::AfterWrite(const WriteCall& call, const Outcome& outcome) {
  if (!impl_->pending.has_value()) return;
  impl_->CheckWriteOutcome(call, outcome, impl_->pending->layer);
  impl_->pending.reset();
}

void ContractChecker::AfterCommit(const CommitCall& call, const Receipt& receipt) {
  if (!impl_->watching) return;
  impl_->NoteCommit(call, receipt);
  if (call.last) {
    impl_->num_staged_tokens += impl_->round.NumStagedTokens();
    impl_->round.open = false;
  }
}

void ContractChecker::AfterAbort() {
  if (!impl_->watching) return;
  impl_->num_staged_tokens += impl_->round.NumStagedTokens();
  impl_->round.open = false;
}

}  // namespace nwor
