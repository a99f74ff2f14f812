#pragma once

#include <functional>
#include <string>

#include "base/check.h"

namespace nwor {

// What the Error that `call` throws says.
inline std::string MessageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace nwor
