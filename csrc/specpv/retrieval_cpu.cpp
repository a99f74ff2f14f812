#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "specpv/cpu/kernels.h"
#include "specpv/retrieval.h"

namespace nwor {
namespace {

constexpr int32_t kChunkBlocks = 128;  // that one thread scores at a time

// Rows of one KV head as the kernels score them. A sum over rows that can be taken before the
// product with the summaries (quest is linear in its two halves) is taken there.
struct RowFold {
  bool queries = false;  // all queries of a head are one row,
  bool heads = false;    // all heads, too
  int32_t num_queries = 0;
  int32_t num_groups = 0;

  RowFold(const SelectParams& params, int32_t request) {
    const QueryRange range = QueriesOf(params, request);
    queries = params.score == Score::kQuest && params.query_reduce == QueryReduce::kMean;
    heads = queries && params.group_reduce == GroupReduce::kMean;
    num_queries = queries ? 1 : std::max(1, range.end - range.begin);
    num_groups = heads ? 1 : params.num_heads / params.num_kv_heads;
  }
};

void CheckValues(const SelectParams& params) {
  // Sums are taken as rows are scored; a maximum is taken of all of them.
  const bool keeps_rows =
      params.query_reduce == QueryReduce::kMax || params.group_reduce == GroupReduce::kMax;
  for (int32_t b = 0; b < params.num_requests; ++b) {
    const int32_t candidates = params.num_candidates[b];
    NWOR_CHECK(candidates <= params.max_blocks, "num_candidates[", b, "]: got ", candidates,
               ", expected at most the ", params.max_blocks, " blocks of kmax");
    NWOR_CHECK(candidates < 0 || StoreRow(params.rows, b, params.num_rows) >= 0, "rows[", b,
               "]: got ", params.rows[b], ", expected 0 to ", params.num_rows - 1);
    for (int32_t i = 0; params.pages.block_table != nullptr && i < candidates; ++i) {
      NWOR_CHECK(BlockInPages(params.pages, b, i) >= 0, "num_candidates[", b, "]: got ", candidates,
                 ", but block ", params.pages.first_block + i, " lies in none of the ",
                 params.pages.num_pages, " pages of kmax");
    }
    if (params.query_rows == nullptr || candidates < 0) continue;
    const int32_t begin = params.query_rows[2 * b], end = params.query_rows[2 * b + 1];
    NWOR_CHECK(0 <= begin && begin <= end && end <= params.num_queries, "query_rows[", b, "]: got ",
               begin, " to ", end, ", expected within 0 to ", params.num_queries);
    const RowFold rows(params, b);
    NWOR_CHECK(!keeps_rows || int64_t{rows.num_queries} * rows.num_groups <= cpu::kMaxScoreRows,
               "query_rows[", b, "]: got ", rows.num_queries, " rows of ", rows.num_groups,
               " heads each, expected at most ", cpu::kMaxScoreRows, " together for a maximum");
  }
}

template <typename T>
void ReadAs(const SelectParams& params, int64_t offset, float* channels) {
  const T* from = static_cast<const T*>(params.query) + offset;
  for (int32_t c = 0; c < params.head_dim; ++c) channels[c] = static_cast<float>(from[c]);
}

void ReadQuery(const SelectParams& params, int64_t offset, float* channels) {
  switch (params.query_dtype) {
    case DType::kFloat16:
      return ReadAs<c10::Half>(params, offset, channels);
    case DType::kBFloat16:
      return ReadAs<c10::BFloat16>(params, offset, channels);
    default:
      return ReadAs<float>(params, offset, channels);
  }
}

// The queries of one KV head as the kernels take them.
struct PackedQueries {
  std::vector<float> upper, lower;
  int32_t padded_rows = 0;
  int32_t num_queries = 0;
  int32_t num_groups = 0;

  void Pack(const SelectParams& params, int32_t request, int32_t kv_head, int lanes) {
    const bool quest = params.score == Score::kQuest;
    const RowFold fold(params, request);
    const QueryRange range = QueriesOf(params, request);
    const int32_t group = params.num_heads / params.num_kv_heads;
    num_queries = fold.num_queries;
    num_groups = fold.num_groups;
    padded_rows = (num_queries * num_groups + lanes - 1) / lanes * lanes;
    upper.assign(static_cast<size_t>(padded_rows) * params.head_dim, 0.0f);
    if (quest) lower.assign(upper.size(), 0.0f);
    float channels[cpu::kMaxHeadDim];
    for (int32_t head = 0; head < group; ++head) {
      for (int32_t q = range.begin; q < range.end; ++q) {
        const int32_t row =
            (fold.heads ? 0 : head) * num_queries + (fold.queries ? 0 : q - range.begin);
        const int64_t from = request * params.query_request + q * params.query_row +
                             (int64_t{kv_head} * group + head) * params.query_head;
        ReadQuery(params, from, channels);
        for (int32_t c = 0; c < params.head_dim; ++c) {
          const float x = channels[c];
          const size_t to = static_cast<size_t>(c) * padded_rows + row;
          if (quest) {  // NaN is of neither sign
            if (x > 0.0f) upper[to] += x;
            if (x < 0.0f) lower[to] += x;
          } else {
            upper[to] = x;
          }
        }
      }
    }
  }
};

// Work of one phase, dealt to threads by a counter.
void ForEachUnit(int64_t num_units, const std::function<void(int64_t)>& run) {
  std::atomic<int64_t> next{0};
  RunOnTorchThreads(num_units, [&] {
    for (int64_t unit = next.fetch_add(1); unit < num_units; unit = next.fetch_add(1)) run(unit);
  });
}

// Where candidate `block` lies: in the request's row, or in one of all pages.
struct SummaryPlace {
  int64_t row = 0;
  int64_t block = 0;
};

const std::byte* SummaryAt(const void* base, const SummaryStrides& strides, const SummaryPlace& at,
                           int64_t head, DType dtype) {
  return static_cast<const std::byte*>(base) +
         (at.row * strides.request + at.block * strides.block + head * strides.head) *
             ElementBytes(dtype);
}

SummaryPlace PlaceOf(const SelectParams& params, int32_t request, int32_t block) {
  if (params.pages.block_table == nullptr) return {request, block};
  return {0, BlockInPages(params.pages, request, block)};
}

// How many blocks from `first` on lie side by side, at most `most`.
int32_t BlocksAbreast(const SelectParams& params, int32_t request, int32_t first, int32_t most) {
  if (params.pages.block_table == nullptr) return most;
  const int64_t begin = BlockInPages(params.pages, request, first);
  int32_t count = 1;
  while (count < most && BlockInPages(params.pages, request, first + count) == begin + count) {
    ++count;
  }
  return count;
}

void ScoreChunk(const SelectParams& params, const cpu::SpecPVKernels& kernels,
                const PackedQueries& queries, int32_t request, int32_t kv_head, int32_t first) {
  const int32_t end = std::min(first + kChunkBlocks, params.num_candidates[request]);
  const int64_t bytes = ElementBytes(params.dtype);
  cpu::ScoreTask task;
  task.upper = queries.upper.data();
  task.lower = params.score == Score::kQuest ? queries.lower.data() : queries.upper.data();
  task.padded_rows = queries.padded_rows;
  task.num_queries = queries.num_queries;
  task.num_groups = queries.num_groups;
  task.add = params.score == Score::kQuest;
  task.query_max = params.query_reduce == QueryReduce::kMax;
  task.group_max = params.group_reduce == GroupReduce::kMax;
  task.kmax_stride_bytes = params.kmax_strides.block * bytes;
  task.kmin_stride_bytes = params.kmin_strides.block * bytes;
  task.dtype = params.dtype;
  task.head_dim = params.head_dim;
  float* const scores =
      params.scores + (int64_t{request} * params.num_kv_heads + kv_head) * params.max_blocks;
  while (first < end) {
    const SummaryPlace at = PlaceOf(params, request, first);
    task.kmax = SummaryAt(params.kmax, params.kmax_strides, at, kv_head, params.dtype);
    task.kmin = SummaryAt(params.kmin, params.kmin_strides, at, kv_head, params.dtype);
    task.num_blocks = BlocksAbreast(params, request, first, end - first);
    task.scores = scores + first;
    kernels.score(task);
    first += task.num_blocks;
  }
}

// The `taken` highest of `keys`, ids ascending into `out`, -1 behind them up to k.
void TakeHighest(const std::vector<uint32_t>& keys, int32_t taken, int32_t k,
                 std::vector<uint32_t>& scratch, int32_t* out) {
  const auto count = static_cast<int32_t>(keys.size());
  int32_t written = 0;
  if (taken > 0) {
    scratch = keys;
    std::nth_element(scratch.begin(), scratch.begin() + taken - 1, scratch.end(), std::greater<>());
    const uint32_t least = scratch[taken - 1];
    int32_t ties =
        taken - static_cast<int32_t>(std::count_if(scratch.begin(), scratch.begin() + taken,
                                                   [least](uint32_t key) { return key > least; }));
    for (int32_t id = 0; id < count; ++id) {
      if (keys[id] > least) {
        out[written++] = id;
      } else if (keys[id] == least && ties > 0) {
        out[written++] = id;
        --ties;
      }
    }
  }
  std::fill(out + written, out + k, -1);
}

void SelectRow(const SelectParams& params, int32_t request, int32_t kv_head) {
  const int32_t candidates = params.num_candidates[request];
  if (candidates < 0) return;
  const bool shared = params.selection == Selection::kShared;
  thread_local std::vector<uint32_t> keys, scratch;
  keys.resize(candidates);
  const float* scores =
      params.scores + (int64_t{request} * params.num_kv_heads + kv_head) * params.max_blocks;
  for (int32_t id = 0; id < candidates; ++id) {
    float score = scores[id];
    for (int32_t head = 1; shared && head < params.num_kv_heads; ++head) {
      score += scores[int64_t{head} * params.max_blocks + id];
    }
    keys[id] = OrderedKey(score);
  }
  const int64_t row = StoreRow(params.rows, request, params.num_rows);
  int32_t* ids = params.ids + (row * params.num_kv_heads + kv_head) * params.k;
  TakeHighest(keys, BlocksToTake(params, request, candidates), params.k, scratch, ids);
  for (int32_t head = 1; shared && head < params.num_kv_heads; ++head) {
    std::copy_n(ids, params.k, ids + int64_t{head} * params.k);
  }
}

}  // namespace

void SelectBlocksCpu(const SelectParams& params) {
  CheckValues(params);
  const cpu::SpecPVKernels& kernels = cpu::ChooseSpecPVKernels();
  const int64_t num_rows = int64_t{params.num_requests} * params.num_kv_heads;
  thread_local std::vector<PackedQueries> packed;
  if (static_cast<int64_t>(packed.size()) < num_rows) packed.resize(num_rows);
  std::vector<PackedQueries>& queries = packed;  // of this thread, read by all

  int32_t most = 0;
  for (int32_t b = 0; b < params.num_requests; ++b) most = std::max(most, params.num_candidates[b]);
  ForEachUnit(num_rows, [&](int64_t row) {
    const auto request = static_cast<int32_t>(row / params.num_kv_heads);
    if (params.num_candidates[request] <= 0) return;
    queries[row].Pack(params, request, static_cast<int32_t>(row % params.num_kv_heads),
                      kernels.lanes);
  });
  const int64_t chunks = (most + kChunkBlocks - 1) / kChunkBlocks;
  // Heads of one chunk follow each other: their summaries lie side by side, and what one head's
  // lines bring along is there for the next.
  ForEachUnit(num_rows * chunks, [&](int64_t unit) {
    const int64_t head = unit % params.num_kv_heads;
    const int64_t chunk = unit / params.num_kv_heads % chunks;
    const int64_t request = unit / params.num_kv_heads / chunks;
    ScoreChunk(params, kernels, queries[request * params.num_kv_heads + head],
               static_cast<int32_t>(request), static_cast<int32_t>(head),
               static_cast<int32_t>(chunk) * kChunkBlocks);
  });
  const bool shared = params.selection == Selection::kShared;
  ForEachUnit(shared ? params.num_requests : num_rows, [&](int64_t row) {
    SelectRow(params, static_cast<int32_t>(shared ? row : row / params.num_kv_heads),
              static_cast<int32_t>(shared ? 0 : row % params.num_kv_heads));
  });
}

}  // namespace nwor
