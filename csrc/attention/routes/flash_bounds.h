#pragma once

#include "attention/verify.h"
#include "base/export.h"

// Clamps lengths, row starts and page ids for FlashAttention's kernels, which do not check them.
// (Our kernels check them on the device while they plan.)

namespace nwor {

// Returns the arguments with every index in range: lengths within their memory, row starts
// ascending within the rows, table entries that name a page. The first value that was out of range
// is reported in arguments.status by a code of VerifyStatus. Work is enqueued; nothing waits for
// the device.
//
// With a compact view, a request that uses its pages also counts as out of range: these kernels
// read either the view or the pages.
NWOR_EXPORT VerifyArguments ClampToBounds(const VerifyArguments& arguments);

}  // namespace nwor
