#pragma once

#include <cstdint>
#include <functional>

#include "base/export.h"

namespace nwor {

// Calls work() on up to `workers` threads of torch's own pool at once, the caller's included, and
// waits for all of them; work() shares out the work itself (an atomic counter). Fewer calls than
// asked for are legal: torch's thread count is respected, and inside a parallel region of torch's
// there is one. An exception of work() reaches the caller.
//
// at::parallel_for is not used directly: it is inline code that runs serially unless compiled with
// OpenMP, and OpenMP of our own would be a second pool beside the one in torch's wheel.
NWOR_EXPORT void RunOnTorchThreads(int64_t workers, const std::function<void()>& work);

}  // namespace nwor
