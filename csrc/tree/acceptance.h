#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "base/export.h"

// Which drafts the target model accepts.
//
// All take tokens [B, R] with row 0 the root, and the tree's first_child, next_sibling [B, R]. All
// return the accepted draft rows of each request and the token that follows them. Links lead to
// later rows, one to a row at most. `status` (int64 [B], optional) receives 0 or a fault word
// (fault.h) per request.
//
// Thread-safe. CPU or CUDA (current stream, capturable, no host sync). On the CPU wrong values
// throw nwor::Error; on CUDA a request with one accepts nothing and gets next_token -1. Of
// probabilities those are checked that are read: rows off the walk are not.

namespace nwor {

struct Accepted {
  at::Tensor path;        // [B, R] int32: accepted draft rows, root excluded, -1 padded
  at::Tensor counts;      // [B] int32: how many
  at::Tensor next_token;  // [B] int64: the correction or bonus token
};

// A child is accepted iff its token equals target_ids [B, R] (the target's argmax) at its parent.
NWOR_EXPORT Accepted AcceptGreedy(const at::Tensor& tokens, const at::Tensor& target_ids,
                                  const at::Tensor& first_child, const at::Tensor& next_sibling,
                                  const std::optional<at::Tensor>& status = std::nullopt);

// Lossless: what is emitted is distributed as target_probs [B, R, V] (float32) say, whatever the
// drafter proposed and however. coins [B, R]: one per depth; siblings share theirs over the
// target's mass; a token that a sibling proposed before counts once. final_coins [B] draws the last
// token from what the rejected siblings leave. Thresholds in (0, 1]; 1 = lossless. Below 1 they
// accept more than the target would: single = a child of at least that probability always, acc =
// the coin is scaled by it.
NWOR_EXPORT Accepted AcceptSampling(const at::Tensor& tokens, const at::Tensor& target_probs,
                                    const at::Tensor& first_child, const at::Tensor& next_sibling,
                                    const at::Tensor& coins, const at::Tensor& final_coins,
                                    double threshold_single = 1.0, double threshold_acc = 1.0,
                                    const std::optional<at::Tensor>& status = std::nullopt);

// Chains, row i + 1 below row i, by the rule of Leviathan et al.: accepted with probability
// min(1, p / q), else drawn from max(p - q, 0). draft_probs [B, R - 1 or R, V]: row i is what
// tokens[i + 1] was drawn from (a last one is not read); without, drafts count as chosen with
// certainty. num_drafts [B]: drafts of each request, R - 1 if absent. Lossless.
NWOR_EXPORT Accepted AcceptChainSampling(const at::Tensor& tokens, const at::Tensor& target_probs,
                                         const std::optional<at::Tensor>& draft_probs,
                                         const at::Tensor& coins, const at::Tensor& final_coins,
                                         const std::optional<at::Tensor>& num_drafts = std::nullopt,
                                         const std::optional<at::Tensor>& status = std::nullopt);

struct Coins {
  at::Tensor accept;  // [B, R] float32: for AcceptSampling's coins
  at::Tensor final;   // [B] float32
};

// Coins that depend on seed and place alone: seeds [B] int64, positions [B] int64 (the position of
// the next token of each sequence). The coin of depth d belongs to position + d.
NWOR_EXPORT Coins MakeCoins(const at::Tensor& seeds, const at::Tensor& positions, int64_t num_rows);

}  // namespace nwor
