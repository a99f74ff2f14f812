#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/types.h"

// Which stream uses a plan of verify attention. The plan's memory also holds the workspace of the
// layers that share it, so two streams must not use it at the same time: the one that takes a plan
// over waits for the one that had it.
//
// Thread-safety: any thread.

namespace nwor {

class PlanUsers {
 public:
  // `stream` uses the plan at this address from now on. Returns the stream that had it, if that was
  // another one. An address is remembered for good: memory that is used again costs a wait at most.
  std::optional<StreamHandle> Enter(const void* plan, StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = streams_.try_emplace(plan, stream);
    if (is_new || place->second == stream) return std::nullopt;
    const StreamHandle before = place->second;
    place->second = stream;
    return before;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, StreamHandle> streams_;
};

}  // namespace nwor
