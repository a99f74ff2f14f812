#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "export.h"
#include "kv_interceptor/interceptor.h"

// An executable shadow of the commit contract: remembers the caches' bytes before a round and says
// afterwards which rule was broken. Slow on purpose (it reads every bound cache, and waits for the
// device); on in tests, switchable at run time.

namespace nwor {

struct Violation {
  std::string rule;   // "C2", "N8", ...
  std::string layer;  // empty: not about one layer
  int64_t slot = -1;  // -1: not about one slot
  std::string detail;
};

// Thread-safety: as the Interceptor it watches.
class NWOR_EXPORT ContractChecker {
 public:
  explicit ContractChecker(Interceptor& interceptor);
  ~ContractChecker();

  // Hashes every page (and slot) of every bound cache. Call it before Begin.
  void Snapshot();

  // Accounting the interceptor cannot see, from the host: tokens and pages held by a request (C1),
  // free slots (C4). Optional; what is not told is not checked.
  void TellRequest(int64_t request, int64_t num_tokens, int64_t num_pages, int64_t page_size);
  void TellFreeSlots(int64_t free_slots);

  // Call it after the last write and before the commit: staging must have touched no cache (C8,
  // C3, C5). Returns what is broken.
  std::vector<Violation> VerifyStaged();

  // Call it after the commit or abort (receipt: none for an abort). `emitted[b]` = draft tokens the
  // host emitted for request b; empty: not checked (C6).
  std::vector<Violation> Verify(const Receipt* receipt, const std::vector<int64_t>& emitted = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nwor
