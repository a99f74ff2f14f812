#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "base/export.h"

namespace nwor {

struct Cut {
  at::Tensor path;         // [B, R] int32: rows to commit, -1 padded
  at::Tensor counts;       // [B] int32
  at::Tensor next_token;   // [B] int64: the last emitted token, -1 = nothing is emitted
  at::Tensor emitted;      // [B, R] int64: this round's tokens, -1 padded
  at::Tensor num_emitted;  // [B] int32
  at::Tensor finish;       // [B] int32: FinishReason, 0 = the sequence goes on
};

// Ends accepted runs where their sequences end: after the first stop token (it is emitted), after
// max_new_tokens [B] more tokens, or after keep [B] tokens (what a callback on the host decided; -1
// = no opinion). The run is the accepted drafts and next_token; what is left of it is emitted, and
// all of it but its last token is committed, so nothing after the cut reaches the cache. stop_ids:
// [n] or [B, n], negative entries are none.
//
// Thread-safe. CPU or CUDA (current stream, one launch, capturable, no host sync). On the CPU a
// count or row outside the tree throws nwor::Error; on CUDA that request emits nothing and its
// status (int64 [B], optional) says so.
NWOR_EXPORT Cut CutPath(const at::Tensor& tokens, const at::Tensor& path, const at::Tensor& counts,
                        const at::Tensor& next_token,
                        const std::optional<at::Tensor>& stop_ids = std::nullopt,
                        const std::optional<at::Tensor>& max_new_tokens = std::nullopt,
                        const std::optional<at::Tensor>& keep = std::nullopt,
                        const std::optional<at::Tensor>& status = std::nullopt);

}  // namespace nwor
