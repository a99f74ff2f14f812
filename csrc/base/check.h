#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/export.h"

namespace nwor {

// The one exception type of the library: wrong use, named by argument, with what was got and what
// was expected. Expected outcomes (no room, unsupported layout, gate closed) are status values
// instead, see bypass_reason.h and kv_interceptor/commit_error.h.
// Python sees it as nwor_specpv.NworError, a ValueError.
class NWOR_EXPORT Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

template <typename Part>
void AppendPart(std::string* text, const Part& part) {
  if constexpr (std::is_same_v<Part, char>) {
    *text += part;
  } else if constexpr (std::is_integral_v<Part>) {
    *text += std::to_string(part);
  } else if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    *text += digits;
  } else if constexpr (std::is_same_v<Part, const void*>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%p", part);
    *text += digits;
  } else if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    *text += std::string_view(part);
  } else {  // a list: [2, 3]
    const char* separator = "[";
    for (const auto& item : part) {
      *text += separator;
      AppendPart(text, item);
      separator = ", ";
    }
    *text += part.size() == 0 ? "[]" : "]";
  }
}

// Texts, numbers and lists of them, one behind the other. Without a stream: integers look alike in
// any locale, and messages need nothing of a C++ runtime that the process may have another version
// of.
template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::string text;
  (AppendPart(&text, parts), ...);
  return text;
}

}  // namespace nwor

// NWOR_CHECK(rows == 3, "key: got ", rows, " rows, expected 3");
#define NWOR_CHECK(condition, ...)                      \
  do {                                                  \
    if (!(condition)) [[unlikely]] {                    \
      throw ::nwor::Error(::nwor::Concat(__VA_ARGS__)); \
    }                                                   \
  } while (false)
