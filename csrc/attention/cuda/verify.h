#pragma once

#include <cstdint>

#include "attention/heuristics.h"
#include "attention/params.h"
#include "base/export.h"

// Verify attention on CUDA, sm_80 and up, for engines without torch: this header needs neither
// torch nor CUDA headers. All work is enqueued on params.stream; nothing waits for the device.
// Every launch can be captured in a CUDA graph and replayed with other lengths. Thread-safe.
//
//   const VerifyConfig config = ChooseVerifyConfig(shape, QueryDeviceProps(device));   // host
//   plan      = VerifyPlanBytes(shape, config) bytes of device memory, 256-byte aligned
//   workspace = VerifyWorkspaceBytes(shape, config) bytes, 256-byte aligned
//   LaunchVerifyPlan(params, config, plan, workspace);      // once per step: plan.cu
//   LaunchVerify(params, config, plan, workspace);          // once per layer: sm80/ or sm90/
//
// The planner writes work tiles (../plan.h); persistent CTAs fetch them (work_tile.cuh), load K and
// V through the page table, compute attention split by split, merge the splits (merge.cuh) and
// combine partial results (combine.cuh). sm90/kernel.cuh runs on sm_90a with 16-bit caches and, for
// heads of 64 or 128 channels, float8 ones, sm80/kernel.cuh everywhere else. verify.cu dispatches;
// launch.cuh and instantiations/ hold the launches.
//
// A plan serves every layer with the same lengths, row starts, mask, view lengths, window and head
// counts. One workspace serves launches that are ordered (one stream). Launches that may run at the
// same time need a workspace and a plan each.
//
// Results are bitwise repeatable, and a row's result depends on its own request only. NaN and
// infinities, in pages or in-flight rows, reach only the rows that see them. Exception: in the
// sm_80 kernel, over float8 pages, at the boundary of a window, they may reach other rows of the
// row tile.

namespace nwor {

// Error codes in params.status[0]; [1] is the request, [2] the value found. Only the first error is
// recorded. A request with a bad length is computed on the tokens that are addressable; nothing out
// of bounds is read.
enum class VerifyStatus : int64_t {
  kOk = 0,
  kPrefixTooLong = 1,  // prefix_lens[b] < 0 or beyond the block table; value: the length
  kBadRowRange = 2,    // query_start not ascending within 0..T; value: query_start[b + 1]
  kViewTooLong = 3,  // num_blocks, view_lens or compact lens beyond their arrays; value: the length
  kBadPage = 4,      // a used table or block-list entry names no page; value: the page
  kTooManyRows = 5,  // a request has more rows than the mask has bits; value: the rows
};

// The device's properties, read once per device. Throws nwor::Error if there is no such device.
NWOR_EXPORT DeviceProps QueryDeviceProps(int device);

// Plans one step from the lengths on the device: splits, work tiles and their order. It also clears
// the workspace's counters. REQUIRES: params describe the shape for which config was chosen.
// Pointers that differ between layers (query, key, value, out, lse, cache) are not read.
NWOR_EXPORT void LaunchVerifyPlan(const VerifyParams& params, const VerifyConfig& config,
                                  void* plan, void* workspace);

// Computes one layer's attention. REQUIRES: query, key, value, out, cache and view pointers are
// 16-byte aligned, and their strides are multiples of 16 bytes; scale > 0; a plan of these lengths
// was launched before. With params.prefix_ready it was not the launch ahead.
NWOR_EXPORT void LaunchVerify(const VerifyParams& params, const VerifyConfig& config,
                              const void* plan, void* workspace);

}  // namespace nwor
