// Room: model. Vocabulary of a model file, as text/ takes it. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model/config.h"
#include "model/gguf.h"
#include "text/tokenizer.h"

namespace pliant {

/// The tokenizer keys that a GGUF file must have, checked without decoding them: one line naming
/// the key otherwise. Also that the file has no more tokens than `vocab_size` embedding rows (0:
/// not checked) and one type a token.
Status CheckGgufVocabulary(const GgufFile& file, Architecture architecture,
                           std::int64_t vocab_size);

/// Decodes the tokenizer keys. Also for vocabulary-only files. end_of_generation holds the ids the
/// file names (eos, eot, eom); Tokenizer::Create adds control tokens of well-known names.
Result<Vocabulary> ReadGgufVocabulary(const GgufFile& file);

/// tokenizer.json of a Hugging Face folder, with begin and end ids of its tokenizer_config.json,
/// generation_config.json and config.json. `vocab_size` rows of embedding.
Result<Vocabulary> ReadHfVocabulary(const std::string& folder, std::int64_t vocab_size);

/// 256 bytes, an end-of-text token and unused ids: what a configuration without a tokenizer can be
/// run with.
Result<Vocabulary> ByteVocabulary(std::int64_t vocab_size);

/// The chat template of a Hugging Face folder (chat_template.jinja, else the "default" of
/// tokenizer_config.json), "" when none.
Result<std::string> ReadHfChatTemplate(const std::string& folder);

/// Adds `id` to the ids that end an answer, once.
void AddEndOfGeneration(Vocabulary& vocabulary, TokenId id);
/// Adds every control token whose text is known to end a turn or a text (<|im_end|>, <|eot_id|>,
/// ...), and eos.
void AddWellKnownEnds(Vocabulary& vocabulary);

}  // namespace pliant
