// Room: text. Cuts the source of a template into tokens, with the white space rules of trim_blocks
// and lstrip_blocks. Free function; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pliant::jinja {

enum class Tok : std::uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,  // text holds it: + - * / // % ** ~ [ ] ( ) { } == != > >= < <= = . : | , ;
  kEof,
};

struct Token {
  Tok type;
  int line;
  std::string text;
  std::int64_t integer = 0;
  double real = 0;
};

/// Fails with kSyntax. The last token is kEof. The source must be valid UTF-8.
std::vector<Token> Tokenize(std::string_view source);

/// The token as error messages name it.
std::string Describe(const Token& token);

}  // namespace pliant::jinja
