#include <cctype>
#include <new>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "text/tokenizer.h"

namespace pliant {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxJsonBytes = 256 << 20;
constexpr int kMaxJsonDepth = 64;
constexpr std::int64_t kMaxTokenId = (1 << 22) - 1;

Status Bad(std::string what) { return InvalidArgument("tokenizer.json: " + std::move(what)); }
Status Unsupported(std::string what) {
  return Unimplemented("tokenizer.json: " + std::move(what) + " is not supported");
}
std::string Quoted(std::string_view text) {
  std::string quoted(1, '"');
  quoted += text.substr(0, 80);
  quoted += '"';
  return quoted;
}

/// Nesting of arrays and objects, looked at before parsing so that the parser's stack is bounded.
bool TooDeep(std::string_view json) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

Result<Json> ParseObject(std::string_view text, std::string_view file) {
  if (text.size() > kMaxJsonBytes) {
    return TooLarge(std::string(file) + ": " + std::to_string(text.size()) + " bytes, limit " +
                    std::to_string(kMaxJsonBytes));
  }
  if (TooDeep(text))
    return TooLarge(std::string(file) + ": nested deeper than " + std::to_string(kMaxJsonDepth));
  try {
    Json json = Json::parse(text);
    if (!json.is_object()) return InvalidArgument(std::string(file) + ": not a JSON object");
    return json;
  } catch (const Json::exception& e) {
    return InvalidArgument(std::string(file) + ": " + std::string(e.what()).substr(0, 200));
  }
}

/// The member, or null when it is absent.
const Json& Member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto it = object.find(key);
  return it == object.end() ? null : *it;
}

Result<bool> Flag(const Json& object, const char* key, bool absent) {
  const Json& value = Member(object, key);
  if (value.is_null()) return absent;
  if (!value.is_boolean()) return Bad(std::string(key) + " is not true or false");
  return value.get<bool>();
}

/// "" when the member is no string.
std::string_view Text(const Json& object, const char* key) {
  const Json& value = Member(object, key);
  return value.is_string() ? std::string_view(value.get_ref<const std::string&>())
                           : std::string_view();
}

Result<TokenId> Id(const Json& value, std::string_view where) {
  if (!value.is_number_integer() || value < 0 || value > kMaxTokenId) {
    return Bad("id of " + Quoted(where) + " is not an integer from 0 to " +
               std::to_string(kMaxTokenId));
  }
  return value.get<TokenId>();
}

/// Reads one file; the members are filled section by section.
class Reader {
 public:
  Result<Vocabulary> Run(const Json& root, const Json& config) {
    PLIANT_RETURN_IF_ERROR(ReadModel(Member(root, "model")));
    PLIANT_RETURN_IF_ERROR(ReadAddedTokens(Member(root, "added_tokens")));
    PLIANT_RETURN_IF_ERROR(ReadNormalizer(Member(root, "normalizer")));
    PLIANT_RETURN_IF_ERROR(ReadPreTokenizer(Member(root, "pre_tokenizer")));
    if (v_.pre_tokenizer_steps.empty() ||
        v_.pre_tokenizer_steps.back().kind != PreTokenizerStep::Kind::kByteLevel) {
      return Unsupported("a pre_tokenizer that does not end in ByteLevel");
    }
    PLIANT_RETURN_IF_ERROR(ReadPostProcessor(Member(root, "post_processor")));
    PLIANT_RETURN_IF_ERROR(ReadConfig(config));
    return std::move(v_);
  }

 private:
  Status Place(TokenId id, const std::string& text, TokenKind kind) {
    const auto i = static_cast<std::size_t>(id);
    if (i >= v_.tokens.size()) {
      v_.tokens.resize(i + 1);
      v_.kinds.resize(i + 1, TokenKind::kUnused);
    }
    if (!v_.tokens[i].empty() && v_.tokens[i] != text) {
      return Bad("id " + std::to_string(id) + " belongs to " + Quoted(v_.tokens[i]) + " and to " +
                 Quoted(text));
    }
    v_.tokens[i] = text;
    v_.kinds[i] = kind;
    return {};
  }

  Status ReadModel(const Json& model);
  Status ReadMerges(const Json& merges, const Json& vocab);
  Status ReadAddedTokens(const Json& added);
  Status ReadNormalizer(const Json& normalizer);
  Status ReadPreTokenizer(const Json& step);
  Status ReadSplit(const Json& step);
  Status ReadPostProcessor(const Json& processor);
  Status ReadTemplate(const Json& processor);
  Status ReadConfig(const Json& config);
  Status ReadNamedToken(const Json& config, const char* key, std::optional<TokenId>* id);

  Vocabulary v_;
  std::unordered_map<std::string, TokenId> ids_;  // of added tokens, then of the model's
};

Status Reader::ReadModel(const Json& model) {
  if (!model.is_object()) return Bad("model is missing");
  const std::string_view type = Text(model, "type");
  if (type != "BPE" && !(type.empty() && Member(model, "merges").is_array()))
    return Unsupported("model type " + Quoted(type));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = Member(model, key);
    if (!value.is_null() && value != "") return Unsupported(std::string("model.") + key);
  }
  const Json& dropout = Member(model, "dropout");
  if (!dropout.is_null() && dropout != 0.0) return Unsupported("model.dropout");
  PLIANT_ASSIGN_OR_RETURN(const bool byte_fallback, Flag(model, "byte_fallback", false));
  if (byte_fallback) return Unsupported("model.byte_fallback");
  PLIANT_ASSIGN_OR_RETURN(v_.ignore_merges, Flag(model, "ignore_merges", false));
  PLIANT_ASSIGN_OR_RETURN(v_.fuse_unk, Flag(model, "fuse_unk", false));

  const Json& vocab = Member(model, "vocab");
  if (!vocab.is_object() || vocab.empty()) return Bad("model.vocab is missing or empty");
  for (const auto& [token, value] : vocab.items()) {
    PLIANT_ASSIGN_OR_RETURN(const TokenId id, Id(value, token));
    if (token.empty()) continue;
    PLIANT_RETURN_IF_ERROR(Place(id, token, TokenKind::kNormal));
    ids_[token] = id;
  }
  const Json& unk = Member(model, "unk_token");
  if (!unk.is_null()) {
    if (!unk.is_string()) return Bad("model.unk_token is not a string");
    const auto it = ids_.find(unk.get_ref<const std::string&>());
    if (it == ids_.end())
      return Bad("model.unk_token " + Quoted(unk.get_ref<const std::string&>()) +
                 " is not in model.vocab");
    v_.unk = it->second;
    v_.unknown_to_unk = true;
  }
  return ReadMerges(Member(model, "merges"), vocab);
}

Status Reader::ReadMerges(const Json& merges, const Json& vocab) {
  if (!merges.is_array()) return Bad("model.merges is not an array");
  v_.merges.reserve(merges.size());
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const Json& merge = merges[i];
    std::string left, right;
    if (merge.is_string()) {
      const auto& line = merge.get_ref<const std::string&>();
      const std::size_t space = line.find(' ');
      if (space == std::string::npos)
        return Bad("merge " + std::to_string(i) + " " + Quoted(line) + " has no space");
      left = line.substr(0, space);
      right = line.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else {
      return Bad("merge " + std::to_string(i) + " is neither a string nor a pair of strings");
    }
    // The reference refuses such files, too.
    for (const std::string& token : {left, right, left + right}) {
      if (!vocab.contains(token))
        return Bad("merge " + std::to_string(i) + " names " + Quoted(token) +
                   ", which is not in model.vocab");
    }
    v_.merges.push_back(left + " " +
                        right);  // a space inside a token is refused by Tokenizer::Create
  }
  return {};
}

Status Reader::ReadAddedTokens(const Json& added) {
  if (added.is_null()) return {};
  if (!added.is_array()) return Bad("added_tokens is not an array");
  for (const Json& token : added) {
    const Json& content = Member(token, "content");
    if (!content.is_string()) return Bad("an added token has no content");
    const auto& text = content.get_ref<const std::string&>();
    if (text.empty()) continue;
    PLIANT_ASSIGN_OR_RETURN(const TokenId id, Id(Member(token, "id"), text));
    PLIANT_ASSIGN_OR_RETURN(const bool special, Flag(token, "special", false));
    PLIANT_RETURN_IF_ERROR(
        Place(id, text, special ? TokenKind::kControl : TokenKind::kUserDefined));
    ids_[text] = id;
    AddedTokenRule rule{.id = id};
    PLIANT_ASSIGN_OR_RETURN(rule.single_word, Flag(token, "single_word", false));
    PLIANT_ASSIGN_OR_RETURN(rule.lstrip, Flag(token, "lstrip", false));
    PLIANT_ASSIGN_OR_RETURN(rule.rstrip, Flag(token, "rstrip", false));
    PLIANT_ASSIGN_OR_RETURN(rule.normalized, Flag(token, "normalized", !special));
    if (rule.single_word || rule.lstrip || rule.rstrip || rule.normalized)
      v_.added_token_rules.push_back(rule);
  }
  return {};
}

Status Reader::ReadNormalizer(const Json& normalizer) {
  if (normalizer.is_null()) return {};
  const std::string_view type = Text(normalizer, "type");
  if (type == "NFC") {
    v_.normalize_nfc = true;
    return {};
  }
  const Json& list = Member(normalizer, "normalizers");
  if (type != "Sequence" || !list.is_array()) return Unsupported("normalizer " + Quoted(type));
  for (const Json& item : list) PLIANT_RETURN_IF_ERROR(ReadNormalizer(item));
  return {};
}

Status Reader::ReadPreTokenizer(const Json& step) {
  if (step.is_null()) return {};
  const std::string_view type = Text(step, "type");
  if (type == "Sequence") {
    const Json& list = Member(step, "pretokenizers");
    if (!list.is_array()) return Bad("pre_tokenizer Sequence has no pretokenizers");
    for (const Json& item : list) PLIANT_RETURN_IF_ERROR(ReadPreTokenizer(item));
    return {};
  }
  if (type == "Split") return ReadSplit(step);
  PreTokenizerStep made;
  if (type == "Digits") {
    made.kind = PreTokenizerStep::Kind::kDigits;
    PLIANT_ASSIGN_OR_RETURN(made.individual, Flag(step, "individual_digits", false));
  } else if (type == "ByteLevel") {
    made.kind = PreTokenizerStep::Kind::kByteLevel;
    PLIANT_ASSIGN_OR_RETURN(made.use_regex, Flag(step, "use_regex", true));
    PLIANT_ASSIGN_OR_RETURN(made.add_prefix_space, Flag(step, "add_prefix_space", true));
  } else {
    return Unsupported("pre_tokenizer " + Quoted(type));
  }
  v_.pre_tokenizer_steps.push_back(std::move(made));
  return {};
}

/// A pattern that matches `text` and nothing else.
std::string Literal(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x80 && std::isalnum(static_cast<unsigned char>(c)) == 0)
      pattern += '\\';
    pattern += c;
  }
  return pattern;
}

Status Reader::ReadSplit(const Json& step) {
  using Behavior = PreTokenizerStep::Behavior;
  PreTokenizerStep made;
  const Json& pattern = Member(step, "pattern");
  if (Member(pattern, "Regex").is_string()) {
    made.pattern = Text(pattern, "Regex");
  } else if (Member(pattern, "String").is_string()) {
    made.pattern = Literal(Text(pattern, "String"));
  } else {
    return Bad("pre_tokenizer Split has no pattern");
  }
  const std::string_view behavior = Text(step, "behavior");
  if (behavior == "Isolated") {
    made.behavior = Behavior::kIsolated;
  } else if (behavior == "Removed") {
    made.behavior = Behavior::kRemoved;
  } else if (behavior == "MergedWithPrevious") {
    made.behavior = Behavior::kMergedWithPrevious;
  } else if (behavior == "MergedWithNext") {
    made.behavior = Behavior::kMergedWithNext;
  } else if (behavior == "Contiguous") {
    made.behavior = Behavior::kContiguous;
  } else {
    return Unsupported("pre_tokenizer Split behavior " + Quoted(behavior));
  }
  PLIANT_ASSIGN_OR_RETURN(made.invert, Flag(step, "invert", false));
  v_.pre_tokenizer_steps.push_back(std::move(made));
  return {};
}

Status Reader::ReadPostProcessor(const Json& processor) {
  if (processor.is_null()) return {};
  const std::string_view type = Text(processor, "type");
  if (type == "ByteLevel") return {};  // moves offsets only
  if (type == "TemplateProcessing") return ReadTemplate(processor);
  const Json& list = Member(processor, "processors");
  if (type != "Sequence" || !list.is_array()) return Unsupported("post_processor " + Quoted(type));
  for (const Json& item : list) PLIANT_RETURN_IF_ERROR(ReadPostProcessor(item));
  return {};
}

/// At most one token before the text and one behind it.
Status Reader::ReadTemplate(const Json& processor) {
  const Json& single = Member(processor, "single");
  if (!single.is_array()) return Bad("post_processor TemplateProcessing has no single");
  bool seen_text = false;
  for (const Json& item : single) {
    if (!Member(item, "Sequence").is_null()) {
      if (seen_text) return Unsupported("a post_processor that repeats the text");
      seen_text = true;
      continue;
    }
    const Json& name = Member(Member(item, "SpecialToken"), "id");
    if (!name.is_string()) return Bad("post_processor TemplateProcessing has an item without id");
    const auto& text = name.get_ref<const std::string&>();
    const Json& ids = Member(Member(Member(processor, "special_tokens"), text.c_str()), "ids");
    if (!ids.is_array() || ids.size() != 1)
      return Unsupported("a post_processor token of other than one id");
    PLIANT_ASSIGN_OR_RETURN(const TokenId id, Id(ids[0], text));
    bool& flag = seen_text ? v_.add_eos : v_.add_bos;
    if (flag) return Unsupported("a post_processor that adds several tokens on one side");
    flag = true;
    (seen_text ? v_.eos : v_.bos) = id;
  }
  return {};
}

Status Reader::ReadNamedToken(const Json& config, const char* key, std::optional<TokenId>* id) {
  const Json& value = Member(config, key);
  const Json& text = value.is_object() ? Member(value, "content") : value;
  if (text.is_null()) return {};
  if (!text.is_string())
    return InvalidArgument(std::string("tokenizer_config.json: ") + key + " is not a string");
  const auto it = ids_.find(text.get_ref<const std::string&>());
  if (it == ids_.end()) {
    return InvalidArgument(std::string("tokenizer_config.json: ") + key + " " +
                           Quoted(text.get_ref<const std::string&>()) +
                           " is not in the vocabulary");
  }
  *id = it->second;
  return {};
}

Status Reader::ReadConfig(const Json& config) {
  PLIANT_RETURN_IF_ERROR(ReadNamedToken(config, "bos_token", &v_.bos));
  PLIANT_RETURN_IF_ERROR(ReadNamedToken(config, "eos_token", &v_.eos));
  PLIANT_RETURN_IF_ERROR(ReadNamedToken(config, "pad_token", &v_.pad));
  if (!v_.unknown_to_unk) PLIANT_RETURN_IF_ERROR(ReadNamedToken(config, "unk_token", &v_.unk));
  PLIANT_ASSIGN_OR_RETURN(v_.add_bos, Flag(config, "add_bos_token", v_.add_bos));
  PLIANT_ASSIGN_OR_RETURN(v_.add_eos, Flag(config, "add_eos_token", v_.add_eos));
  if (!v_.bos) v_.add_bos = false;
  if (!v_.eos) v_.add_eos = false;
  return {};
}

}  // namespace

Result<Vocabulary> Tokenizer::ReadTokenizerJson(std::string_view json,
                                                std::string_view config_json) {
  try {
    PLIANT_ASSIGN_OR_RETURN(const Json root, ParseObject(json, "tokenizer.json"));
    Json config = Json::object();
    if (!config_json.empty()) {
      PLIANT_ASSIGN_OR_RETURN(config, ParseObject(config_json, "tokenizer_config.json"));
    }
    return Reader().Run(root, config);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("tokenizer.json: no memory for " + std::to_string(json.size()) +
                       " bytes of JSON");
  } catch (const Json::exception& e) {  // a type that no check above looked at
    return Bad(std::string(e.what()).substr(0, 200));
  }
}

}  // namespace pliant
