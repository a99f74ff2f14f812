#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace nwor {

// Products with weight matrices are shared out among threads in strips of outputs. A strip stays
// in the cache from the first row to the last.
inline constexpr int64_t kStripOutputs = 40;

// Calls work(i, first, last) for every strip of outputs of every matrix i, on torch's threads; all
// matrices have `depth` columns. Returns when all calls have. What a call computes must not
// depend on which strips other calls have.
void ForStrips(std::span<const int64_t> outputs, int64_t depth,
               const std::function<void(size_t, int64_t, int64_t)>& work);

}  // namespace nwor
