#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attention/params.h"
#include "base/export.h"

namespace nwor {

// Checks the values of index arrays: query_start ascends from 0 to the row count, lengths fit the
// table or the view, tables and views name existing pages, the mask is wide enough. Entries that no
// row uses are not checked. Throws nwor::Error; reads host memory, writes nothing. Thread-safe.
NWOR_EXPORT void CheckVerifyValues(const VerifyParams& params);

// Verify attention (see VerifyParams) on the CPU, with torch's threads.
//
// Reads a prefix once for up to 256 packed rows (rows times query heads of a KV head): online
// softmax in float, 64 tokens at a time. A row's result depends only on its own request, bit for
// bit: not on the batch, the number of threads or the run. kernel.h describes the parts.
//
// Thread-safe. `instruction_set` is one of VerifyCpuInstructionSets; empty: the widest.
// REQUIRES: all pointers are host memory; CheckVerifyValues passes; head_dim is a multiple of 8.
NWOR_EXPORT void VerifyAttentionCpu(const VerifyParams& params,
                                    std::string_view instruction_set = {});

// The instruction sets that this machine can run for a head size, widest first: "neon", "amx",
// "avx512", "avx2", "generic".
NWOR_EXPORT std::vector<std::string> VerifyCpuInstructionSets(int head_dim);

}  // namespace nwor
