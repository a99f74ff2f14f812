#include <cstdint>

#include "attention/cpu/kernels.h"
#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/row_mask.h"
#include "attention/cpu/verify.h"
#include "base/check.h"

namespace nwor {
namespace {

void CheckRows(const VerifyParams& params) {
  NWOR_CHECK(params.query_start[0] == 0, "query_start[0]: got ", params.query_start[0],
             ", expected 0");
  for (int b = 0; b < params.num_requests; ++b) {
    const int32_t begin = params.query_start[b];
    const int32_t end = params.query_start[b + 1];
    NWOR_CHECK(begin <= end, "query_start[", b + 1, "]: got ", end, ", expected at least ", begin,
               " (query_start[", b, "])");
    // This also keeps the row count from overflowing.
    NWOR_CHECK(end <= params.num_rows, "query_start[", b + 1, "]: got ", end,
               ", expected at most the ", params.num_rows, " rows of query");
    NWOR_CHECK(params.tree_mask == nullptr || end - begin <= int64_t{64} * params.mask_words,
               "tree_mask: got ", params.mask_words, " words per row, expected at least ",
               (int64_t{end} - begin + 63) / 64, " for the ", end - begin, " rows of request ", b);
  }
  NWOR_CHECK(params.query_start[params.num_requests] == params.num_rows, "query_start[",
             params.num_requests, "]: got ", params.query_start[params.num_requests],
             ", expected the ", params.num_rows, " rows of query");
}

void CheckPages(const VerifyParams& params, int b) {
  const CacheGeometry& cache = params.cache.geometry;
  const int64_t length = params.prefix_lens[b];
  const int64_t room = static_cast<int64_t>(params.max_pages) * cache.page_size;
  NWOR_CHECK(length >= 0 && length <= room, "prefix_lens[", b, "]: got ", length,
             ", expected 0 .. ", room, " (block_table has ", params.max_pages, " pages of ",
             cache.page_size, " tokens)");
  // Entries before all rows' windows may hold anything, like those past the last token.
  cpu::RowChunk rows;
  rows.request = b;
  rows.request_row = params.query_start[b];
  rows.count = rows.request_rows = params.query_start[b + 1] - params.query_start[b];
  if (rows.count == 0) return;
  const int64_t first = cpu::RowMask(params, rows).FirstVisible();
  const int64_t pages = first < length ? (length + cache.page_size - 1) / cache.page_size : 0;
  for (int64_t i = first / cache.page_size; i < pages; ++i) {
    const int32_t page = params.block_table[b * params.table_stride + i];
    NWOR_CHECK(page >= 0 && page < cache.num_pages, "block_table[", b, ", ", i, "]: got ", page,
               ", expected 0 .. ", cache.num_pages - 1);
  }
}

void CheckBlocks(const VerifyParams& params, int b) {
  const PartialViewParams& view = params.view;
  const CacheGeometry& cache = params.cache.geometry;
  const int64_t blocks = view.num_blocks[b];
  NWOR_CHECK(blocks <= view.max_blocks, "view.num_blocks[", b, "]: got ", blocks,
             ", expected -1 .. ", view.max_blocks);
  const int64_t length = view.view_lens[b];
  NWOR_CHECK(length >= 0 && length <= blocks * view.block_size, "view.view_lens[", b, "]: got ",
             length, ", expected 0 .. ", blocks * view.block_size, " (", blocks, " blocks of ",
             view.block_size, " tokens)");
  if (params.query_start[b] == params.query_start[b + 1]) return;
  const int64_t used = (length + view.block_size - 1) / view.block_size;
  const int64_t limit = cache.num_pages * (cache.page_size / view.block_size);
  for (int head = 0; head < params.num_kv_heads; ++head) {
    const int64_t row = static_cast<int64_t>(b) * params.num_kv_heads + head;
    for (int64_t i = 0; i < used; ++i) {
      const int32_t block = view.blocks[row * view.max_blocks + i];
      NWOR_CHECK(block >= 0 && block < limit, "view.blocks[", b, ", ", head, ", ", i, "]: got ",
                 block, ", expected 0 .. ", limit - 1);
    }
  }
}

}  // namespace

void CheckVerifyValues(const VerifyParams& params) {
  CheckRows(params);
  for (int b = 0; b < params.num_requests; ++b) {
    const int64_t length = params.prefix_lens[b];
    NWOR_CHECK(length >= 0, "prefix_lens[", b, "]: got ", length, ", expected 0 or more");
    switch (cpu::KindOfPrefix(params, b)) {
      case cpu::PrefixKind::kPages:
        CheckPages(params, b);
        break;
      case cpu::PrefixKind::kBlocks:
        CheckBlocks(params, b);
        break;
      case cpu::PrefixKind::kCompact:
        NWOR_CHECK(params.compact.lens[b] <= params.compact.max_tokens, "view.lens[", b, "]: got ",
                   params.compact.lens[b], ", expected -1 .. ", params.compact.max_tokens);
        break;
    }
  }
}

}  // namespace nwor
