// Bodies of the four POST endpoints: whatever the bytes, either one error that names its fault, or
// values inside their ranges.
#include <cmath>
#include <cstdint>

#include "base/check.h"
#include "server/openai_request.h"
#include "server/support/tiny_tokenizer.h"

namespace {

using namespace pliant;  // NOLINT

const testing::TinyTokenizer& Tiny() {
  static const testing::TinyTokenizer tokenizer;
  return tokenizer;
}

void CheckError(const ApiError& error) {
  PLIANT_CHECK(error.http_status == 400 && !error.message.empty(),
               "an error is a 400 that says something");
  const std::string body = ErrorBody(error);
  PLIANT_CHECK(IsValidUtf8(body) && Json::accept(body), "an error body is JSON");
}

void CheckRequest(const CompletionRequest& request) {
  const SamplingParams& s = request.base.sampling;
  for (float value : {s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty,
                      s.repetition_penalty}) {
    PLIANT_CHECK(std::isfinite(value), "sampling values are finite");
  }
  PLIANT_CHECK(s.temperature == 0 || s.temperature >= 0.99e-5f, "no denormal temperature");
  PLIANT_CHECK(s.top_p > 0 && s.top_p <= 1 && s.repetition_penalty > 0 && s.top_k >= 0, "ranges");
  PLIANT_CHECK(s.top_logprobs >= -1 && s.top_logprobs <= kMaxTopLogprobs, "ranges");
  for (const auto& [id, bias] : s.logit_bias) {
    PLIANT_CHECK(id >= 0 && id < Tiny().size() && std::fabs(bias) <= 100, "logit_bias");
  }
  for (TokenId id : request.base.stop.token_ids)
    PLIANT_CHECK(id >= 0 && id < Tiny().size(), "stop ids");
  PLIANT_CHECK(request.n >= 1 && request.n <= kMaxChoices, "n");
  PLIANT_CHECK(!request.max_tokens || *request.max_tokens >= 1, "max_tokens");
  PLIANT_CHECK(request.chat ? !request.chat_input.messages.empty() : !request.prompts.empty(),
               "something to do");
  for (const PromptInput& prompt : request.prompts) {
    PLIANT_CHECK(prompt.is_ids ? !prompt.ids.empty() : !prompt.text.empty(), "no empty prompt");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Json body;
  if (const auto error = ParseJsonBody({reinterpret_cast<const char*>(data), size}, {}, &body)) {
    CheckError(*error);
    return 0;
  }
  PLIANT_CHECK(IsValidUtf8(DumpJson(body)), "dumps are UTF-8");
  for (const bool chat : {true, false}) {
    CompletionRequest request;
    const auto error =
        chat ? ParseChatRequest(body, Tiny(), &request) : ParseTextRequest(body, Tiny(), &request);
    if (error) {
      CheckError(*error);
    } else {
      CheckRequest(request);
    }
  }
  TokenizeRequest tokenize;
  if (const auto error = ParseTokenizeRequest(body, &tokenize)) CheckError(*error);
  DetokenizeRequest detokenize;
  if (const auto error = ParseDetokenizeRequest(body, Tiny(), &detokenize)) CheckError(*error);
  return 0;
}
