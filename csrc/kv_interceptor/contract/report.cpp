#include <algorithm>

#include "kv_interceptor/contract/books.h"
#include "metrics/counters.h"

namespace nwor {

std::vector<Violation> ContractChecker::Impl::TakeReport() {
  std::vector<Violation> report = std::move(found);
  found.clear();
  Counters::Global().Add(Counter::kContractViolations, static_cast<int64_t>(report.size()));
  return report;
}

// Compares every slot of every layer with the snapshot and what was to change since.
void ContractChecker::Impl::CheckBytes(bool before_commit) {
  struct TokenState {
    int num_present = 0;
    std::vector<std::pair<int, int64_t>> absent;  // layer, slot
    int64_t row = -1;
  };
  std::map<int64_t, TokenState> tokens;
  for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
    const Interceptor::LayerInfo& info = Info(layer);
    const LayerBooks& books = layers[layer];
    if (!IsReady(layer)) continue;
    const CacheHashes now = HashCache(info);
    for (const auto& [slot, expectation] : books.expected) {
      const bool holds = now.slots[slot] == expectation.hash;
      if (expectation.kind == Expectation::Kind::kDirectRow) {
        if (!holds) Report("N4", info.name, slot, "row ", expectation.row, " is not in its slot");
        continue;
      }
      TokenState& token = tokens[expectation.token];
      token.row = expectation.row;
      if (holds) {
        ++token.num_present;
      } else if (now.slots[slot] == books.before.slots[slot]) {
        token.absent.emplace_back(layer, slot);
      } else {
        ++token.num_present;
        Report("C9", info.name, slot, "accepted row ", expectation.row,
               " is in its slot with other bytes than a direct write leaves");
      }
    }
    const int64_t page_size = info.layout.geometry.page_size;
    for (size_t page = 0; page < now.pages.size(); ++page) {
      if (now.pages[page] == books.before.pages[page]) continue;
      for (int64_t slot = static_cast<int64_t>(page) * page_size, end = slot + page_size;
           slot < end; ++slot) {
        if (now.slots[slot] == books.before.slots[slot] || books.expected.count(slot) != 0 ||
            books.foreign.count(slot) != 0) {
          continue;
        }
        const int64_t row = round.DraftAt(info.group, slot);
        if (books.refused.count(slot) != 0 && !before_commit) {
          Report("C11", info.name, slot, "a commit that was refused changed a destination");
        } else if (row >= 0 && before_commit) {
          const ShadowRound::StagedRow* staged = round.Staged(layer, row);
          const bool is_draft = staged != nullptr && now.slots[slot] == staged->cached;
          Report(is_draft ? "C3" : "C8", info.name, slot,
                 is_draft ? "the cache holds draft row " : "the cache changed at the slot of row ",
                 row, " before the commit");
        } else if (row >= 0) {
          Report(round.committed ? "N8" : "C5", info.name, slot, "the slot of draft row ", row,
                 round.committed ? ", which was rejected, changed" : " changed without a commit");
        } else {
          Report("C2", info.name, slot, "bytes changed that nothing was to touch, page ", page);
        }
      }
    }
  }
  for (const auto& [number, token] : tokens) {
    for (const auto& [layer, slot] : token.absent) {
      if (token.num_present > 0) {
        Report("C11", Info(layer).name, slot, "accepted row ", token.row,
               " is in other layers but not in this one");
      } else {
        Report("C9", Info(layer).name, slot, "accepted row ", token.row, " is in no layer");
      }
    }
  }
}

// Each staging row holds the row that was written last.
void ContractChecker::Impl::CheckStagingBytes() {
  const Interceptor::RoundInfo info = interceptor.round();
  if (!info.staging) return;
  for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
    const Interceptor::LayerInfo& layer_info = Info(layer);
    if (!IsReady(layer)) continue;
    const StagingBuffer* staging = interceptor.staging(layer_info.group);
    if (staging == nullptr || staging->capacity_rows() < round.num_draft_rows()) {
      Report("N13", layer_info.name, -1, "the round is staged and staging has no room for ",
             round.num_draft_rows(), " rows");
      continue;
    }
    const at::Tensor keys = staging->keys().select(0, layer_info.staged_layer);
    const at::Tensor values = staging->values().select(0, layer_info.staged_layer);
    const RowHashes held = HashRows(layer_info, keys, values);
    for (size_t row = 0; row < info.stage_rows.size(); ++row) {
      const ShadowRound::StagedRow* staged = round.Staged(layer, static_cast<int64_t>(row));
      const int32_t stage_row = info.stage_rows[row];
      if (staged == nullptr || stage_row < 0) continue;
      if (held.staged[stage_row] != staged->staged) {
        Report("C3", layer_info.name, -1, "staging does not hold draft row ", row,
               " as it was written");
      }
    }
  }
}

void ContractChecker::Impl::CheckCounts() {
  const Interceptor::Stats now = interceptor.stats();
  for (const BypassReason reason : reasons_seen) {
    const auto at = static_cast<size_t>(reason);
    if (now.fallbacks[at] <= stats_before.fallbacks[at]) {
      Report("C10", "", -1, "a fallback was answered but not counted: ", Label(reason));
    }
  }
  const int64_t staged = now.staged_tokens - stats_before.staged_tokens;
  if (staged != num_staged_tokens) {
    Report("N3", "", -1, "staged tokens counted ", staged, ", expected ", num_staged_tokens);
  }
  const int64_t operations = now.stage_operations - stats_before.stage_operations;
  if (operations != num_stage_outcomes) {
    Report("N1", "", -1, "stage operations counted ", operations, ", expected ",
           num_stage_outcomes);
  }
  if (!only_disabled) return;
  if (operations != 0 || staged != 0 || now.committed_tokens != stats_before.committed_tokens ||
      now.cache_bytes_written != stats_before.cache_bytes_written ||
      now.staging_bytes != stats_before.staging_bytes) {
    Report("C7", "", -1, "something was counted or allocated although switched off");
  }
}

void ContractChecker::Impl::CheckHostBooks() {
  int64_t taken_slots = 0;
  for (const auto& [request, books] : requests) {
    const RequestState& state = books.last;
    const int64_t needed = (state.num_tokens + state.page_size - 1) / state.page_size;
    if (state.num_pages != needed) {
      Report("C1", "", -1, "request ", request, " holds ", state.num_pages, " pages for ",
             state.num_tokens, " tokens, expected ", needed);
    }
    if (!books.told_again) continue;
    taken_slots +=
        state.num_pages * state.page_size - books.first.num_pages * books.first.page_size;
    if (request >= round.num_requests() || round.open) continue;
    const int64_t grown = state.num_tokens - books.first.num_tokens;
    const int64_t expected = round.NumDirectRows(request) + round.NumCommitted(request);
    if (grown != expected) {
      Report("C1", "", -1, "request ", request, " grew by ", grown, " tokens, expected ", expected);
    }
  }
  if (free_slots_first.has_value() && *free_slots_first - *free_slots_last != taken_slots) {
    Report("C4", "", -1, "free slots went from ", *free_slots_first, " to ", *free_slots_last,
           ", expected ", *free_slots_first - taken_slots);
  }
}

void ContractChecker::Impl::CheckEmitted(const std::vector<int64_t>& emitted) {
  for (size_t b = 0; b < emitted.size(); ++b) {
    const auto request = static_cast<int64_t>(b);
    if (request >= round.num_requests()) break;
    const int64_t committed = round.NumCommitted(request);
    if (committed > emitted[b]) {
      Report("C6", "", -1, "request ", b, " committed ", committed, " drafts, and ", emitted[b],
             " were emitted");
    } else if (round.staging && committed < emitted[b] && !last_receipt_lost) {
      Report("N14", "", -1, "request ", b, " emitted ", emitted[b], " drafts, and ", committed,
             " are committed");
    }
  }
}

}  // namespace nwor
