#include "linear/strips.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "base/parallel.h"

namespace nwor {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kMinParallelWork = 1 << 16;

int64_t Strips(int64_t outputs) { return (outputs + kStripOutputs - 1) / kStripOutputs; }

}  // namespace

void ForStrips(std::span<const int64_t> outputs, int64_t depth,
               const std::function<void(size_t, int64_t, int64_t)>& work) {
  int64_t strips = 0, elements = 0;
  for (const int64_t count : outputs) {
    strips += Strips(count);
    elements += count * depth;
  }
  const bool alone = elements < kMinParallelWork;
  std::atomic<int64_t> next{0};
  RunOnTorchThreads(alone ? 1 : std::min<int64_t>(strips, at::get_num_threads()), [&] {
    for (int64_t strip = next++; strip < strips; strip = next++) {
      size_t matrix = 0;
      int64_t own = strip;
      for (; own >= Strips(outputs[matrix]); ++matrix) own -= Strips(outputs[matrix]);
      const int64_t first = own * kStripOutputs;
      work(matrix, first, std::min(outputs[matrix], first + kStripOutputs));
    }
  });
}

}  // namespace nwor
