#pragma once

#include <string>

#include "attention/routes/route.h"
#include "attention/verify.h"
#include "attention/verify_arguments.h"
#include "base/export.h"

// The FlashAttention routes on CUDA. Each computes attention to the prefix, which needs no mask,
// with a FlashAttention kernel, attention among the in-flight rows by themselves, and merges the
// two by their log-sum-exps.
//
// Kernels outside LibTorch are found by their torch ops at run time: what a Python process has
// imported (vLLM, flash_attn, flash_attn_3) is what this library can call. Nothing is linked.

namespace nwor {

// Of a CUDA device, 90 for 9.0. 0: not known, as of other devices and in builds without CUDA.
NWOR_EXPORT int32_t ComputeCapability(at::Device device);

// Marks the flash routes that this process has for devices of a compute capability, and what they
// need of pages.
NWOR_EXPORT void FindFlashRoutes(RouteAvailability* available, int32_t capability);

// "present: _vllm_fa3_C::fwd", or why not: which ops were looked for in vain.
NWOR_EXPORT std::string DescribeFlashRoute(Route route, int32_t capability);

// Runs a flash route. With `only_prefill` the results of requests of up to kPrefillRows rows are
// not those of the request: the caller writes them afterwards. REQUIRES: ChooseRoute picked the
// route for these arguments.
NWOR_EXPORT void FlashVerify(Route route, const VerifyArguments& arguments,
                             const CheckedVerify& checked, const VerifyOutputs& outputs,
                             bool only_prefill = false);

}  // namespace nwor
