#pragma once

#include "attention/params.h"
#include "attention/routes/route.h"
#include "attention/verify.h"
#include "base/export.h"

namespace nwor {

// Checked arguments as kernels take them, with the copies that had to be made (rows whose channels
// were not contiguous, or not aligned for a CUDA kernel).
struct CheckedVerify {
  VerifyParams params;
  RouteRequest request;
  at::Device device = at::kCPU;
  // Keep the memory behind params alive.
  at::Tensor query, key, value, compact_keys, compact_values;
};

// Checks sizes, dtypes, devices and scalars; values inside index tensors are not looked at.
// `outputs` may be null: a plan is made without. `plan_only`: key and value may be undefined.
// Throws nwor::Error naming the argument, what was got and what was expected.
NWOR_EXPORT CheckedVerify CheckVerifyArguments(const VerifyArguments& arguments,
                                               const VerifyOutputs* outputs, bool plan_only);

}  // namespace nwor
