#include "text/jinja_lexer.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "text/jinja_budget.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

constexpr std::size_t kNone = std::string_view::npos;

bool IsDigitChar(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(NormalizeNewlines(source)) {}

  std::vector<Token> Run() {
    while (position_ < source_.size()) LexRoot();
    Emit(Tok::kEof, "");
    return std::move(tokens_);
  }

 private:
  static std::string NormalizeNewlines(std::string_view source) {
    std::string out;
    out.reserve(source.size());
    for (std::size_t i = 0; i < source.size(); ++i) {
      if (source[i] == '\r') {
        out += '\n';
        if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
      } else {
        out += source[i];
      }
    }
    if (!out.empty() && out.back() == '\n') out.pop_back();  // keep_trailing_newline is off
    return out;
  }

  [[noreturn]] void FailHere(std::string message) const {
    throw Failure{ErrorKind::kSyntax, std::move(message), line_};
  }

  char At(std::size_t i) const { return i < source_.size() ? source_[i] : '\0'; }
  bool Starts(std::size_t i, std::string_view text) const {
    return std::string_view(source_).substr(std::min(i, source_.size()), text.size()) == text;
  }
  std::string_view Cut(std::size_t from, std::size_t to) const {
    return std::string_view(source_).substr(from, to - from);
  }

  void Emit(Tok type, std::string_view text) {
    tokens_.push_back(Token{type, line_, std::string(text)});
  }

  // Moves to `to`, counting lines.
  void Advance(std::size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(position_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    line_starting_ = to > position_ ? source_[to - 1] == '\n' : line_starting_;
    position_ = to;
  }

  std::size_t SkipSpace(std::size_t i) const {
    while (i < source_.size()) {
      std::size_t next = i;
      if (!IsSpace(DecodeNext(source_, next))) break;
      i = next;
    }
    return i;
  }

  std::string_view RightStripped(std::string_view text) const {
    std::size_t end = text.size();
    while (end > 0) {
      std::size_t previous = end;
      if (!IsSpace(DecodePrevious(text, previous))) break;
      end = previous;
    }
    return text.substr(0, end);
  }

  // The text before a tag: without its trailing white space after a minus sign, and without the
  // blanks between the start of the line and a block or comment tag (lstrip_blocks).
  std::string_view TextBefore(std::string_view text, char sign, bool is_variable) const {
    if (sign == '-') return RightStripped(text);
    if (sign == '+' || is_variable) return text;
    const std::size_t newline = text.rfind('\n');
    const std::size_t start = newline == kNone ? 0 : newline + 1;
    if (start == 0 && !line_starting_) return text;
    if (RightStripped(text.substr(start)).empty()) return text.substr(0, start);
    return text;
  }

  // Position of the next "{{", "{%" or "{#".
  std::size_t FindTag(std::size_t from) const {
    for (std::size_t i = from; (i = source_.find('{', i)) != kNone; ++i) {
      const char c = At(i + 1);
      if (c == '{' || c == '%' || c == '#') return i;
    }
    return kNone;
  }

  // If "{%" at `open` begins a raw block, the end of that tag.
  std::size_t RawTagEnd(std::size_t open) const {
    std::size_t i = open + 2;
    if (At(i) == '-' || At(i) == '+') ++i;
    i = SkipSpace(i);
    if (!Starts(i, "raw")) return kNone;
    i = SkipSpace(i + 3);
    if (Starts(i, "-%}")) return SkipSpace(i + 3);
    if (Starts(i, "%}")) return i + 2;
    return kNone;
  }

  void LexRoot() {
    const std::size_t open = FindTag(position_);
    if (open == kNone) {
      Emit(Tok::kData, Cut(position_, source_.size()));
      Advance(source_.size());
      return;
    }
    const char kind = source_[open + 1];
    const char sign = At(open + 2) == '-' || At(open + 2) == '+' ? At(open + 2) : '\0';
    const std::string_view text = TextBefore(Cut(position_, open), sign, kind == '{');
    if (!text.empty()) Emit(Tok::kData, text);
    Advance(open);
    if (kind == '%') {
      if (const std::size_t end = RawTagEnd(open); end != kNone) {
        Advance(end);
        LexRaw();
        return;
      }
    }
    Advance(open + 2 + (sign != '\0'));
    if (kind == '#') {
      LexComment();
    } else {
      Emit(kind == '{' ? Tok::kVariableBegin : Tok::kBlockBegin, "");
      LexCode(kind == '{');
    }
  }

  void LexComment() {
    const std::size_t close = source_.find("#}", position_);
    if (close == kNone) FailHere("Missing end of comment tag");
    const char sign = close > position_ ? source_[close - 1] : '\0';
    std::size_t end = close + 2;
    if (sign == '-') {
      end = SkipSpace(end);
    } else if (sign != '+' && At(end) == '\n') {
      ++end;
    }
    Advance(end);
  }

  void LexRaw() {
    for (std::size_t open = position_; (open = source_.find("{%", open)) != kNone; open += 2) {
      std::size_t i = open + 2;
      const char sign = At(i) == '-' || At(i) == '+' ? At(i) : '\0';
      if (sign != '\0') ++i;
      i = SkipSpace(i);
      if (!Starts(i, "endraw")) continue;
      i = SkipSpace(i + 6);
      std::size_t end;
      if (Starts(i, "+%}")) {
        end = i + 3;
      } else if (Starts(i, "-%}")) {
        end = SkipSpace(i + 3);
      } else if (Starts(i, "%}")) {
        end = i + 2 + (At(i + 2) == '\n');
      } else {
        continue;
      }
      const std::string_view text = TextBefore(Cut(position_, open), sign, false);
      if (!text.empty()) Emit(Tok::kData, text);
      Advance(end);
      return;
    }
    FailHere("Missing end of raw directive");
  }

  // If the code ends here, the end of the closing tag.
  std::size_t CodeEnd(bool is_variable) const {
    const std::size_t i = position_;
    if (is_variable) {
      if (Starts(i, "-}}")) return SkipSpace(i + 3);
      if (Starts(i, "}}")) return i + 2;
      return kNone;
    }
    if (Starts(i, "+%}")) return i + 3;
    if (Starts(i, "-%}")) return SkipSpace(i + 3);
    if (Starts(i, "%}")) return i + 2 + (At(i + 2) == '\n');
    return kNone;
  }

  void LexCode(bool is_variable) {
    std::string open_brackets;
    while (position_ < source_.size()) {
      if (open_brackets.empty()) {
        if (const std::size_t end = CodeEnd(is_variable); end != kNone) {
          Emit(is_variable ? Tok::kVariableEnd : Tok::kBlockEnd, "");
          Advance(end);
          return;
        }
      }
      if (const std::size_t end = SkipSpace(position_); end != position_) {
        Advance(end);
        continue;
      }
      if (LexNumber() || LexName() || LexString() || LexOperator(open_brackets)) continue;
      std::size_t next = position_;
      DecodeNext(source_, next);
      FailHere("unexpected char " + Quote(Cut(position_, next)) + " at " +
               std::to_string(CountCodePoints(Cut(0, position_))));
    }
  }

  // One or more digits with single underscores between them; the end, or `i` when there are none.
  std::size_t Digits(std::size_t i) const {
    if (!IsDigitChar(At(i))) return i;
    while (IsDigitChar(At(i)) || (At(i) == '_' && IsDigitChar(At(i + 1)))) ++i;
    return i;
  }

  std::size_t FloatEnd() const {
    if (position_ > 0 && source_[position_ - 1] == '.') return kNone;
    const std::size_t whole = Digits(position_);
    if (whole == position_) return kNone;
    std::size_t end = whole;
    bool is_float = false;
    if (At(whole) == '.' && Digits(whole + 1) > whole + 1) {
      end = Digits(whole + 1);
      is_float = true;
    }
    if (At(end) == 'e' || At(end) == 'E') {
      std::size_t exponent = end + 1;
      if (At(exponent) == '+' || At(exponent) == '-') ++exponent;
      if (Digits(exponent) > exponent) {
        end = Digits(exponent);
        is_float = true;
      }
    }
    return is_float ? end : kNone;
  }

  std::size_t PrefixedDigits(std::size_t i, int base) const {
    const auto is_digit = [base](char c) {
      if (base == 16) return std::isxdigit(static_cast<unsigned char>(c)) != 0;
      return c >= '0' && c < '0' + base;
    };
    while (is_digit(At(i)) || (At(i) == '_' && is_digit(At(i + 1)))) ++i;
    return i;
  }

  bool LexNumber() {
    if (!IsDigitChar(At(position_))) return false;
    std::string digits;
    const auto without_underscores = [&](std::size_t from, std::size_t to) {
      for (const char c : Cut(from, to)) {
        if (c != '_') digits += c;
      }
    };
    if (const std::size_t end = FloatEnd(); end != kNone) {
      without_underscores(position_, end);
      double value = 0;
      const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value);
      if (parsed.ec != std::errc()) value = std::strtod(digits.c_str(), nullptr);
      tokens_.push_back(Token{Tok::kFloat, line_, digits, 0, value});
      Advance(end);
      return true;
    }
    int base = 10;
    std::size_t start = position_;
    std::size_t end = start;
    if (At(start) == '0') {
      const char c = static_cast<char>(At(start + 1) | 0x20);
      const int wanted = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
      if (wanted != 10 && PrefixedDigits(start + 2, wanted) > start + 2) {
        base = wanted;
        start += 2;
        end = PrefixedDigits(start, base);
      } else {
        end = start + 1;
        while (At(end) == '0' || (At(end) == '_' && At(end + 1) == '0')) ++end;
      }
    } else {
      end = Digits(start);
    }
    without_underscores(start, end);
    std::int64_t value = 0;
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
    if (parsed.ec != std::errc()) FailHere("an integer does not fit into 64 bits");
    tokens_.push_back(Token{Tok::kInteger, line_, digits, value});
    Advance(end);
    return true;
  }

  bool LexName() {
    std::size_t end = position_;
    while (end < source_.size()) {
      std::size_t next = end;
      const char32_t c = DecodeNext(source_, next);
      if (c != '_' && !IsAlnum(c)) break;
      end = next;
    }
    if (end == position_) return false;
    Emit(Tok::kName, Cut(position_, end));
    Advance(end);
    return true;
  }

  bool LexString() {
    const char quote = At(position_);
    if (quote != '\'' && quote != '"') return false;
    std::size_t end = position_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) return false;
    const std::string value = Unescape(Cut(position_ + 1, end));
    Emit(Tok::kString, value);
    Advance(end + 1);
    return true;
  }

  // Python's string escapes.
  std::string Unescape(std::string_view raw) const {
    std::string out;
    for (std::size_t i = 0; i < raw.size(); ++i) {
      if (raw[i] != '\\') {
        out += raw[i];
        continue;
      }
      const char c = raw[++i];
      switch (c) {
        case '\n':
          break;
        case '\\':
        case '\'':
        case '"':
          out += c;
          break;
        case 'a':
          out += '\a';
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'n':
          out += '\n';
          break;
        case 'r':
          out += '\r';
          break;
        case 't':
          out += '\t';
          break;
        case 'v':
          out += '\v';
          break;
        case 'x':
          i = UnescapeHex(raw, i, 2, out);
          break;
        case 'u':
          i = UnescapeHex(raw, i, 4, out);
          break;
        case 'U':
          i = UnescapeHex(raw, i, 8, out);
          break;
        case 'N':
          FailHere("string escapes by character name (\\N{...}) are not supported");
        default:
          if (c >= '0' && c <= '7') {
            char32_t value = 0;
            std::size_t end = i;
            while (end < raw.size() && end < i + 3 && raw[end] >= '0' && raw[end] <= '7') {
              value = value * 8 + static_cast<char32_t>(raw[end++] - '0');
            }
            AppendUtf8(out, value);
            i = end - 1;
          } else {
            out += '\\';
            out += c;
          }
      }
    }
    return out;
  }

  std::size_t UnescapeHex(std::string_view raw, std::size_t i, std::size_t digits,
                          std::string& out) const {
    std::uint32_t value = 0;
    const char* first = raw.data() + i + 1;
    const char* last = raw.data() + std::min(raw.size(), i + 1 + digits);
    const auto parsed = std::from_chars(first, last, value, 16);
    if (parsed.ec != std::errc() || parsed.ptr != first + digits)
      FailHere("truncated \\" + std::string(1, raw[i]) + std::string(digits, 'X') + " escape");
    if (value > 0x10ffff) FailHere("illegal Unicode character");
    if (value >= 0xd800 && value < 0xe000) FailHere("a string escape names half a surrogate pair");
    AppendUtf8(out, value);
    return i + digits;
  }

  bool LexOperator(std::string& open_brackets) {
    static constexpr std::string_view kLong[] = {"//", "**", "==", "!=", ">=", "<="};
    std::size_t size = 0;
    for (const auto op : kLong) {
      if (Starts(position_, op)) size = 2;
    }
    if (size == 0 && std::strchr("+-/*%~[](){}><=.:|,;", At(position_)) != nullptr &&
        At(position_) != '\0') {
      size = 1;
    }
    if (size == 0) return false;
    const char c = source_[position_];
    if (size == 1) Balance(c, open_brackets);
    Emit(Tok::kOperator, Cut(position_, position_ + size));
    Advance(position_ + size);
    return true;
  }

  void Balance(char c, std::string& open_brackets) const {
    if (c == '{') open_brackets += '}';
    if (c == '(') open_brackets += ')';
    if (c == '[') open_brackets += ']';
    if (c != '}' && c != ')' && c != ']') return;
    if (open_brackets.empty()) FailHere(std::string("unexpected '") + c + "'");
    const char expected = open_brackets.back();
    open_brackets.pop_back();
    if (expected != c) {
      FailHere(std::string("unexpected '") + c + "', expected '" + expected + "'");
    }
  }

  const std::string source_;
  std::size_t position_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> Tokenize(std::string_view source) { return Lexer(source).Run(); }

std::string Describe(const Token& token) {
  switch (token.type) {
    case Tok::kData:
      return "template data / text";
    case Tok::kVariableBegin:
      return "begin of print statement";
    case Tok::kVariableEnd:
      return "end of print statement";
    case Tok::kBlockBegin:
      return "begin of statement block";
    case Tok::kBlockEnd:
      return "end of statement block";
    case Tok::kString:
      return "string";
    case Tok::kInteger:
      return "integer";
    case Tok::kFloat:
      return "float";
    case Tok::kEof:
      return "end of template";
    default:
      return token.text;
  }
}

}  // namespace pliant::jinja
