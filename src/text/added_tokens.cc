#include "text/added_tokens.h"

#include <algorithm>
#include <unordered_map>

#include "text/normalizer.h"
#include "text/utf8.h"

namespace pliant {
namespace {

/// Bytes of whitespace that end `text`. Invalid UTF-8 is not whitespace.
std::size_t TrailingWhitespace(std::string_view text) {
  std::size_t end = text.size();
  while (end > 0 && IsWhitespace(LastCodePoint(text.substr(0, end)))) {
    do --end;
    while ((static_cast<std::uint8_t>(text[end]) & 0xC0) == 0x80);
  }
  return text.size() - end;
}

std::size_t LeadingWhitespace(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Unit unit = NextUtf8(text.substr(at));
    if (!IsWhitespace(unit.code_point)) break;
    at += unit.size;
  }
  return at;
}

}  // namespace

AddedTokens::AddedTokens(const Vocabulary& vocabulary, bool normalized) {
  std::unordered_map<TokenId, const AddedTokenRule*> rules;
  for (const AddedTokenRule& rule : vocabulary.added_token_rules) rules[rule.id] = &rule;
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    const TokenKind kind = vocabulary.kinds[i];
    if (vocabulary.tokens[i].empty() ||
        (kind != TokenKind::kControl && kind != TokenKind::kUserDefined))
      continue;
    Entry entry{.text = vocabulary.tokens[i],
                .rule = {.id = static_cast<TokenId>(i)},
                .control = kind == TokenKind::kControl};
    if (const auto rule = rules.find(entry.rule.id); rule != rules.end())
      entry.rule = *rule->second;
    if (entry.rule.normalized != normalized) continue;
    if (normalized && vocabulary.normalize_nfc &&
        ValidUtf8Prefix(entry.text) == entry.text.size()) {
      std::string storage;
      entry.text = std::string(NormalizeNfc(entry.text, &storage));
    }
    entries_.push_back(std::move(entry));
  }
  std::stable_sort(entries_.begin(), entries_.end(),
                   [](const Entry& a, const Entry& b) { return a.text < b.text; });
  // Of equal texts the first id stays.
  entries_.erase(std::unique(entries_.begin(), entries_.end(),
                             [](const Entry& a, const Entry& b) { return a.text == b.text; }),
                 entries_.end());
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    Range& range = by_first_byte_[static_cast<std::uint8_t>(entries_[i].text[0])];
    if (range.begin == range.end) range.begin = i;
    range.end = i + 1;
  }
}

/// Narrows the sorted range byte by byte: O(length of the longest token * log of the tokens).
const AddedTokens::Entry* AddedTokens::Longest(std::string_view text) const {
  const Range range = by_first_byte_[static_cast<std::uint8_t>(text[0])];
  auto low = entries_.begin() + range.begin, high = entries_.begin() + range.end;
  const Entry* longest = nullptr;
  for (std::size_t depth = 1; low != high; ++depth) {
    if (low->text.size() == depth) longest = &*low++;  // the shortest sorts first
    if (depth == text.size()) break;
    const auto byte = static_cast<std::uint8_t>(text[depth]);
    low = std::partition_point(
        low, high, [&](const Entry& e) { return static_cast<std::uint8_t>(e.text[depth]) < byte; });
    high = std::partition_point(low, high, [&](const Entry& e) {
      return static_cast<std::uint8_t>(e.text[depth]) == byte;
    });
  }
  return longest;
}

bool AddedTokens::Find(std::string_view text, std::size_t from, bool parse_special,
                       Found* found) const {
  if (entries_.empty()) return false;
  for (std::size_t at = from; at < text.size();) {
    const Range range = by_first_byte_[static_cast<std::uint8_t>(text[at])];
    const Entry* entry = range.begin == range.end ? nullptr : Longest(text.substr(at));
    if (entry == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + entry->text.size();
    at = end;
    if (entry->control && !parse_special) continue;
    if (entry->rule.single_word) {
      const bool left = begin > 0 && IsWordCharacter(LastCodePoint(text.substr(0, begin)));
      const bool right =
          end < text.size() && IsWordCharacter(NextUtf8(text.substr(end)).code_point);
      if (left || right) continue;
    }
    if (entry->rule.lstrip) begin -= TrailingWhitespace(text.substr(from, begin - from));
    if (entry->rule.rstrip) end += LeadingWhitespace(text.substr(end));
    *found = {begin, end, entry->rule.id};
    return true;
  }
  return false;
}

}  // namespace pliant
