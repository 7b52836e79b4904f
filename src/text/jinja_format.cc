#include "text/jinja_format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "text/jinja_ops.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

// A run of decimal digits, or nothing; fails over the limit on strings.
std::optional<std::size_t> TakeNumber(std::string_view text, std::size_t& i) {
  if (i >= text.size() || text[i] < '0' || text[i] > '9') return std::nullopt;
  std::size_t value = 0;
  for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) {
    value = value * 10 + static_cast<std::size_t>(text[i] - '0');
    CheckStringSize(value);
  }
  return value;
}

std::string Grouped(const std::string& digits, char separator, std::size_t every) {
  std::string out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % every == 0) out += separator;
    out += digits[i];
  }
  return out;
}

std::string SignOf(bool negative, char sign) {
  if (negative) return "-";
  return sign == '+' || sign == ' ' ? std::string(1, sign) : std::string();
}

// Puts sign, prefix and digits together in `width`; '=' fills between prefix and digits.
std::string Assemble(std::string sign, std::string whole, const std::string& rest,
                     const FormatSpec& spec, std::size_t group_every) {
  const char align = spec.align == '\0' ? '>' : spec.align;
  if (spec.grouping != '\0') {
    if (align == '=' && spec.fill == "0") {
      // Zeros are grouped as well.
      const std::size_t used = sign.size() + rest.size();
      while (used + Grouped(whole, spec.grouping, group_every).size() < spec.width) {
        whole.insert(whole.begin(), '0');
        Charge(1 + whole.size() / 32);
      }
      whole = Grouped(whole, spec.grouping, group_every);
      return sign + whole + rest;
    }
    whole = Grouped(whole, spec.grouping, group_every);
  }
  if (align != '=') return Pad(sign + whole + rest, spec.width, spec.fill, align);
  const std::size_t used = sign.size();
  return sign + Pad(whole + rest, spec.width > used ? spec.width - used : 0, spec.fill, '>');
}

std::string FormatInt(std::int64_t value, const FormatSpec& spec) {
  if (spec.precision) Fail(ErrorKind::kValue, "Precision not allowed in integer format specifier");
  if (spec.type == 'c') {
    if (value < 0 || value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) {
      Fail(ErrorKind::kOverflow, "%c arg not in range(0x110000)");
    }
    std::string c;
    AppendUtf8(c, static_cast<char32_t>(value));
    return Pad(c, spec.width, spec.fill, spec.align == '\0' ? '<' : spec.align);
  }
  int base = 10;
  std::string prefix;
  if (spec.type == 'b') base = 2, prefix = "0b";
  if (spec.type == 'o') base = 8, prefix = "0o";
  if (spec.type == 'x') base = 16, prefix = "0x";
  if (spec.type == 'X') base = 16, prefix = "0X";
  std::string sign = SignOf(value < 0, spec.sign);
  if (spec.alternate) sign += prefix;
  return Assemble(std::move(sign), IntDigits(Magnitude(value), base, spec.type == 'X'), "", spec,
                  base == 10 ? 3 : 4);
}

// With an exponent, and without zeros at the end of the digits.
std::string ShortExponent(double value, int precision) {
  std::string digits = FloatDigits(value, 'e', precision - 1, false);
  std::size_t e = digits.find('e');
  if (digits.find('.') != std::string::npos) {
    std::size_t keep = digits.find_last_not_of('0', e - 1);
    if (digits[keep] == '.') --keep;
    digits.erase(keep + 1, e - keep - 1);
  }
  return digits;
}

std::string FormatDouble(double value, const FormatSpec& spec) {
  std::string digits;
  char type = spec.type;
  const double magnitude = std::fabs(value);
  if (type == '\0' && !spec.precision) {
    digits = FloatRepr(magnitude);
  } else if (type == '\0') {
    // Like g, but a number without exponent keeps a digit after the point, for which there must be
    // room.
    const int precision = std::max(*spec.precision, 1);
    digits = FloatDigits(magnitude, 'g', precision, spec.alternate);
    if (std::isfinite(value) && digits.find_first_of(".e") == std::string::npos) {
      digits = static_cast<int>(digits.size()) < precision ? digits + ".0"
                                                           : ShortExponent(magnitude, precision);
    }
  } else if (type == '%') {
    digits = FloatDigits(magnitude * 100, 'f', spec.precision.value_or(6), spec.alternate) + "%";
  } else {
    if (type == 'n') type = 'g';
    digits = FloatDigits(magnitude, type, spec.precision.value_or(6), spec.alternate);
  }
  std::size_t whole = 0;
  while (whole < digits.size() && digits[whole] >= '0' && digits[whole] <= '9') ++whole;
  return Assemble(SignOf(std::signbit(value) && !std::isnan(value), spec.sign),
                  digits.substr(0, whole), digits.substr(whole), spec, 3);
}

std::string FormatText(const std::string& text, const FormatSpec& spec) {
  if (spec.sign != '\0') Fail(ErrorKind::kValue, "Sign not allowed in string format specifier");
  if (spec.align == '=')
    Fail(ErrorKind::kValue, "'=' alignment not allowed in string format specifier");
  if (spec.grouping != '\0')
    Fail(ErrorKind::kValue, std::string("Cannot specify '") + spec.grouping + "' with 's'.");
  std::string cut = text;
  if (spec.precision)
    cut = text.substr(0, ByteOffset(text, static_cast<std::size_t>(*spec.precision)));
  return Pad(std::move(cut), spec.width, spec.fill, spec.align == '\0' ? '<' : spec.align);
}

}  // namespace

std::uint64_t Magnitude(std::int64_t value) {
  return value < 0 ? ~static_cast<std::uint64_t>(value) + 1 : static_cast<std::uint64_t>(value);
}

std::string IntDigits(std::uint64_t value, int base, bool upper) {
  if (value == 0) return "0";
  // Named, not indexed in place: GCC 12's bounds check of (a ? b : c)[i] reads an index that one
  // branch has not set.
  const std::string_view digits = upper ? "0123456789ABCDEF" : "0123456789abcdef";
  std::string out;
  for (; value > 0; value /= static_cast<unsigned>(base)) {
    out += digits[value % static_cast<unsigned>(base)];
  }
  std::reverse(out.begin(), out.end());
  return out;
}

std::string FloatDigits(double value, char type, int precision, bool alternate) {
  const bool upper = type == 'E' || type == 'F' || type == 'G';
  if (std::isnan(value)) return upper ? "NAN" : "nan";
  if (std::isinf(value)) return upper ? "INF" : "inf";
  const std::string format = std::string("%") + (alternate ? "#" : "") + ".*" + type;
  char small[64];
  const int size = std::snprintf(small, sizeof small, format.c_str(), precision, value);
  if (size < static_cast<int>(sizeof small)) return small;
  std::string out(static_cast<std::size_t>(size) + 1, '\0');
  std::snprintf(out.data(), out.size(), format.c_str(), precision, value);
  out.pop_back();
  return out;
}

std::string Pad(std::string text, std::size_t width, std::string_view fill, char align) {
  const std::size_t length = CountCodePoints(text);
  if (width <= length) return text;
  const std::size_t missing = width - length;
  CheckStringSize(text.size() + missing * fill.size());
  ChargeBytes(missing * fill.size());
  const std::size_t left = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  std::string out;
  for (std::size_t i = 0; i < left; ++i) out += fill;
  out += text;
  for (std::size_t i = left; i < missing; ++i) out += fill;
  return out;
}

FormatSpec FormatSpec::Parse(std::string_view text, const Value& value) {
  FormatSpec spec;
  std::size_t i = 0;
  const auto is_align = [&](std::size_t at) {
    return at < text.size() && std::strchr("<>=^", text[at]) != nullptr && text[at] != '\0';
  };
  std::size_t after_fill = 0;
  if (!text.empty()) DecodeNext(text, after_fill);
  bool has_fill = false;
  if (!text.empty() && is_align(after_fill)) {
    spec.fill = std::string(text.substr(0, after_fill));
    spec.align = text[after_fill];
    has_fill = true;
    i = after_fill + 1;
  } else if (is_align(0)) {
    spec.align = text[0];
    i = 1;
  }
  if (i < text.size() && (text[i] == '+' || text[i] == '-' || text[i] == ' '))
    spec.sign = text[i++];
  if (i < text.size() && text[i] == '#') spec.alternate = true, ++i;
  if (i < text.size() && text[i] == '0' && !has_fill) {
    spec.fill = "0";
    if (spec.align == '\0' && !value.Is(Type::kString)) spec.align = '=';
    ++i;
  }
  spec.width = TakeNumber(text, i).value_or(0);
  if (i < text.size() && (text[i] == ',' || text[i] == '_')) spec.grouping = text[i++];
  if (i < text.size() && text[i] == '.') {
    ++i;
    const auto precision = TakeNumber(text, i);
    if (!precision) Fail(ErrorKind::kValue, "Format specifier missing precision");
    spec.precision = static_cast<int>(std::min<std::size_t>(*precision, 1 << 30));
  }
  if (i < text.size()) spec.type = text[i++];
  if (i < text.size()) {
    Fail(ErrorKind::kValue, "Invalid format specifier '" + std::string(text) +
                                "' for object of type '" + TypeName(value) + "'");
  }
  return spec;
}

std::string FormatValue(const Value& value, std::string_view text) {
  if (text.empty()) return Text(value);
  const auto unknown = [&](char code) {
    Fail(ErrorKind::kValue, std::string("Unknown format code '") + code + "' for object of type '" +
                                TypeName(value) + "'");
  };
  if (value.Is(Type::kString)) {
    const FormatSpec spec = FormatSpec::Parse(text, value);
    if (spec.type != '\0' && spec.type != 's') unknown(spec.type);
    return FormatText(value.text(), spec);
  }
  if (!value.IsNumber()) {
    Fail(ErrorKind::kType,
         "unsupported format string passed to " + TypeName(value) + ".__format__");
  }
  FormatSpec spec = FormatSpec::Parse(text, value);
  const bool as_float = spec.type != '\0' && std::strchr("eEfFgG%", spec.type) != nullptr;
  if (value.IsIntLike() && !as_float) {
    if (spec.type != '\0' && std::strchr("bcdoxXn", spec.type) == nullptr) unknown(spec.type);
    return FormatInt(value.AsInt(), spec);
  }
  if (!as_float && spec.type != '\0' && spec.type != 'n') unknown(spec.type);
  if (spec.precision.value_or(0) > kMaxPrecision) {
    Fail(ErrorKind::kLimit,
         "a number would be written with more than " + std::to_string(kMaxPrecision) + " digits");
  }
  return FormatDouble(value.AsDouble(), spec);
}

}  // namespace pliant::jinja
