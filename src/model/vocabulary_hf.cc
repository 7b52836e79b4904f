// Room: model. Vocabulary and chat template of a Hugging Face folder.
#include <optional>
#include <string>
#include <utility>

#include "model/byte_source.h"
#include "model/json.h"
#include "model/vocabulary.h"

namespace pliant {
namespace {

constexpr std::uint64_t kMaxTokenizerBytes = 256 << 20;
constexpr std::uint64_t kMaxVocabularyFileBytes = 16 << 20;

/// The file's text, or "" when there is none.
Result<std::string> OptionalText(const std::string& path, std::uint64_t limit) {
  Result<std::string> text = ReadTextFile(path, limit);
  if (!text.ok() && text.status().code() == StatusCode::kNotFound) return std::string();
  return text;
}

/// An id, a list of ids, or nothing, under `key`.
Status AddIds(const nlohmann::json& json, const char* key, std::size_t tokens,
              std::vector<TokenId>& ids) {
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) return Status::Ok();
  const auto add = [&](const nlohmann::json& id) -> Status {
    if (!id.is_number_integer()) {
      return InvalidArgument(std::string("'") + key + "' must be a token id or a list of them");
    }
    // Some configurations name ids of tokens that the tokenizer lacks, or -1: they can never be
    // produced as such.
    const auto number = id.is_number_unsigned() && id.get<std::uint64_t>() > INT32_MAX
                            ? std::int64_t{-1}
                            : id.get<std::int64_t>();
    if (number >= 0 && static_cast<std::uint64_t>(number) < tokens) {
      ids.push_back(static_cast<TokenId>(number));
    }
    return Status::Ok();
  };
  if (!found->is_array()) return add(*found);
  for (const auto& id : *found) PLIANT_RETURN_IF_ERROR(add(id));
  return Status::Ok();
}

}  // namespace

Result<Vocabulary> ReadHfVocabulary(const std::string& folder, std::int64_t vocab_size) {
  const std::string path = folder + "/tokenizer.json";
  PLIANT_ASSIGN_OR_RETURN(const std::string json, ReadTextFile(path, kMaxTokenizerBytes));
  PLIANT_ASSIGN_OR_RETURN(const std::string config_json,
                          OptionalText(folder + "/tokenizer_config.json", kMaxVocabularyFileBytes));
  Result<Vocabulary> read = Tokenizer::ReadTokenizerJson(json, config_json);
  if (!read.ok()) return read.status().WithContext(path);
  Vocabulary vocabulary = std::move(read).value();
  const std::size_t tokens = vocabulary.tokens.size();
  if (tokens > static_cast<std::size_t>(vocab_size)) {
    return InvalidArgument(path + ": " + std::to_string(tokens) + " tokens, the embedding has " +
                           std::to_string(vocab_size) + " rows");
  }
  std::vector<TokenId> ends;
  std::vector<TokenId> begins;
  for (const char* name : {"generation_config.json", "config.json"}) {
    PLIANT_ASSIGN_OR_RETURN(const std::string text,
                            OptionalText(folder + "/" + name, kMaxVocabularyFileBytes));
    if (text.empty()) continue;
    Result<nlohmann::json> parsed = ParseJsonObject(text);
    if (!parsed.ok()) return parsed.status().WithContext(folder + "/" + name);
    Status added = AddIds(*parsed, "eos_token_id", tokens, ends);
    if (added.ok()) added = AddIds(*parsed, "bos_token_id", tokens, begins);
    if (!added.ok()) return added.WithContext(folder + "/" + name);
  }
  if (!vocabulary.eos && !ends.empty()) vocabulary.eos = ends.front();
  if (!vocabulary.bos && !begins.empty()) vocabulary.bos = begins.front();
  for (const TokenId id : ends) AddEndOfGeneration(vocabulary, id);
  return vocabulary;
}

Result<std::string> ReadHfChatTemplate(const std::string& folder) {
  PLIANT_ASSIGN_OR_RETURN(std::string jinja,
                          OptionalText(folder + "/chat_template.jinja", kMaxVocabularyFileBytes));
  if (!jinja.empty()) return jinja;
  const std::string path = folder + "/tokenizer_config.json";
  PLIANT_ASSIGN_OR_RETURN(const std::string text, OptionalText(path, kMaxVocabularyFileBytes));
  if (text.empty()) return std::string();
  Result<nlohmann::json> config = ParseJsonObject(text);
  if (!config.ok()) return config.status().WithContext(path);
  const auto found = config->find("chat_template");
  if (found == config->end() || found->is_null()) return std::string();
  if (found->is_string()) return found->get<std::string>();
  // A list of named templates: [{"name": "default", "template": "..."}, ...].
  if (found->is_array()) {
    for (const auto& entry : *found) {
      if (!entry.is_object()) continue;
      const auto name = entry.find("name");
      const auto body = entry.find("template");
      if (name != entry.end() && *name == "default" && body != entry.end() && body->is_string()) {
        return body->get<std::string>();
      }
    }
    return std::string();
  }
  return InvalidArgument(path + ": 'chat_template' must be a string or a list");
}

}  // namespace pliant
