#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "base/export.h"

// Draft trees of a batch: what attention, acceptance and commit need to know of them.
//
// Thread-safe. CPU or CUDA (current stream, one launch, capturable, no host sync). On the CPU an
// invalid tree throws nwor::Error with the request and the row named; on CUDA the request's status
// word is set (see fault.h) and it gets a tree of its root alone. Wrong shapes, dtypes and devices
// throw on either.

namespace nwor {

struct Tree {
  at::Tensor tokens;        // [B, R] int64; undefined when built without tokens
  at::Tensor parents;       // [B, R] int32, -1 = the root
  at::Tensor positions;     // [B, R] int64: prefix length + depth
  at::Tensor depths;        // [B, R] int32
  at::Tensor mask;          // [B, R, W] int64: bit j of word w = row 64 * w + j is visible
  at::Tensor first_child;   // [B, R] int32, -1 = none
  at::Tensor next_sibling;  // [B, R] int32, -1 = none; siblings in ascending row order
  at::Tensor status;        // [B] int64, 0 = valid
};

// parents [B, R]: -1 for row 0, an earlier row for every other; R at most 256. prefix_lens [B].
// tokens [B, R] is carried along. num_rows [B]: rows of each request, those beyond are padding that
// sees nothing and is never reached.
NWOR_EXPORT Tree TreeFromParents(const at::Tensor& parents, const at::Tensor& prefix_lens,
                                 const std::optional<at::Tensor>& tokens = std::nullopt,
                                 const std::optional<at::Tensor>& num_rows = std::nullopt);

// The best num_rows - 1 of a top-k drafter's candidates, ordered by candidate id (see
// tree_params.h), below a root. token_steps, score_steps: [B, k], then [B, k, k] or [B, k * k] per
// step; scores have the parents' multiplied in (or added, if they are logarithms).
// parent_steps, joined: the k candidate ids that each step but the last keeps as the parents of the
// next, with or without -1 in front for the root (once, or k times); further ones are not read, and
// with k = 1 none are. Equal scores go to the lower id; a child that scores above its parent counts
// as its equal, so no row is ever without its parent.
NWOR_EXPORT Tree TreeFromTopK(const std::vector<at::Tensor>& token_steps,
                              const std::vector<at::Tensor>& score_steps,
                              const std::vector<at::Tensor>& parent_steps,
                              const at::Tensor& root_tokens, const at::Tensor& prefix_lens,
                              int64_t num_rows);

}  // namespace nwor
