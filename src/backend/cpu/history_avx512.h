// Room: backend. What histories do with instructions that Highway has no name for: dot products of
// bytes (VPDPBUSD) and counts of bits (VPOPCNTQ). Only on machines of level kAvx512. Pure, any
// thread.
#pragma once

#include <cstdint>

#include "backend/plane_code.h"

namespace pliant::avx512 {

/// The most columns of WatchRows.
inline constexpr int kWatchColumns = 4;

/// sums[column][token]: what the digits of a block's rows of plane 0 (watched_keys.h) give with the
/// codes of each of `columns` queries: low[column] of the digits in the lower halves of bytes,
/// high[column] of those in the upper ones, [dim / 2] each. dim: a multiple of 64; sums aligned
/// to 64.
void WatchRows(const std::uint8_t* rows, int dim, int columns, const std::int8_t* const* low,
               const std::int8_t* const* high, std::int32_t (*sums)[kBlockTokens]);

/// KeyKernel::fewest for rows of one word.
void FewestSigns(int count, const std::uint64_t* rows, int later_count, const std::uint64_t* later,
                 std::int32_t* fewest);

/// KeyKernel::nearest for rows of at most kMostCodes, a multiple of 4.
inline constexpr int kMostCodes = 256;
void NearestCodes(int dim, int count, const std::int8_t* rows, int from, const std::int8_t* later,
                  const float* norms, float* nearest);

}  // namespace pliant::avx512
