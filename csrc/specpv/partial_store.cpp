#include "specpv/partial_store.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/profiling.h"
#include "base/tensor_layout.h"
#include "metrics/counters.h"
#include "specpv/specpv_ops.h"

#ifdef NWOR_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nwor {
namespace {

// A stream that is being captured runs nothing now: there is no time to be taken.
bool IsCapturing(at::Device device) {
#ifdef NWOR_WITH_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const auto stream = static_cast<cudaStream_t>(CurrentStream(device));
    return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
           status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

std::unique_ptr<c10::Event> RecordNow(at::Device device) {
  auto event = std::make_unique<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

// Rows of lens_: what a step tells the device of each request.
enum Lens : int {
  kStoreRow,    // -1: takes no part
  kAnchor,      // the length its blocks were selected at
  kCommitted,   // N
  kPartial,     // 1: the view
  kCandidates,  // blocks to choose from in this step, -1: it does not refresh
  kStart,       // tokens that summaries begin at, and end before
  kEnd,
  kDone,   // blocks that are summarised
  kLimit,  // blocks this request may choose
  kNumLens,
};

using StepLens = std::array<int32_t, kNumLens>;

StepLens LensOf(const BatchEntry& entry, const Budget& budget) {
  StepLens lens = {};
  lens[kStoreRow] = lens[kCandidates] = lens[kLimit] = -1;
  if (entry.cache == nullptr) return lens;
  const StoredCache& cache = *entry.cache;
  lens[kStoreRow] = static_cast<int32_t>(cache.row());
  lens[kCommitted] = static_cast<int32_t>(cache.committed_len());
  lens[kAnchor] = static_cast<int32_t>(cache.anchor_len());
  lens[kPartial] = entry.decision.kind == StepKind::kPartial ? 1 : 0;
  if (entry.decision.kind != StepKind::kFullRefresh) return lens;
  const auto anchor = static_cast<int32_t>(entry.decision.anchor_len);
  const ViewSegments segments = SegmentsOf(anchor, anchor, static_cast<int32_t>(budget.sink_blocks),
                                           static_cast<int32_t>(budget.window_blocks),
                                           static_cast<int32_t>(budget.block_size));
  lens[kCandidates] = segments.candidates();
  lens[kLimit] = static_cast<int32_t>(cache.budget().retrieval_blocks);
  lens[kStart] = static_cast<int32_t>(budget.sink_tokens());
  lens[kEnd] = static_cast<int32_t>(segments.window_begin * budget.block_size);
  // What lies in the tail was not verified when it was summarised last, whatever the commit did.
  lens[kDone] = static_cast<int32_t>(
      std::min(cache.summarized_blocks(),
               std::max<int64_t>(0, cache.full_len() - budget.sink_tokens()) / budget.block_size));
  return lens;
}

// Tokens that a context may have behind its prompt.
int64_t RoomBehind(int64_t prompt_tokens, int64_t max_tokens) {
  return max_tokens - std::clamp<int64_t>(prompt_tokens, 0, max_tokens);
}

}  // namespace

PartialStore::PartialStore(const SpecPVConfig& config, const StoreOptions& options)
    : config_(config),
      options_(options),
      // The largest budget that a request may have.
      budget_(ChooseBudget(config, options.max_rows, options.max_tokens)) {}

PartialStore::~PartialStore() = default;

std::shared_ptr<PartialStore> PartialStore::Create(const SpecPVConfig& config,
                                                   const std::vector<at::Tensor>& key_caches,
                                                   const std::vector<at::Tensor>& value_caches,
                                                   const StoreOptions& options,
                                                   const std::vector<at::Tensor>& k_scales) {
  NWOR_CHECK(!key_caches.empty() && key_caches.size() == value_caches.size(), "value_caches: got ",
             value_caches.size(), " layers, expected ", key_caches.size(),
             " as key_caches, at least one");
  NWOR_CHECK(k_scales.empty() || k_scales.size() == key_caches.size(), "k_scales: got ",
             k_scales.size(), " layers, expected ", key_caches.size(), " as key_caches, or none");
  NWOR_CHECK(options.max_requests >= 1, "max_requests: got ", options.max_requests,
             ", expected at least 1");
  CacheGeometry geometry;
  for (size_t layer = 0; layer < key_caches.size(); ++layer) {
    const CacheLayout cache =
        DescribeCache(key_caches[layer], value_caches[layer],
                      k_scales.empty() ? std::nullopt : std::optional(k_scales[layer]));
    if (layer == 0) geometry = cache.geometry;
    NWOR_CHECK(key_caches[layer].sizes() == key_caches[0].sizes() &&
                   cache.geometry.dtype == geometry.dtype,
               "key_caches: got ", Describe(key_caches[layer]), " for layer ", layer, ", expected ",
               Describe(key_caches[0]), " as layer 0");
    CheckDevice(key_caches[layer], "key_caches", key_caches[0].device());
  }
  NWOR_CHECK(options.max_tokens <= kMaxContextTokens, "max_tokens: got ", options.max_tokens,
             ", expected at most ", kMaxContextTokens);
  config.ValidateFor(geometry.page_size, options.max_rows, options.max_tokens);

  const std::shared_ptr<PartialStore> store(new PartialStore(config, options));
  store->key_caches_ = key_caches;
  store->value_caches_ = value_caches;
  store->k_scales_ = k_scales;
  store->page_size_ = geometry.page_size;
  const auto layers = static_cast<int64_t>(key_caches.size());
  store->refreshed_.assign(layers, false);
  store->bytes_per_token_ =
      2 * layers * geometry.num_heads * geometry.head_dim * ElementBytes(geometry.dtype);
  const at::Device device = key_caches[0].device();
  const int64_t requests = options.max_requests, heads = geometry.num_heads;
  const Budget& budget = store->budget_;
  const bool retrieves = budget.retrieval_blocks > 0;
  const int64_t pages = retrieves ? geometry.num_pages : 0;
  const int64_t page_blocks = geometry.page_size / budget.block_size;
  store->max_pages_ =
      retrieves ? (options.max_tokens + geometry.page_size - 1) / geometry.page_size : 0;
  const at::ScalarType dtype = options.dtype.value_or(
      geometry.dtype == DType::kFloat8E4M3 ? at::kBFloat16 : ToScalarType(geometry.dtype));
  const auto of = [device](at::ScalarType type) { return at::dtype(type).device(device); };
  store->kmax_ = at::empty({layers, pages, page_blocks, heads, geometry.head_dim}, of(dtype));
  store->kmin_ = at::empty_like(store->kmax_);
  store->scores_ = at::empty({requests * heads * store->max_pages_ * page_blocks}, of(at::kFloat));
  store->ids_ = at::full({layers, requests, heads, budget.retrieval_blocks}, -1, of(at::kInt));
  store->blocks_ = at::full({layers, requests, heads, budget.max_view_blocks()}, -1, of(at::kInt));
  store->num_blocks_ = at::full({requests}, -1, of(at::kInt));
  store->view_lens_ = at::full({requests}, 0, of(at::kInt));
  store->lens_ = at::full({kNumLens, requests}, -1, of(at::kInt));
  for (int64_t row = requests; row > 0; --row) store->free_rows_.push_back(row - 1);
  return store;
}

std::shared_ptr<StoredCache> PartialStore::Open(int64_t prompt_tokens, int64_t max_new_tokens) {
  int64_t row = -1;
  {
    const std::lock_guard lock(free_rows_mutex_);
    if (free_rows_.empty()) return nullptr;
    row = free_rows_.back();
    free_rows_.pop_back();
  }
  try {
    auto cache =
        std::make_shared<StoredCache>(shared_from_this(), row, prompt_tokens, max_new_tokens);
    cache->set_bytes_per_token(bytes_per_token_);
    return cache;
  } catch (...) {
    Release(row);
    throw;
  }
}

void PartialStore::Release(int64_t row) {
  const std::lock_guard lock(free_rows_mutex_);
  free_rows_.push_back(row);
}

void PartialStore::CheckBatch(const std::vector<BatchEntry>& batch) const {
  NWOR_CHECK(static_cast<int64_t>(batch.size()) <= options_.max_requests, "batch: got ",
             batch.size(), " requests, expected at most ", options_.max_requests);
  std::vector<int64_t> place_of_row(options_.max_requests, -1);
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].cache == nullptr) continue;
    const StoredCache& cache = *batch[i].cache;
    const StepDecision& decision = batch[i].decision;
    NWOR_CHECK(cache.IsOf(*this), "batch[", i,
               "]: got a cache of another store, expected one that this store has opened");
    int64_t& place = place_of_row[cache.row()];
    NWOR_CHECK(place < 0, "batch[", i, "]: got the cache of batch[", place,
               "] again, expected each request once");
    place = static_cast<int64_t>(i);
    NWOR_CHECK(
        decision.committed_len == cache.committed_len() && decision.full_len == cache.full_len(),
        "batch[", i, "]: got a decision of F = ", decision.full_len,
        ", N = ", decision.committed_len, ", expected F = ", cache.full_len(),
        ", N = ", cache.committed_len());
    NWOR_CHECK(cache.committed_len() <= options_.max_tokens, "batch[", i, "]: got ",
               cache.committed_len(), " tokens, expected at most ", options_.max_tokens);
  }
}

void PartialStore::Begin(const std::vector<BatchEntry>& batch) {
  batch_.clear();
  CheckBatch(batch);
  const bool cuda = lens_.is_cuda();
  // A new buffer each time: the one of the step before may still be on its way.
  const at::Tensor host =
      at::full({kNumLens, options_.max_requests}, -1, at::dtype(at::kInt).pinned_memory(cuda));
  auto lens = host.accessor<int32_t, 2>();
  std::vector<Begun> begun;
  for (size_t i = 0; i < static_cast<size_t>(options_.max_requests); ++i) {
    const BatchEntry entry = i < batch.size() ? batch[i] : BatchEntry{};
    const StepLens told = LensOf(entry, budget_);
    for (int row = 0; row < kNumLens; ++row) lens[row][static_cast<int64_t>(i)] = told[row];
    const StepDecision& decision = entry.decision;
    begun.push_back(
        {entry.cache, decision.kind, decision.full_len, decision.committed_len, told[kCandidates]});
  }
  for (const BatchEntry& entry : batch) {
    if (entry.cache == nullptr) continue;
    // A list of the request that had the row before must not be taken for its own.
    if (entry.cache->BeginStep()) ids_.select(1, entry.cache->row()).fill_(-1);
  }
  lens_.copy_(host, /*non_blocking=*/cuda);
  ObserveEvents();
  batch_ = std::move(begun);
  const bool nothing_to_choose = budget_.retrieval_blocks == 0;
  refreshed_.assign(num_layers(), nothing_to_choose);
  if (nothing_to_choose) NoteRefresh();
}

void PartialStore::BuildViews(const at::Tensor& block_table) {
  CheckIndex(block_table, "block_table", at::kInt, {options_.max_requests, -1}, lens_.device());
  BuildView(ids_, block_table, lens_[kAnchor], lens_[kCommitted], lens_[kPartial], blocks_,
            num_blocks_, view_lens_, page_size_, budget_.block_size, budget_.sink_blocks,
            budget_.window_blocks, lens_[kStoreRow]);
}

void PartialStore::RefreshLayer(int64_t layer, const at::Tensor& query,
                                const at::Tensor& block_table,
                                const std::optional<at::Tensor>& query_rows) {
  NWOR_CHECK(layer >= 0 && layer < num_layers(), "layer: got ", layer, ", expected 0 to ",
             num_layers() - 1);
  if (budget_.retrieval_blocks == 0) return;
  const ScopedProfileRange range(ProfileRange::kRefresh);
  const at::Device device = lens_.device();
  const bool observed = Refreshes();
  const bool on_device =
      observed && !device.is_cpu() && refresh_end_ == nullptr && !IsCapturing(device);
  if (on_device) refresh_begin_ = RecordNow(device);
  const auto started = std::chrono::steady_clock::now();
  try {
    const std::optional<at::Tensor> scale =
        k_scales_.empty() ? std::nullopt : std::optional(k_scales_[layer]);
    const at::Tensor table =
        block_table.dim() != 2
            ? block_table  // refused below
            : block_table.narrow(1, 0, std::min(block_table.size(1), max_pages_));
    BlockSummaries(key_caches_[layer], table, lens_[kStart], lens_[kEnd], kmax_[layer],
                   kmin_[layer], budget_.block_size, scale, lens_[kDone], /*by_pages=*/true);
    const SelectOptions options{ChoiceName(config_.score(), kScoreNames),
                                ChoiceName(config_.specpv_query_reduce, kQueryReduceNames),
                                ChoiceName(config_.specpv_group_reduce, kGroupReduceNames),
                                ChoiceName(config_.specpv_selection, kSelectionNames),
                                options_.max_rows,
                                budget_.sink_blocks};
    SelectBlocks(query, kmax_[layer], kmin_[layer], lens_[kCandidates], options, query_rows,
                 ids_[layer], scores_, lens_[kStoreRow], lens_[kLimit], table);
  } catch (const std::exception&) {
    for (const Begun& begun : batch_) {
      const std::shared_ptr<StoredCache> cache = begun.cache.lock();
      if (cache == nullptr || begun.kind != StepKind::kFullRefresh) continue;
      cache->RequireFull(FullTrigger::kRefreshFailure);
      cache->set_summarized_blocks(0);
    }
    throw;
  }
  refreshed_[layer] = true;
  if (refreshed()) NoteRefresh();
  if (on_device) refresh_end_ = RecordNow(device);
  if (!observed || !device.is_cpu()) return;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
  Counters::Global().ObserveRefreshLatency(elapsed.count());
}

bool PartialStore::Refreshes() const {
  return std::any_of(batch_.begin(), batch_.end(), [](const Begun& begun) {
    return begun.kind == StepKind::kFullRefresh && !begun.cache.expired();
  });
}

// What the device has measured meanwhile.
void PartialStore::ObserveEvents() {
  if (refresh_end_ == nullptr || !refresh_end_->query()) return;
  Counters::Global().ObserveRefreshLatency(refresh_begin_->elapsedTime(*refresh_end_) * 1e-3);
  refresh_begin_.reset();
  refresh_end_.reset();
}

int64_t PartialStore::free_rows() const {
  const std::lock_guard lock(free_rows_mutex_);
  return static_cast<int64_t>(free_rows_.size());
}

int64_t PartialStore::bytes() const {
  int64_t total = 0;
  for (const at::Tensor& tensor :
       {kmax_, kmin_, ids_, blocks_, num_blocks_, view_lens_, scores_, lens_}) {
    total += static_cast<int64_t>(tensor.nbytes());
  }
  return total;
}

void PartialStore::MarkRefreshed() {
  refreshed_.assign(num_layers(), true);
  NoteRefresh();
}

// A step that was begun may never be run: only when all layers are done are its blocks summarised.
// Another may be begun before this one is finished, so its requests keep it.
void PartialStore::NoteRefresh() {
  for (const Begun& begun : batch_) {
    const std::shared_ptr<StoredCache> cache = begun.cache.lock();
    if (cache == nullptr || begun.kind != StepKind::kFullRefresh) continue;
    cache->EndRefresh(begun.full_len, begun.committed_len);
    if (budget_.retrieval_blocks == 0) continue;
    cache->set_summarized_blocks(std::max(cache->summarized_blocks(), begun.candidates));
  }
}

bool PartialStore::refreshed() const {
  return std::all_of(refreshed_.begin(), refreshed_.end(), [](bool done) { return done; });
}

bool StoredCache::BeginStep() {
  refreshed_ = {-1, -1};
  return std::exchange(is_new_, false);
}

bool StoredCache::RefreshComplete(const StepDecision& decision) const {
  return refreshed_ == std::pair(decision.full_len, decision.committed_len);
}

at::Tensor PartialStore::committed_lens() const { return lens_[kCommitted]; }

StoredCache::StoredCache(std::shared_ptr<PartialStore> store, int64_t row, int64_t prompt_tokens,
                         int64_t max_new_tokens)
    : PartialCache(store->config_, store->options_.max_rows,
                   std::min(prompt_tokens, store->options_.max_tokens),
                   std::min(max_new_tokens, RoomBehind(prompt_tokens, store->options_.max_tokens))),
      store_(std::move(store)),
      row_(row) {}

StoredCache::~StoredCache() { store_->Release(row_); }

}  // namespace nwor
