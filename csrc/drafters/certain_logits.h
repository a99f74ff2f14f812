#pragma once

#include <ATen/core/Tensor.h>

#include "base/export.h"

// Logits of drafts that were not drawn: a sampler that compares a draft with its logits is told
// that nothing else could have been drafted.

namespace nwor {

// Draft i of request b is tokens[b, i] with certainty, for i >= starts[b]: its logit is 0 and all
// others are kNoChance (certain_logits_params.h). Drafts before are not touched, nor are requests
// whose row is outside of 0 .. R-1; of a token outside of the vocabulary all logits are kNoChance.
//   logits [R, drafts, V] float32, tokens of a draft next to each other
//   rows, starts [B] int32   tokens [B, drafts] int64, drafts next to each other
NWOR_EXPORT void CertainLogits(at::Tensor logits, const at::Tensor& rows, const at::Tensor& starts,
                               const at::Tensor& tokens);

}  // namespace nwor
