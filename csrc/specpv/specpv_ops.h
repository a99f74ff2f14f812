#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/export.h"

// Partial verification on tensors: arguments are checked, then the CPU's or the GPU's way is taken.
// All throw Error and have written nothing then; on CUDA lengths and ids are not read by the host.
//
// Summaries lie by requests, [B, N, Hkv, D], or by pages, [P, blocks of a page, Hkv, D]: a block's
// lie where its page lies, so they take as much memory as the cache asks for, whoever uses it.
// With `rows` [B] int32 ids belong to a store of any number of rows, and request b has row rows[b]
// of it; without, there are B rows and request b has row b.

namespace nwor {

// Summaries of the complete blocks of tokens start_tokens[b] .. end_tokens[b] - 1: row i of
// kmax[b], kmin[b] covers block_size tokens from start_tokens[b] + i * block_size. Rows below
// done_blocks[b] are taken to be there and are not touched. by_pages: rows count in the same way,
// but lie with the pages; block_size divides the page size and start_tokens.
//   key_cache [P, S, Hkv, D]   block_table [B, maxp] int32   start_tokens, end_tokens [B] int32
//   kmax, kmin [B, N, Hkv, D] or [P, S / block_size, Hkv, D] float32, float16 or bfloat16
NWOR_EXPORT void BlockSummaries(const at::Tensor& key_cache, const at::Tensor& block_table,
                                const at::Tensor& start_tokens, const at::Tensor& end_tokens,
                                at::Tensor kmax, at::Tensor kmin, int64_t block_size,
                                const std::optional<at::Tensor>& k_scale = std::nullopt,
                                const std::optional<at::Tensor>& done_blocks = std::nullopt,
                                bool by_pages = false);

struct SelectOptions {
  std::string_view score = "specpv";
  std::string_view query_reduce = "mean";
  std::string_view group_reduce = "mean";
  std::string_view selection = "per_head";
  // Rows that count in one request at most, 0: unknown. Chooses the way, never the result.
  int64_t max_rows = 0;
  // By pages: the block of a request's text that is the first candidate.
  int64_t first_block = 0;
};

// The k best of the first num_candidates[b] blocks, see retrieval.h, into ids [B, Hkv, k] int32. A
// request with a negative number of candidates keeps its ids; one with limits[b] (int32) takes no
// more than so many.
//   query [B, Q, Hq, D]   query_rows [B, 2] int32 or none   scores: float32 scratch of at least
//   B * Hkv * N elements, or undefined: allocated
//   block_table [B, maxp] int32: summaries lie by pages, and N is maxp * blocks of a page
NWOR_EXPORT void SelectBlocks(const at::Tensor& query, const at::Tensor& kmax,
                              const at::Tensor& kmin, const at::Tensor& num_candidates,
                              const SelectOptions& options,
                              const std::optional<at::Tensor>& query_rows, at::Tensor ids,
                              const std::optional<at::Tensor>& scores,
                              const std::optional<at::Tensor>& rows = std::nullopt,
                              const std::optional<at::Tensor>& limits = std::nullopt,
                              const std::optional<at::Tensor>& block_table = std::nullopt);

// The views of a step for all layers, see partial_view.h.
//   ids [L, B, Hkv, k] int32   full_lens, committed_lens, partial, num_blocks, view_lens [B] int32
//   blocks [L, B, Hkv, max_blocks] int32
NWOR_EXPORT void BuildView(const at::Tensor& ids, const at::Tensor& block_table,
                           const at::Tensor& full_lens, const at::Tensor& committed_lens,
                           const at::Tensor& partial, at::Tensor blocks, at::Tensor num_blocks,
                           at::Tensor view_lens, int64_t page_size, int64_t block_size,
                           int64_t sink_blocks, int64_t window_blocks,
                           const std::optional<at::Tensor>& rows = std::nullopt);

}  // namespace nwor
