#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include "cli/commands.h"
#include "cli/options.h"

namespace pliant {
namespace {

struct TokenizeFlags {
  ModelFlags model;
  bool decode = false;
  bool special = false;
  bool bos = false;
};

constexpr std::size_t kMaxInput = 64u << 20;  // the tokenizer's own limit

int Tokenize(const TokenizeFlags& flags) {
  Result<OpenedModel> opened = OpenModel(flags.model);
  if (!opened.ok()) return Fail(opened.status());
  const Tokenizer& tokenizer = *opened->tokenizer;
  Result<std::string> input = ReadText("-", kMaxInput);
  if (!input.ok()) return Fail(input.status());
  if (!flags.decode) {
    Result<std::vector<TokenId>> ids =
        tokenizer.Encode(*input, {.parse_special = flags.special, .add_bos = flags.bos});
    if (!ids.ok()) return Fail(ids.status());
    for (std::size_t i = 0; i < ids->size(); ++i) std::printf("%s%d", i == 0 ? "" : " ", (*ids)[i]);
    std::printf("\n");
    return 0;
  }
  std::string cleaned = *std::move(input);
  for (char& c : cleaned) {
    if (c == ',' || c == '[' || c == ']') c = ' ';
  }
  std::istringstream words(cleaned);
  std::vector<TokenId> ids;
  for (std::string word; words >> word;) {
    char* end = nullptr;
    const long id = std::strtol(word.c_str(), &end, 10);
    if (*end != '\0' || id < 0 || id >= tokenizer.size()) {
      return Fail(InvalidArgument("'" + word.substr(0, 40) +
                                  "' is not a token id; they go from 0 to " +
                                  std::to_string(tokenizer.size() - 1)));
    }
    ids.push_back(static_cast<TokenId>(id));
  }
  const std::string text = tokenizer.Decode(ids, true);
  std::fwrite(text.data(), 1, text.size(), stdout);
  return 0;
}

struct TemplateFlags {
  std::vector<std::string> words;  // [MODEL] FILE
  ModelFlags model;
  bool no_generation_prompt = false;
};

int Template(TemplateFlags flags) {
  if (flags.words.size() == 2) flags.model.model = flags.words[0];
  Result<std::string> messages = ReadText(flags.words.back(), kMaxInput);
  if (!messages.ok()) return Fail(messages.status());
  Result<OpenedModel> opened = OpenModel(flags.model);
  if (!opened.ok()) return Fail(opened.status());
  Result<std::string> text = RenderChat(*opened, *messages, !flags.no_generation_prompt);
  if (!text.ok()) return Fail(text.status());
  std::fwrite(text->data(), 1, text->size(), stdout);
  return 0;
}

}  // namespace

Command AddTokenize(CLI::App& app) {
  auto flags = std::make_shared<TokenizeFlags>();
  flags->model.AddTo(app);
  app.add_flag("--decode", flags->decode,
               "Token ids on standard input (blanks or commas between), text out");
  app.add_flag(
      "--special", flags->special,
      "Read control tokens in the text as such (<|im_start|>); otherwise they are characters");
  app.add_flag("--bos", flags->bos, "Put the begin token in front where the model wants one");
  return [flags] { return Tokenize(*flags); };
}

Command AddTemplate(CLI::App& app) {
  auto flags = std::make_shared<TemplateFlags>();
  app.add_option("MODEL_AND_FILE", flags->words,
                 "[MODEL] FILE: FILE holds a JSON list of messages, or an object with messages, "
                 "tools, ...; - is standard input")
      ->required()
      ->expected(1, 2);
  app.add_option("--chat-template", flags->model.chat_template,
                 "Jinja file that replaces the model's own chat template");
  app.add_flag("--no-generation-prompt", flags->no_generation_prompt,
               "Do not open the assistant's turn at the end");
  return [flags] { return Template(*flags); };
}

}  // namespace pliant
