// Room: backend. Weights as the CPU kernels read them. One form serves every kernel and every
// number of rows, so that a result does not depend on the batch it was computed in.
//
// A matrix is cut into panels of 32 rows (outputs); a panel into blocks of 32 columns, one behind
// the other, so that a product streams memory once, in order. A block is [scales][codes]:
//   4 bits  8 groups of 4 rows, a group = 32 words of 16 bits: word k holds column k of the four
//           rows, row 0 in the low digit. One shift then brings a row's codes into the low digit of
//           32 words, where a 32-entry word permute can look up its 16 dequantised values.
//   5 bits  as 4 bits, then 32 words of 32 bits: bit r of word k is the fifth bit of row r.
//   8 bits  row by row, signed bytes.
//   bf16    row by row, 32 bf16 a row; F32 likewise.
// Scales, [32] each = one a row: half d (Q4_0, Q5_0, Q8_0); half d, half m (Q4_1, Q5_1); for the
// K types unsigned bytes scale and min, or two signed-byte scales for the two halves of the block
// (Q6_K), multiplied by half d (and half dmin) of the superblock, which lie before every 8 blocks.
// A quantised weight takes the bytes it has in the file, except Q6_K (8 bits in place of 6).
//
// A packed matrix is immutable; any thread may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/arena.h"
#include "base/status.h"
#include "base/thread_pool.h"

namespace pliant {

inline constexpr int kPanelRows = 32;
inline constexpr int kPanelCols = 32;   // columns of a block
inline constexpr int kSuperBlocks = 8;  // blocks of a superblock (256 columns)

enum class PackedFormat : std::uint8_t {
  kQ4_0,
  kQ4_1,
  kQ4_K,
  kQ5_0,
  kQ5_1,
  kQ5_K,
  kQ8_0,
  kQ6_K,
  kBf16,
  kF32,
};

struct PackedTraits {
  int code_bits;
  int zero;                 // what a code's value is counted from: value = d (code - zero) + m
  std::size_t super_bytes;  // before every 8 blocks
  std::size_t scale_bytes;  // of a block
  std::size_t code_bytes;   // of a block
};

constexpr PackedTraits Traits(PackedFormat format) {
  switch (format) {
    case PackedFormat::kQ4_0:
      return {4, 8, 0, 64, 512};
    case PackedFormat::kQ4_1:
      return {4, 0, 0, 128, 512};
    case PackedFormat::kQ4_K:
      return {4, 0, 128, 64, 512};
    case PackedFormat::kQ5_0:
      return {5, 16, 0, 64, 640};
    case PackedFormat::kQ5_1:
      return {5, 0, 0, 128, 640};
    case PackedFormat::kQ5_K:
      return {5, 0, 128, 64, 640};
    case PackedFormat::kQ8_0:
      return {8, 0, 0, 64, 1024};
    case PackedFormat::kQ6_K:
      return {8, 0, 64, 64, 1024};
    case PackedFormat::kBf16:
      return {16, 0, 0, 0, 2048};
    case PackedFormat::kF32:
      return {32, 0, 0, 0, 4096};
  }
  return {};
}

constexpr std::size_t PackedBlockBytes(PackedFormat format) {
  return Traits(format).scale_bytes + Traits(format).code_bytes;
}
/// Byte offset of a block in its panel.
constexpr std::size_t PackedBlockOffset(PackedFormat format, std::int64_t block) {
  const std::size_t supers = static_cast<std::size_t>(block / kSuperBlocks) + 1;
  return supers * Traits(format).super_bytes + block * PackedBlockBytes(format);
}
/// Byte offset of the superblock header that `block` belongs to.
constexpr std::size_t PackedSuperOffset(PackedFormat format, std::int64_t block) {
  return PackedBlockOffset(format, block / kSuperBlocks * kSuperBlocks) -
         Traits(format).super_bytes;
}
constexpr std::size_t PackedPanelBytes(PackedFormat format, std::int64_t blocks) {
  const std::size_t supers = static_cast<std::size_t>((blocks + kSuperBlocks - 1) / kSuperBlocks);
  return supers * Traits(format).super_bytes + blocks * PackedBlockBytes(format);
}

/// The panels of one part of a stacked matrix.
struct PackedSegment {
  PackedFormat format = PackedFormat::kBf16;
  std::int64_t first_panel = 0;
  std::int64_t panels = 0;     // ceil(rows / 32); rows beyond are zero
  std::int64_t first_row = 0;  // of the whole matrix: the output column of the first panel
  std::int64_t rows = 0;
  const std::byte* data = nullptr;
  std::size_t panel_bytes = 0;
};

struct PackedMatrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t blocks = 0;  // ceil(cols / 32); columns beyond are zero
  std::int64_t panels = 0;
  std::vector<PackedSegment> segments;
};

/// Packs `parts` (equal cols) one below the other. F32 and F16 become bf16, or stay f32 with
/// `keep_f32`. InvalidArgument names the part whose sizes, bytes or row order do not fit.
Result<PackedMatrix> PackMatrix(std::span<const HostMatrix> parts, bool keep_f32, Arena& arena,
                                ThreadPool& pool);

/// Row `row`, dequantised to [cols] f32. Scalar; for Embed and for tests.
void UnpackRow(const PackedMatrix& matrix, std::int64_t row, float* out);

}  // namespace pliant
