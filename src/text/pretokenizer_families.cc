#include "text/pretokenizer.h"
#include "text/unicode_ranges.h"

namespace pliant {
namespace {

using Step = PreTokenizerStep;

// GPT-2 after the Digits step in one pattern: digits stand alone, and a run of whitespace ends
// before a digit as it would before the end of the text.
std::string DigitsThenGpt2() {
  const std::string digits = "\\p{N}" + ClassText(kDigitsStepOnly);
  return "[" + digits + R"(]|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L})" + digits +
         R"(]+|\s+(?![^\s)" + digits + R"(])|\s+)";
}

// Llama 3: contractions in any case, a word takes one leading symbol or space, digits by threes,
// symbols take line ends with them.
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Qwen 2 and 3: the same with single digits.
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Qwen 3.5: marks belong to words.
constexpr std::string_view kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::vector<PreTokenizerFamily> MakeFamilies() {
  const auto split = [](std::string_view pattern) {
    return std::vector<Step>{{.kind = Step::Kind::kSplit, .pattern = std::string(pattern)}};
  };
  std::vector<PreTokenizerFamily> families;
  for (const std::string_view word : {"smollm", "starcoder", "refact"}) {
    families.push_back({.word = word, .steps = split(DigitsThenGpt2())});
  }
  families.push_back(
      {.word = "command-r", .steps = split(DigitsThenGpt2()), .normalize_nfc = true});
  families.push_back({.word = "gpt-2", .steps = split(kGpt2Pattern)});
  for (const std::string_view word : {"llama-bpe", "llama3", "llama-v3"}) {
    families.push_back({.word = word, .steps = split(kLlama3), .ignore_merges = true});
  }
  for (const std::string_view word : {"qwen2", "deepseek-r1-qwen"}) {
    families.push_back({.word = word, .steps = split(kQwen2), .normalize_nfc = true});
  }
  families.push_back({.word = "qwen35", .steps = split(kQwen35)});
  return families;
}

const std::vector<PreTokenizerFamily>& Families() {
  static const std::vector<PreTokenizerFamily> families = MakeFamilies();
  return families;
}

}  // namespace

const PreTokenizerFamily* FindPreTokenizerFamily(std::string_view word) {
  for (const PreTokenizerFamily& family : Families()) {
    if (family.word == word) return &family;
  }
  return nullptr;
}

std::string PreTokenizerWords() {
  std::string words;
  for (const PreTokenizerFamily& family : Families()) {
    if (!words.empty()) words += ", ";
    words += family.word;
  }
  return words;
}

}  // namespace pliant
