#include "session/session_batch.h"

#include <ATen/ATen.h>

#include "check.h"

namespace nwor {

Acceptance AcceptFirstChoice(const SessionBatch& batch, const at::Tensor& output) {
  const int64_t num_rows = batch.tokens.size(0);
  const bool logits = output.defined() && output.is_floating_point();
  NWOR_CHECK(output.defined() && output.dim() == (logits ? 2 : 1) && output.size(0) == num_rows,
             "forward: got ", output.defined() ? Concat(output.sizes()) : "nothing",
             ", expected ids [", num_rows, "] or logits [", num_rows, ", V]");
  const at::Tensor ids = (logits ? output.argmax(-1) : output).to(at::kCPU, at::kLong);
  const at::Tensor rows = batch.tree_rows.cpu(), tokens = batch.tree_tokens.cpu(),
                   parents = batch.tree_parents.cpu();
  const int64_t num_sessions = rows.size(0), width = rows.size(1);
  Acceptance accepted{at::full({num_sessions, width}, -1, at::kInt),
                      at::zeros({num_sessions}, at::kInt), at::zeros({num_sessions}, at::kLong)};
  const auto id = ids.accessor<int64_t, 1>();
  const auto row_of = rows.accessor<int64_t, 2>(), token = tokens.accessor<int64_t, 2>();
  const auto parent = parents.accessor<int32_t, 2>();
  auto path = accepted.path.accessor<int32_t, 2>();
  for (int64_t b = 0; b < num_sessions; ++b) {
    // A child comes after its parent, so one pass down the rows finds the first match at each step.
    int64_t tip = 0;
    int32_t count = 0;
    for (int64_t row = 1; row < width && row_of[b][row] >= 0; ++row) {
      if (parent[b][row] == tip && token[b][row] == id[row_of[b][tip]]) {
        path[b][count++] = static_cast<int32_t>(row);
        tip = row;
      }
    }
    accepted.counts[b] = count;
    accepted.next_token[b] = id[row_of[b][tip]];
  }
  return accepted;
}

}  // namespace nwor
