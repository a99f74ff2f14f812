#pragma once

#include "specpv/retrieval.h"

namespace nwor {

// Takes the k highest of params.scores for every list, ids ascending into params.ids. CUDA only.
void LaunchTakeHighest(const SelectParams& params);

}  // namespace nwor
