#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "kv_interceptor/commit/agreement.h"
#include "kv_interceptor/interceptor.h"
#include "kv_interceptor/open_round.h"

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

  int64_t epoch = 0;  // of the open round, or of the last one
  std::optional<OpenRound> open;
  EndedRound last;
  GraphMemory graphs;
  // Once memory has run out for `rows_too_many` staging rows, rounds that need as many do not ask
  // for it for a while: before a GPU's allocator fails it gives back all that it had kept, which
  // slows the steps that follow.
  static constexpr int kRoundsBetweenTries = 64;
  int64_t rows_too_many = 0;
  int rounds_to_wait = 0;
  CommitUndoLog undo;
  CacheWriter* writer = &PlainCacheWriter();
  InterceptorObserver* observer = nullptr;

  bool FitsGraphs(const RoundPlan& plan) const {
    return plan.num_rows() <= config.graph_rows &&
           static_cast<int64_t>(plan.query_lens.size()) <= config.graph_rows;
  }
  // Whether the round is staged, and why not. Reserves staging memory.
  Decision Decide(const RoundPlan& plan, bool capture, std::string* detail);
  BypassReason Reserve(int64_t rows, bool capture);
  // Makes the tables and the status of a round, those of the last one where they are alike.
  OpenRound MakeRound(const RoundPlan& plan, bool stage, bool capture);
  // Ends the open round without settling it.
  void EndRound(bool clean);

  static void Stage(const StageParams& params, at::Device device);
  void DoDeferred(OpenRound& round);
  Outcome Bypass(BoundLayer* layer, BypassReason reason, std::string_view detail);
  Outcome Write(const WriteCall& call, std::optional<int64_t> call_epoch, bool defer);
  Outcome WriteLayer(OpenRound& round, BoundLayer& layer, const WriteCall& call, bool defer);
  BypassReason CheckSlotsOnCpu(const BoundLayer& layer, const StageParams& params,
                               const RowsToWrite& rows, std::string* detail) const;

  // Those below REQUIRE: a round is open.
  CommitParams DescribeCommit(const CommitCall& call, at::Tensor& status) const;
  bool FindIncomplete(std::string* detail) const;
  void CheckCommit(const CommitCall& call) const;
  Receipt Commit(const CommitCall& call, RankAnswer& answer);
  void CommitStaged(const CommitCall& call, RankAnswer& answer, Receipt* receipt);
  void CommitDirect(RankAnswer& answer, Receipt* receipt);
  // The ranks' digests of this commit; with `refuse` this rank makes all of them disagree.
  at::Tensor Agree(const CommitParams& params, bool refuse, RankAnswer& answer) const;
  void ReportDisagreement(Receipt* receipt);
  // As ValidateCommit; a destination of an earlier chunk is a fault, too.
  CommitVerdict ValidateOnCpu(const CommitParams& params) const;
  // `found`: what validating found on this rank.
  void CommitOnCpu(const CommitParams& params, const CommitVerdict& found, bool is_last,
                   Receipt* receipt);
  void CommitOnCuda(CommitParams& params, bool is_last);
  int64_t StagedTokens() const;
  void CloseRound(bool aborted);
};

}  // namespace nwor
