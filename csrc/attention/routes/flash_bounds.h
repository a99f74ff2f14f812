#pragma once

#include "attention/verify.h"
#include "base/export.h"

// Lengths, starts and pages for kernels that trust them. Ours look at them on the device while they
// plan; FlashAttention's read wherever they point.

namespace nwor {

// The same arguments within bounds: lengths by the memory there is, row starts ascending within the
// rows, table entries that name a page. What was out of range is told to arguments.status by the
// codes of VerifyStatus, the first one stays. Enqueued, waits for nothing.
//
// A request that does not use the compact view is out of range as well: these kernels see either
// views or pages.
NWOR_EXPORT VerifyArguments WithinBounds(const VerifyArguments& arguments);

}  // namespace nwor
