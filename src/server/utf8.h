// Room: server. Code points of text known to be valid UTF-8. Any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pliant {

inline constexpr char32_t kReplacement = 0xFFFD;

/// Reads the code point at `text[*at]` and moves `*at` past it. A byte that starts no character
/// reads as U+FFFD.
inline char32_t NextCodePoint(std::string_view text, std::size_t* at) {
  const auto lead = static_cast<unsigned char>(text[(*at)++]);
  if (lead < 0x80) return lead;
  const int tail = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC2 ? 1 : 0;
  if (tail == 0) return kReplacement;
  char32_t value = lead & (0x3Fu >> tail);
  for (int i = 0; i < tail; ++i) {
    if (*at >= text.size() || (static_cast<unsigned char>(text[*at]) & 0xC0u) != 0x80u) {
      return kReplacement;
    }
    value = value << 6 | (static_cast<unsigned char>(text[(*at)++]) & 0x3Fu);
  }
  return value;
}

inline char32_t FirstCodePoint(std::string_view text) {
  std::size_t at = 0;
  return NextCodePoint(text, &at);
}

inline char32_t LastCodePoint(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0u) == 0x80u) --at;
  return NextCodePoint(text, &at);
}

inline void AppendUtf8(char32_t code, std::string* out) {
  if (code < 0x80) {
    *out += static_cast<char>(code);
  } else if (code < 0x800) {
    *out += static_cast<char>(0xC0 | code >> 6);
    *out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    *out += static_cast<char>(0xE0 | code >> 12);
    *out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    *out += static_cast<char>(0xF0 | code >> 18);
    *out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
    *out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

}  // namespace pliant
