#pragma once

#include <string>

#include "attention/heuristics.h"
#include "base/export.h"

namespace nwor {

// Why ChooseVerifyConfig finds a shape unsupported: the argument, what it got and what is expected.
// Empty for shapes that it supports.
NWOR_EXPORT std::string DescribeUnsupported(const VerifyShape& shape, const DeviceProps& device);

}  // namespace nwor
