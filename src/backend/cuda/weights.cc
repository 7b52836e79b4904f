#include "backend/cuda/weights.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/dequant.h"
#include "base/dtype.h"

namespace pliant::cuda {
namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 40;
constexpr std::int64_t kStagingElements = std::int64_t{1} << 23;

Status CheckPart(const HostMatrix& part, std::int64_t cols) {
  const DTypeTraits traits = Traits(part.type);
  if (part.rows < 1 || part.cols < 1 || part.cols != cols || part.rows > kMaxElements / part.cols) {
    return InvalidArgument("a matrix of " + std::to_string(part.rows) + " x " +
                           std::to_string(part.cols) + " does not stack on " +
                           std::to_string(cols) + " columns");
  }
  if (part.cols % traits.block_elements != 0 ||
      part.data.size() != part.rows * RowBytes(part.type, part.cols)) {
    return InvalidArgument("a matrix of " + std::to_string(part.rows) + " x " +
                           std::to_string(part.cols) + " " + std::string(traits.name) +
                           " came with " + std::to_string(part.data.size()) + " bytes");
  }
  if (!part.order.empty() && static_cast<std::int64_t>(part.order.size()) != part.rows) {
    return InvalidArgument("a matrix's row order has " + std::to_string(part.order.size()) +
                           " entries for " + std::to_string(part.rows) + " rows");
  }
  for (const std::int32_t row : part.order) {
    if (row < 0 || row >= part.rows)
      return InvalidArgument("a matrix's row order names row " + std::to_string(row) + " of " +
                             std::to_string(part.rows));
  }
  return {};
}

}  // namespace

Result<DeviceMatrix> UploadMatrix(std::span<const HostMatrix> parts) {
  if (parts.empty()) return InvalidArgument("a matrix needs a part");
  DeviceMatrix matrix;
  matrix.cols = parts[0].cols;
  for (const HostMatrix& part : parts) {
    PLIANT_RETURN_IF_ERROR(CheckPart(part, matrix.cols));
    matrix.rows += part.rows;
  }
  const auto is_half = [](const HostMatrix& part) { return part.type == DType::kF16; };
  if (std::all_of(parts.begin(), parts.end(), is_half)) matrix.type = WeightType::kF16;
  if (matrix.rows > kMaxElements / matrix.cols)
    return InvalidArgument("a stacked matrix of more than 2^40 elements");
  PLIANT_ASSIGN_OR_RETURN(
      matrix.data, DeviceArray<std::uint16_t>::Make(
                       static_cast<std::size_t>(matrix.rows * matrix.cols), "a weight matrix"));
  const std::int64_t staged_rows =
      std::clamp<std::int64_t>(kStagingElements / matrix.cols, 1, matrix.rows);
  PLIANT_ASSIGN_OR_RETURN(
      auto staging, PinnedArray<std::uint16_t>::Make(
                        static_cast<std::size_t>(staged_rows * matrix.cols), "weight staging"));
  std::vector<float> row(static_cast<std::size_t>(matrix.cols));
  std::int64_t done = 0, staged = 0;
  auto flush = [&] {
    Upload<std::uint16_t>({staging.data(), static_cast<std::size_t>(staged * matrix.cols)},
                          matrix.data.data() + done * matrix.cols);
    done += staged;
    staged = 0;
  };
  for (const HostMatrix& part : parts) {
    const std::size_t bytes = RowBytes(part.type, part.cols);
    for (std::int64_t r = 0; r < part.rows; ++r) {
      const std::byte* from = part.data.data() + (part.order.empty() ? r : part.order[r]) * bytes;
      std::uint16_t* const to = staging.data() + staged * matrix.cols;
      if (part.type == DType::kBF16 || matrix.type == WeightType::kF16) {
        std::memcpy(to, from, bytes);
      } else {
        DequantizeRow(part.type, from, row);
        std::transform(row.begin(), row.end(), to, FloatToBf16);
      }
      if (++staged == staged_rows) flush();
    }
  }
  flush();
  return matrix;
}

}  // namespace pliant::cuda
