// Vocabularies made on the spot, and a BPE oracle that is slow and plain.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace pliant::testing {

/// 256 byte tokens (ids 0 to 255), then <|start|> 256 and <|end|> 257 (control, bos and eos) and
/// <think> 258 (user-defined).
Vocabulary ByteTokens(std::string_view pre_tokenizer = "smollm");

/// ByteTokens plus `count` merges learned from `text` cut by `pre_tokenizer`'s spaces: the most
/// frequent pair first, as BPE is trained.
Vocabulary Trained(std::string_view text, int count, std::string_view pre_tokenizer = "smollm");

/// A few kilobytes of English, code, numbers and other scripts.
std::string_view SampleText();

std::unique_ptr<Tokenizer> MustCreate(Vocabulary vocabulary);
std::vector<TokenId> MustEncode(const Tokenizer& tokenizer, std::string_view text,
                                EncodeOptions options = {});

/// Merges by definition: looks at every adjacent pair, takes the best, starts again. For one
/// pre-token.
std::vector<TokenId> NaiveBpe(const Vocabulary& vocabulary, std::string_view piece);

/// Valid UTF-8 of `characters` code points, drawn from ASCII, whitespace, letters, marks and
/// everything.
std::string RandomUtf8(std::mt19937& rng, int characters);

}  // namespace pliant::testing
