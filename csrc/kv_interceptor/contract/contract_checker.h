#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/export.h"
#include "kv_interceptor/interceptor.h"

// An executable shadow of the commit contract: remembers the caches' bytes before a round, follows
// the engine's calls with books of its own, and says afterwards which rule was broken. Slow on
// purpose (it reads every bound cache, and waits for the device; not for CUDA-graph capture); on in
// tests, switchable at run time.
//
//   C1   length bookkeeping equals pages held (TellRequest)
//   C2   bytes that no write or commit was meant to touch are as they were
//   C3   draft K/V is in staging, and only there, until it is committed
//   C4   the free-slot count returns (TellFreeSlots)
//   C5   without a successful commit no draft's destination changes
//   C6   a committed draft is on an accepted path, and was emitted
//   C7   switched off: no write, no staging, no count of ours
//   C8   staging touches no cache
//   C9   an accepted destination holds what a direct write of that row would have put there
//   C10  a fallback is counted under its reason, and what fell back was not staged
//   C11  accepted rows are in every layer or in none; a refused commit changes nothing
//   N1   every write's outcome is counted
//   N2   layers of a group agree about slots, or nothing of the round commits
//   N3   staging a (layer, row) twice counts once
//   N4   rows that are no drafts are in the cache after the write, never in staging
//   N7   a commit that says ok was valid: real slots, no slot twice, as many tokens as accepted
//   N8   a rejected draft's slot is as it was
//   N13  a round that is staged fits
//   N14  every emitted draft is committed, or the receipt says it is lost

namespace nwor {

struct Violation {
  std::string rule;   // "C2", "N8", ...
  std::string layer;  // empty: not about one layer
  int64_t slot = -1;  // -1: not about one slot
  std::string detail;
};

// Watches one interceptor from construction to destruction; takes the place of its observer.
// Any number of rounds may pass between Snapshot and Verify. Violations are also counted in
// Counter::kContractViolations.
//
// Thread-safety: as the Interceptor it watches. REQUIRES: the interceptor outlives the checker.
class NWOR_EXPORT ContractChecker final : public InterceptorObserver {
 public:
  explicit ContractChecker(Interceptor& interceptor);
  ~ContractChecker() override;
  ContractChecker(const ContractChecker&) = delete;
  ContractChecker& operator=(const ContractChecker&) = delete;

  // Hashes every page and slot of every bound cache and starts new books. Without a snapshot
  // nothing is watched. REQUIRES: no round is open.
  void Snapshot();

  // Accounting the interceptor cannot see, from the host: tokens and pages held by request b of the
  // round (C1), free slots (C4). Told once after Snapshot: the state is checked; told again after
  // the round: the change too. What is not told is not checked. Slots that told requests took or
  // gave back are accounted for in C4.
  void TellRequest(int64_t request, int64_t num_tokens, int64_t num_pages, int64_t page_size);
  void TellFreeSlots(int64_t free_slots);

  // Call it after the last write and before the commit: drafts must be in staging and nowhere else.
  // REQUIRES: a snapshot, and the layers bound then.
  std::vector<Violation> VerifyStaged();

  // Call it after the commit or abort (receipt: null for an abort). `emitted[b]` = draft tokens the
  // host emitted for request b; empty: not checked (C6, N14).
  // REQUIRES: a snapshot, and the layers bound then.
  std::vector<Violation> Verify(const Receipt* receipt, const std::vector<int64_t>& emitted = {});

  void AfterBegin(const RoundPlan& plan, const Decision& decision) override;
  void BeforeWrite(const WriteCall& call) override;
  void AfterWrite(const WriteCall& call, const Outcome& outcome) override;
  void AfterCommit(const CommitCall& call, const Receipt& receipt) override;
  void AfterAbort() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nwor
