// json.dumps for values of the interpreter.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

void AppendUnicodeEscape(TextBuilder& out, char32_t c) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<unsigned>(c));
  out.Append(buffer);
}

void AppendJsonString(TextBuilder& out, std::string_view text, bool ensure_ascii) {
  out.Append('"');
  std::size_t plain = 0;  // start of the run that needs no escape
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t start = i;
    const char32_t c = DecodeNext(text, i);
    const bool escape = c < 0x20 || c == '"' || c == '\\' || (ensure_ascii && c >= 0x7f);
    if (!escape || (c == 0x7f)) continue;
    out.Append(text.substr(plain, start - plain));
    plain = i;
    switch (c) {
      case '"':
        out.Append("\\\"");
        break;
      case '\\':
        out.Append("\\\\");
        break;
      case '\n':
        out.Append("\\n");
        break;
      case '\r':
        out.Append("\\r");
        break;
      case '\t':
        out.Append("\\t");
        break;
      case '\b':
        out.Append("\\b");
        break;
      case '\f':
        out.Append("\\f");
        break;
      default:
        if (c >= 0x10000) {
          AppendUnicodeEscape(out, 0xd800 + ((c - 0x10000) >> 10));
          AppendUnicodeEscape(out, 0xdc00 + ((c - 0x10000) & 0x3ff));
        } else {
          AppendUnicodeEscape(out, c);
        }
    }
  }
  out.Append(text.substr(plain));
  out.Append('"');
}

class Writer {
 public:
  Writer(TextBuilder& out, const JsonStyle& style) : out_(out), style_(style) {}

  void Write(const Value& value, int level) {
    Charge(1);
    switch (value.type()) {
      case Type::kNone:
        out_.Append("null");
        break;
      case Type::kBool:
        out_.Append(value.b() ? "true" : "false");
        break;
      case Type::kInt:
        out_.Append(std::to_string(value.i()));
        break;
      case Type::kFloat:
        out_.Append(Number(value.d()));
        break;
      case Type::kString:
        AppendJsonString(out_, value.text(), style_.ensure_ascii);
        break;
      case Type::kList:
      case Type::kTuple:
        WriteArray(value.items(), level);
        break;
      case Type::kDict:
        WriteObject(value.dict(), level);
        break;
      default:
        Fail(ErrorKind::kType, "Object of type " + TypeName(value) + " is not JSON serializable");
    }
  }

 private:
  static std::string Number(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d > 0 ? "Infinity" : "-Infinity";
    return FloatRepr(d);
  }

  void NewLine(int level) {
    if (!style_.indent) return;
    out_.Append('\n');
    for (int i = 0; i < level; ++i) out_.Append(*style_.indent);
  }

  void WriteArray(const std::vector<Value>& items, int level) {
    CheckStack();
    if (items.empty()) return out_.Append("[]");
    out_.Append('[');
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_.Append(style_.item_separator);
      NewLine(level + 1);
      Write(items[i], level + 1);
    }
    NewLine(level);
    out_.Append(']');
  }

  static std::string Key(const Value& key) {
    switch (key.type()) {
      case Type::kString:
        return key.text();
      case Type::kNone:
        return "null";
      case Type::kBool:
        return key.b() ? "true" : "false";
      case Type::kInt:
        return std::to_string(key.i());
      case Type::kFloat:
        return Number(key.d());
      default:
        Fail(ErrorKind::kType, "keys must be str, int, float, bool or None, not " + TypeName(key));
    }
  }

  void WriteObject(const Dict& dict, int level) {
    CheckStack();
    if (dict.entries.empty()) return out_.Append("{}");
    std::vector<const Dict::Entry*> entries;
    entries.reserve(dict.entries.size());
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
        return Ordered(a->first, b->first, Order::kLess);
      });
    }
    out_.Append('{');
    bool first = true;
    for (const auto* entry : entries) {
      if (!first) out_.Append(style_.item_separator);
      first = false;
      NewLine(level + 1);
      AppendJsonString(out_, Key(entry->first), style_.ensure_ascii);
      out_.Append(style_.key_separator);
      Write(entry->second, level + 1);
    }
    NewLine(level);
    out_.Append('}');
  }

  TextBuilder& out_;
  const JsonStyle& style_;
};

}  // namespace

std::string ToJson(const Value& value, const JsonStyle& style) {
  TextBuilder out;
  Writer(out, style).Write(value, 0);
  return out.Take();
}

}  // namespace pliant::jinja
