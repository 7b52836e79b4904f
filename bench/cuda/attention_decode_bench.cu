// Decode attention at the shapes of issue 5: time, bytes moved, GB/s, share of a plain read, and
// the error against double on the device. Run: attention_decode_bench [shape 0..3] [planes 0..4]
// (with arguments: that one alone, once; for a profiler).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cuda/attention_decode/attention_decode.h"
#include "backend/cuda/page_layout.h"
#include "bench_util.cuh"

namespace pliant::cuda::bench {
namespace {

constexpr int kHeads = 8, kGroup = 4, kDim = 128;
constexpr KvGeometry kGeometry{.layers = 1, .kv_heads = kHeads, .head_dim = kDim};

__host__ __device__ inline std::uint32_t Hash(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<std::uint32_t>(x);
}
__device__ std::uint32_t Code(int block, int is_v, int head, int token, int dim) {
  return Hash(((((std::uint64_t)block * 2 + is_v) * 8 + head) * 32 + token) * 128 + dim) & 0xffff;
}
__device__ std::uint32_t Scale(int block, int is_v, int head, int token) {  // bf16, 0.5 .. 1.5
  const float f =
      0.5f +
      (Hash(0x5ca1e00000000ull + (((std::uint64_t)block * 2 + is_v) * 8 + head) * 32 + token) &
       255) /
          256.f;
  return __float_as_uint(f) >> 16;
}

__global__ void Fill(int blocks, std::uint8_t* pages, const std::uint32_t* table) {
  const std::size_t n = (std::size_t)blocks * 2 * kHeads * 32 * (kDim / 2);
  for (std::size_t i = blockIdx.x * (std::size_t)blockDim.x + threadIdx.x; i < n;
       i += (std::size_t)gridDim.x * blockDim.x) {
    const int pair = i & 63, token = (i >> 6) & 31, head = (i >> 11) & 7, is_v = (i >> 14) & 1,
              block = (int)(i >> 15);
    const std::uint32_t u0 = Code(block, is_v, head, token, 2 * pair),
                        u1 = Code(block, is_v, head, token, 2 * pair + 1);
    for (int p = 0; p < 4; ++p) {
      const std::uint32_t page = table[block * 8 + is_v * 4 + p];
      std::uint8_t* unit = pages + page * kGeometry.PageBytes() + UnitOffset(kHeads, kDim, 0, head);
      unit[is_v ? VByte(kDim, token, 2 * pair) : KByte(kDim, token, 2 * pair)] =
          ((u0 >> (12 - 4 * p)) & 15) | ((u1 >> (12 - 4 * p)) & 15) << 4;
      if (p == 0 && pair == 0)
        *(std::uint16_t*)(unit + ScaleByte(kDim, token)) =
            (std::uint16_t)Scale(block, is_v, head, token);
    }
  }
}

__device__ double Value(int block, int is_v, int head, int token, int dim, int planes) {
  const int u = MidpointCode((std::uint16_t)Code(block, is_v, head, token, dim), planes);
  return (double)__uint_as_float(Scale(block, is_v, head, token) << 16) * (u - 32768) / 32768.0;
}

/// One block a (sampled task, query head): the same attention in double.
__global__ void __launch_bounds__(256)
    Oracle(const float* q, const int* samples, const int* planes, int row_blocks, int length,
           double* scores, float* out) {
  __shared__ float qs[kDim];
  __shared__ double red[256];
  const int row = samples[blockIdx.x >> 2] >> 3, head = samples[blockIdx.x >> 2] & 7,
            qi = blockIdx.x & 3, tid = threadIdx.x;
  if (tid < kDim) qs[tid] = q[((std::size_t)row * 32 + head * 4 + qi) * kDim + tid];
  __syncthreads();
  double* z = scores + (std::size_t)blockIdx.x * length;
  double top = -1e300;
  for (int i = tid; i < length; i += 256) {
    const int block = row * row_blocks + (i >> 5);
    double s = 0;
    for (int d = 0; d < kDim; ++d)
      s += (double)qs[d] * Value(block, 0, head, i & 31, d, planes[block]);
    z[i] = s * 0.08838834764831845;
    top = fmax(top, z[i]);
  }
  red[tid] = top;
  __syncthreads();
  for (int k = 128; k; k >>= 1) {
    if (tid < k) red[tid] = fmax(red[tid], red[tid + k]);
    __syncthreads();
  }
  top = red[0];
  __syncthreads();
  double mass = 0;
  for (int i = tid; i < length; i += 256) {
    z[i] = exp(z[i] - top);
    mass += z[i];
  }
  red[tid] = mass;
  __syncthreads();
  for (int k = 128; k; k >>= 1) {
    if (tid < k) red[tid] += red[tid + k];
    __syncthreads();
  }
  mass = red[0];
  __syncthreads();
  const int d = tid & 127;
  double sum = 0;
  for (int i = tid >> 7; i < length; i += 2) {
    const int block = row * row_blocks + (i >> 5);
    sum += z[i] * Value(block, 1, head, i & 31, d, planes[block]);
  }
  red[tid] = sum;
  __syncthreads();
  if (tid < kDim)
    out[(std::size_t)blockIdx.x * kDim + tid] = (float)((red[tid] + red[tid + 128]) / mass);
}

template <typename T>
DeviceArray<T> ToDevice(const std::vector<T>& v) {
  auto a = *DeviceArray<T>::Make(v.size(), "bench");
  Upload<T>(v, a.data());
  return a;
}

void RunShape(Timer& timer, int batch, int length, float ceiling, int only) {
  const int row_blocks = length / 32, blocks = batch * row_blocks;
  std::vector<std::uint32_t> order(blocks * 8);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937 random(7);
  std::shuffle(order.begin(), order.end(), random);
  auto pages =
      *DeviceArray<std::uint8_t>::Make((std::size_t)blocks * 8 * kGeometry.PageBytes(), "pages");
  {
    auto full = ToDevice(order);
    Fill<<<132 * 8, 256>>>(blocks, pages.data(), full.data());
    PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
  }
  std::vector<float> q_host((std::size_t)batch * 32 * kDim);
  std::normal_distribution<float> normal(0.f, 2.f);
  for (auto& x : q_host) x = normal(random);
  auto q = ToDevice(q_host);
  auto out = *DeviceArray<float>::Make(q_host.size(), "out");
  const int sample_count = std::min(24, batch * 8);
  std::vector<int> samples;
  for (int i = 0; i < sample_count; ++i)
    samples.push_back((int)((std::int64_t)i * (batch * 8 - 1) / std::max(1, sample_count - 1)));
  auto d_samples = ToDevice(samples);
  auto scores = *DeviceArray<double>::Make((std::size_t)sample_count * 4 * length, "scores");
  auto want = *DeviceArray<float>::Make((std::size_t)sample_count * 4 * kDim, "want");

  std::printf("\n== batch %d x %d tokens\n%-22s %9s %9s %8s %8s %9s %9s\n", batch, length, "state",
              "MB read", "us", "GB/s", "of read", "segments", "err/rms");
  const DecodeShape shape{.kv_heads = kHeads, .group = kGroup, .head_dim = kDim};
  const DecodeLaunch launch = *DecodeLaunchFor(shape);
  for (const int planes : {4, 3, 2, 1, 0}) {
    if (only >= 0 && planes != only) continue;
    std::vector<int> state(blocks, planes);
    if (planes == 0) {
      for (int b = 0; b < blocks; ++b) {
        const int i = b % row_blocks;
        state[b] = i < 2 || i >= row_blocks - 8 ? 4 : 2;
      }
    }
    std::vector<BlockView> views(blocks);
    double bytes = 0;
    for (int b = 0; b < blocks; ++b) {
      for (int p = 0; p < state[b]; ++p) {
        views[b].k[p] = PageId(order[b * 8 + p]);
        views[b].v[p] = PageId(order[b * 8 + 4 + p]);
      }
      bytes += 2.0 * kHeads * (state[b] * kGeometry.UnitBytes() + kScaleBytes);
    }
    std::vector<QueryItem> items(batch);
    for (int i = 0; i < batch; ++i) items[i] = {i, i * row_blocks, length};
    DecodePlan plan;
    PlanDecode(items, views, launch.PlanGroups(), plan);
    auto d_views = ToDevice(views);
    auto d_segments = ToDevice(plan.segments);
    auto d_ranges = ToDevice(plan.ranges);
    auto d_cut = ToDevice(plan.cut_rows);
    auto partials =
        *DeviceArray<float>::Make(DecodePartialFloats(shape, plan.segments.size()), "partials");
    PLIANT_CUDA_CHECK(cudaMemset(out.data(), 0xff, out.bytes()));
    DecodeArgs args;
    args.pages = pages.data();
    args.page_bytes = kGeometry.PageBytes();
    args.blocks = reinterpret_cast<const std::uint32_t*>(d_views.data());
    args.segments = d_segments.data();
    args.ranges = d_ranges.data();
    args.cut_rows = d_cut.data();
    args.max_cut_rows = static_cast<int>(plan.cut_rows.size());
    args.q = q.data();
    args.q_stride = 32 * kDim;
    args.out = out.data();
    args.out_stride = 32 * kDim;
    args.softmax_scale = 0.08838834764831845f;
    args.partials = partials.data();
    auto go = [&] { LaunchDecodeAttention(shape, launch, args, nullptr); };
    if (only >= 0) {
      go();
      go();
      PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
      continue;
    }
    const float us = timer.Microseconds(go, length >= 32768 ? 7 : 15);
    auto d_state = ToDevice(state);
    Oracle<<<sample_count * 4, 256>>>(q.data(), d_samples.data(), d_state.data(), row_blocks,
                                      length, scores.data(), want.data());
    PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<float> w(want.size()), o(out.size());
    Download<float>(want.data(), w);
    Download<float>(out.data(), o);
    double largest = 0, square = 0;
    for (int i = 0; i < sample_count; ++i)
      for (int k = 0; k < 4 * kDim; ++k) {
        const double x = o[((std::size_t)(samples[i] >> 3) * 32 + (samples[i] & 7) * 4) * kDim + k],
                     y = w[(std::size_t)i * 4 * kDim + k];
        square += y * y;
        if (!(std::fabs(x - y) <= largest)) largest = std::fabs(x - y);
      }
    char name[32];
    std::snprintf(name, sizeof name, planes == 0 ? "16 bits ends, 8 else" : "%d bits", planes * 4);
    std::printf("%-22s %9.1f %9.1f %8.0f %7.1f%% %9zu %9.2e\n", name, bytes / 1e6, us,
                bytes / us / 1e3, 100 * bytes / us / 1e3 / ceiling, plan.segments.size(),
                largest / std::sqrt(square / w.size()));
  }
}

}  // namespace
}  // namespace pliant::cuda::bench

int main(int argc, char** argv) {
  using namespace pliant::cuda::bench;
  const int shapes[4][2] = {{64, 4096}, {256, 2048}, {8, 8192}, {32, 32768}};
  Timer timer;
  const float ceiling = timer.ReadCeiling();
  std::printf("plain read of 2 GiB: %.0f GB/s\n", ceiling);
  for (int i = 0; i < 4; ++i) {
    if (argc > 1 && std::atoi(argv[1]) != i) continue;
    RunShape(timer, shapes[i][0], shapes[i][1], ceiling, argc > 2 ? std::atoi(argv[2]) : -1);
  }
  return 0;
}
