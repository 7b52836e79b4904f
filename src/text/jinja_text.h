// Room: text. How values of the Jinja interpreter are written: str(), repr(), JSON. Free functions
// on the rendering thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "text/jinja_value.h"

namespace pliant::jinja {

/// str(value): what {{ }} prints.
std::string Text(const Value& value);
void AppendText(TextBuilder& out, const Value& value);
/// repr(value).
std::string Repr(const Value& value);
/// repr of a string.
std::string Quote(std::string_view text);
/// repr of a float: the shortest digits that read back, exponents from 1e16 and below 1e-4.
std::string FloatRepr(double value);
/// `escape` of markupsafe: & < > ' ".
std::string EscapeHtml(std::string_view text);

struct JsonStyle {
  bool ensure_ascii = false;
  std::optional<std::string> indent;  // of one level; nothing: all on one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
};
/// json.dumps(value). Fails on what JSON cannot hold.
std::string ToJson(const Value& value, const JsonStyle& style);

}  // namespace pliant::jinja
