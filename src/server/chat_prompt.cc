#include "server/chat_prompt.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "server/utf8.h"

namespace pliant {
namespace {

// The private-use planes. A window of them that no client string touches is chosen per request.
constexpr char32_t kPrivateFirst = 0xF0000;
constexpr char32_t kPrivateLast = 0x10FFFD;

using StringFn = std::function<std::string(const std::string&)>;

void ForEachString(const Json& value, const std::function<void(const std::string&)>& visit) {
  if (value.is_string()) {
    visit(value.get_ref<const std::string&>());
  } else if (value.is_array()) {
    for (const Json& item : value) ForEachString(item, visit);
  } else if (value.is_object()) {
    for (const auto& [key, item] : value.items()) {
      visit(key);
      ForEachString(item, visit);
    }
  }
}

Json MapStrings(const Json& value, const StringFn& map) {
  if (value.is_string()) return map(value.get_ref<const std::string&>());
  if (value.is_array()) {
    Json out = Json::array();
    for (const Json& item : value) out.push_back(MapStrings(item, map));
    return out;
  }
  if (value.is_object()) {
    Json out = Json::object();
    for (const auto& [key, item] : value.items()) out[map(key)] = MapStrings(item, map);
    return out;
  }
  return value;
}

void ForEachClientString(const ChatInput& input,
                         const std::function<void(const std::string&)>& visit) {
  ForEachString(input.messages, visit);
  ForEachString(input.tools, visit);
  ForEachString(input.template_kwargs, visit);
}

}  // namespace

struct ChatPrompter::Rendered {
  struct Range {
    std::size_t begin, end;
  };
  std::string text;
  std::vector<Range> client;  // sorted, apart
};

/// Stand-ins of one rendering: a piece of client text and the private-use character that takes its
/// place.
struct ChatPrompter::Mapping {
  char32_t base = 0;
  std::vector<std::string> pieces;                  // base + i stands for pieces[i]
  std::unordered_map<std::string, char32_t> edges;  // rendering B: one character each
  std::unordered_map<TokenId, char32_t> controls;   // rendering A: one control text each
};

ChatPrompter::ChatPrompter(const Tokenizer* tokenizer, RenderFn render, std::string bos_text,
                           std::string eos_text)
    : tokenizer_(tokenizer),
      render_(std::move(render)),
      bos_text_(std::move(bos_text)),
      eos_text_(std::move(eos_text)),
      controls_(tokenizer->vocabulary()) {}

Json ChatPrompter::Context(const ChatInput& input) const {
  Json context = Json::object();
  for (const auto& [key, value] : input.template_kwargs.items()) context[key] = value;
  context["messages"] = input.messages;
  context["tools"] = input.tools;
  context["add_generation_prompt"] = input.add_generation_prompt;
  context["bos_token"] = bos_text_;
  context["eos_token"] = eos_text_;
  return context;
}

Result<ChatPrompter::Rendered> ChatPrompter::RenderMapped(const ChatInput& input,
                                                          const Mapping& mapping) const {
  const auto map = [&](const std::string& text) {
    std::string out;
    for (std::size_t i = 0; i < text.size();) {
      if (const auto match = controls_.Longest(text, i, text.size()); match.length > 0) {
        if (const auto it = mapping.controls.find(match.id); it != mapping.controls.end()) {
          AppendUtf8(it->second, &out);
          i += match.length;
          continue;
        }
      }
      const std::size_t start = i;
      NextCodePoint(text, &i);
      const std::string character = text.substr(start, i - start);
      const auto it = mapping.edges.find(character);
      if (it != mapping.edges.end()) {
        AppendUtf8(it->second, &out);
      } else {
        out += character;
      }
    }
    return out;
  };
  ChatInput mapped = input;
  mapped.messages = MapStrings(input.messages, map);
  mapped.tools = MapStrings(input.tools, map);
  mapped.template_kwargs = MapStrings(input.template_kwargs, map);
  const Result<std::string> text = render_(Context(mapped));

  Rendered out;
  const auto unmap = [&](const std::string& from) {
    for (std::size_t i = 0; i < from.size();) {
      const std::size_t start = i;
      const char32_t code = NextCodePoint(from, &i);
      if (code >= mapping.base && code < mapping.base + mapping.pieces.size()) {
        const std::string& piece = mapping.pieces[code - mapping.base];
        out.client.push_back({out.text.size(), out.text.size() + piece.size()});
        out.text += piece;
      } else {
        out.text.append(from, start, i - start);
      }
    }
  };
  unmap(text.ok() ? *text : text.status().message());
  if (!text.ok()) return Status(text.status().code(), std::move(out.text));
  return out;
}

std::vector<ChatPrompter::Control> ChatPrompter::ControlsIn(const Rendered& rendered) const {
  std::vector<Control> found;
  std::size_t range = 0;
  for (std::size_t i = 0; i < rendered.text.size();) {
    while (range < rendered.client.size() && rendered.client[range].end <= i) ++range;
    const std::size_t limit =
        range < rendered.client.size() ? rendered.client[range].begin : rendered.text.size();
    const auto match = controls_.Longest(rendered.text, i, limit);
    if (match.length > 0) found.push_back({i, i + match.length, match.id});
    i += std::max<std::size_t>(match.length, 1);
  }
  return found;
}

/// Marks the bytes of control texts that a client had a part in; empty when there are none.
std::vector<bool> ChatPrompter::ForgedBytes(const Rendered& rendered) const {
  std::vector<bool> forged;
  std::size_t range = 0;
  for (std::size_t i = 0; i < rendered.text.size(); ++i) {
    while (range < rendered.client.size() && rendered.client[range].end <= i) ++range;
    if (range == rendered.client.size()) break;
    const auto match = controls_.Longest(rendered.text, i, rendered.text.size());
    if (i + match.length <= rendered.client[range].begin) continue;
    forged.resize(rendered.text.size());
    std::fill_n(forged.begin() + static_cast<std::ptrdiff_t>(i), match.length, true);
  }
  return forged;
}

Result<std::vector<TokenId>> ChatPrompter::EncodeRendered(const Rendered& rendered) const {
  const std::string_view text = rendered.text;
  const std::vector<bool> forged = ForgedBytes(rendered);
  std::vector<TokenId> ids;
  std::size_t done = 0;  // everything before is encoded
  const auto encode = [&](std::size_t end, bool parse_special) -> Status {
    if (end == done) return Status::Ok();
    PLIANT_ASSIGN_OR_RETURN(
        const std::vector<TokenId> part,
        tokenizer_->Encode(text.substr(done, end - done), {.parse_special = parse_special}));
    ids.insert(ids.end(), part.begin(), part.end());
    done = end;
    return Status::Ok();
  };
  // The tokenizer itself finds the template's control tokens, with its rules about the space around
  // them; only what lies between two of them and holds a forged one is encoded apart.
  if (!forged.empty()) {
    std::size_t gap = 0;
    std::vector<Control> controls = ControlsIn(rendered);
    controls.push_back({text.size(), text.size(), 0});
    for (const Control& control : controls) {
      const auto at = [&](std::size_t i) {
        return forged.begin() + static_cast<std::ptrdiff_t>(i);
      };
      if (std::find(at(gap), at(control.begin), true) != at(control.begin)) {
        PLIANT_RETURN_IF_ERROR(encode(gap, true));
        PLIANT_RETURN_IF_ERROR(encode(control.begin, false));
      }
      gap = control.end;
    }
  }
  PLIANT_RETURN_IF_ERROR(encode(text.size(), true));
  return ids;
}

std::vector<TokenId> ChatPrompter::WithBos(std::vector<TokenId> ids) const {
  const Vocabulary& vocabulary = tokenizer_->vocabulary();
  if (vocabulary.add_bos && vocabulary.bos && (ids.empty() || ids.front() != *vocabulary.bos)) {
    ids.insert(ids.begin(), *vocabulary.bos);
  }
  return ids;
}

Result<std::vector<TokenId>> ChatPrompter::Encode(const ChatInput& input) const {
  // What of the client's text could take part in a control text, and which private-use characters
  // it holds itself.
  std::set<char32_t> private_used;
  std::set<char32_t> edges_used;
  std::map<TokenId, std::string> controls_used;
  ForEachClientString(input, [&](const std::string& text) {
    for (std::size_t i = 0; i < text.size();) {
      if (const auto match = controls_.Longest(text, i, text.size()); match.length > 0) {
        controls_used.try_emplace(match.id, text.substr(i, match.length));
      }
      const char32_t code = NextCodePoint(text, &i);
      if (code >= kPrivateFirst) private_used.insert(code);
      const auto& edges = controls_.edges();
      if (std::find(edges.begin(), edges.end(), code) != edges.end()) edges_used.insert(code);
    }
  });
  if (edges_used.empty() && controls_used.empty()) {
    PLIANT_ASSIGN_OR_RETURN(const std::string text, render_(Context(input)));
    PLIANT_ASSIGN_OR_RETURN(std::vector<TokenId> ids,
                            tokenizer_->Encode(text, {.parse_special = true}));
    return WithBos(std::move(ids));
  }

  const std::size_t needed = std::max(controls_used.size(), edges_used.size());
  char32_t base = kPrivateFirst;
  for (char32_t used : private_used) {
    if (used - base >= needed) break;
    base = used + 1;
  }
  if (base + needed > kPrivateLast) {
    return InvalidArgument("the messages use too many private-use characters");
  }
  Mapping whole, single;
  whole.base = single.base = base;
  for (const auto& [id, text] : controls_used) {
    whole.controls[id] = base + static_cast<char32_t>(whole.pieces.size());
    whole.pieces.push_back(text);
  }
  for (char32_t code : edges_used) {
    std::string character;
    AppendUtf8(code, &character);
    single.edges[character] = base + static_cast<char32_t>(single.pieces.size());
    single.pieces.push_back(character);
  }

  PLIANT_ASSIGN_OR_RETURN(const Rendered a, RenderMapped(input, whole));
  const Result<Rendered> b = RenderMapped(input, single);
  if (b.ok() && b->text == a.text) {
    PLIANT_ASSIGN_OR_RETURN(std::vector<TokenId> ids, EncodeRendered(*b));
    return WithBos(std::move(ids));
  }
  if (b.ok()) {
    std::map<TokenId, std::int64_t> balance;
    for (const Control& control : ControlsIn(*b)) ++balance[control.id];
    for (const Control& control : ControlsIn(a)) {
      if (--balance[control.id] < 0) {
        return InvalidArgument(
            "the messages put together the control token \"" +
            tokenizer_->vocabulary().tokens[static_cast<std::size_t>(control.id)] +
            "\" out of pieces");
      }
    }
  }
  PLIANT_ASSIGN_OR_RETURN(std::vector<TokenId> ids, EncodeRendered(a));
  return WithBos(std::move(ids));
}

}  // namespace pliant
