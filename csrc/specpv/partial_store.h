#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/export.h"
#include "specpv/config.h"
#include "specpv/partial_cache.h"
#include "specpv/verify_policy.h"

// What partial verification keeps on the device for a number of requests: block summaries, chosen
// blocks and views of every layer, and the lengths and decisions of a step as device data, so that
// one captured graph serves every mix of full and partial requests.
//
// A step: Begin(batch) -> BuildViews -> per layer: write, RefreshLayer, attention with View(layer)
//         -> acceptance, commit -> Finish on each request's PartialCache.
// BuildViews and RefreshLayer read device data only and may be captured; Begin copies a few numbers
// to the device and belongs before the replay.

namespace nwor {

// A request of the store: its PartialCache and its row, which is free again when it goes.
class NWOR_EXPORT StoredCache;

// One request of a step's batch; no cache: it takes no part and sees its whole prefix.
struct BatchEntry {
  std::shared_ptr<StoredCache> cache;
  StepDecision decision;
};

struct StoreOptions {
  int64_t max_requests = 1;             // also the size of a step's batch
  int64_t max_tokens = 0;               // longest context
  int64_t max_rows = 1;                 // rows of the largest tree, the root included
  std::optional<at::ScalarType> dtype;  // of summaries; default: the caches', bfloat16 for float8
};

// Thread-safety: none, but caches may be dropped from any thread.
class NWOR_EXPORT PartialStore : public std::enable_shared_from_this<PartialStore> {
 public:
  // Caches are [P, S, Hkv, D] views, one pair for each layer, of one size, dtype and device. Throws
  // Error when the configuration does not fit them. Memory is taken here and nowhere else.
  static std::shared_ptr<PartialStore> Create(const SpecPVConfig& config,
                                              const std::vector<at::Tensor>& key_caches,
                                              const std::vector<at::Tensor>& value_caches,
                                              const StoreOptions& options,
                                              const std::vector<at::Tensor>& k_scales = {});
  ~PartialStore();

  // A new request, or null when no row is free: it then runs full. What lies beyond max_tokens does
  // not count for its budget, which is therefore never larger than the store's.
  std::shared_ptr<StoredCache> Open(int64_t prompt_tokens = 0, int64_t max_new_tokens = 0);

  // Tells the device what the requests of this step do. batch[i] is request i of block tables and
  // views; those beyond the batch take no part. Throws Error, and no step is begun, unless all are
  // caches of this store, each of them once, with decisions of their state.
  void Begin(const std::vector<BatchEntry>& batch);

  // Views of all layers for the batch. block_table [max_requests, pages] int32.
  void BuildViews(const at::Tensor& block_table);

  // For requests that refresh in this step: summaries of what was committed before it, then the
  // choice of blocks for the steps to come. Call it after the layer's K/V of re-fed rows is in the
  // cache. query [max_requests, rows, Hq, D] after RoPE; query_rows [max_requests, 2] int32: which
  // of the rows are the tree's (default: all). When it throws, the requests that were to refresh
  // will be full again (refresh_failure).
  void RefreshLayer(int64_t layer, const at::Tensor& query, const at::Tensor& block_table,
                    const std::optional<at::Tensor>& query_rows = std::nullopt);

  int64_t num_layers() const { return static_cast<int64_t>(key_caches_.size()); }
  int64_t free_rows() const;
  int64_t bytes() const;  // held on the device
  const SpecPVConfig& config() const { return config_; }
  const Budget& budget() const { return budget_; }

  // The view of a layer, as PartialView takes it.
  at::Tensor blocks(int64_t layer) const { return blocks_.select(0, layer); }
  const at::Tensor& all_blocks() const { return blocks_; }  // [L, max_requests, Hkv, blocks]
  const at::Tensor& num_blocks() const { return num_blocks_; }
  const at::Tensor& view_lens() const { return view_lens_; }
  // [L, pages, blocks of a page, Hkv, D] and [L, rows, Hkv, k]: for tests and for the commit.
  const at::Tensor& kmax() const { return kmax_; }
  const at::Tensor& kmin() const { return kmin_; }
  const at::Tensor& ids() const { return ids_; }
  // [max_requests] int32, of the step that was begun last.
  at::Tensor committed_lens() const;

  // A captured graph has refreshed all layers of this step.
  void MarkRefreshed();
  bool refreshed() const;

 private:
  friend class StoredCache;
  PartialStore(const SpecPVConfig& config, const StoreOptions& options);
  void Release(int64_t row);
  void CheckBatch(const std::vector<BatchEntry>& batch) const;
  bool Refreshes() const;  // whether a request of the step does
  void NoteRefresh();
  void ObserveEvents();

  struct Begun {
    std::weak_ptr<StoredCache> cache;  // a request that is gone must not be kept by the last step
    StepKind kind = StepKind::kFull;
    int64_t full_len = 0;  // of the decision: the two tell a request's steps apart
    int64_t committed_len = 0;
    int64_t candidates = -1;  // blocks that are summarised when it has refreshed
  };

  const SpecPVConfig config_;
  const StoreOptions options_;
  const Budget budget_;
  std::vector<at::Tensor> key_caches_, value_caches_, k_scales_;
  int64_t page_size_ = 0;
  int64_t max_pages_ = 0;  // of a request that chooses blocks
  int64_t bytes_per_token_ = 0;
  at::Tensor kmax_, kmin_, ids_, blocks_, num_blocks_, view_lens_, scores_;
  at::Tensor lens_;  // [kNumLens, max_requests] int32
  std::vector<Begun> batch_;
  std::vector<bool> refreshed_;  // layers, in this step
  // Around one layer's refresh on a device, until its time is known; the host does not wait for it.
  std::unique_ptr<c10::Event> refresh_begin_, refresh_end_;
  mutable std::mutex free_rows_mutex_;
  std::vector<int64_t> free_rows_;
};

class NWOR_EXPORT StoredCache : public PartialCache {
 public:
  StoredCache(std::shared_ptr<PartialStore> store, int64_t row, int64_t prompt_tokens,
              int64_t max_new_tokens);
  ~StoredCache() override;

  int64_t row() const { return row_; }
  bool IsOf(const PartialStore& store) const { return store_.get() == &store; }
  // Complete blocks whose summaries are there, in every layer.
  int64_t summarized_blocks() const { return summarized_blocks_; }
  void set_summarized_blocks(int64_t blocks) { summarized_blocks_ = blocks; }

  // For the store. The first tells whether it is the request's first step; the second, which one
  // has refreshed.
  bool BeginStep();
  void EndRefresh(int64_t full_len, int64_t committed_len) {
    refreshed_ = {full_len, committed_len};
  }

 protected:
  bool RefreshComplete(const StepDecision& decision) const override;

 private:
  std::shared_ptr<PartialStore> store_;
  const int64_t row_;
  int64_t summarized_blocks_ = 0;
  bool is_new_ = true;
  std::pair<int64_t, int64_t> refreshed_ = {-1, -1};  // F and N of the step that has
};

}  // namespace nwor
