#include "replay/line_reader.h"

namespace pliant {

bool ReadLine(std::istream& in, std::string& line, std::size_t limit) {
  constexpr auto kEnd = std::streambuf::traits_type::eof();
  line.clear();
  std::streambuf& buffer = *in.rdbuf();
  for (int c = buffer.sbumpc();; c = buffer.sbumpc()) {
    if (c == kEnd) return !line.empty();
    if (c == '\n') return true;
    line.push_back(static_cast<char>(c));
    if (line.size() > limit) return true;
  }
}

}  // namespace pliant
