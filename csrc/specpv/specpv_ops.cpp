#include "specpv/specpv_ops.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "specpv/cpu/kernels.h"
#include "specpv/partial_view.h"
#include "specpv/retrieval.h"
#include "specpv/summaries.h"

namespace nwor {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMinInt = std::numeric_limits<int32_t>::min();

template <typename T>
const T* Data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
T* MutableData(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// int64 as int32: what does not fit is refused on the CPU; on CUDA it becomes the nearest number
// that does, which is out of range as well.
at::Tensor Narrowed(const at::Tensor& tensor, const char* name) {
  if (!tensor.is_cpu()) return tensor.clamp(kMinInt, kMaxInt).to(at::kInt).contiguous();
  const at::Tensor wide = tensor.contiguous();
  for (int64_t i = 0; i < wide.numel(); ++i) {
    const int64_t value = Data<int64_t>(wide)[i];
    NWOR_CHECK(value >= kMinInt && value <= kMaxInt, name, "[", i, "]: got ", value, ", expected ",
               kMinInt, " to ", kMaxInt);
  }
  return wide.to(at::kInt);
}

// Lengths come as int32; int64 is converted, which on CUDA are launches of its own.
at::Tensor Lengths(const at::Tensor& tensor, const char* name, int64_t requests,
                   at::Device device) {
  NWOR_CHECK(tensor.defined(), name, ": got nothing, expected a tensor");
  const at::Tensor lengths = tensor.scalar_type() == at::kLong ? Narrowed(tensor, name) : tensor;
  CheckIndex(lengths, name, at::kInt, {requests}, device);
  return lengths;
}

int64_t CheckTable(const at::Tensor& table, at::Device device) {
  NWOR_CHECK(table.dim() == 2 && table.scalar_type() == at::kInt, "block_table: got ",
             Describe(table), ", expected [requests, pages] Int");
  NWOR_CHECK(table.size(1) <= 1 || table.stride(1) == 1, "block_table: got a stride of ",
             table.stride(1), " between pages, expected 1");
  NWOR_CHECK(table.size(0) <= kMaxInt && table.size(1) <= kMaxInt, "block_table: got sizes ",
             table.sizes(), ", expected both below 2^31");
  CheckDevice(table, "block_table", device);
  return table.size(0);
}

int64_t TableStride(const at::Tensor& table) {
  return table.size(0) > 1 ? table.stride(0) : table.size(1);
}

// A [B, N, Hkv, D] pair of summaries.
void CheckSummaries(const at::Tensor& kmax, const at::Tensor& kmin, at::Device device) {
  for (const auto& [tensor, name] : {std::pair{&kmax, "kmax"}, std::pair{&kmin, "kmin"}}) {
    NWOR_CHECK(tensor->defined() && tensor->dim() == 4, name, ": got ",
               tensor->defined() ? Describe(*tensor) : "nothing",
               ", expected [requests, blocks, KV heads, channels]");
    RowDType(*tensor, name);
    CheckDevice(*tensor, name, device);
    NWOR_CHECK(tensor->size(1) <= kMaxInt, name, ": got ", tensor->size(1),
               " blocks, expected at most ", kMaxInt);
  }
  NWOR_CHECK(kmin.sizes() == kmax.sizes() && kmin.scalar_type() == kmax.scalar_type(), "kmin: got ",
             Describe(kmin), ", expected ", Describe(kmax), " as kmax");
}

// By requests there is one for each of `rows`; by pages there are `rows` pages.
void CheckSizes(const at::Tensor& summaries, int64_t rows, int64_t heads, int64_t channels) {
  NWOR_CHECK(
      summaries.size(0) == rows && summaries.size(2) == heads && summaries.size(3) == channels,
      "kmax: got sizes ", summaries.sizes(), ", expected [", rows, ", blocks, ", heads, ", ",
      channels, "]");
}

SummaryStrides StridesOf(const at::Tensor& summaries) {
  return {summaries.stride(0), summaries.stride(1), summaries.stride(2)};
}

// Those by pages, where blocks of all pages are numbered through.
SummaryStrides StridesByPages(const at::Tensor& summaries, const char* name) {
  SummaryStrides strides = StridesOf(summaries);
  const int64_t pages = summaries.size(0), blocks = summaries.size(1);
  NWOR_CHECK(pages <= 1 || blocks <= 1 || strides.request == blocks * strides.block, name,
             ": got strides ", summaries.strides(), ", expected blocks of a page behind those of ",
             "the page before");
  NWOR_CHECK(pages * blocks <= kMaxInt, name, ": got ", pages * blocks,
             " blocks, expected at most ", kMaxInt);
  if (blocks == 1) strides.block = strides.request;
  return strides;
}

// Blocks that a request may have; with a table those of its pages.
int32_t BlocksOf(const at::Tensor& summaries, const at::Tensor* block_table) {
  const int64_t pages = block_table == nullptr ? 1 : block_table->size(1);
  const int64_t blocks = pages * summaries.size(1);
  NWOR_CHECK(blocks <= kMaxInt, "block_table: got ", pages, " pages of ", summaries.size(1),
             " blocks, expected at most ", kMaxInt, " blocks");
  return static_cast<int32_t>(blocks);
}

}  // namespace

void BlockSummaries(const at::Tensor& key_cache, const at::Tensor& block_table,
                    const at::Tensor& start_tokens, const at::Tensor& end_tokens, at::Tensor kmax,
                    at::Tensor kmin, int64_t block_size, const std::optional<at::Tensor>& k_scale,
                    const std::optional<at::Tensor>& done_blocks, bool by_pages) {
  SummaryParams params;
  params.cache = DescribeCache(key_cache, key_cache, k_scale);
  const at::Device device = key_cache.device();
  const int64_t requests = CheckTable(block_table, device);
  NWOR_CHECK(block_size >= 1 && block_size <= kMaxInt, "block_size: got ", block_size,
             ", expected at least 1");
  const at::Tensor start = Lengths(start_tokens, "start_tokens", requests, device);
  const at::Tensor end = Lengths(end_tokens, "end_tokens", requests, device);
  CheckSummaries(kmax, kmin, device);
  const CacheGeometry& geometry = params.cache.geometry;
  CheckSizes(kmax, by_pages ? geometry.num_pages : requests, geometry.num_heads, geometry.head_dim);
  NWOR_CHECK(!by_pages || kmax.size(1) * block_size == geometry.page_size, "kmax: got ",
             kmax.size(1), " blocks of ", block_size, " tokens for each page, expected those of ",
             geometry.page_size, " tokens");
  for (const auto& [tensor, name] : {std::pair{&kmax, "kmax"}, std::pair{&kmin, "kmin"}}) {
    NWOR_CHECK(tensor->size(3) == 1 || tensor->stride(3) == 1, name, ": got a stride of ",
               tensor->stride(3), " between channels, expected 1 (contiguous channels)");
    NWOR_CHECK(at::has_internal_overlap(*tensor) != at::MemOverlap::Yes, name,
               ": got overlapping strides ", tensor->strides(), ", expected one place per element");
  }
  at::Tensor done;
  if (done_blocks.has_value()) done = Lengths(*done_blocks, "done_blocks", requests, device);
  if (requests == 0 || kmax.size(1) == 0) return;

  params.block_table = Data<int32_t>(block_table);
  params.start_tokens = Data<int32_t>(start);
  params.end_tokens = Data<int32_t>(end);
  if (done.defined()) params.done_blocks = Data<int32_t>(done);
  params.kmax = kmax.mutable_data_ptr();
  params.kmin = kmin.mutable_data_ptr();
  params.kmax_strides = StridesOf(kmax);
  params.kmin_strides = StridesOf(kmin);
  params.dtype = RowDType(kmax, "kmax");
  params.table_stride = TableStride(block_table);
  params.max_pages = static_cast<int32_t>(block_table.size(1));
  params.by_pages = by_pages;
  params.max_blocks = BlocksOf(kmax, by_pages ? &block_table : nullptr);
  params.block_size = static_cast<int32_t>(block_size);
  params.num_requests = static_cast<int32_t>(requests);
  params.stream = CurrentStream(device);
  const c10::DeviceGuard guard(device);
  if (device.is_cpu()) return SummarizeBlocksCpu(params);
#ifdef NWOR_WITH_CUDA
  LaunchSummarizeBlocks(params);
#endif
}

void SelectBlocks(const at::Tensor& query_in, const at::Tensor& kmax_in, const at::Tensor& kmin_in,
                  const at::Tensor& num_candidates, const SelectOptions& options,
                  const std::optional<at::Tensor>& query_rows, at::Tensor ids,
                  const std::optional<at::Tensor>& scores_in, const std::optional<at::Tensor>& rows,
                  const std::optional<at::Tensor>& limits,
                  const std::optional<at::Tensor>& block_table) {
  SelectParams params;
  NWOR_CHECK(query_in.dim() == 4, "query: got sizes ", query_in.sizes(),
             ", expected [requests, rows, heads, channels]");
  const at::Device device = query_in.device();
  const at::Tensor query = ContiguousChannels(query_in);
  const at::Tensor kmax = ContiguousChannels(kmax_in), kmin = ContiguousChannels(kmin_in);
  params.query_dtype = RowDType(query, "query");
  CheckSummaries(kmax, kmin, device);
  const int64_t requests = query.size(0), heads = query.size(2), channels = query.size(3);
  const int64_t kv_heads = kmax.size(2);
  NWOR_CHECK(kv_heads >= 1 && heads >= 1 && heads % kv_heads == 0, "query: got ", heads,
             " heads, expected a multiple of the ", kv_heads, " KV heads of kmax");
  const bool by_pages = block_table.has_value();
  CheckSizes(kmax, by_pages ? kmax.size(0) : requests, kv_heads, channels);
  if (by_pages) {
    const int64_t tables = CheckTable(*block_table, device);
    NWOR_CHECK(tables == requests, "block_table: got ", tables, " requests, expected ", requests);
  }
  NWOR_CHECK(options.first_block >= 0 && options.first_block <= kMaxInt &&
                 (by_pages || options.first_block == 0),
             "first_block: got ", options.first_block, ", expected 0",
             by_pages ? " or more" : " without a block table");
  const int64_t blocks = BlocksOf(kmax, by_pages ? &*block_table : nullptr);
  NWOR_CHECK(channels >= 1 && channels <= cpu::kMaxHeadDim, "query: got ", channels,
             " channels, expected 1 to ", cpu::kMaxHeadDim);
  NWOR_CHECK(query.size(1) >= 1 || query_rows.has_value(),
             "query: got no rows, expected at least 1");
  NWOR_CHECK(query_rows.has_value() || query.size(1) * (heads / kv_heads) <= cpu::kMaxScoreRows,
             "query: got ", query.size(1), " rows of ", heads / kv_heads,
             " heads each, expected at most ", cpu::kMaxScoreRows, " together");
  NWOR_CHECK(options.max_rows >= 0, "max_rows: got ", options.max_rows, ", expected 0 or more");
  params.score = ParseChoice<Score>("score", options.score, kScoreNames);
  NWOR_CHECK(params.score != Score::kAuto, "score: got 'auto', expected 'specpv' or 'quest'");
  params.query_reduce =
      ParseChoice<QueryReduce>("query_reduce", options.query_reduce, kQueryReduceNames);
  params.group_reduce =
      ParseChoice<GroupReduce>("group_reduce", options.group_reduce, kGroupReduceNames);
  params.selection = ParseChoice<Selection>("selection", options.selection, kSelectionNames);
  const at::Tensor candidates = Lengths(num_candidates, "num_candidates", requests, device);
  if (query_rows.has_value()) {
    CheckIndex(*query_rows, "query_rows", at::kInt, {requests, 2}, device);
  }
  if (limits.has_value()) CheckIndex(*limits, "limits", at::kInt, {requests}, device);
  if (rows.has_value()) CheckIndex(*rows, "rows", at::kInt, {requests}, device);
  CheckIndex(ids, "ids", at::kInt, {rows.has_value() ? -1 : requests, kv_heads, -1}, device);
  const int64_t needed = requests * kv_heads * blocks;
  if (scores_in.has_value()) {
    NWOR_CHECK(scores_in->scalar_type() == at::kFloat && scores_in->is_contiguous() &&
                   scores_in->numel() >= needed,
               "scores: got ", Describe(*scores_in), ", expected at least ", needed,
               " contiguous float32 elements");
    CheckDevice(*scores_in, "scores", device);
  }
  if (ids.numel() == 0 || requests == 0) return;

  const c10::DeviceGuard guard(device);
  at::Tensor scores =
      scores_in.has_value() ? *scores_in : at::empty({needed}, query.options().dtype(at::kFloat));
  params.query = query.const_data_ptr();
  params.query_request = query.stride(0);
  params.query_row = query.stride(1);
  params.query_head = query.stride(2);
  if (query_rows.has_value()) params.query_rows = Data<int32_t>(*query_rows);
  if (rows.has_value()) params.rows = Data<int32_t>(*rows);
  params.num_rows = static_cast<int32_t>(ids.size(0));
  params.kmax = kmax.const_data_ptr();
  params.kmin = kmin.const_data_ptr();
  params.kmax_strides = by_pages ? StridesByPages(kmax, "kmax") : StridesOf(kmax);
  params.kmin_strides = by_pages ? StridesByPages(kmin, "kmin") : StridesOf(kmin);
  if (by_pages) {
    params.pages = {Data<int32_t>(*block_table),
                    TableStride(*block_table),
                    static_cast<int32_t>(block_table->size(1)),
                    static_cast<int32_t>(kmax.size(0)),
                    static_cast<int32_t>(kmax.size(1)),
                    static_cast<int32_t>(options.first_block)};
  }
  params.num_candidates = Data<int32_t>(candidates);
  if (limits.has_value()) params.limits = Data<int32_t>(*limits);
  params.ids = MutableData<int32_t>(ids);
  params.scores = MutableData<float>(scores);
  params.dtype = RowDType(kmax, "kmax");
  params.num_requests = static_cast<int32_t>(requests);
  params.num_queries = static_cast<int32_t>(query.size(1));
  if (query_rows.has_value()) {
    params.max_rows = static_cast<int32_t>(std::min(options.max_rows, query.size(1)));
  }
  params.num_heads = static_cast<int32_t>(heads);
  params.num_kv_heads = static_cast<int32_t>(kv_heads);
  params.head_dim = static_cast<int32_t>(channels);
  params.max_blocks = static_cast<int32_t>(blocks);
  params.k = static_cast<int32_t>(ids.size(2));
  params.stream = CurrentStream(device);
  if (device.is_cpu()) return SelectBlocksCpu(params);
#ifdef NWOR_WITH_CUDA
  LaunchSelectBlocks(params);
#endif
}

void BuildView(const at::Tensor& ids, const at::Tensor& block_table, const at::Tensor& full_lens,
               const at::Tensor& committed_lens, const at::Tensor& partial, at::Tensor blocks,
               at::Tensor num_blocks, at::Tensor view_lens, int64_t page_size, int64_t block_size,
               int64_t sink_blocks, int64_t window_blocks, const std::optional<at::Tensor>& rows) {
  const at::Device device = blocks.device();
  const int64_t requests = CheckTable(block_table, device);
  CheckIndex(blocks, "blocks", at::kInt, {-1, requests, -1, -1}, device);
  const int64_t layers = blocks.size(0), heads = blocks.size(2);
  CheckIndex(ids, "ids", at::kInt, {layers, rows.has_value() ? -1 : requests, heads, -1}, device);
  if (rows.has_value()) CheckIndex(*rows, "rows", at::kInt, {requests}, device);
  for (const auto& [tensor, name] :
       {std::pair{&full_lens, "full_lens"}, std::pair{&committed_lens, "committed_lens"},
        std::pair{&partial, "partial"},
        std::pair<const at::Tensor*, const char*>{&num_blocks, "num_blocks"},
        std::pair<const at::Tensor*, const char*>{&view_lens, "view_lens"}}) {
    CheckIndex(*tensor, name, at::kInt, {requests}, device);
  }
  NWOR_CHECK(page_size >= 1 && page_size <= kMaxInt, "page_size: got ", page_size,
             ", expected at least 1");
  NWOR_CHECK(block_size >= 1 && page_size % block_size == 0, "block_size: got ", block_size,
             ", expected a divisor of the page size ", page_size);
  NWOR_CHECK(
      sink_blocks >= 0 && sink_blocks <= kMaxInt && window_blocks >= 0 && window_blocks <= kMaxInt,
      "sink_blocks, window_blocks: got ", sink_blocks, " and ", window_blocks,
      ", expected 0 or more");
  if (requests == 0 || layers == 0 || heads == 0) return;

  ViewParams params;
  params.ids = Data<int32_t>(ids);
  if (rows.has_value()) params.rows = Data<int32_t>(*rows);
  params.num_rows = static_cast<int32_t>(ids.size(1));
  params.block_table = Data<int32_t>(block_table);
  params.full_lens = Data<int32_t>(full_lens);
  params.committed_lens = Data<int32_t>(committed_lens);
  params.partial = Data<int32_t>(partial);
  params.blocks = MutableData<int32_t>(blocks);
  params.num_blocks = MutableData<int32_t>(num_blocks);
  params.view_lens = MutableData<int32_t>(view_lens);
  params.table_stride = TableStride(block_table);
  params.max_pages = static_cast<int32_t>(block_table.size(1));
  params.num_layers = static_cast<int32_t>(layers);
  params.num_requests = static_cast<int32_t>(requests);
  params.num_kv_heads = static_cast<int32_t>(heads);
  params.k = static_cast<int32_t>(ids.size(3));
  params.max_blocks = static_cast<int32_t>(blocks.size(3));
  params.sink_blocks = static_cast<int32_t>(sink_blocks);
  params.window_blocks = static_cast<int32_t>(window_blocks);
  params.block_size = static_cast<int32_t>(block_size);
  params.page_size = static_cast<int32_t>(page_size);
  params.stream = CurrentStream(device);
  const c10::DeviceGuard guard(device);
  if (device.is_cpu()) return BuildViewCpu(params);
#ifdef NWOR_WITH_CUDA
  LaunchBuildView(params);
#endif
}

}  // namespace nwor
