#pragma once

#include <string>

#include "attention/heuristics.h"
#include "base/export.h"

namespace nwor {

// Why ChooseVerifyConfig does not support a shape: the argument, what it got and what is expected.
// Empty if the shape is supported.
NWOR_EXPORT std::string DescribeUnsupported(const VerifyShape& shape, const DeviceProps& device);

}  // namespace nwor
