#pragma once

#include <cstdint>

#include "attention/heuristics.h"
#include "attention/params.h"
#include "base/export.h"

// Verify attention on CUDA, sm_80 and up. No torch, no CUDA headers: an engine without torch can
// call it. Everything is enqueued on params.stream, nothing waits for the device, every launch can
// be captured in a CUDA graph and replayed with other lengths.
//
//   const VerifyConfig config = ChooseVerifyConfig(shape, QueryDeviceProps(device));   // host
//   plan      = VerifyPlanBytes(shape, config) bytes of device memory, 256-byte aligned
//   workspace = VerifyWorkspaceBytes(shape, config) bytes, likewise
//   LaunchVerifyPlan(params, config, plan, workspace);      once per step
//   LaunchVerify(params, config, plan, workspace);          once per layer
//
// A plan serves every layer whose lengths, row starts, mask, view lengths, window and head counts
// are those it was made from. One workspace serves launches that are ordered (one stream); launches
// that may run at the same time need one workspace each and a plan call for each.
//
// Results are bitwise repeatable, and a row's result depends on its own request only.
// NaN and infinities, in pages or in-flight rows, reach the rows that see them and no others; over
// float8 pages, at the edge of a window, others of the tile as well.

namespace nwor {

// params.status[0]; [1] is the request, [2] the value found. The first error found stays.
// A request with a bad length is computed on as much as is addressable; nothing out of bounds is
// read.
enum class VerifyStatus : int64_t {
  kOk = 0,
  kPrefixTooLong = 1,  // prefix_lens[b] < 0 or beyond the block table; value: the length
  kBadRowRange = 2,    // query_start not ascending within 0..T; value: query_start[b + 1]
  kViewTooLong = 3,  // num_blocks / view_lens / compact lens beyond their arrays; value: the length
  kBadPage = 4,      // a used table or block-list entry names no page; value: the page
  kTooManyRows = 5,  // a request has more rows than the mask has bits; value: the rows
};

// Reads the device's properties once per device. Throws nwor::Error when there is no such device.
NWOR_EXPORT DeviceProps QueryDeviceProps(int device);

// Plans one step from the lengths on the device: leaves, work items, their order. Also clears the
// workspace's counters. REQUIRES: params describe the shape that config was chosen for; pointers
// that layers differ in (query, key, value, out, lse, cache) are not read.
NWOR_EXPORT void LaunchVerifyPlan(const VerifyParams& params, const VerifyConfig& config,
                                  void* plan, void* workspace);

// One layer's attention. REQUIRES: 16-byte aligned query, key, value, out, cache and view pointers
// and strides that are multiples of 16 bytes; 0 < scale; a plan of these lengths ordered before it.
NWOR_EXPORT void LaunchVerify(const VerifyParams& params, const VerifyConfig& config,
                              const void* plan, void* workspace);

}  // namespace nwor
