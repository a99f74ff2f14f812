#pragma once

#include "attention/params.h"
#include "attention/routes/route.h"
#include "attention/verify.h"
#include "base/export.h"

namespace nwor {

// Checked arguments as kernels take them. Rows whose channels are not contiguous, or not aligned
// for a CUDA kernel, have been copied.
struct CheckedVerify {
  VerifyParams params;
  RouteRequest request;
  at::Device device = at::kCPU;
  // Keep the memory behind params alive.
  at::Tensor query, key, value, compact_keys, compact_values;
};

// Checks sizes, dtypes, devices and scalars, but not the values in index tensors. `outputs` may be
// null for a plan. With `plan_only` key and value may be undefined. Throws nwor::Error that names
// the argument, what it got and what was expected. Thread-safe.
NWOR_EXPORT CheckedVerify CheckVerifyArguments(const VerifyArguments& arguments,
                                               const VerifyOutputs* outputs, bool plan_only);

}  // namespace nwor
