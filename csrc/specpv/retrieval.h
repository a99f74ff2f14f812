#pragma once

#include <bit>
#include <cstdint>

#include "base/export.h"
#include "base/host_device.h"
#include "base/types.h"
#include "specpv/config.h"
#include "specpv/summaries.h"

// Retrieval: the k blocks whose summaries promise the most to the queries of a tree.
//
// Score of a query row and a block, in float32:
//   specpv   max(q . kmax, q . kmin)
//   quest    sum over channels of max(q * kmax, q * kmin), an upper bound of q . k
// Rows are reduced over the queries of a query head (mean, max, or the last one alone), then over
// the query heads of a KV head (mean, max). Means are left as sums: only their order matters.
// Blocks of equal score go by their id, the lower first; -0 equals 0 and NaN is below everything.
//
// Where queries or summaries are no numbers: in every maximum, of two products as of rows, NaN
// gives way to any number, wherever it stands; in a sum it stays. quest is q+ . kmax + q- . kmin: a
// channel of a query that is NaN has neither sign and adds nothing. A bound that is infinite is
// nothing to a query that has not its sign; CUDA multiplies it by zero there, which is NaN.

namespace nwor {

// Summaries that lie with the pages of a cache, [pages, blocks of a page, Hkv, D]: those of pages
// follow one another, at the distance of blocks.
struct SummaryPages {
  const int32_t* block_table = nullptr;  // [B, table_stride], or null: summaries lie with requests
  int64_t table_stride = 0;
  int32_t max_pages = 0;  // columns of block_table
  int32_t num_pages = 0;
  int32_t blocks_per_page = 1;
  int32_t first_block = 0;  // of a request's text: the first candidate
};

// Where candidate `block` of a request lies among the blocks of all pages, -1: outside of them.
NWOR_HOST_DEVICE inline int32_t BlockInPages(const SummaryPages& pages, int32_t request,
                                             int32_t block) {
  const int32_t of_text = pages.first_block + block;
  const int32_t column = of_text / pages.blocks_per_page;
  if (column >= pages.max_pages) return -1;
  const int32_t page = pages.block_table[request * pages.table_stride + column];
  if (page < 0 || page >= pages.num_pages) return -1;
  return page * pages.blocks_per_page + of_text % pages.blocks_per_page;
}

// A request's row of a store: -1 when there is none such.
NWOR_HOST_DEVICE inline int32_t StoreRow(const int32_t* rows, int32_t request, int32_t num_rows) {
  if (rows == nullptr) return request;
  return rows[request] >= 0 && rows[request] < num_rows ? rows[request] : -1;
}

struct SelectParams {
  const void* query = nullptr;                               // [B, Q, Hq, D]
  int64_t query_request = 0, query_row = 0, query_head = 0;  // strides in elements
  // [B, 2] rows begin .. end - 1 of request b's queries count, or null: all Q.
  const int32_t* query_rows = nullptr;
  // [B, N, Hkv, D], or with a block table those of pages, see below.
  const void* kmax = nullptr;
  const void* kmin = nullptr;
  SummaryStrides kmax_strides, kmin_strides;
  SummaryPages pages;
  const int32_t* rows = nullptr;            // [B] row of request b's ids, or null: row b
  const int32_t* num_candidates = nullptr;  // [B] blocks to choose from; < 0: leave ids as they are
  const int32_t* limits = nullptr;          // [B] blocks request b may take, or null: k
  int32_t* ids = nullptr;                   // [rows, Hkv, k] ascending, -1 padded
  float* scores = nullptr;                  // [B, Hkv, N] scratch
  DType query_dtype = DType::kFloat32;
  DType dtype = DType::kFloat32;  // of the summaries
  Score score = Score::kSpecPV;   // not kAuto
  QueryReduce query_reduce = QueryReduce::kMean;
  GroupReduce group_reduce = GroupReduce::kMean;
  Selection selection = Selection::kPerHead;
  int32_t num_requests = 0;  // B
  int32_t num_queries = 0;   // Q
  // Rows of query_rows that one request has at most, 0: unknown. Chooses the way, never the result.
  int32_t max_rows = 0;
  int32_t num_heads = 0;     // Hq
  int32_t num_kv_heads = 0;  // Hkv
  int32_t head_dim = 0;      // D
  int32_t max_blocks = 0;    // N; by pages as many as the pages of a request have
  int32_t num_rows = 0;      // of ids
  int32_t k = 0;
  StreamHandle stream = nullptr;
};

// A score as an unsigned number of the same order.
NWOR_HOST_DEVICE inline uint32_t OrderedKey(float score) {
  if (score != score) return 0;
  const float positive_zero = score + 0.0f;
#ifdef __CUDA_ARCH__
  const uint32_t bits = __float_as_uint(positive_zero);
#else
  const auto bits = std::bit_cast<uint32_t>(positive_zero);
#endif
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// How many blocks a request takes of `candidates`.
NWOR_HOST_DEVICE inline int32_t BlocksToTake(const SelectParams& params, int32_t request,
                                             int32_t candidates) {
  int32_t taken = candidates < params.k ? candidates : params.k;
  if (params.limits != nullptr && params.limits[request] < taken) taken = params.limits[request];
  return taken < 0 ? 0 : taken;
}

// The rows of a request's queries that count. kLast: the last of them alone.
struct QueryRange {
  int32_t begin;
  int32_t end;
};
NWOR_HOST_DEVICE inline QueryRange QueriesOf(const SelectParams& params, int32_t request) {
  QueryRange range{0, params.num_queries};
  if (params.query_rows != nullptr) {
    range = {params.query_rows[2 * request], params.query_rows[2 * request + 1]};
    if (range.begin < 0) range.begin = 0;
    if (range.end > params.num_queries) range.end = params.num_queries;
    if (range.end < range.begin) range.end = range.begin;
  }
  if (params.query_reduce == QueryReduce::kLast && range.end > range.begin) {
    range.begin = range.end - 1;
  }
  return range;
}

// Throws Error naming the request when candidates, rows or pages are out of range, or a maximum is
// to be taken of more rows than cpu::kMaxScoreRows.
NWOR_EXPORT void SelectBlocksCpu(const SelectParams& params);

// Two launches: scores, then one thread block for each (request, KV head) that selects. Candidates
// beyond N and rows beyond Q are left out; a block of no page is scored by the first page.
NWOR_EXPORT void LaunchSelectBlocks(const SelectParams& params);  // CUDA builds only

}  // namespace nwor
