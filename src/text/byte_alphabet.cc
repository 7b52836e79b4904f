#include "text/byte_alphabet.h"

#include <array>

#include "text/utf8.h"

namespace pliant {
namespace {

constexpr bool StandsForItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr int kAlphabetEnd = 256 + 68;

struct Alphabet {
  std::array<char32_t, 256> character;
  std::array<std::int16_t, kAlphabetEnd> byte;  // -1: not in the alphabet
};

constexpr Alphabet MakeAlphabet() {
  Alphabet a{};
  a.byte.fill(-1);
  int next = 256;
  for (int b = 0; b < 256; ++b) {
    const int c = StandsForItself(b) ? b : next++;
    a.character[b] = static_cast<char32_t>(c);
    a.byte[c] = static_cast<std::int16_t>(b);
  }
  return a;
}

constexpr Alphabet kAlphabet = MakeAlphabet();

}  // namespace

char32_t ByteToAlphabet(std::uint8_t byte) { return kAlphabet.character[byte]; }

std::optional<std::string> AlphabetToBytes(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  while (!text.empty()) {
    const Utf8Unit unit = NextUtf8(text);
    if (unit.kind != Utf8Unit::Kind::kCharacter || unit.code_point >= kAlphabetEnd ||
        kAlphabet.byte[unit.code_point] < 0) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kAlphabet.byte[unit.code_point]));
    text.remove_prefix(unit.size);
  }
  return bytes;
}

std::string BytesToAlphabet(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) AppendUtf8(ByteToAlphabet(static_cast<std::uint8_t>(c)), &text);
  return text;
}

}  // namespace pliant
