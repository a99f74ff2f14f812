#pragma once

#include <deque>

#include "kv_interceptor/contract/contract_checker.h"
#include "specpv/verify_policy.h"
#include "target.h"

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
  Engine(const Settings& settings, Model& model, const std::vector<std::vector<int64_t>>& prompts);

  // Runs all requests to their ends.
  void Run();

  const std::vector<Request>& requests() const { return requests_; }
  const Stats& stats() const { return stats_; }

 private:
  void Admit();
  void Step();
  void Plan();
  Part MakePart(Request& request, int64_t end, nwor::DraftTree tree);
  nwor::Accepted Accept(const nwor::SessionBatch& batch, const at::Tensor& ids);
  void Check(const std::vector<nwor::VerifyResult>& results);
  void SettlePrompt(const Part& part, int64_t next_token);
  void Settle(const Part& part, const nwor::VerifyResult& result);
  void Show(Request& request);
  void EndSpeculation(const std::string& reason);

  int64_t PagesOf(const Request& request) const;
  int64_t room(const Request& request) const {
    return settings_.max_new_tokens - (request.size() - request.prompt_len);
  }

  const Settings settings_;
  std::vector<int64_t> stops_;
  std::vector<Request> requests_;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;
  int64_t max_running_ = 0;
  int64_t free_pages_ = 0;          // that no running request may need
  std::optional<Drafter> drafter_;  // none: plain decoding
  std::unique_ptr<Target> target_;
  std::unique_ptr<nwor::SessionStore> store_;
  std::optional<nwor::VerifyPolicy> policy_;
  std::optional<nwor::ContractChecker> checker_;
  std::vector<nwor::Violation> violations_;  // of this step
  size_t last_pass_ = 0;                     // requests in the step's last pass
  Stats stats_;
};

}  // namespace engine
