// Room: backend. Scalar dequantisation of every weight type, the oracle for packed formats. Pure, any thread.
// The block formats are those of the GGUF specification.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace pliant {

/// Writes the `out.size()` elements of one row; the row's bytes are RowBytes(type, out.size()).
void DequantizeRow(DType type, const std::byte* row, std::span<float> out);

/// IEEE half to float, exact.
float F16ToFloat(unsigned short bits);
/// Round to nearest even.
unsigned short FloatToF16(float value);

}  // namespace pliant
