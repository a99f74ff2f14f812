#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

// Where a sequence ends inside a run of new tokens.

namespace nwor {

// Why a sequence ends.
enum class FinishReason : uint8_t { kNone, kStop, kLength };
constexpr std::string_view Label(FinishReason reason) {
  constexpr std::string_view kLabels[] = {"", "stop", "length"};
  return kLabels[static_cast<size_t>(reason)];
}

struct RunEnd {
  int64_t num_tokens = 0;  // of the run that are emitted
  FinishReason finish = FinishReason::kNone;
};

// A sequence ends with the first token of `stop_ids`, which is emitted, or after `room` tokens.
inline RunEnd FindRunEnd(std::span<const int64_t> run, std::span<const int64_t> stop_ids,
                         int64_t room) {
  const auto length = std::clamp<int64_t>(room, 0, static_cast<int64_t>(run.size()));
  for (int64_t i = 0; i < length; ++i) {
    if (std::find(stop_ids.begin(), stop_ids.end(), run[i]) != stop_ids.end()) {
      return {i + 1, FinishReason::kStop};
    }
  }
  return {length, length == room ? FinishReason::kLength : FinishReason::kNone};
}

}  // namespace nwor
