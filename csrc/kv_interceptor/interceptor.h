#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bypass_reason.h"
#include "base/export.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/tail_tensors.h"
#include "kv_interceptor/layer_table.h"
#include "kv_interceptor/round_books.h"
#include "kv_interceptor/round_plan.h"

// The one way in: an engine's K/V writes pass through here, draft rows wait in staging, and only
// accepted ones reach the paged caches.
//
// A round is one verification step: begin -> write (per layer) -> commit or abort.

namespace nwor {

struct NworConfig {
  bool enable_nwor = true;
  // Errors instead of fallbacks: every bypass other than "disabled" throws.
  bool strict = false;
  // Rows to reserve when the first round opens; staging grows between rounds beyond it.
  int64_t staging_rows = 256;
  // Staging never takes more than this, over all groups; a round that needs more is written
  // directly.
  int64_t max_staging_bytes = int64_t{1} << 30;
  // Above 0: writes may be captured in CUDA graphs of up to so many rows. Whatever a write touches
  // on the device then keeps its address between rounds, and staging is staging_rows, reserved
  // once.
  int64_t graph_rows = 0;
  // Ask every rank of this torch.distributed group (its registered name) before a commit writes
  // anything; empty: no agreement. Every rank must then call Commit equally often; one that throws
  // or did not stage like the others makes all of them refuse.
  std::string agreement_group;
};

// Begin's answer for the whole round.
struct Decision {
  bool stage = false;
  BypassReason reason = BypassReason::kNone;  // why not, when stage is false and there are drafts
  int64_t epoch = 0;                          // names the round; pass it to Write to be safe
};

enum class Action : uint8_t {
  kStage,   // drafts are in staging, all other rows in the cache
  kDirect,  // every row is in the cache
  kBypass,  // nothing was written: the engine does its own write (except for stale_round, whose
            // rows belong to nobody any more)
};

struct Outcome {
  Action action = Action::kBypass;
  BypassReason reason = BypassReason::kNone;
  int64_t staged_rows = 0;  // rows this call staged for the first time in this layer
};

// A layer's write whose launch was left to the caller, and the tensors it reads.
struct DeferredWrite {
  StageParams params;
  at::Tensor key, value, slot_mapping;
  int64_t epoch = 0;  // of its round
};

// What rows a path names.
enum class RowSpace : uint8_t {
  kBatch,    // rows of the batch, 0 .. T-1
  kRequest,  // rows of the request, 0 = its first row: what acceptance returns
};

// A commit's answer. On CUDA it is pending until the device has run the commit; ok() and the other
// methods wait for that.
class NWOR_EXPORT Receipt {
 public:
  int64_t epoch = 0;
  at::Tensor status;  // int64[8] on the caches' device, see commit/error.h
  // Set when the accepted rows could not be committed in one piece: they were then written one by
  // one from staging (kCommitFailure), or lost (kCommitLost: the host must compute the
  // requests again or end them).
  BypassReason degraded = BypassReason::kNone;
  std::string problem;  // text for people when degraded

  bool ok() const;  // code is kOk and nothing is lost
  CommitVerdict verdict() const;
  int64_t committed_tokens() const;
};

enum class Mode : uint8_t { kDisabled, kStage };

// One call to Write or Commit as the engine made it; valid during the callback only.
struct WriteCall {
  const std::string& layer;
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& slot_mapping;
  const std::optional<std::vector<int32_t>>& rows;
};
struct CommitCall {
  const at::Tensor& path;
  const at::Tensor& counts;
  const std::vector<at::Tensor>& slots;
  RowSpace rows;
  bool last;
  const TailTensors& tail;
};

// Sees every call from outside, on the caller's thread; the contract checker is one. A call that
// throws has a Before but no After. BeforeWrite runs before the arguments are checked.
class NWOR_EXPORT InterceptorObserver {
 public:
  virtual ~InterceptorObserver() = default;
  virtual void AfterBegin(const RoundPlan& plan, const Decision& decision) = 0;
  virtual void BeforeWrite(const WriteCall& call) = 0;
  virtual void AfterWrite(const WriteCall& call, const Outcome& outcome) = 0;
  virtual void AfterCommit(const CommitCall& call, const Receipt& receipt) = 0;
  virtual void AfterAbort() = 0;
};

// Thread-safety: one round at a time per Interceptor, from one thread at a time; stats() and mode()
// may be called from any thread. Device work is enqueued on the current stream; begin, write and
// commit never wait for the device.
class NWOR_EXPORT Interceptor {
 public:
  explicit Interceptor(NworConfig config);
  ~Interceptor();
  Interceptor(const Interceptor&) = delete;
  Interceptor& operator=(const Interceptor&) = delete;

  // Registers a layer's paged cache: [P, S, H, D] views with contiguous channels. Layers of one
  // group share slots and must share geometry. `dtype` is the model's, needed when the cache is
  // float8. Binding a name again replaces its cache (engines reallocate). REQUIRES: no open round.
  void BindLayer(const std::string& name, const at::Tensor& key_cache,
                 const at::Tensor& value_cache, int group = 0,
                 const std::optional<at::Tensor>& k_scale = std::nullopt,
                 const std::optional<at::Tensor>& v_scale = std::nullopt,
                 std::optional<at::ScalarType> dtype = std::nullopt);

  // Opens a round. Decides once, before any write, whether drafts are staged: a round that does not
  // fit, or that there is no memory for, is written directly and says why. Throws when a round is
  // open. With `capture` the round's writes are only being captured: nothing of it is counted or
  // seen by the observer, and Abort ends it. REQUIRES then: graph_rows.
  Decision Begin(const RoundPlan& plan, bool capture = false);

  // Routes one layer's rows. key, value: [n, H, D]; slot_mapping: int64 [n], -1 = skip. `rows` says
  // which rows of the batch these are (default: all of them in order). A write with the epoch of
  // another round is refused. Nothing is written when an argument is wrong. With graph_rows set,
  // rows beyond the plan's are padding and ignored.
  // With `defer` the write may wait for TakeDeferred, for a kernel that does it beside other work;
  // a commit does what is still waiting, an abort drops it. REQUIRES then: nothing reads the rows
  // from the cache before that, and key, value and slot_mapping stay as they are.
  Outcome Write(const std::string& layer, const at::Tensor& key, const at::Tensor& value,
                const at::Tensor& slot_mapping,
                const std::optional<std::vector<int32_t>>& rows = std::nullopt,
                std::optional<int64_t> epoch = std::nullopt, bool defer = false);

  // The layer's deferred write, which the caller must now do. Nothing: the write has been done.
  std::optional<DeferredWrite> TakeDeferred(const std::string& layer);
  // Gives a deferred write back that was not done. It waits again, unless its round is over.
  // REQUIRES: nothing has been written since it was taken.
  void ReturnDeferred(const std::string& layer, DeferredWrite write);

  // Notes that a captured graph has done the writes of every layer in this round. REQUIRES: a round
  // is open, graph_rows is set, and no layer has been written.
  void NoteReplay();

  // Moves the accepted rows to the caches of every layer, or none of them. path: int32 [B, depth],
  // -1 padded; counts: int32 [B]; slots: int64 [B, depth] destinations, one tensor per group in
  // ascending group order, or none: each row goes to the slot it was written with. With last =
  // false the round stays open for the next consecutive chunk.
  // tail: compact views that the same launch feeds, their layers those that staged in this round,
  // in the order they were bound; one cache group only. In a later chunk `begin` counts the rows of
  // the earlier chunks, and there is no root. On the CPU a wrong path, count or slot throws before
  // anything is written; on CUDA the receipt's status says it and nothing is written. A view
  // without room for the rows is in the status on either.
  Receipt Commit(const at::Tensor& path, const at::Tensor& counts,
                 const std::vector<at::Tensor>& slots = {}, RowSpace rows = RowSpace::kBatch,
                 bool last = true, const TailTensors& tail = {});

  // Ends the round without writing; its drafts count as rejected. REQUIRES: a round is open.
  void Abort();

  // Switches staging on or off between rounds; a reason is logged and counted.
  void SetEnabled(bool enabled, BypassReason reason = BypassReason::kDisabled);

  // Counts, and logs the first time, a bypass that the host took by itself, such as writing
  // accepted rows after a commit that threw. Throws when strict.
  void ReportBypass(BypassReason reason, std::string_view detail);

  using Stats = InterceptorStats;
  // Waits for what this thread has enqueued on the device, because commits count there.
  Stats stats() const;

  Mode mode() const;
  const NworConfig& config() const;

  // Where a bypass is reported, once per reason; default: nowhere (Python installs logging).
  using LogSink = RoundBooks::LogSink;
  void SetLogSink(LogSink sink);

  // What the contract checker looks at. The views are valid until the next BindLayer or Begin.
  using LayerInfo = BoundLayer;
  struct RoundInfo {
    bool open = false;
    bool staging = false;
    int64_t epoch = 0;
    RoundPlan plan;
    std::vector<int32_t> stage_rows;  // [T] staging row or -1
  };
  const std::vector<LayerInfo>& layers() const;
  RoundInfo round() const;
  const StagingBuffer* staging(int group) const;  // null before a layer of the group has memory

  // There is at most one observer; null removes it. Without one the calls cost nothing.
  void SetObserver(InterceptorObserver* observer);
  InterceptorObserver* observer() const;

  // Replaces how the CPU path writes cache rows; for fault injection in tests.
  void SetCacheWriter(CacheWriter* writer);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nwor
