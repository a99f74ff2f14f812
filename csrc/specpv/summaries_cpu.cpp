#include <atomic>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "specpv/cpu/kernels.h"
#include "specpv/summaries.h"

namespace nwor {
namespace {

// The new blocks of one request.
struct Range {
  int64_t first_unit = 0;  // of all requests' blocks, counted through
  int32_t first_block = 0;
};

int32_t DoneBlocks(const SummaryParams& params, int32_t request) {
  return params.done_blocks == nullptr ? 0 : params.done_blocks[request];
}

void CheckRequest(const SummaryParams& params, int32_t b) {
  const CacheGeometry& cache = params.cache.geometry;
  const int64_t start = params.start_tokens[b], end = params.end_tokens[b];
  NWOR_CHECK(start >= 0, "start_tokens[", b, "]: got ", start, ", expected 0 or more");
  NWOR_CHECK(!params.by_pages || start % params.block_size == 0, "start_tokens[", b, "]: got ",
             start, ", expected a multiple of the block size ", params.block_size);
  const int64_t room = int64_t{params.max_pages} * cache.page_size;
  NWOR_CHECK(end <= room, "end_tokens[", b, "]: got ", end, ", expected at most ", room,
             " (block_table has ", params.max_pages, " pages of ", cache.page_size, " tokens)");
  NWOR_CHECK(DoneBlocks(params, b) >= 0, "done_blocks[", b, "]: got ", DoneBlocks(params, b),
             ", expected 0 or more");
  const int32_t blocks =
      CompleteBlocks(params.start_tokens[b], params.end_tokens[b], params.block_size);
  NWOR_CHECK(blocks <= params.max_blocks, "end_tokens[", b, "]: got ", end, ", that is ", blocks,
             " blocks, expected at most the ", params.max_blocks, " blocks of kmax");
  if (blocks <= DoneBlocks(params, b)) return;
  const int64_t first = start + int64_t{DoneBlocks(params, b)} * params.block_size;
  const int64_t last = start + int64_t{blocks} * params.block_size - 1;
  for (int64_t i = first / cache.page_size; i <= last / cache.page_size; ++i) {
    const int32_t page = params.block_table[b * params.table_stride + i];
    NWOR_CHECK(page >= 0 && page < cache.num_pages, "block_table[", b, ", ", i, "]: got ", page,
               ", expected 0 .. ", cache.num_pages - 1);
  }
}

class BlockSummary {
 public:
  explicit BlockSummary(const SummaryParams& params)
      : params_(params), kernels_(cpu::ChooseSpecPVKernels()), rows_(params.block_size) {}

  // All heads of one block.
  void Run(int32_t request, int32_t block) {
    const CacheGeometry& cache = params_.cache.geometry;
    const int64_t bytes = ElementBytes(cache.dtype);
    const int64_t first = params_.start_tokens[request] + int64_t{block} * params_.block_size;
    for (int32_t i = 0; i < params_.block_size; ++i) {
      const int64_t token = first + i;
      const int64_t page =
          params_.block_table[request * params_.table_stride + token / cache.page_size];
      rows_[i] = static_cast<const std::byte*>(params_.cache.key) +
                 (page * cache.key.page + token % cache.page_size * cache.key.token) * bytes;
    }
    const int64_t out_bytes = ElementBytes(params_.dtype);
    int64_t row = request, at = block;
    if (params_.by_pages) {
      row = params_.block_table[request * params_.table_stride + first / cache.page_size];
      at = first % cache.page_size / params_.block_size;
    }
    const KvScales& scales = params_.cache.scales;
    cpu::ExtremesTask task;
    task.rows = rows_.data();
    task.count = params_.block_size;
    task.head_dim = cache.head_dim;
    task.row_dtype = cache.dtype;
    task.out_dtype = params_.dtype;
    for (int32_t head = 0; head < cache.num_heads; ++head) {
      task.scale = scales.key == nullptr ? 1.0f : scales.key[scales.key_count == 1 ? 0 : head];
      task.kmax = At(params_.kmax, params_.kmax_strides, row, at, head, out_bytes);
      task.kmin = At(params_.kmin, params_.kmin_strides, row, at, head, out_bytes);
      kernels_.extremes(task);
      for (const std::byte*& row : rows_) row += cache.key.head * bytes;
    }
  }

 private:
  static void* At(void* base, const SummaryStrides& strides, int64_t row, int64_t block,
                  int64_t head, int64_t bytes) {
    return static_cast<std::byte*>(base) +
           (row * strides.request + block * strides.block + head * strides.head) * bytes;
  }

  const SummaryParams& params_;
  const cpu::SpecPVKernels& kernels_;
  std::vector<const std::byte*> rows_;
};

}  // namespace

void SummarizeBlocksCpu(const SummaryParams& params) {
  for (int32_t b = 0; b < params.num_requests; ++b) CheckRequest(params, b);
  thread_local std::vector<Range> ranges;
  ranges.clear();
  int64_t num_units = 0;
  for (int32_t b = 0; b < params.num_requests; ++b) {
    const int32_t done = DoneBlocks(params, b);
    ranges.push_back({num_units, done});
    const int32_t blocks =
        CompleteBlocks(params.start_tokens[b], params.end_tokens[b], params.block_size);
    if (blocks > done) num_units += blocks - done;
  }
  ranges.push_back({num_units, 0});

  constexpr int64_t kChunk = 16;  // blocks that one thread takes at a time
  const std::vector<Range>& shared = ranges;
  std::atomic<int64_t> next{0};
  RunOnTorchThreads((num_units + kChunk - 1) / kChunk, [&] {
    BlockSummary summary(params);
    for (int64_t chunk = next.fetch_add(kChunk); chunk < num_units;
         chunk = next.fetch_add(kChunk)) {
      int32_t request = 0;
      const int64_t end = chunk + kChunk < num_units ? chunk + kChunk : num_units;
      for (int64_t unit = chunk; unit < end; ++unit) {
        while (unit >= shared[request + 1].first_unit) ++request;
        const Range& range = shared[request];
        summary.Run(request, range.first_block + static_cast<int32_t>(unit - range.first_unit));
      }
    }
  });
}

}  // namespace nwor
