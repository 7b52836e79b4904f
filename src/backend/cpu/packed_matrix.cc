#include "backend/cpu/packed_matrix.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/dequant.h"
#include "base/check.h"

namespace pliant {
namespace {

// 32 consecutive elements of a row as the file has them, before they are laid out in a block.
struct SourceBlock {
  std::uint8_t codes[kPanelCols];  // two's complement for 8 bits
  std::uint16_t d = 0;             // half bits; of the superblock for K types
  std::uint16_t m = 0;             // half bits; dmin for K types
  std::uint8_t scale[2] = {0, 0};  // K types: scale and min; Q6_K: the scales of the two halves
};

std::uint8_t Byte(const std::byte* p) { return std::to_integer<std::uint8_t>(*p); }

std::uint16_t Word(const std::byte* p) {
  std::uint16_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

void ReadNibbles(const std::byte* nibbles, SourceBlock& out) {
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = Byte(nibbles + i) & 15;
    out.codes[i + 16] = Byte(nibbles + i) >> 4;
  }
}

void ReadFifthBits(const std::byte* bits, SourceBlock& out) {
  for (int i = 0; i < kPanelCols; ++i) {
    out.codes[i] |= static_cast<std::uint8_t>(((Byte(bits + i / 8) >> (i % 8)) & 1) << 4);
  }
}

// Q4_K and Q5_K: 6-bit scale and min of sub-block j in 12 bytes (layout: dequant.cc).
void ReadScaleMin(const std::byte* s, int j, SourceBlock& out) {
  if (j < 4) {
    out.scale[0] = Byte(s + j) & 63;
    out.scale[1] = Byte(s + j + 4) & 63;
  } else {
    out.scale[0] = static_cast<std::uint8_t>((Byte(s + j + 4) & 15) | (Byte(s + j - 4) >> 6) << 4);
    out.scale[1] = static_cast<std::uint8_t>((Byte(s + j + 4) >> 4) | (Byte(s + j) >> 6) << 4);
  }
}

// Sub-block j of a K superblock takes the low (j even) or high digits of 32 of its bytes.
void ReadNibblesK(const std::byte* nibbles, int j, SourceBlock& out) {
  const std::byte* bytes = nibbles + j / 2 * 32;
  for (int i = 0; i < kPanelCols; ++i) out.codes[i] = (Byte(bytes + i) >> (j % 2 * 4)) & 15;
}

// Q6_K: 128 bytes of low digits, 64 of high bit pairs, 16 signed scales, half d; value = d s (q -
// 32).
void ReadQ6K(const std::byte* super, int j, SourceBlock& out) {
  const int half = j / 4;  // 128 elements each
  const int part = j % 4;  // 32 elements each
  const std::byte* low = super + half * 64 + part % 2 * 32;
  const std::byte* high = super + 128 + half * 32;
  const int low_shift = part / 2 * 4;
  const int high_shift = part * 2;
  for (int i = 0; i < kPanelCols; ++i) {
    const int q = ((Byte(low + i) >> low_shift) & 15) | ((Byte(high + i) >> high_shift) & 3) << 4;
    out.codes[i] = static_cast<std::uint8_t>(q - 32);
  }
  out.scale[0] = Byte(super + 192 + j * 2);
  out.scale[1] = Byte(super + 192 + j * 2 + 1);
  out.d = Word(super + 208);
}

void ReadBlock(DType type, const std::byte* row, std::int64_t block, SourceBlock& out) {
  const DTypeTraits traits = Traits(type);
  const std::int64_t per_group = traits.block_elements / kPanelCols;
  const std::byte* p = row + block / per_group * traits.block_bytes;
  const int j = static_cast<int>(block % per_group);
  out.d = Word(p);
  switch (type) {
    case DType::kQ8_0:
      std::memcpy(out.codes, p + 2, kPanelCols);
      return;
    case DType::kQ4_0:
      ReadNibbles(p + 2, out);
      return;
    case DType::kQ4_1:
      out.m = Word(p + 2);
      ReadNibbles(p + 4, out);
      return;
    case DType::kQ5_0:
      ReadNibbles(p + 6, out);
      ReadFifthBits(p + 2, out);
      return;
    case DType::kQ5_1:
      out.m = Word(p + 2);
      ReadNibbles(p + 8, out);
      ReadFifthBits(p + 4, out);
      return;
    case DType::kQ4_K:
      out.m = Word(p + 2);
      ReadScaleMin(p + 4, j, out);
      ReadNibblesK(p + 16, j, out);
      return;
    case DType::kQ5_K:
      out.m = Word(p + 2);
      ReadScaleMin(p + 4, j, out);
      ReadNibblesK(p + 48, j, out);
      for (int i = 0; i < kPanelCols; ++i) {
        out.codes[i] |= static_cast<std::uint8_t>(((Byte(p + 16 + i) >> j) & 1) << 4);
      }
      return;
    case DType::kQ6_K:
      ReadQ6K(p, j, out);
      return;
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
      break;
  }
  PLIANT_CHECK(false, "not a quantised type");
}

PackedFormat FormatOf(DType type, bool keep_f32) {
  switch (type) {
    case DType::kF32:
    case DType::kF16:
      return keep_f32 ? PackedFormat::kF32 : PackedFormat::kBf16;
    case DType::kBF16:
      return PackedFormat::kBf16;
    case DType::kQ8_0:
      return PackedFormat::kQ8_0;
    case DType::kQ4_0:
      return PackedFormat::kQ4_0;
    case DType::kQ4_1:
      return PackedFormat::kQ4_1;
    case DType::kQ5_0:
      return PackedFormat::kQ5_0;
    case DType::kQ5_1:
      return PackedFormat::kQ5_1;
    case DType::kQ4_K:
      return PackedFormat::kQ4_K;
    case DType::kQ5_K:
      return PackedFormat::kQ5_K;
    case DType::kQ6_K:
      return PackedFormat::kQ6_K;
  }
  PLIANT_CHECK(false, "unknown type");
}

template <typename T>
void Put(std::byte* base, std::size_t index, T value) {
  std::memcpy(base + index * sizeof(T), &value, sizeof(T));
}
template <typename T>
T Get(const std::byte* base, std::size_t index) {
  T value;
  std::memcpy(&value, base + index * sizeof(T), sizeof(T));
  return value;
}

// Writes one row's 32 codes of a block whose memory is zero so far.
void PutCodes(int code_bits, std::byte* codes, int row, const std::uint8_t* values) {
  if (code_bits == 8) {
    std::memcpy(codes + row * kPanelCols, values, kPanelCols);
    return;
  }
  std::byte* group = codes + row / 4 * 64;
  const int shift = row % 4 * 4;
  for (int k = 0; k < kPanelCols; ++k) {
    const auto word = Get<std::uint16_t>(group, k);
    Put(group, k, static_cast<std::uint16_t>(word | (values[k] & 15) << shift));
  }
  if (code_bits == 5) {
    std::byte* fifth = codes + 512;
    for (int k = 0; k < kPanelCols; ++k) {
      const auto word = Get<std::uint32_t>(fifth, k);
      Put(fifth, k, word | static_cast<std::uint32_t>(values[k] >> 4) << row);
    }
  }
}

void PutScales(PackedFormat format, std::byte* super, std::byte* scales, int row,
               const SourceBlock& source) {
  switch (format) {
    case PackedFormat::kQ4_1:
    case PackedFormat::kQ5_1:
      Put(scales, kPanelRows + row, source.m);
      [[fallthrough]];
    case PackedFormat::kQ4_0:
    case PackedFormat::kQ5_0:
    case PackedFormat::kQ8_0:
      Put(scales, row, source.d);
      return;
    case PackedFormat::kQ4_K:
    case PackedFormat::kQ5_K:
      Put(super, kPanelRows + row, source.m);
      [[fallthrough]];
    case PackedFormat::kQ6_K:
      Put(super, row, source.d);
      Put(scales, row, source.scale[0]);
      Put(scales, kPanelRows + row, source.scale[1]);
      return;
    case PackedFormat::kBf16:
    case PackedFormat::kF32:
      return;
  }
}

const std::byte* SourceRow(const HostMatrix& part, std::int64_t row) {
  const std::int64_t source = part.order.empty() ? row : part.order[row];
  return part.data.data() + source * RowBytes(part.type, part.cols);
}

void PackQuantisedPanel(const HostMatrix& part, PackedFormat format, std::int64_t first_row,
                        std::byte* panel) {
  const std::int64_t blocks = part.cols / kPanelCols;
  const int rows = static_cast<int>(std::min<std::int64_t>(kPanelRows, part.rows - first_row));
  for (int r = 0; r < rows; ++r) {
    const std::byte* row = SourceRow(part, first_row + r);
    SourceBlock source;
    for (std::int64_t b = 0; b < blocks; ++b) {
      ReadBlock(part.type, row, b, source);
      std::byte* block = panel + PackedBlockOffset(format, b);
      PutScales(format, panel + PackedSuperOffset(format, b), block, r, source);
      PutCodes(Traits(format).code_bits, block + Traits(format).scale_bytes, r, source.codes);
    }
  }
}

void PackFloatPanel(const HostMatrix& part, PackedFormat format, std::int64_t first_row,
                    std::byte* panel) {
  const int rows = static_cast<int>(std::min<std::int64_t>(kPanelRows, part.rows - first_row));
  std::vector<float> values(part.cols);
  for (int r = 0; r < rows; ++r) {
    DequantizeRow(part.type, SourceRow(part, first_row + r), values);
    for (std::int64_t k = 0; k < part.cols; ++k) {
      std::byte* block = panel + PackedBlockOffset(format, k / kPanelCols);
      const std::size_t index = r * kPanelCols + k % kPanelCols;
      if (format == PackedFormat::kF32) {
        Put(block, index, values[k]);
      } else {
        Put(block, index, FloatToBf16(values[k]));
      }
    }
  }
}

Status CheckPart(const HostMatrix& part, std::int64_t cols, std::size_t index) {
  constexpr std::int64_t kMostRows = std::int64_t{1} << 31;
  const auto fail = [&](const std::string& what) {
    return InvalidArgument("weight part " + std::to_string(index) + ": " + what);
  };
  if (part.rows < 1 || part.rows > kMostRows || part.cols < 1 || part.cols > kMostRows) {
    return fail("sizes " + std::to_string(part.rows) + " x " + std::to_string(part.cols) +
                " are outside 1 .. 2^31");
  }
  if (part.cols != cols) {
    return fail(std::to_string(part.cols) + " columns where the first part has " +
                std::to_string(cols));
  }
  const DTypeTraits traits = Traits(part.type);
  if (part.cols % traits.block_elements != 0) {
    return fail(std::to_string(part.cols) + " columns are not a multiple of the " +
                std::to_string(traits.block_elements) + " of a " + std::string(traits.name) +
                " block");
  }
  const std::size_t row_bytes = RowBytes(part.type, part.cols);
  if (part.data.size() / row_bytes != static_cast<std::size_t>(part.rows) ||
      part.data.size() % row_bytes != 0) {
    return fail(std::to_string(part.data.size()) + " bytes where " + std::to_string(part.rows) +
                " rows of " + std::to_string(row_bytes) + " are needed");
  }
  if (!part.order.empty() && part.order.size() != static_cast<std::size_t>(part.rows)) {
    return fail("a row order of " + std::to_string(part.order.size()) + " entries for " +
                std::to_string(part.rows) + " rows");
  }
  for (const std::int32_t row : part.order) {
    if (row < 0 || row >= part.rows) {
      return fail("row order names row " + std::to_string(row) + " of " +
                  std::to_string(part.rows));
    }
  }
  return Status::Ok();
}

// value = d (code - zero) + m of every element of one row of a block.
void UnpackBlockRow(PackedFormat format, const std::byte* super, const std::byte* block, int row,
                    float* out) {
  const PackedTraits traits = Traits(format);
  const std::byte* codes = block + traits.scale_bytes;
  if (format == PackedFormat::kF32 || format == PackedFormat::kBf16) {
    for (int k = 0; k < kPanelCols; ++k) {
      const std::size_t index = row * kPanelCols + k;
      out[k] = format == PackedFormat::kF32 ? Get<float>(codes, index)
                                            : Bf16ToFloat(Get<std::uint16_t>(codes, index));
    }
    return;
  }
  float d[2] = {0, 0};  // of the two halves of the block
  float m = 0;
  if (traits.super_bytes == 0) {
    d[0] = d[1] = F16ToFloat(Get<std::uint16_t>(block, row));
    if (traits.scale_bytes == 128) m = F16ToFloat(Get<std::uint16_t>(block, kPanelRows + row));
  } else {
    const float super_d = F16ToFloat(Get<std::uint16_t>(super, row));
    if (format == PackedFormat::kQ6_K) {
      d[0] = super_d * Get<std::int8_t>(block, row);
      d[1] = super_d * Get<std::int8_t>(block, kPanelRows + row);
    } else {
      d[0] = d[1] = super_d * Get<std::uint8_t>(block, row);
      m = -(F16ToFloat(Get<std::uint16_t>(super, kPanelRows + row)) *
            Get<std::uint8_t>(block, kPanelRows + row));
    }
  }
  for (int k = 0; k < kPanelCols; ++k) {
    int code;
    if (traits.code_bits == 8) {
      code = Get<std::int8_t>(codes, row * kPanelCols + k);
    } else {
      code = (Get<std::uint16_t>(codes + row / 4 * 64, k) >> (row % 4 * 4)) & 15;
      if (traits.code_bits == 5) code |= ((Get<std::uint32_t>(codes + 512, k) >> row) & 1) << 4;
    }
    out[k] = d[k / 16] * static_cast<float>(code - traits.zero) + m;
  }
}

}  // namespace

Result<PackedMatrix> PackMatrix(std::span<const HostMatrix> parts, bool keep_f32, Arena& arena,
                                ThreadPool& pool) {
  if (parts.empty()) return InvalidArgument("a weight matrix of no parts");
  PackedMatrix matrix;
  matrix.cols = parts[0].cols;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    PLIANT_RETURN_IF_ERROR(CheckPart(parts[i], matrix.cols, i));
  }
  matrix.blocks = (matrix.cols + kPanelCols - 1) / kPanelCols;
  for (const HostMatrix& part : parts) {
    PackedSegment segment;
    segment.format = FormatOf(part.type, keep_f32);
    segment.first_panel = matrix.panels;
    segment.panels = (part.rows + kPanelRows - 1) / kPanelRows;
    segment.first_row = matrix.rows;
    segment.rows = part.rows;
    segment.panel_bytes = PackedPanelBytes(segment.format, matrix.blocks);
    PLIANT_ASSIGN_OR_RETURN(std::byte* const data,
                            arena.Allocate(segment.panels * segment.panel_bytes));
    pool.ForEach(segment.panels, [&](std::int64_t panel, int) {
      std::byte* to = data + panel * segment.panel_bytes;
      if (Traits(part.type).block_elements == 1) {
        PackFloatPanel(part, segment.format, panel * kPanelRows, to);
      } else {
        PackQuantisedPanel(part, segment.format, panel * kPanelRows, to);
      }
    });
    segment.data = data;
    matrix.panels += segment.panels;
    matrix.rows += segment.rows;
    matrix.segments.push_back(segment);
  }
  return matrix;
}

void UnpackRow(const PackedMatrix& matrix, std::int64_t row, float* out) {
  PLIANT_CHECK(row >= 0 && row < matrix.rows, "row outside the matrix");
  const PackedSegment* segment = matrix.segments.data();
  while (row >= segment->first_row + segment->rows) ++segment;
  const std::int64_t local = row - segment->first_row;
  const std::byte* panel = segment->data + local / kPanelRows * segment->panel_bytes;
  const int panel_row = static_cast<int>(local % kPanelRows);
  for (std::int64_t b = 0; b < matrix.blocks; ++b) {
    const std::byte* super = panel + PackedSuperOffset(segment->format, b);
    const std::byte* block = panel + PackedBlockOffset(segment->format, b);
    if ((b + 1) * kPanelCols <= matrix.cols) {
      UnpackBlockRow(segment->format, super, block, panel_row, out + b * kPanelCols);
    } else {
      float last[kPanelCols];
      UnpackBlockRow(segment->format, super, block, panel_row, last);
      std::copy_n(last, matrix.cols - b * kPanelCols, out + b * kPanelCols);
    }
  }
}

}  // namespace pliant
