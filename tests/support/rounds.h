// How often a long test repeats itself. Under a sanitizer the same code takes many times longer, so
// there it runs fewer seeds, requests or steps, with every check on each of them.
#pragma once

namespace pliant {

#ifdef PLIANT_SANITIZED  // set by the build (tests/CMakeLists.txt)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

/// `sanitized` under a sanitizer, `usual` everywhere else.
template <typename T>
constexpr T Rounds(T usual, T sanitized) {
  return kSanitized ? sanitized : usual;
}

}  // namespace pliant
