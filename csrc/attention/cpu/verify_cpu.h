#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attention/params.h"
#include "base/export.h"

namespace nwor {

// Checks what only the values tell: query_start ascends from 0 to the row count, lengths fit the
// table or the view, block tables and views name existing pages, the mask is wide enough. Entries
// that no row uses are not looked at. Throws nwor::Error; reads host memory, writes nothing.
NWOR_EXPORT void CheckVerifyValues(const VerifyParams& params);

// Verify attention (see VerifyParams) on the CPU, over torch's threads.
//
// One pass over a prefix for up to 256 packed rows (rows times query heads of a KV head), online
// softmax in float, scores of one block of 64 tokens at a time. A row's result depends on its own
// request alone, bit for bit: not on the batch, the number of threads, or the run.
//
// Thread-safe. `instruction_set` names one of VerifyCpuInstructionSets; empty: the widest.
// REQUIRES: all pointers are host memory, CheckVerifyValues passes, head_dim is a multiple of 8.
NWOR_EXPORT void VerifyAttentionCpu(const VerifyParams& params,
                                    std::string_view instruction_set = {});

// What this machine can run for a head size, widest first: "neon", "amx", "avx512", "avx2",
// "generic".
NWOR_EXPORT std::vector<std::string> VerifyCpuInstructionSets(int head_dim);

}  // namespace nwor
