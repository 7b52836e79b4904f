#include <charconv>
#include <cmath>

#include "server/field_reader.h"
#include "server/message_parse.h"
#include "server/openai_request.h"

namespace pliant {
namespace {

constexpr std::size_t kMaxModelBytes = 1024;
constexpr std::size_t kNoLimit = ~std::size_t{0};

void ReadSampling(FieldReader* fields, SamplingParams* out) {
  if (const auto temperature = fields->Number("temperature", 0, kMaxTemperature)) {
    if (*temperature != 0 && *temperature < kMinTemperature) {
      fields->Fail("temperature", "must be 0 (greedy) or at least 1e-05");
    }
    out->temperature = static_cast<float>(*temperature);
  }
  out->top_p = static_cast<float>(fields->Number("top_p", 1e-6, 1).value_or(out->top_p));
  if (const auto top_k = fields->Int("top_k", -1, INT32_MAX)) {
    out->top_k = *top_k < 0 ? 0 : static_cast<int>(*top_k);
  }
  out->min_p = static_cast<float>(fields->Number("min_p", 0, 1).value_or(out->min_p));
  out->presence_penalty = static_cast<float>(fields->Number("presence_penalty", -2, 2).value_or(0));
  out->frequency_penalty =
      static_cast<float>(fields->Number("frequency_penalty", -2, 2).value_or(0));
  out->repetition_penalty =
      static_cast<float>(fields->Number("repetition_penalty", 0.1, 10).value_or(1));
  if (const auto seed = fields->Int("seed", INT64_MIN, INT64_MAX)) {
    out->seed = static_cast<std::uint64_t>(*seed);
  }
}

void ReadLogitBias(FieldReader* fields, const Tokenizer& tokenizer, SamplingParams* out) {
  const Json* bias = fields->Find("logit_bias");
  if (bias == nullptr) return;
  if (!bias->is_object()) {
    fields->Fail("logit_bias", "must be an object of token id to number, not " + Describe(*bias));
    return;
  }
  if (bias->size() > static_cast<std::size_t>(kMaxLogitBias)) {
    fields->Fail("logit_bias", "has " + std::to_string(bias->size()) + " entries; the limit is " +
                                   std::to_string(kMaxLogitBias));
    return;
  }
  for (const auto& [key, value] : bias->items()) {
    std::int64_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    // Only plain decimal digits: "-0", "+1", "01" and "1.5" are no ids.
    const bool canonical =
        error == std::errc() && end == key.data() + key.size() && std::to_string(id) == key;
    if (!canonical || id < 0 || id >= tokenizer.size() ||
        tokenizer.vocabulary().kinds[static_cast<std::size_t>(id)] == TokenKind::kUnused ||
        tokenizer.TokenBytes(static_cast<TokenId>(id), true).empty()) {
      fields->Fail("logit_bias", "has the key \"" + Excerpt(key, 40) +
                                     "\", which is no token id in [0, " +
                                     std::to_string(tokenizer.size()) + ")");
      return;
    }
    if (!value.is_number() || !std::isfinite(value.get<double>()) ||
        std::fabs(value.get<double>()) > 100) {
      fields->Fail("logit_bias",
                   "must give numbers from -100 to 100; \"" + key + "\" has " + Describe(value));
      return;
    }
    out->logit_bias.emplace_back(static_cast<TokenId>(id), value.get<float>());
  }
}

void ReadStop(FieldReader* fields, const Tokenizer& tokenizer, StopParams* out) {
  const auto add = [&](const Json& value) {
    if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
      fields->Fail("stop", "must hold non-empty strings, not " + Describe(value));
    } else if (value.get_ref<const std::string&>().size() > kMaxStopBytes) {
      fields->Fail("stop", "has a string of over " + std::to_string(kMaxStopBytes) + " bytes");
    } else {
      out->strings.push_back(value.get<std::string>());
    }
  };
  if (const Json* stop = fields->Find("stop")) {
    if (stop->is_string()) {
      add(*stop);
    } else if (!stop->is_array()) {
      fields->Fail("stop", "must be a string or a list of strings, not " + Describe(*stop));
    } else if (stop->size() > static_cast<std::size_t>(kMaxStopStrings)) {
      fields->Fail("stop", "has " + std::to_string(stop->size()) + " strings; the limit is " +
                               std::to_string(kMaxStopStrings));
    } else {
      for (const Json& value : *stop) add(value);
    }
  }
  if (const Json* ids = fields->Find("stop_token_ids")) {
    if (!ids->is_array()) {
      fields->Fail("stop_token_ids", "must be a list of token ids, not " + Describe(*ids));
    } else if (ids->size() > static_cast<std::size_t>(kMaxStopTokens)) {
      fields->Fail("stop_token_ids", "has " + std::to_string(ids->size()) + " ids; the limit is " +
                                         std::to_string(kMaxStopTokens));
    } else {
      for (const Json& value : *ids) {
        TokenId id = 0;
        if (const auto fault = ReadTokenId(value, tokenizer.size(), &id)) {
          fields->Fail("stop_token_ids", "is wrong: " + *fault);
          break;
        }
        out->token_ids.push_back(id);
      }
    }
  }
  out->ignore_eos = fields->Bool("ignore_eos").value_or(false);
  out->min_tokens = fields->Int("min_tokens", 0, kMaxTokensField).value_or(0);
}

void ReadCapacity(FieldReader* fields, Capacity* out) {
  const Json* value = fields->Find("capacity");
  if (value == nullptr) return;
  if (value->is_string()) {
    const Result<Capacity> parsed = ParseCapacity(value->get_ref<const std::string&>());
    if (parsed.ok()) {
      *out = *parsed;
    } else {
      fields->Fail("capacity", "must be \"full\", \"grow\" or a number of tokens");
    }
  } else if (const auto tokens = fields->Int("capacity", 1, kMaxTokensField)) {
    *out = {Capacity::Kind::kFixed, *tokens};
  }
}

void ReadKv(FieldReader* fields, GenerateRequest* out) {
  if (const Json* kv = fields->Find("kv")) {
    if (!kv->is_object()) {
      fields->Fail("kv", "must be an object, not " + Describe(*kv));
      return;
    }
    FieldReader inner(kv, "kv.");
    if (const auto bits = inner.Int("min_bits", 4, 16)) {
      if (*bits != 4 && *bits != 8 && *bits != 16) {
        inner.Fail("min_bits", "must be 16, 8 or 4, not " + std::to_string(*bits));
      }
      out->kv.min_bits = static_cast<int>(*bits);
    }
    ReadCapacity(&inner, &out->kv.capacity);
    if (inner.failed()) fields->Fail(*inner.error());
  }
  out->kv.cache_salt = fields->String("cache_salt", kMaxSaltBytes).value_or("");
  out->priority =
      static_cast<int>(fields->Int("priority", -kMaxPriority, kMaxPriority).value_or(0));
}

void ReadStreaming(FieldReader* fields, CompletionRequest* out) {
  out->stream = fields->Bool("stream").value_or(false);
  const Json* options = fields->Find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) {
    fields->Fail("stream_options", "must be an object, not " + Describe(*options));
    return;
  }
  if (!out->stream) {
    fields->Fail("stream_options", "may only be set when 'stream' is true");
    return;
  }
  FieldReader inner(options, "stream_options.");
  out->include_usage = inner.Bool("include_usage").value_or(false);
  if (inner.failed()) fields->Fail(*inner.error());
}

void RefuseUnsupported(FieldReader* fields, int n) {
  if (const Json* format = fields->Find("response_format")) {
    const auto type = format->is_object() ? format->find("type") : format->end();
    if (!format->is_object() || type == format->end() || !type->is_string()) {
      fields->Fail("response_format", "must be an object with a 'type'");
    } else if (*type != "text") {
      fields->Fail("response_format",
                   "of type \"" + Excerpt(type->get_ref<const std::string&>(), 40) +
                       "\" is not supported; only \"text\" is",
                   "unsupported");
    }
  }
  if (const auto best_of = fields->Int("best_of", 1, kMaxChoices); best_of && *best_of != n) {
    fields->Fail("best_of", "is not supported other than equal to 'n'", "unsupported");
  }
  if (const auto suffix = fields->String("suffix", kNoLimit); suffix && !suffix->empty()) {
    fields->Fail("suffix", "is not supported", "unsupported");
  }
  if (const Json* modalities = fields->Find("modalities")) {
    if (*modalities != Json::array({"text"})) {
      fields->Fail("modalities", "may only be [\"text\"]", "unsupported");
    }
  }
}

/// What both endpoints share. Reads in an order that lets later checks use earlier values.
void ReadCommon(FieldReader* fields, const Tokenizer& tokenizer, CompletionRequest* out) {
  out->model = fields->String("model", kMaxModelBytes).value_or("");
  out->n = static_cast<int>(fields->Int("n", 1, kMaxChoices).value_or(1));
  RefuseUnsupported(fields, out->n);
  ReadSampling(fields, &out->base.sampling);
  ReadLogitBias(fields, tokenizer, &out->base.sampling);
  ReadStop(fields, tokenizer, &out->base.stop);
  ReadKv(fields, &out->base);
  ReadStreaming(fields, out);
  fields->String("user", kMaxModelBytes);
  out->base.special_in_text = !fields->Bool("skip_special_tokens").value_or(true);

  const auto max_tokens = fields->Int("max_tokens", 1, kMaxTokensField);
  const auto max_completion =
      out->chat ? fields->Int("max_completion_tokens", 1, kMaxTokensField) : std::nullopt;
  if (max_tokens && max_completion && *max_tokens != *max_completion) {
    fields->Fail("max_completion_tokens", "differs from 'max_tokens'; give one of them");
  }
  out->max_tokens = max_completion ? max_completion : max_tokens;
  if (!out->chat) out->default_max_tokens = kDefaultCompletionTokens;
  const std::int64_t most = out->max_tokens.value_or(out->default_max_tokens);
  if (out->base.stop.min_tokens > most) {
    fields->Fail("min_tokens", "is " + std::to_string(out->base.stop.min_tokens) +
                                   ", more than 'max_tokens', which is " + std::to_string(most));
  }
}

bool ReadIds(FieldReader* fields, const Json& list, const Tokenizer& tokenizer, PromptInput* out) {
  out->is_ids = true;
  out->ids.reserve(list.size());
  for (const Json& value : list) {
    TokenId id = 0;
    if (const auto fault = ReadTokenId(value, tokenizer.size(), &id)) {
      fields->Fail("prompt", "is wrong: " + *fault);
      return false;
    }
    out->ids.push_back(id);
  }
  return true;
}

void ReadPrompts(FieldReader* fields, const Tokenizer& tokenizer, CompletionRequest* out) {
  if (fields->failed()) return;
  const Json* prompt = fields->Find("prompt");
  if (prompt == nullptr) {
    fields->Fail("prompt",
                 "is missing; a string, a list of strings, token ids or a list of lists "
                 "of token ids is expected");
    return;
  }
  const auto add_text = [&](const Json& text) {
    if (text.get_ref<const std::string&>().empty()) {
      fields->Fail("prompt", "is empty; it needs at least one token");
      return;
    }
    out->prompts.push_back({text.get<std::string>(), {}, false});
  };
  const auto add_ids = [&](const Json& list) {
    PromptInput input;
    if (list.empty()) {
      fields->Fail("prompt", "is empty; it needs at least one token");
    } else if (ReadIds(fields, list, tokenizer, &input)) {
      out->prompts.push_back(std::move(input));
    }
  };
  if (prompt->is_string()) {
    add_text(*prompt);
  } else if (!prompt->is_array()) {
    fields->Fail("prompt", "must be a string or a list, not " + Describe(*prompt));
  } else if (prompt->empty() || prompt->front().is_number()) {
    add_ids(*prompt);
  } else {
    if (prompt->size() * static_cast<std::size_t>(out->n) > static_cast<std::size_t>(kMaxChoices)) {
      fields->Fail("prompt", "times 'n' asks for " +
                                 std::to_string(prompt->size() * static_cast<std::size_t>(out->n)) +
                                 " answers; the limit is " + std::to_string(kMaxChoices));
      return;
    }
    for (const Json& one : *prompt) {
      if (one.is_string()) {
        add_text(one);
      } else if (one.is_array()) {
        add_ids(one);
      } else {
        fields->Fail("prompt", "holds " + Describe(one) + " where a prompt is expected");
      }
      if (fields->failed()) return;
    }
  }
}

}  // namespace

std::optional<ApiError> ParseChatRequest(const Json& body, const Tokenizer& tokenizer,
                                         CompletionRequest* out) {
  out->chat = true;
  FieldReader fields(&body);
  ReadCommon(&fields, tokenizer, out);
  ReadChatInput(&fields, body, &out->chat_input);
  const bool logprobs = fields.Bool("logprobs").value_or(false);
  const auto top = fields.Int("top_logprobs", 0, kMaxTopLogprobs);
  if (top && !logprobs) fields.Fail("top_logprobs", "needs 'logprobs' to be true");
  if (logprobs) out->base.sampling.top_logprobs = static_cast<int>(top.value_or(0));
  return fields.error();
}

std::optional<ApiError> ParseTextRequest(const Json& body, const Tokenizer& tokenizer,
                                         CompletionRequest* out) {
  out->chat = false;
  FieldReader fields(&body);
  ReadCommon(&fields, tokenizer, out);
  if (const auto logprobs = fields.Int("logprobs", 0, kMaxTopLogprobs)) {
    out->base.sampling.top_logprobs = static_cast<int>(*logprobs);
  }
  out->echo = fields.Bool("echo").value_or(false);
  if (out->echo && out->base.sampling.top_logprobs >= 0) {
    fields.Fail("echo", "cannot be combined with 'logprobs': prompts have none here",
                "unsupported");
  }
  out->parse_special = fields.Bool("parse_special").value_or(true);
  out->add_special = fields.Bool("add_special").value_or(true);
  ReadPrompts(&fields, tokenizer, out);
  return fields.error();
}

std::optional<ApiError> ParseTokenizeRequest(const Json& body, TokenizeRequest* out) {
  FieldReader fields(&body);
  if (const auto content = fields.String("content", kNoLimit)) {
    out->text = *content;
  } else if (const auto prompt = fields.String("prompt", kNoLimit)) {
    out->text = *prompt;
  } else if (fields.Find("messages")) {
    ReadChatInput(&fields, body, &out->chat_input);
  } else {
    fields.Fail("content", "is missing; give 'content', 'prompt' or 'messages'");
  }
  out->add_special = fields.Bool("add_special").value_or(false);
  out->parse_special = fields.Bool("parse_special").value_or(true);
  out->with_pieces = fields.Bool("with_pieces").value_or(false);
  return fields.error();
}

std::optional<ApiError> ParseDetokenizeRequest(const Json& body, const Tokenizer& tokenizer,
                                               DetokenizeRequest* out) {
  FieldReader fields(&body);
  const Json* tokens = fields.Find("tokens");
  if (tokens == nullptr || !tokens->is_array()) {
    fields.Fail("tokens", "must be a list of token ids");
    return fields.error();
  }
  out->tokens.reserve(tokens->size());
  for (const Json& value : *tokens) {
    TokenId id = 0;
    if (const auto fault = ReadTokenId(value, tokenizer.size(), &id)) {
      fields.Fail("tokens", "is wrong: " + *fault);
      return fields.error();
    }
    out->tokens.push_back(id);
  }
  out->special = fields.Bool("special").value_or(true);
  return fields.error();
}

}  // namespace pliant
