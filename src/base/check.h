// Room: base. Broken invariants stop the process with a message; they are never expected failures. Any thread.
#pragma once

#include <string_view>

namespace pliant {

/// Prints "file:line: check failed: expression: message" to standard error and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* expression,
                              std::string_view message);

#if defined(PLIANT_CHECKED)
inline constexpr bool kChecked = true;
#else
inline constexpr bool kChecked = false;
#endif

}  // namespace pliant

/// Stops the process when `condition` is false. For invariants, in every build.
#define PLIANT_CHECK(condition, message)                                              \
  do {                                                                                \
    if (!(condition)) [[unlikely]]                                                    \
      ::pliant::CheckFailed(__FILE__, __LINE__, #condition, (message));               \
  } while (false)

/// The same in checked builds only; the condition is not evaluated elsewhere.
#define PLIANT_DCHECK(condition, message)                             \
  do {                                                                \
    if constexpr (::pliant::kChecked) PLIANT_CHECK(condition, message); \
  } while (false)
