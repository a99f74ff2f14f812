#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "base/export.h"
#include "tree/acceptance.h"

// What a session store hands to the host's model, and what it gets back.

namespace nwor {

// One forward pass over several sessions: B sessions, T rows of them all, in order. A session's
// rows are new tokens, written directly, the last of which is the root, then its drafts. Tensors
// are on the caches' device.
struct SessionBatch {
  std::vector<std::string> sessions;  // [B]
  int64_t epoch = 0;                  // the round's; pass it to Interceptor::Write to be safe

  at::Tensor tokens;        // [T] int64
  at::Tensor positions;     // [T] int64
  at::Tensor slot_mapping;  // [T] int64; -1 for drafts, which hold no slots
  at::Tensor query_start;   // [B + 1] int32
  at::Tensor prefix_lens;   // [B] int32: tokens in the cache before these rows
  at::Tensor block_table;   // [B, max_pages] int32
  at::Tensor tree_mask;     // [T, W] int64, as VerifyAttention takes it; undefined: causal

  // The trees as acceptance takes them, padded to the largest. R = 1 when no session has drafts.
  at::Tensor tree_rows;     // [B, R] int64: the batch row of each; padding: that of the root
  at::Tensor tree_tokens;   // [B, R] int64
  at::Tensor tree_parents;  // [B, R] int32; -1 = the root, or padding
  at::Tensor first_child;   // [B, R] int32; -1 = none
  at::Tensor next_sibling;  // [B, R] int32; -1 = none
};

// Runs the model: writes K/V of all rows through the interceptor, once per layer, and returns what
// the target says after each row, on any device: ids [T] (integers) or logits [T, V] (floating
// point), or whatever the store's Acceptor takes.
using SessionForward = std::function<at::Tensor(const SessionBatch&)>;

// Judges a batch by what the forward pass returned. The path may have fewer columns than R. The
// store checks what it says.
using SessionAcceptor = std::function<Accepted(const SessionBatch&, const at::Tensor&)>;

// The default: a draft is accepted iff it is the target's first choice after its parent.
NWOR_EXPORT Accepted AcceptFirstChoice(const SessionBatch& batch, const at::Tensor& output);

}  // namespace nwor
