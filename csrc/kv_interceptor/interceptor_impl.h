#pragma once

#include <atomic>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "kv_interceptor/interceptor.h"
#include "kv_interceptor/round.h"

// The interceptor's state, shared by the files that open a round, write and commit.

namespace nwor {

// One layer's rows of a write with the staging row of each.
struct RowsToWrite {
  std::vector<int32_t> stage_rows;  // -1: direct
  std::vector<int32_t> staged;      // those that are not
};

struct Interceptor::Impl {
  explicit Impl(NworConfig config_in)
      : config(std::move(config_in)), enabled(config.enable_nwor), books(config.strict) {}

  const NworConfig config;
  std::atomic<bool> enabled;  // mode() may be asked from any thread
  LayerTable table;
  RoundBooks books;

  // The open round, or the last one.
  bool round_open = false;
  bool staging = false;
  int64_t epoch = 0;
  RoundPlan plan;
  RoundTables rows;
  at::Tensor round_status;  // faults that writes of the round found on the device

  bool owes_answer = false;  // the commit at hand has yet to take part in the ranks' agreement

  CommitUndoLog undo;
  // On the CPU: where chunks of the open round went, by group of the commit; empty: none was.
  std::vector<std::unordered_set<int64_t>> committed_slots;
  // On CUDA: whether commits of the open round count there, and have settled its books there.
  bool counts_on_device = false;
  bool capturing = false;
  bool captured = false;          // a round was captured, by whichever graph
  bool captured_staging = false;  // and one of those was staged
  at::Tensor fixed_tables;        // with graph_rows: where every round's tables stand
  // On CUDA, with graph_rows: whether the last commit has left round_status and tips as a round
  // finds them, so that a round like the last one finds its tables, too.
  bool left_clean = false;
  bool settled_on_device = false;
  bool in_chunks = false;  // on CUDA: commits of the open round may have moved tips
  CacheWriter* writer = &PlainCacheWriter();
  InterceptorObserver* observer = nullptr;

  // Writes that wait for their caller to do them, by layer.
  std::map<std::string, DeferredWrite> deferred;
  bool defer = false;  // what the write at hand was asked for

  bool FitsGraphs(const RoundPlan& round_plan) const {
    return round_plan.num_rows() <= config.graph_rows &&
           static_cast<int64_t>(round_plan.query_lens.size()) <= config.graph_rows;
  }
  static void Stage(const StageParams& params, at::Device device);
  void DoDeferred();
  Outcome Bypass(BoundLayer* layer, BypassReason reason, std::string_view detail);
  Outcome Write(const WriteCall& call, std::optional<int64_t> call_epoch);
  Outcome WriteLayer(BoundLayer& layer, const WriteCall& call);
  BypassReason CheckSlotsOnCpu(const BoundLayer& layer, const StageParams& params,
                               const RowsToWrite& rows, std::string* detail) const;

  CommitParams DescribeCommit(const CommitCall& call, at::Tensor& status) const;
  bool FindIncomplete(std::string* detail) const;
  void CheckCommit(const CommitCall& call) const;
  Receipt Commit(const CommitCall& call);
  void CommitStaged(const CommitCall& call, Receipt* receipt);
  void CommitDirect(Receipt* receipt);
  // The ranks' digests of this commit; with `refuse` this rank makes all of them disagree.
  at::Tensor Agree(const CommitParams& params, bool refuse);
  void AskRanks(at::Tensor& digest);
  // Makes all ranks disagree for a commit that threw before it asked them: none waits for it.
  void Refuse() noexcept;
  void ReportDisagreement(Receipt* receipt);
  // As ValidateCommit; a destination of an earlier chunk is a fault, too.
  CommitVerdict ValidateOnCpu(const CommitParams& params) const;
  // `found`: what validating found on this rank.
  void CommitOnCpu(const CommitParams& params, const CommitVerdict& found, bool last,
                   Receipt* receipt);
  void CommitOnCuda(CommitParams& params, bool last);
  int64_t StagedTokens() const;
  void CloseRound(bool aborted);
};

}  // namespace nwor
