#include "text/jinja_unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>

namespace pliant::jinja {
namespace {

// Characters whose upper or title case has several characters (Unicode's SpecialCasing.txt,
// unconditional part).
struct SpecialCase {
  char32_t c;
  const char* upper;
  const char* title;
};
constexpr SpecialCase kSpecialCases[] = {
    {0x00df, "SS", "Ss"},
    {0x0149, "\u02bcN", "\u02bcN"},
    {0x01f0, "J\u030c", "J\u030c"},
    {0x0390, "\u0399\u0308\u0301", "\u0399\u0308\u0301"},
    {0x03b0, "\u03a5\u0308\u0301", "\u03a5\u0308\u0301"},
    {0x0587, "\u0535\u0552", "\u0535\u0582"},
    {0x1e96, "H\u0331", "H\u0331"},
    {0x1e97, "T\u0308", "T\u0308"},
    {0x1e98, "W\u030a", "W\u030a"},
    {0x1e99, "Y\u030a", "Y\u030a"},
    {0x1e9a, "A\u02be", "A\u02be"},
    {0x1f50, "\u03a5\u0313", "\u03a5\u0313"},
    {0x1f52, "\u03a5\u0313\u0300", "\u03a5\u0313\u0300"},
    {0x1f54, "\u03a5\u0313\u0301", "\u03a5\u0313\u0301"},
    {0x1f56, "\u03a5\u0313\u0342", "\u03a5\u0313\u0342"},
    {0x1f80, "\u1f08\u0399", "\u1f88"},
    {0x1f81, "\u1f09\u0399", "\u1f89"},
    {0x1f82, "\u1f0a\u0399", "\u1f8a"},
    {0x1f83, "\u1f0b\u0399", "\u1f8b"},
    {0x1f84, "\u1f0c\u0399", "\u1f8c"},
    {0x1f85, "\u1f0d\u0399", "\u1f8d"},
    {0x1f86, "\u1f0e\u0399", "\u1f8e"},
    {0x1f87, "\u1f0f\u0399", "\u1f8f"},
    {0x1f88, "\u1f08\u0399", "\u1f88"},
    {0x1f89, "\u1f09\u0399", "\u1f89"},
    {0x1f8a, "\u1f0a\u0399", "\u1f8a"},
    {0x1f8b, "\u1f0b\u0399", "\u1f8b"},
    {0x1f8c, "\u1f0c\u0399", "\u1f8c"},
    {0x1f8d, "\u1f0d\u0399", "\u1f8d"},
    {0x1f8e, "\u1f0e\u0399", "\u1f8e"},
    {0x1f8f, "\u1f0f\u0399", "\u1f8f"},
    {0x1f90, "\u1f28\u0399", "\u1f98"},
    {0x1f91, "\u1f29\u0399", "\u1f99"},
    {0x1f92, "\u1f2a\u0399", "\u1f9a"},
    {0x1f93, "\u1f2b\u0399", "\u1f9b"},
    {0x1f94, "\u1f2c\u0399", "\u1f9c"},
    {0x1f95, "\u1f2d\u0399", "\u1f9d"},
    {0x1f96, "\u1f2e\u0399", "\u1f9e"},
    {0x1f97, "\u1f2f\u0399", "\u1f9f"},
    {0x1f98, "\u1f28\u0399", "\u1f98"},
    {0x1f99, "\u1f29\u0399", "\u1f99"},
    {0x1f9a, "\u1f2a\u0399", "\u1f9a"},
    {0x1f9b, "\u1f2b\u0399", "\u1f9b"},
    {0x1f9c, "\u1f2c\u0399", "\u1f9c"},
    {0x1f9d, "\u1f2d\u0399", "\u1f9d"},
    {0x1f9e, "\u1f2e\u0399", "\u1f9e"},
    {0x1f9f, "\u1f2f\u0399", "\u1f9f"},
    {0x1fa0, "\u1f68\u0399", "\u1fa8"},
    {0x1fa1, "\u1f69\u0399", "\u1fa9"},
    {0x1fa2, "\u1f6a\u0399", "\u1faa"},
    {0x1fa3, "\u1f6b\u0399", "\u1fab"},
    {0x1fa4, "\u1f6c\u0399", "\u1fac"},
    {0x1fa5, "\u1f6d\u0399", "\u1fad"},
    {0x1fa6, "\u1f6e\u0399", "\u1fae"},
    {0x1fa7, "\u1f6f\u0399", "\u1faf"},
    {0x1fa8, "\u1f68\u0399", "\u1fa8"},
    {0x1fa9, "\u1f69\u0399", "\u1fa9"},
    {0x1faa, "\u1f6a\u0399", "\u1faa"},
    {0x1fab, "\u1f6b\u0399", "\u1fab"},
    {0x1fac, "\u1f6c\u0399", "\u1fac"},
    {0x1fad, "\u1f6d\u0399", "\u1fad"},
    {0x1fae, "\u1f6e\u0399", "\u1fae"},
    {0x1faf, "\u1f6f\u0399", "\u1faf"},
    {0x1fb2, "\u1fba\u0399", "\u1fba\u0345"},
    {0x1fb3, "\u0391\u0399", "\u1fbc"},
    {0x1fb4, "\u0386\u0399", "\u0386\u0345"},
    {0x1fb6, "\u0391\u0342", "\u0391\u0342"},
    {0x1fb7, "\u0391\u0342\u0399", "\u0391\u0342\u0345"},
    {0x1fbc, "\u0391\u0399", "\u1fbc"},
    {0x1fc2, "\u1fca\u0399", "\u1fca\u0345"},
    {0x1fc3, "\u0397\u0399", "\u1fcc"},
    {0x1fc4, "\u0389\u0399", "\u0389\u0345"},
    {0x1fc6, "\u0397\u0342", "\u0397\u0342"},
    {0x1fc7, "\u0397\u0342\u0399", "\u0397\u0342\u0345"},
    {0x1fcc, "\u0397\u0399", "\u1fcc"},
    {0x1fd2, "\u0399\u0308\u0300", "\u0399\u0308\u0300"},
    {0x1fd3, "\u0399\u0308\u0301", "\u0399\u0308\u0301"},
    {0x1fd6, "\u0399\u0342", "\u0399\u0342"},
    {0x1fd7, "\u0399\u0308\u0342", "\u0399\u0308\u0342"},
    {0x1fe2, "\u03a5\u0308\u0300", "\u03a5\u0308\u0300"},
    {0x1fe3, "\u03a5\u0308\u0301", "\u03a5\u0308\u0301"},
    {0x1fe4, "\u03a1\u0313", "\u03a1\u0313"},
    {0x1fe6, "\u03a5\u0342", "\u03a5\u0342"},
    {0x1fe7, "\u03a5\u0308\u0342", "\u03a5\u0308\u0342"},
    {0x1ff2, "\u1ffa\u0399", "\u1ffa\u0345"},
    {0x1ff3, "\u03a9\u0399", "\u1ffc"},
    {0x1ff4, "\u038f\u0399", "\u038f\u0345"},
    {0x1ff6, "\u03a9\u0342", "\u03a9\u0342"},
    {0x1ff7, "\u03a9\u0342\u0399", "\u03a9\u0342\u0345"},
    {0x1ffc, "\u03a9\u0399", "\u1ffc"},
    {0xfb00, "FF", "Ff"},
    {0xfb01, "FI", "Fi"},
    {0xfb02, "FL", "Fl"},
    {0xfb03, "FFI", "Ffi"},
    {0xfb04, "FFL", "Ffl"},
    {0xfb05, "ST", "St"},
    {0xfb06, "ST", "St"},
    {0xfb13, "\u0544\u0546", "\u0544\u0576"},
    {0xfb14, "\u0544\u0535", "\u0544\u0565"},
    {0xfb15, "\u0544\u053b", "\u0544\u056b"},
    {0xfb16, "\u054e\u0546", "\u054e\u0576"},
    {0xfb17, "\u0544\u053d", "\u0544\u056d"},
};

const SpecialCase* FindSpecial(char32_t c) {
  if (c < 0xdf) return nullptr;
  const auto* found =
      std::lower_bound(std::begin(kSpecialCases), std::end(kSpecialCases), c,
                       [](const SpecialCase& entry, char32_t key) { return entry.c < key; });
  return found != std::end(kSpecialCases) && found->c == c ? found : nullptr;
}

utf8proc_category_t Category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

void AppendUpper(std::string& out, char32_t c) {
  if (const SpecialCase* special = FindSpecial(c)) {
    out += special->upper;
  } else {
    AppendUtf8(out, static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))));
  }
}

void AppendTitle(std::string& out, char32_t c) {
  if (const SpecialCase* special = FindSpecial(c)) {
    out += special->title;
  } else {
    AppendUtf8(out, static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))));
  }
}

// Characters that casing looks through: marks, format characters, modifiers, and a few signs.
bool IsCaseIgnorable(char32_t c) {
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return c == '\'' || c == '.' || c == ':' || c == 0xb7 || c == 0x387 || c == 0x55f ||
             c == 0x5f4 || c == 0x2018 || c == 0x2019 || c == 0x2024 || c == 0x2027 ||
             c == 0xfe13 || c == 0xfe52 || c == 0xfe55 || c == 0xff07 || c == 0xff0e || c == 0xff1a;
  }
}

// A capital sigma at the end of a word becomes the final small sigma.
bool IsFinalSigma(std::string_view text, std::size_t start, std::size_t end) {
  bool cased_before = false;
  while (start > 0) {
    const char32_t c = DecodePrevious(text, start);
    if (IsCaseIgnorable(c)) continue;
    cased_before = IsCased(c);
    break;
  }
  if (!cased_before) return false;
  while (end < text.size()) {
    const char32_t c = DecodeNext(text, end);
    if (IsCaseIgnorable(c)) continue;
    return !IsCased(c);
  }
  return true;
}

void AppendLower(std::string& out, std::string_view text, std::size_t start, std::size_t end,
                 char32_t c) {
  if (c == 0x3a3) {
    AppendUtf8(out, IsFinalSigma(text, start, end) ? 0x3c2 : 0x3c3);
  } else if (c == 0x130) {
    out += "i\u0307";
  } else {
    AppendUtf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
  }
}

bool IsAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<signed char>(c) >= 0; });
}

}  // namespace

bool IsValidUtf8(std::string_view text) {
  std::size_t i = 0;
  const std::size_t size = text.size();
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const auto more = [&](std::size_t at) { return at < size && (byte(at) & 0xc0) == 0x80; };
  while (i < size) {
    const unsigned char lead = byte(i);
    if (lead < 0x80) {
      ++i;
    } else if (lead >= 0xc2 && lead < 0xe0) {
      if (!more(i + 1)) return false;
      i += 2;
    } else if (lead >= 0xe0 && lead < 0xf0) {
      if (!more(i + 1) || !more(i + 2)) return false;
      if (lead == 0xe0 && byte(i + 1) < 0xa0) return false;
      if (lead == 0xed && byte(i + 1) >= 0xa0) return false;
      i += 3;
    } else if (lead >= 0xf0 && lead < 0xf5) {
      if (!more(i + 1) || !more(i + 2) || !more(i + 3)) return false;
      if (lead == 0xf0 && byte(i + 1) < 0x90) return false;
      if (lead == 0xf4 && byte(i + 1) >= 0x90) return false;
      i += 4;
    } else {
      return false;
    }
  }
  return true;
}

std::size_t CountCodePoints(std::string_view valid) {
  std::size_t count = 0;
  for (const char c : valid) count += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return count;
}

char32_t DecodeNext(std::string_view text, std::size_t& position) {
  const auto byte = [&](std::size_t k) {
    return static_cast<char32_t>(
        static_cast<unsigned char>(position + k < text.size() ? text[position + k] : 0));
  };
  const char32_t lead = byte(0);
  if (lead < 0x80) {
    ++position;
    return lead;
  }
  char32_t c;
  if (lead < 0xe0) {
    c = (lead & 0x1f) << 6 | (byte(1) & 0x3f);
    position += 2;
  } else if (lead < 0xf0) {
    c = (lead & 0x0f) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f);
    position += 3;
  } else {
    c = (lead & 0x07) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f);
    position += 4;
  }
  position = std::min(position, text.size());
  return c;
}

char32_t DecodePrevious(std::string_view text, std::size_t& position) {
  do {
    --position;
  } while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xc0) == 0x80);
  std::size_t at = position;
  return DecodeNext(text, at);
}

void AppendUtf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xc0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3f));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

std::size_t ByteOffset(std::string_view text, std::size_t index) {
  std::size_t position = 0;
  while (position < text.size()) {
    if ((static_cast<unsigned char>(text[position]) & 0xc0) != 0x80 && index-- == 0) break;
    ++position;
  }
  return position;
}

bool IsSpace(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
         c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool IsLineBreak(char32_t c) {
  return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

bool IsAlpha(char32_t c) {
  const auto category = Category(c);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool IsDecimal(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_ND; }

bool IsDigit(char32_t c) {
  if (IsDecimal(c)) return true;
  return c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 || (c >= 0x2074 && c <= 0x2079) ||
         (c >= 0x2080 && c <= 0x2089) || (c >= 0x2460 && c <= 0x2468) ||
         (c >= 0x2474 && c <= 0x247c) || (c >= 0x2488 && c <= 0x2490) || c == 0x24ea ||
         (c >= 0x24f5 && c <= 0x24fd) || c == 0x24ff || (c >= 0x2776 && c <= 0x277e) ||
         (c >= 0x2780 && c <= 0x2788) || (c >= 0x278a && c <= 0x2792);
}

bool IsNumeric(char32_t c) {
  const auto category = Category(c);
  return category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
         category == UTF8PROC_CATEGORY_NO;
}

bool IsAlnum(char32_t c) { return IsAlpha(c) || IsNumeric(c); }

bool IsPrintable(char32_t c) {
  if (c < 0x7f) return c >= 0x20;
  const auto category = Category(c);
  if (category == UTF8PROC_CATEGORY_CN || category >= UTF8PROC_CATEGORY_CC) return false;
  return category < UTF8PROC_CATEGORY_ZS || category > UTF8PROC_CATEGORY_ZP;
}

bool IsUpper(char32_t c) {
  return Category(c) == UTF8PROC_CATEGORY_LU ||
         (utf8proc_isupper(static_cast<utf8proc_int32_t>(c)) != 0 && !IsTitle(c));
}

bool IsLower(char32_t c) {
  return Category(c) == UTF8PROC_CATEGORY_LL || c == 0xaa || c == 0xba ||
         (utf8proc_islower(static_cast<utf8proc_int32_t>(c)) != 0 && !IsTitle(c));
}

bool IsTitle(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_LT; }

bool IsCased(char32_t c) { return IsUpper(c) || IsLower(c) || IsTitle(c); }

int DecimalValue(char32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9' ? static_cast<int>(c - '0') : -1;
  if (!IsDecimal(c)) return -1;
  // Decimal digits come in runs of ten; the mathematical ones, five runs in a row, start at a
  // multiple of ten after 1D7CE.
  if (c >= 0x1d7ce && c <= 0x1d7ff) return static_cast<int>((c - 0x1d7ce) % 10);
  int value = 0;
  while (value < 9 && IsDecimal(c - static_cast<char32_t>(value) - 1)) ++value;
  return value;
}

std::string Upper(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = DecodeNext(text, i);
    if (c < 0x80) {
      out += static_cast<char>(c >= 'a' && c <= 'z' ? c - 32 : c);
    } else {
      AppendUpper(out, c);
    }
  }
  return out;
}

std::string Lower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t start = i;
    const char32_t c = DecodeNext(text, i);
    if (c < 0x80) {
      out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
    } else {
      AppendLower(out, text, start, i, c);
    }
  }
  return out;
}

std::string Casefold(std::string_view text) {
  if (IsAscii(text)) return Lower(text);
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    utf8proc_int32_t folded[8];
    int last_boundclass = 0;
    const auto c = static_cast<utf8proc_int32_t>(DecodeNext(text, i));
    const auto count = utf8proc_decompose_char(c, folded, 8, UTF8PROC_CASEFOLD, &last_boundclass);
    if (count < 0 || count > 8) {
      AppendUtf8(out, static_cast<char32_t>(c));
      continue;
    }
    for (utf8proc_ssize_t k = 0; k < count; ++k) AppendUtf8(out, static_cast<char32_t>(folded[k]));
  }
  return out;
}

std::string SwapCase(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t start = i;
    const char32_t c = DecodeNext(text, i);
    if (IsUpper(c)) {
      AppendLower(out, text, start, i, c);
    } else if (IsLower(c)) {
      AppendUpper(out, c);
    } else {
      AppendUtf8(out, c);
    }
  }
  return out;
}

std::string Capitalize(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t start = i;
    const char32_t c = DecodeNext(text, i);
    if (start == 0) {
      AppendTitle(out, c);
    } else {
      AppendLower(out, text, start, i, c);
    }
  }
  return out;
}

std::string TitleCase(std::string_view text) {
  std::string out;
  bool inside = false;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t start = i;
    const char32_t c = DecodeNext(text, i);
    if (inside) {
      AppendLower(out, text, start, i, c);
    } else {
      AppendTitle(out, c);
    }
    inside = IsCased(c);
  }
  return out;
}

}  // namespace pliant::jinja
