#include "text/jinja_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

void AppendEscape(std::string& out, const char* format, char32_t c) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, format, static_cast<unsigned>(c));
  out += buffer;
}

void AppendRepr(TextBuilder& out, const Value& value);

void AppendItems(TextBuilder& out, const std::vector<Value>& items, std::string_view open,
                 std::string_view close) {
  CheckStack();
  Charge(items.size());
  out.Append(open);
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.Append(", ");
    AppendRepr(out, items[i]);
  }
  out.Append(close);
}

void AppendDict(TextBuilder& out, const Dict& dict) {
  CheckStack();
  Charge(dict.entries.size());
  out.Append('{');
  bool first = true;
  for (const auto& [key, item] : dict.entries) {
    if (!first) out.Append(", ");
    first = false;
    AppendRepr(out, key);
    out.Append(": ");
    AppendRepr(out, item);
  }
  out.Append('}');
}

void AppendView(TextBuilder& out, const Value& value) {
  out.Append(TypeName(value));
  AppendItems(out, Collect(value), "([", "])");
}

void AppendNamespace(TextBuilder& out, const Namespace& ns) {
  CheckStack();
  out.Append("<Namespace {");
  for (std::size_t i = 0; i < ns.attributes.size(); ++i) {
    if (i > 0) out.Append(", ");
    out.Append(Quote(ns.attributes[i].first));
    out.Append(": ");
    AppendRepr(out, ns.attributes[i].second);
  }
  out.Append("}>");
}

void AppendRepr(TextBuilder& out, const Value& value) {
  Charge(1);
  switch (value.type()) {
    case Type::kUndefined:
      out.Append("Undefined");
      break;
    case Type::kNone:
      out.Append("None");
      break;
    case Type::kBool:
      out.Append(value.b() ? "True" : "False");
      break;
    case Type::kInt:
      out.Append(std::to_string(value.i()));
      break;
    case Type::kFloat:
      out.Append(FloatRepr(value.d()));
      break;
    case Type::kString:
      if (value.str().markup) out.Append("Markup(");
      out.Append(Quote(value.text()));
      if (value.str().markup) out.Append(')');
      break;
    case Type::kList:
      AppendItems(out, value.items(), "[", "]");
      break;
    case Type::kTuple:
      AppendItems(out, value.items(), "(", value.items().size() == 1 ? ",)" : ")");
      break;
    case Type::kDict:
      AppendDict(out, value.dict());
      break;
    case Type::kView:
      AppendView(out, value);
      break;
    case Type::kRange: {
      const Range& range = value.range();
      out.Append("range(" + std::to_string(range.start) + ", " + std::to_string(range.stop));
      if (range.step != 1) out.Append(", " + std::to_string(range.step));
      out.Append(')');
      break;
    }
    case Type::kCallable:
      out.Append("<" + TypeName(value) + " " + Quote(value.callable().name) + ">");
      break;
    case Type::kNamespace:
      AppendNamespace(out, value.ns());
      break;
    default:
      out.Append("<" + TypeName(value) + " object>");
      break;
  }
}

}  // namespace

std::string Quote(std::string_view text) {
  ChargeBytes(text.size());
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t start = i;
    const char32_t c = DecodeNext(text, i);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (IsPrintable(c)) {
      out.append(text.substr(start, i - start));
    } else {
      AppendEscape(out, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
    }
  }
  out += quote;
  return out;
}

std::string FloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  const std::string_view scientific(buffer, static_cast<std::size_t>(end - buffer));
  std::string digits;
  const std::size_t e = scientific.find('e');
  for (const char c : scientific.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  int exponent = 0;
  std::string_view exponent_text = scientific.substr(e + 1);
  if (exponent_text.front() == '+') exponent_text.remove_prefix(1);
  std::from_chars(exponent_text.data(), exponent_text.data() + exponent_text.size(), exponent);
  std::string out = std::signbit(value) ? "-" : "";
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (count > 1) out += "." + digits.substr(1);
    const int size = std::abs(exponent);
    out += exponent < 0 ? "e-" : "e+";
    if (size < 10) out += '0';
    out += std::to_string(size);
  } else if (exponent < 0) {
    out += "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  } else if (count <= exponent + 1) {
    out += digits + std::string(static_cast<std::size_t>(exponent + 1 - count), '0') + ".0";
  } else {
    out += digits.substr(0, static_cast<std::size_t>(exponent + 1)) + "." +
           digits.substr(static_cast<std::size_t>(exponent + 1));
  }
  return out;
}

std::string Repr(const Value& value) {
  TextBuilder out;
  AppendRepr(out, value);
  return out.Take();
}

void AppendText(TextBuilder& out, const Value& value) {
  if (value.Is(Type::kString)) {
    out.Append(value.text());
  } else if (!value.Is(Type::kUndefined)) {
    AppendRepr(out, value);
  }
}

std::string Text(const Value& value) {
  if (value.Is(Type::kString)) {
    ChargeBytes(value.text().size());
    return value.text();
  }
  TextBuilder out;
  AppendText(out, value);
  return out.Take();
}

std::string EscapeHtml(std::string_view text) {
  TextBuilder out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out.Append("&amp;");
        break;
      case '<':
        out.Append("&lt;");
        break;
      case '>':
        out.Append("&gt;");
        break;
      case '\'':
        out.Append("&#39;");
        break;
      case '"':
        out.Append("&#34;");
        break;
      default:
        out.Append(c);
        break;
    }
  }
  return out.Take();
}

}  // namespace pliant::jinja
