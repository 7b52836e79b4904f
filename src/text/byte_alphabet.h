// Room: text. GPT-2's byte-to-unicode alphabet: every byte is written as one printable character,
// so that vocabularies of arbitrary byte strings fit in text files. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pliant {

/// The character that stands for a byte. Printable Latin-1 stands for itself, the other 68 bytes
/// for U+0100 and up, in order.
char32_t ByteToAlphabet(std::uint8_t byte);

/// The bytes that a token's text stands for, or nothing when it has a character outside the
/// alphabet or is not valid UTF-8.
std::optional<std::string> AlphabetToBytes(std::string_view text);

/// The text that stands for some bytes; the inverse of AlphabetToBytes.
std::string BytesToAlphabet(std::string_view bytes);

}  // namespace pliant
