// Room: text. UTF-8 as untrusted bytes: decoding with the exact extent of what is invalid, and the
// few Unicode classes that are needed outside regular expressions. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pliant {

/// What stands at the start of some bytes.
struct Utf8Unit {
  enum class Kind : std::uint8_t {
    kCharacter,   // a whole character
    kInvalid,     // a maximal invalid sequence: as many bytes as could have begun a character, at
                  // least one
    kIncomplete,  // the start of a character that the end of the bytes cuts off
  };
  Kind kind;
  std::uint8_t size;    // bytes, 1 to 4
  char32_t code_point;  // of a character, else U+FFFD
};

/// Classifies the first unit of `bytes`, which must not be empty. Surrogates, overlong forms and
/// values above U+10FFFF are invalid (Unicode 3.9, table 3-7; substitution of maximal subparts).
Utf8Unit NextUtf8(std::string_view bytes);

/// The code point that ends `bytes`, which must not be empty; U+FFFD where no whole character does.
char32_t LastCodePoint(std::string_view bytes);

/// Length of the longest valid UTF-8 prefix.
std::size_t ValidUtf8Prefix(std::string_view bytes);

void AppendUtf8(char32_t code_point, std::string* out);

/// Moves all that is certain from `pending` into `out`: characters as they are, each maximal
/// invalid sequence as one U+FFFD. What stays, at most 3 bytes, is the start of a character. With
/// `flush` nothing stays.
void DrainUtf8(std::string* pending, bool flush, std::string* out);

/// Unicode White_Space, which is what the reference's \s means.
bool IsWhitespace(char32_t c);
/// The reference's \w, as far as word edges of added tokens need it: letters, marks, numbers,
/// connector punctuation.
bool IsWordCharacter(char32_t c);

}  // namespace pliant
