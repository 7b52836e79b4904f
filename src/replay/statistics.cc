#include "replay/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pliant {

double Percentile(const std::vector<double>& ascending, double fraction) {
  if (ascending.empty()) return 0;
  const double place = std::clamp(fraction, 0.0, 1.0) * static_cast<double>(ascending.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(place));
  const std::size_t above = std::min(below + 1, ascending.size() - 1);
  return ascending[below] +
         (place - static_cast<double>(below)) * (ascending[above] - ascending[below]);
}

Distribution Describe(std::vector<double> values) {
  Distribution out;
  out.count = values.size();
  if (values.empty()) return out;
  std::sort(values.begin(), values.end());
  out.mean =
      std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  out.p50 = Percentile(values, 0.50);
  out.p90 = Percentile(values, 0.90);
  out.p99 = Percentile(values, 0.99);
  out.max = values.back();
  return out;
}

}  // namespace pliant
