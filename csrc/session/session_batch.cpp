#include "session/session_batch.h"

#include <ATen/ATen.h>

#include "base/check.h"

namespace nwor {

Accepted AcceptFirstChoice(const SessionBatch& batch, const at::Tensor& output) {
  const int64_t num_rows = batch.tokens.size(0);
  const bool logits = output.defined() && output.is_floating_point();
  NWOR_CHECK(output.defined() && output.dim() == (logits ? 2 : 1) && output.size(0) == num_rows,
             "forward: got ", output.defined() ? Concat(output.sizes()) : "nothing",
             ", expected ids [", num_rows, "] or logits [", num_rows, ", V]");
  const at::Tensor ids =
      (logits ? output.argmax(-1) : output).to(batch.tree_rows.device(), at::kLong);
  return AcceptGreedy(batch.tree_tokens, ids.index({batch.tree_rows}), batch.first_child,
                      batch.next_sibling);
}

}  // namespace nwor
