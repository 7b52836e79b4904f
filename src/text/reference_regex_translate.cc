#include <cstdint>
#include <cstdio>

#include "text/reference_regex.h"
#include "text/unicode_ranges.h"

namespace pliant {

std::string ClassText(std::span<const CodePointRange> ranges) {
  std::string text;
  for (const CodePointRange& r : ranges) {
    char item[40];
    std::snprintf(item, sizeof item, "\\x{%x}-\\x{%x}", static_cast<unsigned>(r.low),
                  static_cast<unsigned>(r.high));
    text += item;
  }
  return text;
}

namespace {

constexpr std::string_view kSpaces =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

/// Members of a general category ("L", "Lu") that PCRE2's older tables lack; empty for other
/// properties.
std::string NewMembers(std::string_view property) {
  std::string text;
  for (const CategoryRanges& c : kNewCategories) {
    if (c.category == property || (property.size() == 1 && c.category[0] == property[0]))
      text += ClassText(c.ranges);
  }
  return text;
}

std::string WordMembers() {
  std::string text = R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc})";
  for (const std::string_view p : {"L", "M", "Nd", "Nl", "Pc"}) text += NewMembers(p);
  return text + ClassText(kWordOnly);
}

/// Walks a pattern once, copying all but the escapes that need another spelling.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  Result<std::string> Run() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      Status status;
      if (c == '\\') {
        status = Escape();
      } else if (in_class_) {
        status = InClass(c);
      } else {
        status = Outside(c);
      }
      if (!status.ok()) return status;
    }
    return out_;
  }

 private:
  Status Refuse(std::string_view what) const {
    return Unimplemented("pattern \"" + std::string(pattern_.substr(0, 200)) +
                         "\": " + std::string(what) + " at byte " + std::to_string(at_) +
                         " is not supported");
  }
  bool Next(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  void Copy(std::size_t n) {
    out_ += pattern_.substr(at_, n);
    at_ += n;
  }

  Status Outside(char c) {
    if (c == '[') {
      in_class_ = true;
      Copy(Next("[^") ? 2 : 1);
      if (Next("]")) Copy(1);  // a bracket first is a member
      return {};
    }
    if (Next("(?")) {
      for (std::size_t i = at_ + 2; i < pattern_.size(); ++i) {
        const char flag = pattern_[i];
        if (flag == 'm') return Refuse("(?m)");
        if (flag != 'i' && flag != 'x' && flag != '-') break;
      }
    }
    if (Next("(*")) return Refuse("a control verb");
    Copy(1);
    return {};
  }

  Status InClass(char c) {
    if (c == ']') in_class_ = false;
    if (c == '[' && Next("[:")) {
      const std::size_t end = pattern_.find(":]", at_);
      if (end == std::string_view::npos) return Refuse("an open class name");
      Copy(end + 2 - at_);
      return {};
    }
    if (c == '[') return Refuse("a set in a set");
    if (Next("&&")) return Refuse("a set intersection");
    Copy(1);
    return {};
  }

  /// Writes `members` as a class of its own, or into the class at hand.
  Status Class(std::string_view members, bool negated, std::size_t source_bytes) {
    if (in_class_) {
      if (negated) {  // no spelling inside a class: the plain escape is right but for code points
                      // newer than PCRE2's tables
        Copy(source_bytes);
        return {};
      }
      out_ += members;
    } else {
      out_ += negated ? "[^" : "[";
      out_ += members;
      out_ += ']';
    }
    at_ += source_bytes;
    return {};
  }

  Status Property() {
    const bool capital = pattern_[at_ + 1] == 'P';
    std::size_t end = at_ + 2;
    if (end >= pattern_.size()) return Refuse("an open property");
    std::string_view name;
    if (pattern_[end] == '{') {
      const std::size_t close = pattern_.find('}', end);
      if (close == std::string_view::npos) return Refuse("an open property");
      name = pattern_.substr(end + 1, close - end - 1);
      end = close + 1;
    } else {
      name = pattern_.substr(end, 1);
      ++end;
    }
    const bool caret = name.starts_with('^');
    if (caret) name.remove_prefix(1);
    const std::string members = "\\p{" + std::string(name) + "}" + NewMembers(name);
    return Class(members, capital != caret, end - at_);
  }

  Status Escape() {
    if (at_ + 1 >= pattern_.size()) return Refuse("a backslash at the end");
    switch (pattern_[at_ + 1]) {
      case 's':
        return Class(kSpaces, false, 2);
      case 'S':
        return Class(kSpaces, true, 2);
      case 'w':
        return Class(WordMembers(), false, 2);
      case 'W':
        return Class(WordMembers(), true, 2);
      case 'd':
        return Class("\\p{Nd}" + NewMembers("Nd"), false, 2);
      case 'D':
        return Class("\\p{Nd}" + NewMembers("Nd"), true, 2);
      case 'p':
      case 'P':
        return Property();
      case 'h':
      case 'H':
      case 'C':
      case 'K':
      case 'Q':
      case 'E':
        return Refuse(pattern_.substr(at_, 2));
      case 'b':
      case 'B':
        if (!in_class_) return Refuse(pattern_.substr(at_, 2));
        break;
      default:
        break;
    }
    Copy(2);
    return {};
  }

  std::string_view pattern_;
  std::size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

}  // namespace

Result<std::string> TranslateReferenceRegex(std::string_view pattern) {
  return Translator(pattern).Run();
}

}  // namespace pliant
