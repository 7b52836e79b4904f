// Room: text. Unicode normalisation form C as the reference does it. Pure functions; any thread.
#pragma once

#include <string>
#include <string_view>

namespace pliant {

/// NFC of valid UTF-8. Returns `text` itself when nothing can change, else a view of `*storage`.
/// Linear in the text but for sorting runs of combining marks (n log n).
std::string_view NormalizeNfc(std::string_view text, std::string* storage);

}  // namespace pliant
