#pragma once

#include <string>

#include "attention/routes/route.h"
#include "attention/verify.h"
#include "attention/verify_arguments.h"
#include "base/export.h"

// The FlashAttention routes on CUDA. Each computes attention to the prefix, which needs no mask,
// with a FlashAttention kernel. The in-flight rows are added to it by their LSEs: those of trees,
// and of chains beside FlashAttention-3, in one launch (merge/merge_rows.h); other chains by the
// same FlashAttention kernel and a merge (merge/merge_state.h). Thread-safe; work is enqueued on
// the current stream.
//
//   flash.cpp         the two parts
//   flash_op.cpp      finds and calls a FlashAttention op
//   flash_bounds.cpp  clamps lengths and pages, which these kernels do not check
//   flash_rows.cpp    arranges the rows of a batch for these kernels
//
// Kernels outside LibTorch are found at run time by their torch ops: what a Python process has
// imported (vLLM, flash_attn, flash_attn_3) is what this library can call. Nothing is linked.

namespace nwor {

// The compute capability of a CUDA device, 90 for 9.0. 0: unknown (other devices, builds without
// CUDA).
NWOR_EXPORT int32_t ComputeCapability(at::Device device);

// Sets in `available` which flash routes this process has for a device of that compute capability,
// and which page sizes they take.
NWOR_EXPORT void FindFlashRoutes(RouteAvailability* available, int32_t capability);

// "present: _vllm_fa3_C::fwd", or "absent: " and which ops were not found.
NWOR_EXPORT std::string DescribeFlashRoute(Route route, int32_t capability);

// Runs a flash route. With `only_prefill`, requests of up to kPrefillRows rows get undefined
// results; the caller overwrites them afterwards. REQUIRES: ChooseRoute chose the route for these
// arguments.
NWOR_EXPORT void FlashVerify(Route route, const VerifyArguments& arguments,
                             const CheckedVerify& checked, const VerifyOutputs& outputs,
                             bool only_prefill = false);

}  // namespace nwor
