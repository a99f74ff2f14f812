#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "drafter.h"
#include "model.h"
#include "round.h"
#include "settings.h"
#include "specpv/partial_store.h"
#include "specpv/verify_policy.h"
#include "verdict.h"

// Requests in, tokens out: admission, steps, what stands after each.

namespace engine {

struct Stats {
  int64_t steps = 0;  // forward passes
  int64_t new_tokens = 0, drafts = 0, accepted = 0, cut_tokens = 0;
  int64_t violations = 0;
  int64_t largest_batch = 0;                  // requests in one pass
  std::map<std::string, int64_t> step_kinds;  // of requests under partial verification
  std::string speculation_ended;              // why; empty: it goes on, or was never on
};

class Engine {
 public:
  // Throws nwor::Error when prompts, model and settings do not fit each other.
  Engine(const Settings& settings, const Model& model, std::unique_ptr<Drafter> drafter,
         const std::vector<std::vector<int64_t>>& prompts);

  // Runs all requests to their ends.
  void Run();

  const std::vector<Request>& requests() const { return requests_; }
  const Stats& stats() const { return stats_; }

  // For demonstrations and tests: step number `step` writes to a slot that belongs to nobody, which
  // the contract checker is to notice.
  void BreakContractAt(int64_t step) { broken_step_ = step; }

 private:
  void Admit();
  void Step();
  std::vector<Part> PlanParts();
  Part PrefillPart(Request& request, int64_t rows) const;
  void DecideViews(std::vector<Part>* parts);
  bool MustConfirm(const Request& request) const;
  void Settle(const Round& round, const Part& part, const Verdict& verdict,
              const std::vector<int64_t>& path, const std::vector<int64_t>& run);
  void SettlePrompt(const Round& round, const Part& part, const Verdict& verdict);
  void Observe(const Round& round, Request& request, const std::vector<int64_t>& rows,
               const std::vector<int64_t>& tokens);
  void Show(Request& request);
  void EndSpeculation(const std::string& reason);

  int64_t PagesOf(const Request& request) const;
  bool lossless() const {
    return store_ != nullptr && settings_.specpv.specpv_mode == nwor::SpecPVMode::kLossless;
  }
  int64_t room(const Request& request) const {
    return settings_.max_new_tokens - (request.size() - request.prompt_len);
  }

  const Settings settings_;
  const Model& model_;
  std::unique_ptr<Drafter> drafter_;  // null: plain decoding
  std::vector<int64_t> stops_;
  std::vector<Request> requests_;
  std::deque<Request*> waiting_;
  std::vector<Request*> places_;  // null: the place is free
  int64_t free_pages_ = 0;        // that no running request may need
  std::unique_ptr<PagedCache> cache_;
  std::shared_ptr<nwor::PartialStore> store_;  // null: every step is full
  std::unique_ptr<nwor::VerifyPolicy> policy_;
  Stats stats_;
  int64_t broken_step_ = -1;
};

}  // namespace engine
