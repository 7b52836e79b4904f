// Room: server. One POST to a completions endpoint while the engine works on it: its choices, its
// engine requests, its answer. A Generation belongs to one thread at a time (its connection's
// strand); only the Mailbox is shared with the engine thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "server/http_message.h"
#include "server/metrics.h"
#include "server/openai_format.h"
#include "server/openai_request.h"

namespace pliant {

/// Where the engine thread leaves events. It never waits for the reader: the lock covers a push or
/// a swap.
class Mailbox {
 public:
  struct Item {
    int choice = 0;
    Nanoseconds at = 0;
    TokenEvent event;
  };
  /// `notify` is called once after the box turns from empty to filled, under the lock, on the
  /// engine thread; it must not block.
  explicit Mailbox(std::function<void()> notify) : notify_(std::move(notify)) {}
  void Push(Item item);
  std::vector<Item> Take();
  /// After this nothing is kept and notify is not called any more.
  void Close();

 private:
  std::mutex mutex_;
  std::vector<Item> items_;
  bool closed_ = false;
  std::function<void()> notify_;
};

/// One answer to be made: for each prompt its tokens, and the text to put in front (echo).
struct GenerationPlan {
  AnswerHeader header;
  bool stream = false;
  int n = 1;  // choices a prompt
  GenerateRequest base;
  struct Prompt {
    std::vector<TokenId> ids;
    std::string echo;
    std::int64_t max_tokens = 1;
  };
  std::vector<Prompt> prompts;
  std::size_t max_plain_bytes = 64u << 20;  // a plain answer that would be larger fails
};

class Generation {
 public:
  /// Submits every choice. When one is refused those before it are cancelled and the refusal is
  /// returned.
  static Result<std::unique_ptr<Generation>> Start(GenerationPlan plan, Engine* engine,
                                                   const Tokenizer* tokenizer,
                                                   ServerMetrics* metrics,
                                                   std::function<void()> notify);
  /// Cancels whatever the engine has not finished.
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  bool streaming() const { return plan_.stream; }

  struct Progress {
    std::string stream;  // server-sent events to send now
    std::optional<HttpResponse>
        response;  // the whole answer: a plain one, or an error before a stream began
    bool done = false;
  };
  /// Takes what the engine has said since the last call.
  Progress Advance();

 private:
  struct Choice {
    RequestId request;
    std::string text;
    std::vector<TokenLogprob> logprobs;
    LogprobCursor cursor;
    bool started = false;
    bool submitted = false;
    Nanoseconds last_token = 0;
    std::optional<FinishReason> finish;
    std::string stop_match;
    Usage usage;
  };

  Generation(GenerationPlan plan, Engine* engine, const Tokenizer* tokenizer,
             ServerMetrics* metrics, std::function<void()> notify);
  Status SubmitAll();
  std::vector<Mailbox::Item> TakeMerged();
  void Take(Mailbox::Item item, Progress* progress);
  void Observe(const Mailbox::Item& item, Choice* choice);
  void TakeStreamed(int index, TokenEvent event, Choice* choice, Progress* progress);
  void Fail(const ApiError& error, Progress* progress);
  void Finish(Progress* progress);
  Usage TotalUsage() const;
  void CancelOpen();

  GenerationPlan plan_;
  Engine* engine_;
  const Tokenizer* tokenizer_;
  ServerMetrics* metrics_;
  std::shared_ptr<Mailbox> mailbox_;
  std::vector<Choice> choices_;
  Nanoseconds submitted_at_ = 0;
  std::size_t plain_bytes_ = 0;
  std::size_t open_ = 0;  // choices without their last event
  bool sent_ = false;     // part of a stream is out
  bool over_ = false;
};

}  // namespace pliant
