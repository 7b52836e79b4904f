#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "text/unicode_ranges.h"
#include "text/utf8.h"

namespace pliant {
namespace {

// U+11938 (Unicode 13) is newer than the reference's data: it neither decomposes there nor is it
// composed.
constexpr char32_t kUnknownComposite = 0x11938, kItsSecondHalf = 0x11930;

/// Whether text of only such bytes is NFC as it stands: below U+0300 nothing combines and nothing
/// decomposes for good.
bool BelowCombining(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<std::uint8_t>(c) < 0xCC; });
}

int LibraryCombiningClass(char32_t c) {
  if (c < 0x300) return 0;
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
}

/// A mark of the library's that the reference takes as a starter.
bool IsUnknownMark(char32_t c) {
  return LibraryCombiningClass(c) != 0 && Contains(kNfcStarters, c);
}

int CombiningClass(char32_t c) { return IsUnknownMark(c) ? 0 : LibraryCombiningClass(c); }

/// Appends the full canonical decomposition of one character.
void Decompose(char32_t c, std::vector<std::int32_t>* out) {
  if (c < 0xC0 || c == kUnknownComposite) {
    out->push_back(static_cast<std::int32_t>(c));
    return;
  }
  std::int32_t parts[32];  // the longest canonical decomposition has 4
  int boundary = 0;
  const auto count = utf8proc_decompose_char(
      static_cast<utf8proc_int32_t>(c), parts, 32,
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &boundary);
  PLIANT_CHECK(count >= 1 && count <= 32, "canonical decomposition of a valid code point");
  out->insert(out->end(), parts, parts + count);
}

/// Canonical ordering. utf8proc's own is quadratic in the length of a run of marks, so it is not
/// used.
void SortMarks(std::vector<std::int32_t>* code_points) {
  struct Mark {
    int combining_class;
    std::int32_t code_point;
  };
  std::vector<Mark> run;
  for (std::size_t i = 0; i < code_points->size();) {
    run.clear();
    std::size_t end = i;
    for (; end < code_points->size(); ++end) {
      const std::int32_t c = (*code_points)[end];
      const int ccc = CombiningClass(static_cast<char32_t>(c));
      if (ccc == 0) break;
      run.push_back({ccc, c});
    }
    if (run.size() > 1) {
      std::stable_sort(run.begin(), run.end(), [](const Mark& a, const Mark& b) {
        return a.combining_class < b.combining_class;
      });
      for (std::size_t k = 0; k < run.size(); ++k) (*code_points)[i + k] = run[k].code_point;
    }
    i = end + 1;
  }
}

}  // namespace

std::string_view NormalizeNfc(std::string_view text, std::string* storage) {
  if (BelowCombining(text)) return text;
  std::vector<std::int32_t> code_points;
  code_points.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Unit unit = NextUtf8(text.substr(at));
    Decompose(unit.code_point, &code_points);
    at += unit.size;
  }
  SortMarks(&code_points);

  storage->clear();
  storage->reserve(text.size());
  // utf8proc composes piece by piece: a mark the reference does not know begins a piece, so nothing
  // composes across it.
  const auto begins_piece = [](std::int32_t c) {
    const auto code = static_cast<char32_t>(c);
    return code == kItsSecondHalf || IsUnknownMark(code);
  };
  for (std::size_t i = 0; i < code_points.size();) {
    std::size_t end = i + 1;
    while (end < code_points.size() && !begins_piece(code_points[end])) ++end;
    const auto composed = utf8proc_normalize_utf32(
        code_points.data() + i, static_cast<utf8proc_ssize_t>(end - i),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    PLIANT_CHECK(composed >= 0, "canonical composition");
    for (utf8proc_ssize_t k = 0; k < composed; ++k) {
      AppendUtf8(static_cast<char32_t>(code_points[i + k]), storage);
    }
    i = end;
  }
  return *storage;
}

}  // namespace pliant
