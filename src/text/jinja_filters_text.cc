// Filters that make text or numbers of one value.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "text/jinja_filters.h"
#include "text/jinja_format.h"
#include "text/jinja_methods.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

// Markup stays markup, everything else becomes its text.
Value SoftString(const Value& value) {
  return value.Is(Type::kString) ? value : String(Text(value));
}

template <std::string (*Map)(std::string_view)>
Value MapFilter(const Value& value, Args& args) {
  const Bound bound("filter", args, {});
  const Value text = SoftString(value);
  ChargeBytes(text.text().size() * 2);
  return Like(text, Map(text.text()));
}

// The filter `title` starts words after blanks, hyphens and opening brackets only.
std::string TitleWords(std::string_view text) {
  std::string out;
  bool start = true;
  std::size_t word = 0;
  const auto flush = [&](std::size_t end) {
    if (end > word) out += Lower(text.substr(word, end - word));
  };
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t at = i;
    const char32_t c = DecodeNext(text, i);
    const bool separator = IsSpace(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
    if (separator) {
      flush(at);
      out.append(text.substr(at, i - at));
      word = i;
      start = true;
    } else if (start) {
      out += Upper(text.substr(at, i - at));
      word = i;
      start = false;
    }
  }
  flush(text.size());
  return out;
}

Value TrimFilter(const Value& value, Args& args) {
  const Bound bound("trim", args, {"chars"});
  const Value text = SoftString(value);
  std::optional<std::string> characters;
  if (!bound[0].Is(Type::kNone)) {
    if (!bound[0].Is(Type::kString)) Fail(ErrorKind::kType, "strip arg must be None or str");
    characters = bound[0].text();
  }
  return Like(text, std::string(Strip(text.text(), characters, true, true)));
}

Value ReplaceFilter(const Value& value, Args& args) {
  const Bound bound("replace", args, {"old", "new", "count"}, 2);
  const std::int64_t count = bound[2].Is(Type::kNone) ? -1 : ToInteger(bound[2]);
  return String(Replace(Text(value), Text(bound[0]), Text(bound[1]), count));
}

Value StringFilter(const Value& value, Args& args) {
  const Bound bound("string", args, {});
  return SoftString(value);
}

Value SafeFilter(const Value& value, Args& args) {
  const Bound bound("safe", args, {});
  return String(Text(value), true);
}

Value EscapeFilter(const Value& value, Args& args) {
  const Bound bound("escape", args, {});
  if (value.Is(Type::kString) && value.str().markup) return value;
  return String(EscapeHtml(Text(value)), true);
}

Value ForceEscapeFilter(const Value& value, Args& args) {
  const Bound bound("forceescape", args, {});
  return String(EscapeHtml(Text(value)), true);
}

// Removes tags and comments and runs of white space. Character references stay as they are, but for
// the five of `escape`.
Value StripTagsFilter(const Value& value, Args& args) {
  const Bound bound("striptags", args, {});
  const std::string text = Text(value);
  std::string plain;
  std::size_t from = 0;
  for (std::size_t open; (open = text.find('<', from)) != std::string::npos;) {
    const bool comment = text.compare(open, 4, "<!--") == 0;
    const std::size_t close = comment ? text.find("-->", open + 4) : text.find('>', open);
    if (close == std::string::npos) break;
    plain.append(text, from, open - from);
    from = close + (comment ? 3 : 1);
  }
  plain.append(text, from);
  std::string out;
  bool blank = false;
  for (std::size_t i = 0; i < plain.size();) {
    const std::size_t start = i;
    if (IsSpace(DecodeNext(plain, i))) {
      blank = true;
      continue;
    }
    if (blank && !out.empty()) out += ' ';
    blank = false;
    out.append(plain, start, i - start);
  }
  static constexpr std::pair<std::string_view, std::string_view> kReferences[] = {
      {"&lt;", "<"},   {"&gt;", ">"},    {"&#39;", "'"},
      {"&#34;", "\""}, {"&quot;", "\""}, {"&amp;", "&"}};
  for (const auto& [reference, plain_text] : kReferences)
    out = Replace(out, reference, plain_text, -1);
  return String(std::move(out));
}

Value IndentFilter(const Value& value, Args& args) {
  const Bound bound("indent", args, {"width", "first", "blank"});
  std::string indention(4, ' ');
  if (bound[0].Is(Type::kString)) {
    indention = bound[0].text();
  } else if (bound.Has(0)) {
    const std::int64_t width = std::max<std::int64_t>(ToInteger(bound[0]), 0);
    CheckStringSize(static_cast<std::size_t>(width));
    indention.assign(static_cast<std::size_t>(width), ' ');
  }
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (!value.Is(Type::kString)) {
    Fail(ErrorKind::kType,
         "unsupported operand type(s) for +=: '" + TypeName(value) + "' and 'str'");
  }
  const bool blank = bound.Bool(2, false);
  const std::vector<std::string> lines = SplitLines(value.text() + "\n", false);
  TextBuilder out;
  if (bound.Bool(1, false)) out.Append(indention);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      out.Append('\n');
      if (blank || !lines[i].empty()) out.Append(indention);
    }
    out.Append(lines[i]);
  }
  return Like(value, out.Take());
}

Value TruncateFilter(const Value& value, Args& args) {
  const Bound bound("truncate", args, {"length", "killwords", "end", "leeway"});
  const std::int64_t length = bound.Int(0, 255);
  const std::string end = bound.Has(2) ? Text(bound[2]) : "...";
  const std::int64_t leeway = bound[3].Is(Type::kNone) ? 5 : ToInteger(bound[3]);
  const auto end_length = static_cast<std::int64_t>(CountCodePoints(end));
  if (length < end_length) {
    Fail(ErrorKind::kRuntime,
         "expected length >= " + std::to_string(end_length) + ", got " + std::to_string(length));
  }
  if (leeway < 0) Fail(ErrorKind::kRuntime, "expected leeway >= 0, got " + std::to_string(leeway));
  const auto size = static_cast<std::int64_t>(Length(value));
  if (!value.Is(Type::kString)) {
    if (value.Is(Type::kUndefined)) return value;
    Fail(ErrorKind::kType, "truncate() needs a string, not " + TypeName(value));
  }
  if (size - leeway <= length) return value;
  const std::string cut = value.text().substr(
      0, ByteOffset(value.text(), static_cast<std::size_t>(length - end_length)));
  if (bound.Bool(1, false)) return Like(value, cut + end);
  const std::size_t blank = cut.rfind(' ');
  return Like(value, cut.substr(0, blank) + end);
}

Value CenterFilter(const Value& value, Args& args) {
  const Bound bound("center", args, {"width"});
  Args width;
  width.positional.emplace_back(bound.Int(0, 80));
  const Value text = SoftString(value);
  return FindStringMethod("center")(text, width);
}

Value WordCountFilter(const Value& value, Args& args) {
  const Bound bound("wordcount", args, {});
  const std::string text = Text(value);
  std::int64_t count = 0;
  bool inside = false;
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = DecodeNext(text, i);
    const bool word = c == '_' || IsAlnum(c);
    count += word && !inside;
    inside = word;
  }
  return Value(count);
}

std::string UrlQuote(std::string_view text, bool for_query) {
  TextBuilder out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x80 && std::isalnum(byte) != 0) || std::strchr("_.-~", c) != nullptr ||
        (c == '/' && !for_query)) {
      if (c != '\0') {
        out.Append(c);
        continue;
      }
    }
    if (c == ' ' && for_query) {
      out.Append('+');
      continue;
    }
    static constexpr char kHex[] = "0123456789ABCDEF";
    out.Append('%');
    out.Append(kHex[byte >> 4]);
    out.Append(kHex[byte & 15]);
  }
  return out.Take();
}

Value UrlEncodeFilter(const Value& value, Args& args) {
  const Bound bound("urlencode", args, {});
  if (value.Is(Type::kString) || !Iterable(value)) return String(UrlQuote(Text(value), false));
  TextBuilder out;
  const auto add = [&](const Value& key, const Value& item) {
    if (out.size() > 0) out.Append('&');
    out.Append(UrlQuote(Text(key), true));
    out.Append('=');
    out.Append(UrlQuote(Text(item), true));
  };
  if (value.Is(Type::kDict)) {
    for (const auto& [key, item] : value.dict().entries) add(key, item);
  } else {
    Reader reader(value);
    for (Value pair; reader.Next(pair);) {
      const std::vector<Value> parts = Collect(pair);
      if (parts.size() != 2) Fail(ErrorKind::kValue, "urlencode() needs pairs");
      add(parts[0], parts[1]);
    }
  }
  return String(out.Take());
}

Value XmlAttrFilter(const Value& value, Args& args) {
  const Bound bound("xmlattr", args, {"autospace"});
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (!value.Is(Type::kDict))
    Fail(ErrorKind::kType, "xmlattr() needs a mapping, not " + TypeName(value));
  TextBuilder out;
  const bool space = bound.Bool(0, true);
  for (const auto& [key, item] : value.dict().entries) {
    if (item.Is(Type::kNone) || item.Is(Type::kUndefined)) continue;
    if (!key.Is(Type::kString))
      Fail(ErrorKind::kType, "expected string or bytes-like object, got '" + TypeName(key) + "'");
    if (key.text().find_first_of(" \t\n\r\f\v/>=") != std::string::npos) {
      Fail(ErrorKind::kValue, "Invalid character in attribute name: " + Quote(key.text()));
    }
    if (space || out.size() > 0) out.Append(' ');
    const auto escaped = [](const Value& part) {
      return part.Is(Type::kString) && part.str().markup ? part.text() : EscapeHtml(Text(part));
    };
    out.Append(escaped(key) + "=\"" + escaped(item) + "\"");
  }
  return String(out.Take());
}

Value FormatFilter(const Value& value, Args& args) {
  if (!args.positional.empty() && !args.keyword.empty()) {
    Fail(ErrorKind::kRuntime, "can't handle positional and keyword arguments at the same time");
  }
  Value values;
  if (!args.keyword.empty()) {
    std::vector<Dict::Entry> entries;
    for (auto& [key, item] : args.keyword) entries.emplace_back(String(key), item);
    values = MakeDict(std::move(entries));
  } else {
    values = Tuple(args.positional);
  }
  return PercentFormat(SoftString(value), values);
}

Value ToJsonFilter(const Value& value, Args& args) {
  const Bound bound("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = bound.Bool(0, false);
  if (bound[1].Is(Type::kString)) {
    style.indent = bound[1].text();
  } else if (!bound[1].Is(Type::kNone)) {
    const std::int64_t width = std::max<std::int64_t>(ToInteger(bound[1]), 0);
    CheckStringSize(static_cast<std::size_t>(width));
    style.indent = std::string(static_cast<std::size_t>(width), ' ');
  }
  if (style.indent) style.item_separator = ",";
  if (!bound[2].Is(Type::kNone)) {
    const std::vector<Value> separators = Collect(bound[2]);
    if (separators.size() != 2 || !separators[0].Is(Type::kString) ||
        !separators[1].Is(Type::kString)) {
      Fail(ErrorKind::kValue, "tojson() needs two separators");
    }
    style.item_separator = separators[0].text();
    style.key_separator = separators[1].text();
  }
  style.sort_keys = bound.Bool(3, false);
  return String(ToJson(value, style));
}

// ---- numbers

// Python's int(text, base), or nothing.
std::optional<std::int64_t> ParseInt(std::string_view text, std::int64_t base) {
  text = Strip(text, std::nullopt, true, true);
  bool negative = false;
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) {
    negative = text[0] == '-';
    text.remove_prefix(1);
  }
  if (base != 0 && (base < 2 || base > 36))
    Fail(ErrorKind::kValue, "int() base must be >= 2 and <= 36, or 0");
  if (text.size() > 2 && text[0] == '0') {
    const char c = static_cast<char>(text[1] | 0x20);
    const int named = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 0;
    if (named != 0 && (base == 0 || base == named)) {
      base = named;
      text.remove_prefix(2);
      if (text.starts_with('_')) text.remove_prefix(1);
    }
  }
  if (base == 0) base = 10;
  std::string digits = negative ? "-" : "";
  bool digit_before = false;
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = DecodeNext(text, i);
    if (c == '_') {
      if (!digit_before || i >= text.size()) return std::nullopt;
      digit_before = false;
      continue;
    }
    digit_before = true;
    if (c < 0x80) {
      digits += static_cast<char>(c);
    } else {
      const int value = DecimalValue(c);
      if (value < 0) return std::nullopt;
      digits += static_cast<char>('0' + value);
    }
  }
  if (!digit_before) return std::nullopt;
  std::int64_t value = 0;
  const auto parsed =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, static_cast<int>(base));
  if (parsed.ptr != digits.data() + digits.size()) return std::nullopt;
  if (parsed.ec == std::errc::result_out_of_range)
    Fail(ErrorKind::kOverflow, "an integer does not fit into 64 bits");
  if (parsed.ec != std::errc()) return std::nullopt;
  return value;
}

// Python's float(text), or nothing.
std::optional<double> ParseFloat(std::string_view text) {
  text = Strip(text, std::nullopt, true, true);
  std::string plain;
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = DecodeNext(text, i);
    if (c == '_') {
      const bool between = !plain.empty() && plain.back() >= '0' && plain.back() <= '9' &&
                           i < text.size() && text[i] >= '0' && text[i] <= '9';
      if (!between) return std::nullopt;
      continue;
    }
    const int digit = DecimalValue(c);
    if (digit >= 0) {
      plain += static_cast<char>('0' + digit);
    } else if (c < 0x80) {
      plain += static_cast<char>(c);
    } else {
      return std::nullopt;
    }
  }
  std::string lower = Lower(plain);
  std::string_view body = lower;
  double sign = 1;
  if (!body.empty() && (body[0] == '+' || body[0] == '-')) {
    sign = body[0] == '-' ? -1 : 1;
    body.remove_prefix(1);
  }
  if (body == "inf" || body == "infinity") return sign * std::numeric_limits<double>::infinity();
  if (body == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (body.empty() || (!(body[0] >= '0' && body[0] <= '9') && body[0] != '.')) return std::nullopt;
  double value = 0;
  const auto parsed = std::from_chars(body.data(), body.data() + body.size(), value);
  if (parsed.ptr != body.data() + body.size() || parsed.ec == std::errc::invalid_argument)
    return std::nullopt;
  if (parsed.ec == std::errc::result_out_of_range) {
    const std::string zero_ended(body);
    value = std::strtod(zero_ended.c_str(), nullptr);
  }
  return sign * value;
}

// A float cut to an integer; nothing for NaN and infinity.
std::optional<std::int64_t> CutFloat(double value) {
  if (!std::isfinite(value)) return std::nullopt;
  if (std::fabs(value) >= 9.2e18)
    Fail(ErrorKind::kOverflow, "an integer does not fit into 64 bits");
  return static_cast<std::int64_t>(value);
}

Value IntFilter(const Value& value, Args& args) {
  const Bound bound("int", args, {"default", "base"});
  const Value fallback = bound.Has(0) ? bound[0] : Value(std::int64_t{0});
  if (value.IsIntLike()) return Value(value.AsInt());
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (value.Is(Type::kFloat)) {
    if (std::isinf(value.d()))
      Fail(ErrorKind::kOverflow, "cannot convert float infinity to integer");
    const auto cut = CutFloat(value.d());
    return cut ? Value(*cut) : fallback;
  }
  if (!value.Is(Type::kString)) return fallback;
  const std::int64_t base = bound.Int(1, 10);
  if (base == 0 || (base >= 2 && base <= 36)) {
    if (const auto parsed = ParseInt(value.text(), base)) return Value(*parsed);
  }
  if (const auto parsed = ParseFloat(value.text())) {
    if (const auto cut = CutFloat(*parsed)) return Value(*cut);
  }
  return fallback;
}

Value FloatFilter(const Value& value, Args& args) {
  const Bound bound("float", args, {"default"});
  if (value.IsNumber()) return Value(value.AsDouble());
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (value.Is(Type::kString)) {
    if (const auto parsed = ParseFloat(value.text())) return Value(*parsed);
  }
  return bound.Has(0) ? bound[0] : Value(0.0);
}

Value AbsFilter(const Value& value, Args& args) {
  const Bound bound("abs", args, {});
  if (value.Is(Type::kFloat)) return Value(std::fabs(value.d()));
  if (value.IsIntLike()) return value.AsInt() < 0 ? Negate(value) : Value(value.AsInt());
  Fail(ErrorKind::kType, "bad operand type for abs(): '" + TypeName(value) + "'");
}

// round() to `precision` digits after the point, ties to even, on the exact decimal value as
// Python.
double RoundTo(double value, std::int64_t precision) {
  if (!std::isfinite(value) || precision > 323) return value;
  if (precision < -308) return std::copysign(0.0, value);
  if (precision >= 0)
    return std::strtod(FloatDigits(value, 'f', static_cast<int>(precision), false).c_str(),
                       nullptr);
  const double scale = std::pow(10.0, static_cast<double>(-precision));
  return std::nearbyint(value / scale) * scale;
}

Value RoundFilter(const Value& value, Args& args) {
  const Bound bound("round", args, {"precision", "method"});
  const std::int64_t precision = bound.Int(0, 0);
  const std::string method = bound.Has(1) ? Text(bound[1]) : "common";
  if (method != "common" && method != "ceil" && method != "floor") {
    Fail(ErrorKind::kRuntime, "method must be common, ceil or floor");
  }
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (!value.IsNumber()) {
    Fail(ErrorKind::kType, "type " + TypeName(value) + " doesn't define __round__ method");
  }
  if (method == "common") {
    if (value.Is(Type::kFloat)) return Value(RoundTo(value.d(), precision));
    if (precision >= 0) return Value(value.AsInt());
    if (precision < -18) return Value(std::int64_t{0});
    std::int64_t scale = 1;
    for (std::int64_t i = precision; i < 0; ++i) scale *= 10;
    const Wide number = value.AsInt();
    const Wide below = number >= 0 ? number / scale : -((-number + scale - 1) / scale);
    const Wide rest = number - below * scale;
    const bool up = rest * 2 > scale || (rest * 2 == scale && below % 2 != 0);
    const Wide rounded = (below + (up ? 1 : 0)) * scale;
    if (rounded > std::numeric_limits<std::int64_t>::max() ||
        rounded < std::numeric_limits<std::int64_t>::min()) {
      Fail(ErrorKind::kOverflow, "an integer does not fit into 64 bits");
    }
    return Value(static_cast<std::int64_t>(rounded));
  }
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = value.AsDouble() * scale;
  if (!std::isfinite(scaled))
    Fail(ErrorKind::kOverflow, "cannot convert float infinity to integer");
  return Value((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

Value FileSizeFilter(const Value& value, Args& args) {
  const Bound bound("filesizeformat", args, {"binary"});
  const Value number = FloatFilter(value, *std::make_unique<Args>());
  const bool binary = bound.Bool(0, false);
  const double base = binary ? 1024 : 1000;
  const double bytes = number.AsDouble();
  if (bytes == 1) return String("1 Byte");
  if (!(bytes >= base)) {
    const auto whole = CutFloat(bytes);
    if (!whole) Fail(ErrorKind::kValue, "cannot convert float NaN to integer");
    return String(std::to_string(*whole) + " Bytes");
  }
  static constexpr const char* kDecimal[] = {"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"};
  static constexpr const char* kBinary[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"};
  double unit = base * base;
  std::size_t i = 0;
  for (; i < 7 && bytes >= unit; ++i) unit *= base;
  return String(FloatDigits(base * bytes / unit, 'f', 1, false) + " " +
                (binary ? kBinary : kDecimal)[i]);
}

Value PprintFilter(const Value& value, Args& args) {
  const Bound bound("pprint", args, {});
  return String(Repr(value));
}

constexpr FilterEntry kTextFilters[] = {
    {"abs", AbsFilter},
    {"capitalize", MapFilter<Capitalize>},
    {"center", CenterFilter},
    {"e", EscapeFilter},
    {"escape", EscapeFilter},
    {"filesizeformat", FileSizeFilter},
    {"float", FloatFilter},
    {"forceescape", ForceEscapeFilter},
    {"format", FormatFilter},
    {"indent", IndentFilter},
    {"int", IntFilter},
    {"lower", MapFilter<Lower>},
    {"pprint", PprintFilter},
    {"replace", ReplaceFilter},
    {"round", RoundFilter},
    {"safe", SafeFilter},
    {"string", StringFilter},
    {"striptags", StripTagsFilter},
    {"title", MapFilter<TitleWords>},
    {"tojson", ToJsonFilter},
    {"trim", TrimFilter},
    {"truncate", TruncateFilter},
    {"upper", MapFilter<Upper>},
    {"urlencode", UrlEncodeFilter},
    {"wordcount", WordCountFilter},
    {"xmlattr", XmlAttrFilter},
};

}  // namespace

FilterTable TextFilters() { return {kTextFilters, std::size(kTextFilters)}; }

}  // namespace pliant::jinja
