#include "session/session_rounds.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "session/session_error.h"
#include "tree/tree.h"

namespace nwor {
namespace {

template <typename T>
at::Tensor HostTensor(const std::vector<T>& values, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, c10::CppTypeToScalarType<T>::value);
  if (!values.empty()) {
    std::memcpy(tensor.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  }
  return tensor;
}

// Rows of a turn are the leading ones, then the tree's. Bit j of a row: it sees row j of the turn.
void AppendMask(const Turn& turn, int64_t words, std::vector<int64_t>* mask) {
  const int64_t leading = turn.num_leading();
  const auto first = static_cast<int64_t>(mask->size());
  mask->resize(first + turn.num_rows() * words, 0);
  const auto row_bits = [&](int64_t row) { return mask->data() + first + row * words; };
  for (int64_t row = 0; row < turn.num_rows(); ++row) {
    const int64_t tree_row = row - leading;
    const int64_t parent =
        tree_row > 0 ? leading + turn.tree.parent(tree_row) : row - 1;  // the root's: a new token
    if (parent >= 0) std::copy_n(row_bits(parent), words, row_bits(row));
    row_bits(row)[row / 64] |= static_cast<int64_t>(uint64_t{1} << (row % 64));
  }
}

}  // namespace

SessionRounds::SessionRounds(Interceptor& interceptor, SessionForward forward,
                             SessionAcceptor accept, SessionPages& pages, int64_t max_batch,
                             int64_t vocab_size)
    : interceptor_(interceptor),
      forward_(std::move(forward)),
      accept_(std::move(accept)),
      pages_(pages),
      max_batch_(static_cast<size_t>(max_batch)),
      vocab_size_(vocab_size),
      device_(interceptor.layers().at(0).key_cache.device()) {}

void SessionRounds::Run(std::span<Turn* const> turns) {
  std::unique_lock lock(mutex_);
  waiting_.insert(waiting_.end(), turns.begin(), turns.end());
  const auto all_done = [&] {
    return std::all_of(turns.begin(), turns.end(), [](const Turn* turn) { return turn->done; });
  };
  while (!all_done()) {
    if (leading_) {
      finished_.wait(lock);
      continue;
    }
    leading_ = true;
    const size_t count = std::min(max_batch_, waiting_.size());
    std::vector<Turn*> batch(waiting_.begin(), waiting_.begin() + static_cast<int64_t>(count));
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<int64_t>(count));
    lock.unlock();
    Lead(batch);
    lock.lock();
    for (Turn* turn : batch) turn->done = true;
    leading_ = false;
    finished_.notify_all();
  }
}

RoundStats SessionRounds::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

// A turn that gets no pages fails alone; what the model or the commit throws is everybody's.
void SessionRounds::Lead(const std::vector<Turn*>& turns) {
  std::vector<Turn*> batch;
  std::vector<std::vector<int64_t>> slots;
  for (Turn* turn : turns) {
    try {
      slots.push_back(pages_.Extend(*turn->session, static_cast<int64_t>(turn->direct.size()),
                                    turn->tree.Depth()));
      batch.push_back(turn);
    } catch (...) {
      turn->error = std::current_exception();
    }
  }
  if (!batch.empty()) RunParts(batch, slots);
  pages_.Settle();
}

// Drafts that staging does not take together go in halves, each with a pass of its own.
void SessionRounds::RunParts(std::span<Turn* const> turns, Slots slots) {
  try {
    if (RunBatch(turns, slots)) return;
  } catch (...) {
    for (Turn* turn : turns) turn->error = std::current_exception();
    return;
  }
  const size_t half = turns.size() / 2;
  RunParts(turns.first(half), slots.first(half));
  RunParts(turns.subspan(half), slots.subspan(half));
}

bool SessionRounds::RunBatch(std::span<Turn* const> turns, Slots slots) {
  RoundPlan plan;
  for (const Turn* turn : turns) {
    plan.query_lens.push_back(static_cast<int32_t>(turn->num_rows()));
    plan.num_drafts.push_back(static_cast<int32_t>(turn->tree.num_drafts()));
    std::vector<int32_t>& parents = plan.parents.emplace_back();
    for (int64_t row = 1; row < turn->tree.num_rows(); ++row) {
      parents.push_back(static_cast<int32_t>(turn->num_leading()) + turn->tree.parent(row));
    }
  }
  const int64_t drafts = plan.num_draft_rows();
  if (turns.size() > 1 && drafts >= too_many_drafts_) return false;
  CopyPages();
  SessionBatch batch = Describe(turns, slots);
  const Decision decision = interceptor_.Begin(plan);
  batch.epoch = decision.epoch;
  try {
    if (drafts > 0 && !decision.stage) {
      const bool capacity = decision.reason == BypassReason::kCapacity;
      if (capacity) too_many_drafts_ = std::min(too_many_drafts_, drafts);
      // Half of them may find memory that all of them have not found.
      if ((capacity || decision.reason == BypassReason::kOutOfMemory) && turns.size() > 1) {
        interceptor_.Abort();
        return false;
      }
      const NworConfig& config = interceptor_.config();
      const std::string rows = config.graph_rows > 0
                                   ? Concat(" and staging_rows = ", config.staging_rows)
                                   : std::string();
      throw CapacityError(Concat("staging: got ", drafts, " draft rows, expected what fits into ",
                                 config.max_staging_bytes, " bytes", rows, " (",
                                 Label(decision.reason), ")"));
    }
    {
      const std::lock_guard lock(mutex_);
      ++stats_.forwards;
      stats_.rows += plan.num_rows();
      stats_.largest_batch = std::max(stats_.largest_batch, static_cast<int64_t>(turns.size()));
    }
    const at::Tensor output = forward_(batch);
    CheckAllLayersWrote();
    ReadAcceptance(accept_(batch, output), turns);
    Commit(turns);
  } catch (...) {
    if (interceptor_.round().open) interceptor_.Abort();
    throw;
  }
  for (const Turn* turn : turns) {
    turn->session->length += static_cast<int64_t>(turn->direct.size() + turn->accepted.size());
  }
  return true;
}

SessionBatch SessionRounds::Describe(std::span<Turn* const> turns, Slots slots) {
  const auto num_turns = static_cast<int64_t>(turns.size());
  SessionBatch batch;
  std::vector<int64_t> tokens, positions, slot_mapping, mask;
  std::vector<int32_t> query_start{0}, prefix_lens;
  int64_t width = 1, most_rows = 1;
  bool chains = true;
  for (const Turn* turn : turns) {
    width = std::max(width, turn->tree.num_rows());
    most_rows = std::max(most_rows, turn->num_rows());
    chains = chains && turn->tree.is_chain();
  }
  std::vector<int64_t> tree_rows, tree_tokens(num_turns * width, 0);
  std::vector<int32_t> tree_parents(num_turns * width, -1), tree_sizes;
  for (int64_t b = 0; b < num_turns; ++b) {
    const Turn& turn = *turns[b];
    const int64_t prefix = turn.session->length, leading = turn.num_leading();
    const std::vector<int32_t> depths = turn.tree.Depths();
    batch.sessions.push_back(turn.session->name);
    prefix_lens.push_back(static_cast<int32_t>(prefix));
    for (int64_t row = 0; row < leading; ++row) {
      tokens.push_back(turn.direct[row]);
      positions.push_back(prefix + row);
    }
    tree_rows.resize(b * width + width, static_cast<int64_t>(tokens.size()));
    tree_sizes.push_back(static_cast<int32_t>(turn.tree.num_rows()));
    for (int64_t row = 0; row < turn.tree.num_rows(); ++row) {
      tree_rows[b * width + row] = static_cast<int64_t>(tokens.size());
      tree_tokens[b * width + row] = turn.tree.tokens[row];
      tree_parents[b * width + row] = turn.tree.parent(row);
      tokens.push_back(turn.tree.tokens[row]);
      positions.push_back(prefix + leading + depths[row]);
    }
    slot_mapping.insert(slot_mapping.end(), slots[b].begin(), slots[b].end());
    slot_mapping.resize(tokens.size(), -1);
    query_start.push_back(static_cast<int32_t>(tokens.size()));
    if (!chains) AppendMask(turn, (most_rows + 63) / 64, &mask);
  }
  const auto num_rows = static_cast<int64_t>(tokens.size());
  const auto send = [&](const at::Tensor& host) { return host.to(device_); };
  batch.tokens = send(HostTensor(tokens, {num_rows}));
  batch.positions = send(HostTensor(positions, {num_rows}));
  batch.slot_mapping = send(HostTensor(slot_mapping, {num_rows}));
  batch.query_start = send(HostTensor(query_start, {num_turns + 1}));
  batch.prefix_lens = send(HostTensor(prefix_lens, {num_turns}));
  batch.block_table = BlockTable(turns);
  if (!chains) batch.tree_mask = send(HostTensor(mask, {num_rows, (most_rows + 63) / 64}));
  batch.tree_rows = send(HostTensor(tree_rows, {num_turns, width}));
  batch.tree_tokens = send(HostTensor(tree_tokens, {num_turns, width}));
  batch.tree_parents = send(HostTensor(tree_parents, {num_turns, width}));
  const Tree tree = TreeFromParents(batch.tree_parents, batch.prefix_lens, std::nullopt,
                                    send(HostTensor(tree_sizes, {num_turns})));
  batch.first_child = tree.first_child;
  batch.next_sibling = tree.next_sibling;
  return batch;
}

// A session's row is kept from pass to pass and only its end is new; alone it is the table itself.
at::Tensor SessionRounds::BlockTable(std::span<Turn* const> turns) {
  int64_t most = 1;
  for (const Turn* turn : turns) {
    RefreshBlockRow(*turn->session);
    most = std::max(most, turn->session->block_row_pages);
  }
  const auto valid = [](const Session& session) {
    return session.block_row.slice(0, 0, session.block_row_pages);
  };
  if (turns.size() == 1) return valid(*turns[0]->session).unsqueeze(0);
  at::Tensor table =
      at::zeros({static_cast<int64_t>(turns.size()), most}, at::dtype(at::kInt).device(device_));
  for (size_t b = 0; b < turns.size(); ++b) {
    const Session& session = *turns[b]->session;
    table[static_cast<int64_t>(b)].slice(0, 0, session.block_row_pages).copy_(valid(session));
  }
  return table;
}

void SessionRounds::RefreshBlockRow(Session& session) {
  // The last page that was there may have been exchanged for a copy.
  const int64_t kept = std::max<int64_t>(0, session.block_row_pages - 1);
  const std::vector<int32_t> fresh = pages_.Pages(session, kept);
  const int64_t pages = kept + static_cast<int64_t>(fresh.size());
  if (!session.block_row.defined() || session.block_row.size(0) < pages) {
    at::Tensor larger =
        at::zeros({std::max<int64_t>(16, 2 * pages)}, at::dtype(at::kInt).device(device_));
    if (kept > 0) larger.slice(0, 0, kept).copy_(session.block_row.slice(0, 0, kept));
    session.block_row = std::move(larger);
  }
  session.block_row.slice(0, kept, pages)
      .copy_(HostTensor(fresh, {static_cast<int64_t>(fresh.size())}));
  session.block_row_pages = pages;
}

void SessionRounds::CopyPages() {
  for (const PageCopy& copy : pages_.TakeCopies()) {
    for (const Interceptor::LayerInfo& layer : interceptor_.layers()) {
      for (const at::Tensor& cache : {layer.key_cache, layer.value_cache}) {
        cache.select(0, copy.destination).copy_(cache.select(0, copy.source));
      }
    }
  }
}

void SessionRounds::CheckAllLayersWrote() const {
  for (const Interceptor::LayerInfo& layer : interceptor_.layers()) {
    NWOR_CHECK(layer.round == LayerRound::kStaged || layer.round == LayerRound::kDirect,
               "forward: got no write of layer '", layer.name,
               "' through the interceptor, expected one in every pass");
  }
}

void SessionRounds::ReadAcceptance(const Accepted& acceptance, std::span<Turn* const> turns) const {
  const auto num_turns = static_cast<int64_t>(turns.size());
  NWOR_CHECK(acceptance.path.defined() && acceptance.path.dim() == 2 &&
                 acceptance.path.size(0) == num_turns && acceptance.counts.defined() &&
                 acceptance.counts.numel() == num_turns && acceptance.next_token.defined() &&
                 acceptance.next_token.numel() == num_turns,
             "accept: got wrong shapes, expected path [", num_turns,
             ", R], counts and next_token [", num_turns, "]");
  const at::Tensor path = acceptance.path.to(at::kCPU, at::kLong).contiguous();
  const at::Tensor counts = acceptance.counts.to(at::kCPU, at::kLong).contiguous();
  const at::Tensor next = acceptance.next_token.to(at::kCPU, at::kLong).contiguous();
  for (int64_t b = 0; b < num_turns; ++b) {
    Turn& turn = *turns[b];
    const int64_t count = counts.const_data_ptr<int64_t>()[b];
    NWOR_CHECK(count >= 0 && count <= std::min(path.size(1), turn.tree.num_drafts()),
               "accept: got a count of ", count, " for session '", turn.session->name,
               "', expected 0 to ", turn.tree.num_drafts());
    int64_t tip = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = path.const_data_ptr<int64_t>()[b * path.size(1) + i];
      NWOR_CHECK(row > 0 && row < turn.tree.num_rows() && turn.tree.parent(row) == tip,
                 "accept: got row ", row, " at index ", i, " for session '", turn.session->name,
                 "', expected a child of row ", tip);
      turn.accepted.push_back(static_cast<int32_t>(row));
      tip = row;
    }
    turn.next_token = next.const_data_ptr<int64_t>()[b];
    NWOR_CHECK(turn.next_token >= 0 && (vocab_size_ == 0 || turn.next_token < vocab_size_),
               "accept: got token ", turn.next_token, " for session '", turn.session->name,
               "', expected a token of the vocabulary");
    turn.CutAtTheEnd();
  }
}

// Accepted rows go to the slots of the positions behind the root: a path through a tree is dense
// from then on.
void SessionRounds::Commit(std::span<Turn* const> turns) {
  const auto num_turns = static_cast<int64_t>(turns.size());
  size_t depth = 1;
  for (const Turn* turn : turns) depth = std::max(depth, turn->accepted.size());
  std::vector<int32_t> path(num_turns * depth, -1), counts(num_turns, 0);
  std::vector<int64_t> slots(num_turns * depth, -1);
  for (int64_t b = 0; b < num_turns; ++b) {
    const Turn& turn = *turns[b];
    const auto count = static_cast<int64_t>(turn.accepted.size());
    const std::vector<int64_t> own = pages_.Accept(*turn.session, count);
    counts[b] = static_cast<int32_t>(count);
    for (int64_t i = 0; i < count; ++i) {
      path[b * depth + i] = static_cast<int32_t>(turn.num_leading()) + turn.accepted[i];
      slots[b * depth + i] = own[i];
    }
  }
  // A commit takes so many entries; a long path goes in consecutive parts.
  const auto columns = static_cast<int64_t>(depth);
  const int64_t part = std::max<int64_t>(1, kMaxCommitRows / std::max<int64_t>(1, num_turns));
  const at::Tensor paths = HostTensor(path, {num_turns, columns}).to(device_);
  const at::Tensor all_slots = HostTensor(slots, {num_turns, columns}).to(device_);
  const at::Tensor all_counts = HostTensor(counts, {num_turns}).to(device_);
  for (int64_t first = 0; first < columns; first += part) {
    const int64_t last = std::min(first + part, columns);
    const Receipt receipt = interceptor_.Commit(
        paths.slice(1, first, last).contiguous(), (all_counts - first).clamp(0, last - first),
        {all_slots.slice(1, first, last).contiguous()}, RowSpace::kRequest, last == columns);
    NWOR_CHECK(receipt.ok(), "commit: got ", Label(receipt.verdict().error), ", expected ok",
               receipt.problem.empty() ? "" : ": ", receipt.problem);
  }
}

}  // namespace nwor
