// str % values and str.format.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "text/jinja_format.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

std::string Ascii(const std::string& text) {
  std::string out;
  char buffer[16];
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = DecodeNext(text, i);
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else {
      std::snprintf(buffer, sizeof buffer,
                    c < 0x100     ? "\\x%02x"
                    : c < 0x10000 ? "\\u%04x"
                                  : "\\U%08x",
                    static_cast<unsigned>(c));
      out += buffer;
    }
  }
  return out;
}

// One rendering of a printf-style format.
class Percent {
 public:
  Percent(const Value& format, const Value& values)
      : format_(format.text()), markup_(format.str().markup), values_(values) {
    is_tuple_ = values.Is(Type::kTuple);
    is_mapping_ = values.Is(Type::kDict) || values.Is(Type::kUndefined) || values.Is(Type::kList) ||
                  values.Is(Type::kRange);
  }

  std::string Run() {
    while (i_ < format_.size()) {
      const std::size_t percent = std::min(format_.find('%', i_), format_.size());
      out_.Append(std::string_view(format_).substr(i_, percent - i_));
      i_ = percent;
      if (i_ < format_.size()) Directive();
    }
    const std::size_t given = is_tuple_ ? values_.items().size() : 1;
    if (next_ < given && !is_mapping_) {
      Fail(ErrorKind::kType, "not all arguments converted during string formatting");
    }
    return out_.Take();
  }

 private:
  char Peek() const {
    if (i_ >= format_.size()) Fail(ErrorKind::kValue, "incomplete format");
    return format_[i_];
  }

  Value NextValue() {
    if (is_tuple_) {
      if (next_ >= values_.items().size())
        Fail(ErrorKind::kType, "not enough arguments for format string");
      return values_.items()[next_++];
    }
    if (next_++ > 0) Fail(ErrorKind::kType, "not enough arguments for format string");
    return values_;
  }

  std::size_t Number() {
    std::size_t value = 0;
    for (; i_ < format_.size() && format_[i_] >= '0' && format_[i_] <= '9'; ++i_) {
      value = value * 10 + static_cast<std::size_t>(format_[i_] - '0');
      CheckStringSize(value);
    }
    return value;
  }

  std::int64_t StarOrNumber() {
    if (i_ < format_.size() && format_[i_] == '*') {
      ++i_;
      const Value value = NextValue();
      if (!value.IsIntLike()) Fail(ErrorKind::kType, "* wants int");
      CheckStringSize(static_cast<std::size_t>(Magnitude(value.AsInt())));
      return value.AsInt();
    }
    return static_cast<std::int64_t>(Number());
  }

  Value MappedValue() {
    if (!values_.Is(Type::kDict)) Fail(ErrorKind::kType, "format requires a mapping");
    int depth = 1;
    const std::size_t start = ++i_;
    for (; depth > 0; ++i_) {
      if (i_ >= format_.size()) Fail(ErrorKind::kValue, "incomplete format key");
      if (format_[i_] == '(') ++depth;
      if (format_[i_] == ')') --depth;
    }
    const std::string key = format_.substr(start, i_ - 1 - start);
    const Value* found = values_.dict().Find(std::string_view(key));
    if (found == nullptr) Fail(ErrorKind::kValue, Quote(key));
    return *found;
  }

  void Directive() {
    ++i_;
    std::optional<Value> value;
    if (Peek() == '(') value = MappedValue();
    bool left = false, zero = false, alternate = false;
    char sign = '\0';
    for (;; ++i_) {
      const char c = Peek();
      if (c == '-')
        left = true;
      else if (c == '0')
        zero = true;
      else if (c == '#')
        alternate = true;
      else if (c == '+')
        sign = '+';
      else if (c == ' ')
        sign = sign == '+' ? '+' : ' ';
      else
        break;
    }
    std::int64_t width = StarOrNumber();
    if (width < 0) left = true, width = -width;
    std::optional<std::int64_t> precision;
    if (i_ < format_.size() && format_[i_] == '.') {
      ++i_;
      precision = std::max<std::int64_t>(StarOrNumber(), 0);
    }
    while (Peek() == 'h' || Peek() == 'l' || Peek() == 'L') ++i_;
    const char type = Peek();
    ++i_;
    if (type == '%') return out_.Append('%');
    if (std::strchr("diouxXeEfFgGcrsa", type) == nullptr) {
      Fail(ErrorKind::kValue,
           std::string("unsupported format character '") + type + "' (0x" +
               IntDigits(static_cast<unsigned char>(type), 16, false) + ") at index " +
               std::to_string(CountCodePoints(std::string_view(format_).substr(0, i_ - 1))));
    }
    if (!value) value = NextValue();
    Write(*value, type, left, zero, alternate, sign, static_cast<std::size_t>(width), precision);
  }

  void Write(const Value& value, char type, bool left, bool zero, bool alternate, char sign,
             std::size_t width, std::optional<std::int64_t> precision) {
    std::string text, prefix;
    bool numeric = true;
    if (std::strchr("rsa", type) != nullptr) {
      numeric = false;
      text = type == 's' ? Text(value) : type == 'r' ? Repr(value) : Ascii(Repr(value));
      if (markup_ && !(value.Is(Type::kString) && value.str().markup)) text = EscapeHtml(text);
      if (precision) text = text.substr(0, ByteOffset(text, static_cast<std::size_t>(*precision)));
    } else if (type == 'c') {
      numeric = false;
      text = Character(value);
    } else if (std::strchr("diuoxX", type) != nullptr) {
      const std::int64_t number = Integer(value, type);
      const int base = type == 'o' ? 8 : type == 'x' || type == 'X' ? 16 : 10;
      text = IntDigits(Magnitude(number), base, type == 'X');
      if (precision && text.size() < static_cast<std::size_t>(*precision)) {
        text = Pad(text, static_cast<std::size_t>(*precision), "0", '>');
      }
      prefix = number < 0 ? "-" : sign != '\0' ? std::string(1, sign) : "";
      if (alternate && base != 10) prefix += base == 8 ? "0o" : type == 'x' ? "0x" : "0X";
    } else {
      if (!value.IsNumber()) {
        if (value.Is(Type::kUndefined)) FailUndefined(value);
        Fail(ErrorKind::kType, "must be real number, not " + TypeName(value));
      }
      const double number = value.AsDouble();
      if (precision.value_or(0) > kMaxPrecision) {
        Fail(ErrorKind::kLimit, "a number would be written with more than " +
                                    std::to_string(kMaxPrecision) + " digits");
      }
      text =
          FloatDigits(std::fabs(number), type, static_cast<int>(precision.value_or(6)), alternate);
      prefix = std::signbit(number) ? "-" : sign != '\0' ? std::string(1, sign) : "";
    }
    const std::size_t used = prefix.size();
    if (left) {
      out_.Append(Pad(prefix + text, width, " ", '<'));
    } else if (zero && numeric) {
      out_.Append(prefix + Pad(text, width > used ? width - used : 0, "0", '>'));
    } else {
      out_.Append(Pad(prefix + text, width, " ", '>'));
    }
  }

  static std::string Character(const Value& value) {
    if (value.Is(Type::kString)) {
      if (value.str().length != 1) Fail(ErrorKind::kType, "%c requires int or char");
      return value.text();
    }
    if (!value.IsIntLike()) Fail(ErrorKind::kType, "%c requires int or char");
    const std::int64_t c = value.AsInt();
    if (c < 0 || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
      Fail(ErrorKind::kOverflow, "%c arg not in range(0x110000)");
    std::string out;
    AppendUtf8(out, static_cast<char32_t>(c));
    return out;
  }

  static std::int64_t Integer(const Value& value, char type) {
    if (value.IsIntLike()) return value.AsInt();
    if (value.Is(Type::kFloat) && (type == 'd' || type == 'i' || type == 'u')) {
      if (!(std::fabs(value.d()) < 9.2e18))
        Fail(ErrorKind::kOverflow, "a float is too large to be written as an integer");
      return static_cast<std::int64_t>(value.d());
    }
    if (value.Is(Type::kUndefined) && (type == 'd' || type == 'i' || type == 'u'))
      FailUndefined(value);
    const bool real = type == 'd' || type == 'i' || type == 'u';
    Fail(ErrorKind::kType, std::string("%") + type +
                               " format: " + (real ? "a real number" : "an integer") +
                               " is required, not " + TypeName(value));
  }

  const std::string& format_;
  const bool markup_;
  const Value& values_;
  bool is_tuple_ = false, is_mapping_ = false;
  std::size_t i_ = 0;
  std::size_t next_ = 0;
  TextBuilder out_;
};

// One rendering of str.format.
class Brace {
 public:
  Brace(const Args& args, bool markup) : args_(args), markup_(markup) {}

  std::string Run(std::string_view format, int nesting) {
    if (nesting < 0) Fail(ErrorKind::kValue, "Max string recursion exceeded");
    TextBuilder out;
    for (std::size_t i = 0; i < format.size();) {
      const char c = format[i];
      if ((c == '{' || c == '}') && i + 1 < format.size() && format[i + 1] == c) {
        out.Append(c);
        i += 2;
      } else if (c == '}') {
        Fail(ErrorKind::kValue, "Single '}' encountered in format string");
      } else if (c == '{') {
        const std::size_t start = ++i;
        int depth = 1;
        for (; i < format.size() && depth > 0; ++i) {
          if (format[i] == '{') ++depth;
          if (format[i] == '}') --depth;
        }
        if (depth > 0) {
          Fail(ErrorKind::kValue, start == format.size() ? "Single '{' encountered in format string"
                                                         : "expected '}' before end of string");
        }
        out.Append(Field(format.substr(start, i - 1 - start), nesting));
      } else {
        const std::size_t end = std::min(format.find_first_of("{}", i), format.size());
        out.Append(format.substr(i, end - i));
        i = end;
      }
    }
    return out.Take();
  }

 private:
  std::string Field(std::string_view field, int nesting) {
    // The name ends at the first ! or : outside of brackets.
    std::size_t end = 0;
    bool bracket = false;
    for (; end < field.size(); ++end) {
      if (field[end] == '[') bracket = true;
      if (field[end] == ']') bracket = false;
      if (!bracket && (field[end] == '!' || field[end] == ':')) break;
    }
    Value value = Lookup(field.substr(0, end));
    std::string_view rest = field.substr(end);
    if (rest.starts_with('!')) {
      if (rest.size() < 2 || (rest.size() > 2 && rest[2] != ':'))
        Fail(ErrorKind::kValue, "expected ':' after conversion specifier");
      switch (rest[1]) {
        case 's':
          value = String(Text(value));
          break;
        case 'r':
          value = String(Repr(value));
          break;
        case 'a':
          value = String(Ascii(Repr(value)));
          break;
        default:
          Fail(ErrorKind::kValue, std::string("Unknown conversion specifier ") + rest[1]);
      }
      rest = rest.substr(2);
    }
    const std::string spec = rest.empty() ? "" : Run(rest.substr(1), nesting - 1);
    const std::string text = FormatValue(value, spec);
    const bool safe = value.Is(Type::kString) && value.str().markup;
    return markup_ && !safe ? EscapeHtml(text) : text;
  }

  Value Lookup(std::string_view name) {
    const std::size_t end = std::min(name.find_first_of(".["), name.size());
    Value value = First(name.substr(0, end));
    for (std::size_t i = end; i < name.size();) {
      if (name[i] == '.') {
        const std::size_t stop = std::min(name.find_first_of(".[", i + 1), name.size());
        if (stop == i + 1) Fail(ErrorKind::kValue, "Empty attribute in format string");
        value = GetAttribute(value, name.substr(i + 1, stop - i - 1));
        i = stop;
      } else if (name[i] == '[') {
        const std::size_t stop = name.find(']', i);
        if (stop == std::string_view::npos) Fail(ErrorKind::kValue, "Missing ']' in format string");
        const std::string_view key = name.substr(i + 1, stop - i - 1);
        if (key.empty()) Fail(ErrorKind::kValue, "Empty attribute in format string");
        const auto number = Index(key);
        value = GetItem(value, number ? Value(*number) : String(std::string(key)));
        i = stop + 1;
      } else {
        Fail(ErrorKind::kValue, "Only '.' or '[' may follow ']' in format field specifier");
      }
    }
    return value;
  }

  static std::optional<std::int64_t> Index(std::string_view text) {
    if (text.empty() || text.size() > 18) return std::nullopt;
    std::int64_t value = 0;
    for (const char c : text) {
      if (c < '0' || c > '9') return std::nullopt;
      value = value * 10 + (c - '0');
    }
    return value;
  }

  Value First(std::string_view name) {
    std::optional<std::int64_t> index = Index(name);
    if (name.empty()) {
      if (manual_)
        Fail(ErrorKind::kValue,
             "cannot switch from manual field specification to automatic field numbering");
      automatic_ = true;
      index = next_++;
    } else if (index) {
      if (automatic_)
        Fail(ErrorKind::kValue,
             "cannot switch from automatic field numbering to manual field specification");
      manual_ = true;
    }
    if (index) {
      if (static_cast<std::size_t>(*index) >= args_.positional.size()) {
        Fail(ErrorKind::kValue, "tuple index out of range");
      }
      return args_.positional[static_cast<std::size_t>(*index)];
    }
    Charge(args_.keyword.size() / 8);
    for (const auto& [key, value] : args_.keyword) {
      if (key == name) return value;
    }
    Fail(ErrorKind::kValue, Quote(name));
  }

  const Args& args_;
  const bool markup_;
  std::int64_t next_ = 0;
  bool manual_ = false, automatic_ = false;
};

}  // namespace

Value PercentFormat(const Value& format, const Value& values) {
  return Like(format, Percent(format, values).Run());
}

Value BraceFormat(const Value& format, const Args& args) {
  return Like(format, Brace(args, format.str().markup).Run(format.text(), 1));
}

}  // namespace pliant::jinja
