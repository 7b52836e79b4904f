#include "text/utf8.h"

#include <utf8proc.h>

#include <cstring>

namespace pliant {
namespace {

/// Bounds of the second byte, and how many bytes follow the first.
struct LeadByte {
  std::uint8_t following, low, high;
};

LeadByte Lead(std::uint8_t b) {
  if (b >= 0xC2 && b <= 0xDF) return {1, 0x80, 0xBF};
  if (b == 0xE0) return {2, 0xA0, 0xBF};
  if (b == 0xED) return {2, 0x80, 0x9F};
  if (b >= 0xE1 && b <= 0xEF) return {2, 0x80, 0xBF};
  if (b == 0xF0) return {3, 0x90, 0xBF};
  if (b >= 0xF1 && b <= 0xF3) return {3, 0x80, 0xBF};
  if (b == 0xF4) return {3, 0x80, 0x8F};
  return {0, 0, 0};
}

constexpr char32_t kReplacement = 0xFFFD;

/// Bytes at the start that are ASCII, counted in steps of eight.
std::size_t AsciiPrefix(std::string_view bytes) {
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  return i;
}

}  // namespace

Utf8Unit NextUtf8(std::string_view bytes) {
  const auto first = static_cast<std::uint8_t>(bytes[0]);
  if (first < 0x80) return {Utf8Unit::Kind::kCharacter, 1, first};
  const LeadByte lead = Lead(first);
  if (lead.following == 0) return {Utf8Unit::Kind::kInvalid, 1, kReplacement};
  char32_t code = first & (0x3F >> lead.following);
  for (std::uint8_t i = 1; i <= lead.following; ++i) {
    if (i == bytes.size()) return {Utf8Unit::Kind::kIncomplete, i, kReplacement};
    const auto b = static_cast<std::uint8_t>(bytes[i]);
    const std::uint8_t low = i == 1 ? lead.low : 0x80, high = i == 1 ? lead.high : 0xBF;
    if (b < low || b > high) return {Utf8Unit::Kind::kInvalid, i, kReplacement};
    code = code << 6 | (b & 0x3F);
  }
  return {Utf8Unit::Kind::kCharacter, static_cast<std::uint8_t>(lead.following + 1), code};
}

char32_t LastCodePoint(std::string_view bytes) {
  std::size_t size = 1;
  while (size < 4 && size < bytes.size() &&
         (static_cast<std::uint8_t>(bytes[bytes.size() - size]) & 0xC0) == 0x80)
    ++size;
  const Utf8Unit unit = NextUtf8(bytes.substr(bytes.size() - size));
  return unit.size == size ? unit.code_point : kReplacement;
}

std::size_t ValidUtf8Prefix(std::string_view bytes) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    at += AsciiPrefix(bytes.substr(at));
    if (at == bytes.size()) break;
    const Utf8Unit unit = NextUtf8(bytes.substr(at));
    if (unit.kind != Utf8Unit::Kind::kCharacter) break;
    at += unit.size;
  }
  return at;
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
    return;
  }
  if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | c >> 6));
  } else {
    if (c < 0x10000) {
      out->push_back(static_cast<char>(0xE0 | c >> 12));
    } else {
      out->push_back(static_cast<char>(0xF0 | c >> 18));
      out->push_back(static_cast<char>(0x80 | (c >> 12 & 0x3F)));
    }
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
  }
  out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
}

void DrainUtf8(std::string* pending, bool flush, std::string* out) {
  std::string_view rest = *pending;
  while (!rest.empty()) {
    const std::size_t valid = ValidUtf8Prefix(rest);
    out->append(rest.substr(0, valid));
    rest.remove_prefix(valid);
    if (rest.empty()) break;
    const Utf8Unit unit = NextUtf8(rest);
    if (unit.kind == Utf8Unit::Kind::kIncomplete && !flush) break;
    AppendUtf8(kReplacement, out);
    rest.remove_prefix(unit.size);
  }
  pending->erase(0, pending->size() - rest.size());
}

bool IsWhitespace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsWordCharacter(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

}  // namespace pliant
