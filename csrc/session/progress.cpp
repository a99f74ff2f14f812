#include "session/progress.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace nwor {

DraftTree Progress::NextTree() const {
  return chunks ? DraftTree{chunks->chunk().tokens, {}} : request->tree;
}

bool Progress::OnePass() const {
  const auto left = static_cast<int64_t>(request->new_tokens.size() - new_tokens_run);
  return left + NextTree().num_drafts() <= kMaxTreeRows;
}

int64_t Progress::NextPiece() const {
  const auto left = static_cast<int64_t>(request->new_tokens.size() - new_tokens_run);
  return OnePass() ? left : std::min(left - 1, kMaxTreeRows);
}

void Progress::PrepareTurn() {
  turn = Turn{};
  turn.session = &*session;
  if (request->max_new_tokens > 0) turn.max_new_tokens = request->max_new_tokens - emitted;
  turn.stop_ids = request->stop_ids;
  DraftTree tree = NextTree();
  const std::vector<int64_t>& tokens = request->new_tokens;
  if (new_tokens_run == tokens.size()) {  // a later chunk: its first row is accepted
    turn.direct = {tree.tokens[0]};
    turn.tree = std::move(tree);
    return;
  }
  const auto begin = tokens.begin() + static_cast<int64_t>(new_tokens_run);
  const bool whole = OnePass();
  turn.direct.assign(begin, begin + NextPiece());
  turn.tree = whole ? std::move(tree) : DraftTree{{turn.direct.back()}, {}};
  turn.prompt_only = !whole;
}

void Progress::Record() {
  result.rows_run += turn.num_rows();
  new_tokens_run = std::min(new_tokens_run + turn.direct.size(), request->new_tokens.size());
  if (turn.prompt_only) return;
  const auto accepted = static_cast<int64_t>(turn.accepted.size());
  result.finish = turn.finish;
  if (!chunks) {
    result.accepted_rows = turn.accepted;
    result.next_token = turn.next_token;
    finished = true;
    return;
  }
  const ChainChunk& chunk = chunks->chunk();
  const bool whole = accepted + 1 == static_cast<int64_t>(chunk.tokens.size());
  const bool goes_on = whole && chunk.next_draft && *chunk.next_draft == turn.next_token &&
                       turn.finish == FinishReason::kNone;
  emitted += accepted + (goes_on ? 1 : 0);
  chunks->Report({accepted + (goes_on ? 1 : 0), turn.next_token});
  if (!chunks->done()) return;
  for (int64_t row = 1; row <= chunks->result().accepted; ++row) {
    result.accepted_rows.push_back(static_cast<int32_t>(row));
  }
  result.next_token = chunks->result().next_token;
  result.rows_saved = chunks->result().rows_saved;
  finished = true;
}

}  // namespace nwor
