#pragma once

#include <string>

#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/error.h"

namespace nwor {

// Faults of the caller's input: on the CPU they are found before anything is written and thrown.
bool IsInputFault(CommitError error);

// An input fault in the words of Interceptor::Commit's arguments. REQUIRES: IsInputFault.
std::string ExplainInputFault(const CommitVerdict& verdict, const CommitParams& params);

}  // namespace nwor
