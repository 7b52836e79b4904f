#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

#include "text/jinja_format.h"
#include "text/jinja_methods.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {

std::string_view Strip(std::string_view text, const std::optional<std::string>& characters,
                       bool left, bool right) {
  std::u32string set;
  if (characters) {
    for (std::size_t i = 0; i < characters->size();) set += DecodeNext(*characters, i);
  }
  const auto strips = [&](char32_t c) {
    if (!characters) return IsSpace(c);
    Charge(1 + set.size() / 16);
    return set.find(c) != std::u32string::npos;
  };
  std::size_t start = 0, end = text.size();
  while (left && start < end) {
    std::size_t next = start;
    if (!strips(DecodeNext(text, next))) break;
    start = next;
  }
  while (right && end > start) {
    std::size_t previous = end;
    if (!strips(DecodePrevious(text, previous))) break;
    end = previous;
  }
  ChargeBytes(text.size());
  return text.substr(start, end - start);
}

std::string Replace(std::string_view text, std::string_view old, std::string_view with,
                    std::int64_t count) {
  TextBuilder out;
  if (count < 0) count = std::numeric_limits<std::int64_t>::max();
  std::size_t from = 0;
  if (old.empty()) {
    for (; count > 0; --count) {
      out.Append(with);
      if (from >= text.size()) return out.Take();
      std::size_t next = from;
      DecodeNext(text, next);
      out.Append(text.substr(from, next - from));
      from = next;
    }
  } else {
    ChargeBytes(text.size());
    const void* found;
    while (count-- > 0 && (found = memmem(text.data() + from, text.size() - from, old.data(),
                                          old.size())) != nullptr) {
      Charge(1);
      const auto at = static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
      out.Append(text.substr(from, at - from));
      out.Append(with);
      from = at + old.size();
    }
  }
  out.Append(text.substr(from));
  return out.Take();
}

std::vector<std::string> SplitLines(std::string_view text, bool keep_ends) {
  ChargeBytes(text.size());
  std::vector<std::string> lines;
  std::size_t start = 0;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t at = i;
    const char32_t c = DecodeNext(text, i);
    if (!IsLineBreak(c)) continue;
    Charge(1);
    if (c == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.emplace_back(text.substr(start, (keep_ends ? i : at) - start));
    start = i;
  }
  if (start < text.size()) lines.emplace_back(text.substr(start));
  return lines;
}

namespace {

bool AllCased(std::string_view text, bool upper) {
  ChargeBytes(text.size());
  bool any = false;
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = DecodeNext(text, i);
    if ((upper ? IsLower(c) : IsUpper(c)) || IsTitle(c)) return false;
    any |= upper ? IsUpper(c) : IsLower(c);
  }
  return any;
}

}  // namespace

bool IsAllLower(std::string_view text) { return AllCased(text, false); }
bool IsAllUpper(std::string_view text) { return AllCased(text, true); }

namespace {

const std::string& NeedText(const Value& value, const char* function) {
  if (value.Is(Type::kString)) return value.text();
  Fail(ErrorKind::kType, std::string(function) + " argument must be str, not " + TypeName(value));
}

// A method without arguments that maps the text.
template <std::string (*Map)(std::string_view)>
Value MapText(const Value& self, Args& args) {
  const Bound bound("method", args, {});
  ChargeBytes(self.text().size() * 2);
  return Like(self, Map(self.text()));
}

// A method without arguments that holds for every character of a text that is not empty.
template <bool (*Holds)(char32_t)>
Value EveryCharacter(const Value& self, Args& args) {
  const Bound bound("method", args, {});
  const std::string& text = self.text();
  ChargeBytes(text.size());
  for (std::size_t i = 0; i < text.size();) {
    if (!Holds(DecodeNext(text, i))) return Value(false);
  }
  return Value(!text.empty());
}

Value IsPrintableText(const Value& self, Args& args) {
  return self.text().empty() ? Value(true) : EveryCharacter<IsPrintable>(self, args);
}
Value IsAsciiText(const Value& self, Args& args) {
  const Bound bound("isascii", args, {});
  return Value(self.str().ascii());
}
Value IsLowerText(const Value& self, Args& args) {
  const Bound bound("islower", args, {});
  return Value(IsAllLower(self.text()));
}
Value IsUpperText(const Value& self, Args& args) {
  const Bound bound("isupper", args, {});
  return Value(IsAllUpper(self.text()));
}

Value IsTitleText(const Value& self, Args& args) {
  const Bound bound("istitle", args, {});
  bool cased = false, previous_cased = false;
  const std::string& text = self.text();
  ChargeBytes(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = DecodeNext(text, i);
    if (IsUpper(c) || IsTitle(c)) {
      if (previous_cased) return Value(false);
      previous_cased = cased = true;
    } else if (IsLower(c)) {
      if (!previous_cased) return Value(false);
      cased = true;
    } else {
      previous_cased = false;
    }
  }
  return Value(cased);
}

Value IsIdentifier(const Value& self, Args& args) {
  const Bound bound("isidentifier", args, {});
  const std::string& text = self.text();
  for (std::size_t i = 0; i < text.size();) {
    const bool first = i == 0;
    const char32_t c = DecodeNext(text, i);
    if (c != '_' && !(first ? IsAlpha(c) : IsAlnum(c))) return Value(false);
  }
  return Value(!text.empty());
}

template <bool Left, bool Right>
Value StripMethod(const Value& self, Args& args) {
  const Bound bound("strip", args, {"chars"});
  std::optional<std::string> characters;
  if (!bound[0].Is(Type::kNone)) characters = NeedText(bound[0], "strip");
  return Like(self, std::string(Strip(self.text(), characters, Left, Right)));
}

// startswith and endswith, of one text or any of a tuple.
template <bool Start>
Value HasAffix(const Value& self, Args& args) {
  const char* name = Start ? "startswith" : "endswith";
  const Bound bound(name, args, {"affix", "start", "end"}, 1);
  const Value part =
      bound.Has(1) || bound.Has(2) ? GetSlice(self, bound[1], bound[2], Value()) : self;
  if (bound[1].IsIntLike() && bound[1].AsInt() > static_cast<std::int64_t>(self.str().length))
    return Value(false);
  const std::string_view text = part.text();
  const auto matches = [&](const Value& affix) {
    if (!affix.Is(Type::kString)) {
      Fail(ErrorKind::kType,
           std::string(name) + " first arg must be str or a tuple of str, not " + TypeName(affix));
    }
    ChargeBytes(affix.text().size());
    return Start ? text.starts_with(affix.text()) : text.ends_with(affix.text());
  };
  if (!bound[0].Is(Type::kTuple)) return Value(matches(bound[0]));
  Charge(bound[0].items().size());
  return Value(std::any_of(bound[0].items().begin(), bound[0].items().end(), matches));
}

template <bool Prefix>
Value RemoveAffix(const Value& self, Args& args) {
  const Bound bound(Prefix ? "removeprefix" : "removesuffix", args, {"affix"}, 1);
  const std::string& affix = NeedText(bound[0], Prefix ? "removeprefix()" : "removesuffix()");
  std::string_view text = self.text();
  if (Prefix && text.starts_with(affix)) text.remove_prefix(affix.size());
  if (!Prefix && text.ends_with(affix)) text.remove_suffix(affix.size());
  ChargeBytes(text.size());
  return Like(self, std::string(text));
}

// The part of the text that find, index and count look at, in bytes.
struct Window {
  std::size_t start, end;
  bool valid;
};
Window WindowOf(const Value& self, const Bound& bound) {
  const Str& str = self.str();
  const auto length = static_cast<std::int64_t>(str.length);
  const auto limit = [&](std::int64_t i) {
    return i < 0 ? std::max<std::int64_t>(i + length, 0) : i;
  };
  const std::int64_t start = bound[1].Is(Type::kNone) ? 0 : limit(ToInteger(bound[1]));
  const std::int64_t end =
      bound[2].Is(Type::kNone) ? length : std::min(limit(ToInteger(bound[2])), length);
  if (start > end) return {0, 0, false};
  const auto offset = [&](std::int64_t i) {
    return str.ascii() ? static_cast<std::size_t>(i)
                       : ByteOffset(str.text, static_cast<std::size_t>(i));
  };
  return {offset(start), offset(end), true};
}

std::int64_t FindIn(const Value& self, Args& args, const char* name, bool last) {
  const Bound bound(name, args, {"sub", "start", "end"}, 1);
  const std::string& needle = NeedText(bound[0], name);
  const Window window = WindowOf(self, bound);
  if (!window.valid) return -1;
  const std::string_view text = std::string_view(self.text()).substr(0, window.end);
  std::size_t found;
  if (last) {
    found = FindLastText(text.substr(window.start), needle, text.size() - window.start);
    if (found != std::string_view::npos) found += window.start;
  } else {
    found = FindText(text, needle, window.start);
  }
  if (found == std::string_view::npos) return -1;
  ChargeBytes(found);
  return static_cast<std::int64_t>(CountCodePoints(text.substr(0, found)));
}

Value FindMethodOf(const Value& self, Args& args) {
  return Value(FindIn(self, args, "find", false));
}
Value RFindMethod(const Value& self, Args& args) {
  return Value(FindIn(self, args, "rfind", true));
}
template <bool Last>
Value IndexMethod(const Value& self, Args& args) {
  const std::int64_t found = FindIn(self, args, Last ? "rindex" : "index", Last);
  if (found < 0) Fail(ErrorKind::kValue, "substring not found");
  return Value(found);
}

Value CountMethod(const Value& self, Args& args) {
  const Bound bound("count", args, {"sub", "start", "end"}, 1);
  const std::string& needle = NeedText(bound[0], "count");
  const Window window = WindowOf(self, bound);
  if (!window.valid) return Value(std::int64_t{0});
  const std::string_view text =
      std::string_view(self.text()).substr(window.start, window.end - window.start);
  if (needle.empty()) return Value(static_cast<std::int64_t>(CountCodePoints(text)) + 1);
  ChargeBytes(text.size());
  std::int64_t count = 0;
  std::size_t from = 0;
  while (const void* found =
             memmem(text.data() + from, text.size() - from, needle.data(), needle.size())) {
    ++count;
    from = static_cast<std::size_t>(static_cast<const char*>(found) - text.data()) + needle.size();
  }
  Charge(static_cast<std::size_t>(count));
  return Value(count);
}

Value ReplaceMethod(const Value& self, Args& args) {
  const Bound bound("replace", args, {"old", "new", "count"}, 2);
  const std::string& old = NeedText(bound[0], "replace()");
  std::string with = NeedText(bound[1], "replace()");
  if (self.str().markup && !bound[1].str().markup) with = EscapeHtml(with);
  return Like(self, Replace(self.text(), old, with, bound.Int(2, -1)));
}

// ---- splitting and joining

// The first position at or after `i` where a character is not (`space`: not white space; else:
// white space).
std::size_t SkipWhile(std::string_view text, std::size_t i, bool space) {
  while (i < text.size()) {
    std::size_t next = i;
    if (IsSpace(DecodeNext(text, next)) != space) break;
    i = next;
  }
  return i;
}
std::size_t SkipBackWhile(std::string_view text, std::size_t i, bool space) {
  while (i > 0) {
    std::size_t previous = i;
    if (IsSpace(DecodePrevious(text, previous)) != space) break;
    i = previous;
  }
  return i;
}

void SplitSpaces(const Value& self, std::int64_t max, bool from_right, std::vector<Value>& out) {
  const std::string_view text = self.text();
  const auto add = [&](std::size_t from, std::size_t to) {
    out.push_back(Like(self, std::string(text.substr(from, to - from))));
  };
  ChargeBytes(text.size());
  if (!from_right) {
    for (std::size_t i = 0;;) {
      const std::size_t start = SkipWhile(text, i, true);
      if (start >= text.size()) return;
      if (max-- == 0) return add(start, text.size());
      i = SkipWhile(text, start, false);
      add(start, i);
    }
  }
  for (std::size_t i = text.size();;) {
    const std::size_t end = SkipBackWhile(text, i, true);
    if (end == 0) break;
    if (max-- == 0) {
      add(0, end);
      break;
    }
    i = SkipBackWhile(text, end, false);
    add(i, end);
  }
  std::reverse(out.begin(), out.end());
}

void SplitAt(const Value& self, std::string_view separator, std::int64_t max, bool from_right,
             std::vector<Value>& out) {
  const std::string_view text = self.text();
  ChargeBytes(text.size());
  std::vector<std::size_t> found;  // positions of the separators to split at
  if (!from_right) {
    std::size_t from = 0;
    while (max-- != 0) {
      const void* at =
          memmem(text.data() + from, text.size() - from, separator.data(), separator.size());
      if (at == nullptr) break;
      found.push_back(static_cast<std::size_t>(static_cast<const char*>(at) - text.data()));
      from = found.back() + separator.size();
    }
  } else {
    // Over reversed copies, so that every search is linear.
    const std::string reversed(text.rbegin(), text.rend());
    const std::string pattern(separator.rbegin(), separator.rend());
    std::size_t from = 0;
    while (max-- != 0) {
      const void* at =
          memmem(reversed.data() + from, reversed.size() - from, pattern.data(), pattern.size());
      if (at == nullptr) break;
      const auto position =
          static_cast<std::size_t>(static_cast<const char*>(at) - reversed.data());
      found.push_back(text.size() - position - separator.size());
      from = position + pattern.size();
    }
    std::reverse(found.begin(), found.end());
  }
  std::size_t from = 0;
  for (const std::size_t at : found) {
    Charge(1);
    out.push_back(Like(self, std::string(text.substr(from, at - from))));
    from = at + separator.size();
  }
  out.push_back(Like(self, std::string(text.substr(from))));
}

template <bool FromRight>
Value SplitMethod(const Value& self, Args& args) {
  const Bound bound(FromRight ? "rsplit" : "split", args, {"sep", "maxsplit"});
  const std::int64_t max = bound.Int(1, -1);
  std::vector<Value> out;
  if (bound[0].Is(Type::kNone)) {
    SplitSpaces(self, max < 0 ? -1 : max, FromRight, out);
  } else {
    if (!bound[0].Is(Type::kString))
      Fail(ErrorKind::kType, "must be str or None, not " + TypeName(bound[0]));
    if (bound[0].text().empty()) Fail(ErrorKind::kValue, "empty separator");
    SplitAt(self, bound[0].text(), max < 0 ? -1 : max, FromRight, out);
  }
  return List(std::move(out));
}

Value SplitLinesMethod(const Value& self, Args& args) {
  const Bound bound("splitlines", args, {"keepends"});
  std::vector<Value> out;
  for (std::string& line : SplitLines(self.text(), bound.Bool(0, false)))
    out.push_back(Like(self, std::move(line)));
  return List(std::move(out));
}

template <bool Last>
Value PartitionMethod(const Value& self, Args& args) {
  const Bound bound(Last ? "rpartition" : "partition", args, {"sep"}, 1);
  const std::string& separator = NeedText(bound[0], "partition()");
  if (separator.empty()) Fail(ErrorKind::kValue, "empty separator");
  const std::string& text = self.text();
  const std::size_t at =
      Last ? FindLastText(text, separator, text.size()) : FindText(text, separator, 0);
  if (at == std::string::npos) {
    return Last ? Tuple({Like(self, ""), Like(self, ""), self})
                : Tuple({self, Like(self, ""), Like(self, "")});
  }
  return Tuple({Like(self, text.substr(0, at)), Like(self, separator),
                Like(self, text.substr(at + separator.size()))});
}

Value JoinMethod(const Value& self, Args& args) {
  const Bound bound("join", args, {"iterable"}, 1);
  if (!Iterable(bound[0])) Fail(ErrorKind::kType, "can only join an iterable");
  TextBuilder out;
  Reader reader(bound[0]);
  std::size_t i = 0;
  for (Value item; reader.Next(item); ++i) {
    if (i > 0) out.Append(self.text());
    const bool escape = self.str().markup && !(item.Is(Type::kString) && item.str().markup);
    if (escape) {
      out.Append(EscapeHtml(Text(item)));
    } else if (!item.Is(Type::kString)) {
      Fail(ErrorKind::kType, "sequence item " + std::to_string(i) + ": expected str instance, " +
                                 TypeName(item) + " found");
    } else {
      out.Append(item.text());
    }
  }
  return Like(self, out.Take());
}

// ---- padding

template <char Align>
Value JustifyMethod(const Value& self, Args& args) {
  const Bound bound("justify", args, {"width", "fillchar"}, 1);
  const std::int64_t width = ToInteger(bound[0]);
  std::string fill = " ";
  if (bound.Has(1)) {
    fill = NeedText(bound[1], "fill character");
    if (CountCodePoints(fill) != 1)
      Fail(ErrorKind::kType, "The fill character must be exactly one character long");
  }
  const auto length = static_cast<std::int64_t>(self.str().length);
  if (width <= length) return self;
  const auto wide = static_cast<std::size_t>(width);
  CheckStringSize(wide);
  if (Align != '^') return Like(self, Pad(self.text(), wide, fill, Align));
  // Python centres with the odd cell on the left when the width is odd.
  const auto missing = wide - self.str().length;
  const std::size_t left = missing / 2 + (missing & wide & 1);
  return Like(self, Pad(Pad(self.text(), self.str().length + left, fill, '>'), wide, fill, '<'));
}

Value ZFillMethod(const Value& self, Args& args) {
  const Bound bound("zfill", args, {"width"}, 1);
  const std::int64_t width = ToInteger(bound[0]);
  const std::string& text = self.text();
  if (width <= static_cast<std::int64_t>(self.str().length)) return self;
  CheckStringSize(static_cast<std::size_t>(width));
  const bool sign = !text.empty() && (text[0] == '+' || text[0] == '-');
  const std::string padded =
      Pad(text.substr(sign), static_cast<std::size_t>(width) - sign, "0", '>');
  return Like(self, text.substr(0, sign) + padded);
}

Value ExpandTabsMethod(const Value& self, Args& args) {
  const Bound bound("expandtabs", args, {"tabsize"});
  const std::int64_t size = bound.Int(0, 8);
  TextBuilder out;
  std::size_t column = 0;
  const std::string_view text = self.text();
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t start = i;
    const char32_t c = DecodeNext(text, i);
    if (c == '\t') {
      if (size <= 0) continue;
      const auto fill = static_cast<std::size_t>(size) - column % static_cast<std::size_t>(size);
      CheckStringSize(fill);
      out.Append(fill, ' ');
      column += fill;
      continue;
    }
    out.Append(text.substr(start, i - start));
    column = c == '\n' || c == '\r' ? 0 : column + 1;
  }
  return Like(self, out.Take());
}

Value FormatMethod(const Value& self, Args& args) { return BraceFormat(self, args); }

Value FormatMapMethod(const Value& self, Args& args) {
  const Bound bound("format_map", args, {"mapping"}, 1);
  if (!bound[0].Is(Type::kDict))
    Fail(ErrorKind::kType, "format_map() needs a mapping, not " + TypeName(bound[0]));
  Args named;
  Charge(bound[0].dict().entries.size() / 4);
  for (const auto& [key, value] : bound[0].dict().entries) {
    if (key.Is(Type::kString)) named.keyword.emplace_back(key.text(), value);
  }
  return BraceFormat(self, named);
}

Value NotSupported(const Value&, Args&) {
  Fail(ErrorKind::kUnsupported,
       "the methods encode, translate and maketrans of str are not supported");
}

}  // namespace

MethodFn FindStringMethod(std::string_view name) {
  static const std::map<std::string_view, MethodFn> kMethods = {
      {"capitalize", MapText<Capitalize>},
      {"casefold", MapText<Casefold>},
      {"center", JustifyMethod<'^'>},
      {"count", CountMethod},
      {"encode", NotSupported},
      {"endswith", HasAffix<false>},
      {"expandtabs", ExpandTabsMethod},
      {"find", FindMethodOf},
      {"format", FormatMethod},
      {"format_map", FormatMapMethod},
      {"index", IndexMethod<false>},
      {"isalnum", EveryCharacter<IsAlnum>},
      {"isalpha", EveryCharacter<IsAlpha>},
      {"isascii", IsAsciiText},
      {"isdecimal", EveryCharacter<IsDecimal>},
      {"isdigit", EveryCharacter<IsDigit>},
      {"isidentifier", IsIdentifier},
      {"islower", IsLowerText},
      {"isnumeric", EveryCharacter<IsNumeric>},
      {"isprintable", IsPrintableText},
      {"isspace", EveryCharacter<IsSpace>},
      {"istitle", IsTitleText},
      {"isupper", IsUpperText},
      {"join", JoinMethod},
      {"ljust", JustifyMethod<'<'>},
      {"lower", MapText<Lower>},
      {"lstrip", StripMethod<true, false>},
      {"maketrans", NotSupported},
      {"partition", PartitionMethod<false>},
      {"removeprefix", RemoveAffix<true>},
      {"removesuffix", RemoveAffix<false>},
      {"replace", ReplaceMethod},
      {"rfind", RFindMethod},
      {"rindex", IndexMethod<true>},
      {"rjust", JustifyMethod<'>'>},
      {"rpartition", PartitionMethod<true>},
      {"rsplit", SplitMethod<true>},
      {"rstrip", StripMethod<false, true>},
      {"split", SplitMethod<false>},
      {"splitlines", SplitLinesMethod},
      {"startswith", HasAffix<true>},
      {"strip", StripMethod<true, true>},
      {"swapcase", MapText<SwapCase>},
      {"title", MapText<TitleCase>},
      {"translate", NotSupported},
      {"upper", MapText<Upper>},
      {"zfill", ZFillMethod},
  };
  const auto found = kMethods.find(name);
  return found == kMethods.end() ? nullptr : found->second;
}

}  // namespace pliant::jinja
