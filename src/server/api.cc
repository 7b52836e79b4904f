#include "server/api.h"

#include <algorithm>
#include <chrono>

namespace pliant {
namespace {

std::int64_t UnixSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

struct RouteRow {
  std::string_view path;
  Route route;
  bool post;
};
constexpr RouteRow kRoutes[] = {
    {"/health", Route::kHealth, false},
    {"/ready", Route::kReady, false},
    {"/metrics", Route::kMetrics, false},
    {"/v1/models", Route::kModels, false},
    {"/v1/chat/completions", Route::kChat, true},
    {"/v1/completions", Route::kText, true},
    {"/v1/kv", Route::kKv, false},
    {"/tokenize", Route::kTokenize, true},
    {"/detokenize", Route::kDetokenize, true},
};
constexpr std::string_view kModelPrefix = "/v1/models/";

RouteRow FindRoute(std::string_view path) {
  for (const RouteRow& row : kRoutes) {
    if (row.path == path) return row;
  }
  if (path.starts_with(kModelPrefix) && path.size() > kModelPrefix.size()) {
    return {kModelPrefix, Route::kModel, false};
  }
  return {"", Route::kNone, false};
}

HttpResponse JsonResponse(const Json& json, int status = 200) {
  HttpResponse out;
  out.status = status;
  out.body = DumpJson(json);
  return out;
}

ApiError Refusal(int http_status, std::string message, std::string code) {
  ApiError error;
  error.http_status = http_status;
  error.message = std::move(message);
  error.code = std::move(code);
  return error;
}

/// Takes as long for a near miss as for a far one.
bool EqualInConstantTime(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ (b.empty() ? 0 : b[i % b.size()]));
  }
  return difference == 0;
}

ApiError UnknownModel(const std::string& name) {
  ApiError error =
      Refusal(404, "the model \"" + Excerpt(name) + "\" does not exist here", "model_not_found");
  error.param = "model";
  return error;
}

}  // namespace

std::string_view RouteName(Route route) {
  switch (route) {
    case Route::kHealth:
      return "health";
    case Route::kReady:
      return "ready";
    case Route::kMetrics:
      return "metrics";
    case Route::kModels:
    case Route::kModel:
      return "models";
    case Route::kKv:
      return "kv";
    case Route::kChat:
      return "chat_completions";
    case Route::kText:
      return "completions";
    case Route::kTokenize:
      return "tokenize";
    case Route::kDetokenize:
      return "detokenize";
    case Route::kNone:
      return "other";
  }
  return "other";
}

Api::Api(const ServerOptions& options, ServedModel model)
    : options_(options),
      model_(std::move(model)),
      started_(UnixSeconds()),
      metrics_(model_.model_id) {
  PLIANT_CHECK(model_.engine != nullptr && model_.tokenizer != nullptr,
               "a served model has an engine and a tokenizer");
  if (model_.chat_template != nullptr) {
    prompter_ = std::make_unique<ChatPrompter>(
        model_.tokenizer,
        [chat_template = model_.chat_template](const Json& context) {
          return chat_template->Render(context);
        },
        model_.bos_text, model_.eos_text);
  }
}

std::optional<HttpResponse> Api::Refuse(const HttpRequestHead& head, Route route) const {
  if (options_.api_key.empty() || route == Route::kHealth || route == Route::kReady) {
    return std::nullopt;
  }
  constexpr std::string_view kScheme = "Bearer ";
  const std::string_view given = head.authorization;
  if (given.starts_with(kScheme) &&
      EqualInConstantTime(given.substr(kScheme.size()), options_.api_key)) {
    return std::nullopt;
  }
  HttpResponse out = ErrorResponse(Refusal(
      401, "an API key is needed: send the header 'Authorization: Bearer KEY'", "invalid_api_key"));
  out.headers.emplace_back("WWW-Authenticate", "Bearer");
  return out;
}

Api::Routed Api::RouteHead(const HttpRequestHead& head) {
  const RouteRow row = FindRoute(head.path);
  Routed out;
  out.route = row.route;
  const std::string allow = row.post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
  if (head.method == "OPTIONS" && (row.route != Route::kNone || head.path == "*")) {
    HttpResponse answer;
    answer.status = 204;
    answer.content_type.clear();
    answer.headers.emplace_back("Allow", head.path == "*" ? "GET, HEAD, POST, OPTIONS" : allow);
    if (!options_.cors_origin.empty()) {
      answer.headers.emplace_back("Access-Control-Allow-Methods", allow);
      answer.headers.emplace_back("Access-Control-Allow-Headers", "Authorization, Content-Type");
      answer.headers.emplace_back("Access-Control-Max-Age", "86400");
    }
    out.answer = std::move(answer);
    return out;
  }
  if ((out.answer = Refuse(head, row.route))) return out;
  if (row.route == Route::kNone) {
    out.answer = ErrorResponse(
        Refusal(404, "there is nothing at \"" + Excerpt(head.path) + "\"", "not_found"));
    return out;
  }
  const bool fits =
      row.post ? head.method == "POST" : head.method == "GET" || head.method == "HEAD";
  if (!fits) {
    out.answer = ErrorResponse(Refusal(
        405, "\"" + Excerpt(head.path) + "\" takes " + allow + ", not " + Excerpt(head.method, 20),
        "method_not_allowed"));
    out.answer->headers.emplace_back("Allow", allow);
    return out;
  }
  if (!head.content_encoding.empty() && head.content_encoding != "identity") {
    out.answer = ErrorResponse(Refusal(
        415,
        "bodies with Content-Encoding \"" + Excerpt(head.content_encoding, 40) + "\" are not taken",
        "unsupported_encoding"));
    return out;
  }
  switch (row.route) {
    case Route::kHealth:
      out.answer = JsonResponse({{"status", "ok"}});
      break;
    case Route::kReady:
      out.answer = ready() ? JsonResponse({{"status", "ready"}})
                           : ErrorResponse(FromStatus(Unavailable("loading, or shutting down")));
      break;
    case Route::kMetrics: {
      HttpResponse text;
      text.content_type = "text/plain; version=0.0.4; charset=utf-8";
      text.body = metrics_.Text(model_.engine->Stats(), ready());
      out.answer = std::move(text);
      break;
    }
    case Route::kModels:
    case Route::kModel:
      out.answer = Models(row.route, head.path);
      break;
    case Route::kChat:
    case Route::kText:
      if (!ready()) {
        out.answer = ErrorResponse(FromStatus(
            Unavailable("no new work is taken: the server is loading, or shutting down")));
      }
      break;
    default:
      break;
  }
  return out;
}

Json Api::ModelJson() const {
  Json out;
  out["id"] = model_.model_id;
  out["object"] = "model";
  out["created"] = started_;
  out["owned_by"] = "pliant";
  out["max_model_len"] = model_.engine->MaxContext();
  out["vocab_size"] = model_.tokenizer->size();
  Json& kv = out["kv"];
  kv["k_bits"] = model_.kv.k_bits;
  kv["v_bits"] = model_.kv.v_bits;
  kv["floor_bits"] = model_.kv.floor_bits;
  kv["bytes_per_token"] = model_.kv.bytes_per_token;
  kv["policy"] = model_.kv.policy;
  return out;
}

HttpResponse Api::Models(Route route, const std::string& path) const {
  if (route == Route::kModels) {
    Json out;
    out["object"] = "list";
    out["data"] = Json::array({ModelJson()});
    return JsonResponse(out);
  }
  const std::string name = path.substr(kModelPrefix.size());
  if (name != model_.model_id) return ErrorResponse(UnknownModel(name));
  return JsonResponse(ModelJson());
}

Api::Posted Api::Post(Route route, const std::string& body, std::function<void()> notify) {
  if (route == Route::kKv) return Kv();
  Json json;
  if (const auto error = ParseJsonBody(body, {}, &json)) return ErrorResponse(*error);
  switch (route) {
    case Route::kChat:
      return Complete(true, json, std::move(notify));
    case Route::kText:
      return Complete(false, json, std::move(notify));
    case Route::kTokenize:
      return Tokenize(json);
    case Route::kDetokenize:
      return Detokenize(json);
    default:
      return ErrorResponse(FromStatus(Internal("a route without a handler")));
  }
}

HttpResponse Api::Kv() {
  Result<std::string> report = model_.engine->KvReportJson();
  if (!report.ok()) return ErrorResponse(FromStatus(report.status()));
  HttpResponse out;
  out.body = std::move(report).value();
  return out;
}

Api::Posted Api::Complete(bool chat, const Json& body, std::function<void()> notify) {
  CompletionRequest request;
  std::optional<ApiError> error = chat ? ParseChatRequest(body, *model_.tokenizer, &request)
                                       : ParseTextRequest(body, *model_.tokenizer, &request);
  if (error) return ErrorResponse(*error);
  // An explicit name must be right; {"model": ""} is one.
  const auto model = body.find("model");
  if (model != body.end() && !model->is_null() && request.model != model_.model_id) {
    return ErrorResponse(UnknownModel(request.model));
  }
  GenerationPlan plan;
  if ((error = Plan(std::move(request), &plan))) return ErrorResponse(*error);
  Result<std::unique_ptr<Generation>> started = Generation::Start(
      std::move(plan), model_.engine, model_.tokenizer, &metrics_, std::move(notify));
  if (!started.ok()) {
    ApiError refusal = FromStatus(started.status());
    if (started.status().code() == StatusCode::kTooLarge) refusal.code = "context_length_exceeded";
    return ErrorResponse(refusal);
  }
  return std::move(started).value();
}

Result<std::vector<TokenId>> Api::EncodeChat(const ChatInput& input) const {
  if (!prompter_) {
    return InvalidArgument(
        "this model has no chat template; start the server with --chat-template");
  }
  return prompter_->Encode(input);
}

std::optional<ApiError> Api::Plan(CompletionRequest request, GenerationPlan* plan) const {
  plan->header.chat = request.chat;
  plan->header.id = NewAnswerId(request.chat);
  plan->header.created = UnixSeconds();
  plan->header.model = model_.model_id;
  plan->header.include_usage = request.include_usage;
  plan->stream = request.stream;
  plan->n = request.n;
  plan->base = request.base;
  plan->max_plain_bytes = options_.max_plain_bytes;
  if (request.chat) {
    Result<std::vector<TokenId>> ids = EncodeChat(request.chat_input);
    if (!ids.ok()) return FromStatus(ids.status(), "messages");
    return AddPrompt(request, std::move(ids).value(), "", plan);
  }
  for (PromptInput& prompt : request.prompts) {
    std::vector<TokenId> ids = std::move(prompt.ids);
    std::string echo;
    if (prompt.is_ids) {
      if (request.echo) echo = model_.tokenizer->Decode(ids, true);
    } else {
      Result<std::vector<TokenId>> encoded = model_.tokenizer->Encode(
          prompt.text, {.parse_special = request.parse_special, .add_bos = request.add_special});
      if (!encoded.ok()) return FromStatus(encoded.status(), "prompt");
      ids = std::move(encoded).value();
      if (request.echo) echo = std::move(prompt.text);
    }
    if (auto error = AddPrompt(request, std::move(ids), std::move(echo), plan)) return error;
  }
  return std::nullopt;
}

std::optional<ApiError> Api::AddPrompt(const CompletionRequest& request, std::vector<TokenId> ids,
                                       std::string echo, GenerationPlan* plan) const {
  const std::string field = request.chat ? "messages" : "prompt";
  const std::int64_t context = model_.engine->MaxContext();
  const auto length = static_cast<std::int64_t>(ids.size());
  if (length == 0)
    return BadField(field, "'" + field + "' gives no tokens; at least one is needed");
  if (length >= context) {
    return BadField(field,
                    "the prompt has " + std::to_string(length) + " tokens; the context is " +
                        std::to_string(context) + " tokens, and the answer needs at least one",
                    "context_length_exceeded");
  }
  const std::int64_t room = context - length;
  if (request.max_tokens && *request.max_tokens > room) {
    return BadField("max_tokens",
                    "the prompt has " + std::to_string(length) + " tokens and 'max_tokens' is " +
                        std::to_string(*request.max_tokens) +
                        "; together they pass the context of " + std::to_string(context) +
                        " tokens",
                    "context_length_exceeded");
  }
  if (request.base.stop.min_tokens > room) {
    return BadField("min_tokens",
                    "'min_tokens' is " + std::to_string(request.base.stop.min_tokens) +
                        "; the context has room for " + std::to_string(room) + " tokens",
                    "context_length_exceeded");
  }
  plan->prompts.push_back(
      {std::move(ids), std::move(echo),
       request.max_tokens.value_or(std::min(request.default_max_tokens, room))});
  return std::nullopt;
}

HttpResponse Api::Tokenize(const Json& body) const {
  TokenizeRequest request;
  if (const auto error = ParseTokenizeRequest(body, &request)) return ErrorResponse(*error);
  const Result<std::vector<TokenId>> ids =
      request.text
          ? model_.tokenizer->Encode(*request.text, {.parse_special = request.parse_special,
                                                     .add_bos = request.add_special})
          : EncodeChat(request.chat_input);
  if (!ids.ok()) {
    return ErrorResponse(FromStatus(ids.status(), request.text ? "content" : "messages"));
  }
  Json tokens = Json::array();
  for (TokenId id : *ids) {
    if (!request.with_pieces) {
      tokens.push_back(id);
      continue;
    }
    const std::string_view piece = model_.tokenizer->TokenBytes(id, true);
    Json entry;
    entry["id"] = id;
    if (IsValidUtf8(piece)) {
      entry["piece"] = piece;
    } else {  // half a character
      entry["piece"] = Json::array();
      for (unsigned char byte : piece) entry["piece"].push_back(byte);
    }
    tokens.push_back(std::move(entry));
  }
  Json out;
  out["tokens"] = std::move(tokens);
  out["count"] = ids->size();
  return JsonResponse(out);
}

HttpResponse Api::Detokenize(const Json& body) const {
  DetokenizeRequest request;
  if (const auto error = ParseDetokenizeRequest(body, *model_.tokenizer, &request)) {
    return ErrorResponse(*error);
  }
  Json out;
  out["content"] = model_.tokenizer->Decode(request.tokens, request.special);
  return JsonResponse(out);
}

}  // namespace pliant
