#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/export.h"

namespace nwor {

// Makes `digest` ({d, ~d}, int64[2]) the maximum over all ranks of a torch.distributed process
// group, named as torch registered it. Every rank must call it. On CUDA groups it only enqueues.
// Throws Error when there is no such group.
NWOR_EXPORT void AgreeOnDigest(const std::string& group_name, at::Tensor& digest);

}  // namespace nwor
