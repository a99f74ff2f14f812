#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "export.h"

namespace nwor {

// The one exception type of the library: wrong use, named by argument, with what was got and what
// was expected. Expected outcomes (no room, unsupported layout, gate closed) are status values
// instead, see bypass_reason.h and kv_interceptor/commit_error.h.
// Python sees it as nwor_specpv.NworError, a ValueError.
class NWOR_EXPORT Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace nwor

// NWOR_CHECK(rows == 3, "key: got ", rows, " rows, expected 3");
#define NWOR_CHECK(condition, ...)                      \
  do {                                                  \
    if (!(condition)) [[unlikely]] {                    \
      throw ::nwor::Error(::nwor::Concat(__VA_ARGS__)); \
    }                                                   \
  } while (false)
