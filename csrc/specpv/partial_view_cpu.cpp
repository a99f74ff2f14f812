#include "base/check.h"
#include "specpv/partial_view.h"

namespace nwor {
namespace {

const int32_t* IdsOf(const ViewParams& params, int32_t layer, int32_t request, int32_t head) {
  const int32_t row = StoreRow(params.rows, request, params.num_rows);
  return params.ids +
         ((int64_t{layer} * params.num_rows + row) * params.num_kv_heads + head) * params.k;
}

int32_t CountIds(const int32_t* ids, int32_t k) {
  int32_t count = 0;
  while (count < k && ids[count] >= 0) ++count;
  return count;
}

// The number of blocks that every list of the request has.
int32_t CheckLists(const ViewParams& params, int32_t request, int32_t candidates) {
  const int32_t expected = CountIds(IdsOf(params, 0, request, 0), params.k);
  for (int32_t layer = 0; layer < params.num_layers; ++layer) {
    for (int32_t head = 0; head < params.num_kv_heads; ++head) {
      const int32_t* ids = IdsOf(params, layer, request, head);
      const int32_t count = CountIds(ids, params.k);
      NWOR_CHECK(count == expected, "ids[", layer, ", ", request, ", ", head, "]: got ", count,
                 " blocks, expected ", expected, " as in every list of the request");
      for (int32_t i = 0; i < count; ++i) {
        NWOR_CHECK(ids[i] < candidates && (i == 0 || ids[i] > ids[i - 1]), "ids[", layer, ", ",
                   request, ", ", head, ", ", i, "]: got ", ids[i],
                   ", expected ascending numbers below the ", candidates, " candidates");
      }
    }
  }
  return expected;
}

void BuildRequest(const ViewParams& params, int32_t request) {
  params.num_blocks[request] = -1;
  params.view_lens[request] = 0;
  if (params.partial[request] == 0) return;
  const int32_t committed = params.committed_lens[request];
  const ViewSegments segments = SegmentsOf(params.full_lens[request], committed, params.sink_blocks,
                                           params.window_blocks, params.block_size);
  const int32_t retrieved = CountIds(IdsOf(params, 0, request, 0), params.k);
  const int32_t total = segments.sink_blocks + retrieved + segments.end - segments.window_begin;
  const int64_t room = int64_t{params.max_pages} * params.page_size;
  if (total > params.max_blocks || committed > room) return;
  for (int32_t layer = 0; layer < params.num_layers; ++layer) {
    for (int32_t head = 0; head < params.num_kv_heads; ++head) {
      const int32_t* ids = IdsOf(params, layer, request, head);
      const int64_t row =
          (int64_t{layer} * params.num_requests + request) * params.num_kv_heads + head;
      int32_t* to = params.blocks + row * params.max_blocks;
      for (int32_t i = 0; i < segments.sink_blocks; ++i) *to++ = CacheBlock(params, request, i);
      for (int32_t i = 0; i < retrieved; ++i) {
        *to++ = CacheBlock(params, request, segments.sink_blocks + ids[i]);
      }
      for (int32_t i = segments.window_begin; i < segments.end; ++i) {
        *to++ = CacheBlock(params, request, i);
      }
    }
  }
  params.num_blocks[request] = total;
  params.view_lens[request] =
      total * params.block_size - (segments.end * params.block_size - committed);
}

}  // namespace

void BuildViewCpu(const ViewParams& params) {
  for (int32_t b = 0; b < params.num_requests; ++b) {
    if (params.partial[b] == 0) continue;
    const int32_t full = params.full_lens[b], committed = params.committed_lens[b];
    NWOR_CHECK(StoreRow(params.rows, b, params.num_rows) >= 0, "rows[", b, "]: got ",
               params.rows[b], ", expected 0 to ", params.num_rows - 1);
    NWOR_CHECK(full >= 0 && full <= committed, "full_lens[", b, "]: got ", full,
               ", expected 0 to committed_lens[", b, "] = ", committed);
    CheckLists(
        params, b,
        SegmentsOf(full, committed, params.sink_blocks, params.window_blocks, params.block_size)
            .candidates());
  }
  for (int32_t b = 0; b < params.num_requests; ++b) BuildRequest(params, b);
}

}  // namespace nwor
