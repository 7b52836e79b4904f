// Room: server. The endpoints, free of sockets: which one a request is for, the quick answers, and
// the work of a POST. Immutable but for the ready flag and the metrics; any thread. Post may take
// long (tokenising) and belongs on a worker thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "server/chat_prompt.h"
#include "server/generation.h"
#include "server/http_message.h"
#include "server/server.h"

namespace pliant {

enum class Route {
  kHealth,
  kReady,
  kMetrics,
  kModels,
  kModel,
  kKv,
  kChat,
  kText,
  kTokenize,
  kDetokenize,
  kNone,
};
/// The word for metrics.
std::string_view RouteName(Route route);

class Api {
 public:
  Api(const ServerOptions& options, ServedModel model);

  ServerMetrics& metrics() { return metrics_; }
  void SetReady(bool ready) { ready_.store(ready); }
  bool ready() const { return ready_.load(); }

  struct Routed {
    Route route = Route::kNone;
    std::optional<HttpResponse> answer;  // set: the body is of no interest
  };
  /// Judges a request by its head: the whole answer of a GET, 401, 404, 405, 415, 503, or nothing
  /// when the body decides. Quick.
  Routed RouteHead(const HttpRequestHead& head);

  using Posted = std::variant<HttpResponse, std::unique_ptr<Generation>>;
  /// Answers a POST, or a GET that takes time (/v1/kv). `notify` is called on the engine thread when the generation has something to
  /// take.
  Posted Post(Route route, const std::string& body, std::function<void()> notify);

 private:
  std::optional<HttpResponse> Refuse(const HttpRequestHead& head, Route route) const;
  HttpResponse Models(Route route, const std::string& path) const;
  Json ModelJson() const;
  HttpResponse Kv();  // waits for the engine's step
  Posted Complete(bool chat, const Json& body, std::function<void()> notify);
  std::optional<ApiError> Plan(CompletionRequest request, GenerationPlan* plan) const;
  std::optional<ApiError> AddPrompt(const CompletionRequest& request, std::vector<TokenId> ids,
                                    std::string echo, GenerationPlan* plan) const;
  Result<std::vector<TokenId>> EncodeChat(const ChatInput& input) const;
  HttpResponse Tokenize(const Json& body) const;
  HttpResponse Detokenize(const Json& body) const;

  ServerOptions options_;
  ServedModel model_;
  std::int64_t started_;  // seconds since 1970
  ServerMetrics metrics_;
  std::atomic<bool> ready_{false};
  std::unique_ptr<ChatPrompter> prompter_;  // null without a template
};

}  // namespace pliant
