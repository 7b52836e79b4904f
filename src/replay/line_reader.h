// Room: replay. Lines of files that nobody vouches for. Any thread.
#pragma once

#include <istream>
#include <string>

namespace pliant {

/// Reads one line without its end; false at the end of the input. Stops `limit` + 1 bytes into a
/// longer line, so that one endless line costs no memory: the caller refuses lines larger than
/// `limit`.
bool ReadLine(std::istream& in, std::string& line, std::size_t limit);

}  // namespace pliant
