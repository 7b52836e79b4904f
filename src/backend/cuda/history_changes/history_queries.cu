// For rows of prompts; a decoded row is noted where it goes to the cache (append). Bound: one row
// reads and writes both means of a head, 16 * head_dim bytes, and is over in the time of a launch;
// rows of a prompt are taken one after the other by a thread a channel.
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/history/query_means.cuh"
#include "backend/cuda/history_changes/history_queries.h"
#include "backend/cuda/overlap.cuh"

namespace pliant::cuda {
namespace {

constexpr int kWarps = 16;
constexpr std::uint32_t kAll = 0xffffffffu;

/// One thread block a (head, history), a thread a channel.
__global__ void QueriesKernel(const __grid_constant__ HistoryQueriesArgs a) {
  WaitForPrevious();
  const HistoryRow& row = a.histories[blockIdx.y];
  const int rows = row.rows;
  float* const quick = row.tables.short_mean;
  float* const slow = row.tables.long_mean;
  if (rows == 0 || quick == nullptr) return;
  const int head = blockIdx.x, channel = threadIdx.x;
  const std::size_t at =
      (static_cast<std::size_t>(a.layer) * a.heads + head) * a.head_dim + channel;
  const float* from = a.q + row.row * a.q_stride + head * a.head_dim + channel;
  const bool seen = row.queries_seen;
  float s = seen ? quick[at] : *from, l = seen ? slow[at] : *from;
#pragma unroll 8
  for (int i = seen ? 0 : 1; i < rows; ++i) {
    const float x = from[i * a.q_stride];
    s = MovedMean(s, x, 1 / RetainedHistory::kShortSteps);
    l = MovedMean(l, x, 1 / RetainedHistory::kLongSteps);
  }
  quick[at] = s;
  slow[at] = l;
}

/// One thread block a history; a warp goes through every kWarps-th head.
__global__ void __launch_bounds__(kWarps * 32)
    QuerySignalKernel(const HistoryRow* histories, int pairs, int dim, HistoryCounts* counts) {
  __shared__ double sums[kWarps];
  const HistoryRow& row = histories[blockIdx.x];
  const float* const quick = row.tables.short_mean;
  const float* const slow = row.tables.long_mean;
  if (quick == nullptr || (row.context + row.rows) % kQuerySignalTokens != 0) return;
  const float* const quick_weight = row.tables.short_weight;
  const float* const slow_weight = row.tables.long_weight;
  const bool fitted = quick_weight != nullptr;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  double sum = 0;
  for (int pair = warp; pair < pairs; pair += kWarps) {
    double dot = 0, aa = 0, bb = 0, wa = 0, wb = 0;
    for (int c = lane; c < dim; c += 32) {
      const std::size_t at = static_cast<std::size_t>(pair) * dim + c;
      const double a = quick[at], b = slow[at];
      dot += a * b;
      aa += a * a;
      bb += b * b;
      if (!fitted) continue;
      wa += a * quick_weight[at];
      wb += b * slow_weight[at];
    }
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
      dot += __shfl_xor_sync(kAll, dot, m);
      aa += __shfl_xor_sync(kAll, aa, m);
      bb += __shfl_xor_sync(kAll, bb, m);
      wa += __shfl_xor_sync(kAll, wa, m);
      wb += __shfl_xor_sync(kAll, wb, m);
    }
    if (fitted) {
      sum += (aa > 0 ? wa / sqrt(aa) : 0) + (bb > 0 ? wb / sqrt(bb) : 0);
    } else if (aa * bb > 0) {
      sum += 1 - dot / sqrt(aa * bb);
    }
  }
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w];
  counts[row.index].query_signal =
      fitted ? 1 / (1 + exp(-(row.tables.weight_bias + sum))) : sum / pairs;
}

}  // namespace

void LaunchHistoryQueries(const HistoryQueriesArgs& args, cudaStream_t stream) {
  LaunchOverlapped(true, QueriesKernel, dim3(args.heads, args.count), dim3(args.head_dim), 0,
                   stream, args);
}

void LaunchHistoryQuerySignal(const HistoryRow* histories, int count, int pairs, int head_dim,
                              HistoryCounts* counts, cudaStream_t stream) {
  QuerySignalKernel<<<count, kWarps * 32, 0, stream>>>(histories, pairs, head_dim, counts);
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace pliant::cuda
