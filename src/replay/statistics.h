// Room: replay. Means and percentiles of measured values. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <vector>

namespace pliant {

/// Of `values`; all 0 when there are none.
struct Distribution {
  std::size_t count = 0;
  double mean = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;
};
Distribution Describe(std::vector<double> values);

/// The value at `fraction` (0 .. 1) of an ascending list, linear between neighbours (as numpy's
/// default); 0 when empty.
double Percentile(const std::vector<double>& ascending, double fraction);

}  // namespace pliant
