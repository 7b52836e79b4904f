// Room: text. UTF-8 and Unicode properties as Python's str has them, over utf8proc (simple
// mappings, categories) and a table of the mappings that make several characters of one (ß to SS).
// Free functions; any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pliant::jinja {

bool IsValidUtf8(std::string_view text);  // no surrogates, no overlong forms
std::size_t CountCodePoints(std::string_view valid);
/// Decodes the character at `position` and moves past it. The text must be valid UTF-8 from there.
char32_t DecodeNext(std::string_view text, std::size_t& position);
/// Decodes the character that ends before `position` and moves to its start.
char32_t DecodePrevious(std::string_view text, std::size_t& position);
void AppendUtf8(std::string& out, char32_t c);
/// Byte position of the code point `index`, or the end.
std::size_t ByteOffset(std::string_view text, std::size_t index);

bool IsSpace(char32_t c);      // str.isspace, strip, split
bool IsLineBreak(char32_t c);  // str.splitlines
bool IsAlpha(char32_t c);
bool IsDecimal(char32_t c);
bool IsDigit(char32_t c);
bool IsNumeric(char32_t c);
bool IsAlnum(char32_t c);
bool IsPrintable(char32_t c);
bool IsUpper(char32_t c);
bool IsLower(char32_t c);
bool IsTitle(char32_t c);
bool IsCased(char32_t c);
/// Value of a decimal digit of any script; -1 for others.
int DecimalValue(char32_t c);

std::string Upper(std::string_view text);
std::string Lower(std::string_view text);
std::string Casefold(std::string_view text);
std::string SwapCase(std::string_view text);
std::string Capitalize(std::string_view text);
std::string TitleCase(std::string_view text);  // str.title()

}  // namespace pliant::jinja
