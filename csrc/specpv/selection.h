#pragma once

#include "specpv/retrieval.h"

namespace nwor {

// Takes the k highest of params.scores for every list, ids ascending into params.ids. CUDA only.
// REQUIRES: the launch ahead is the one of the scores (LaunchSelectBlocks), or there are no blocks.
void LaunchTakeHighest(const SelectParams& params);

}  // namespace nwor
