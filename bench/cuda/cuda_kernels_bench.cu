// Append, gather, row-wise kernels, prefill attention and products at Llama-3.1-8B's shapes (32
// heads, 8 KV heads, head dim 128, hidden 4096, features 14336): time, bytes or operations, and the
// share of the ceiling measured in the same run.
#include <cuda_fp16.h>

#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/append/append.h"
#include "backend/cuda/attention_prefill/attention_prefill.h"
#include "backend/cuda/gather/gather.h"
#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/page_layout.h"
#include "backend/cuda/rowwise/rowwise.h"
#include "bench_util.cuh"

namespace pliant::cuda::bench {
namespace {

constexpr int kHeads = 32, kKvHeads = 8, kDim = 128, kHidden = 4096, kFeatures = 14336;
constexpr KvGeometry kGeometry{.layers = 1, .kv_heads = kKvHeads, .head_dim = kDim};

template <typename T>
DeviceArray<T> ToDevice(const std::vector<T>& v) {
  auto a = *DeviceArray<T>::Make(v.size(), "bench");
  Upload<T>(v, a.data());
  return a;
}
DeviceArray<float> Random(std::size_t n) {
  std::mt19937 random(1);
  std::vector<float> v(1 << 20);
  std::normal_distribution<float> normal(0.f, 1.f);
  for (auto& x : v) x = normal(random);
  auto a = *DeviceArray<float>::Make(n, "bench");
  for (std::size_t at = 0; at < n; at += v.size())
    Upload<float>(std::span(v).subspan(0, std::min(v.size(), n - at)), a.data() + at);
  return a;
}
std::vector<BlockView> Blocks(int count, int planes) {
  std::vector<std::uint32_t> order(count * 8);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  std::vector<BlockView> views(count);
  for (int b = 0; b < count; ++b)
    for (int p = 0; p < planes; ++p)
      views[b].k[p] = PageId(order[8 * b + p]), views[b].v[p] = PageId(order[8 * b + 4 + p]);
  return views;
}

float ceiling = 0;
void Line(const char* name, int n, double bytes, float us) {
  std::printf("%-28s %6d %10.1f us %9.1f MB %7.0f GB/s %6.1f%%\n", name, n, us, bytes / 1e6,
              bytes / us / 1e3, 100 * bytes / us / 1e3 / ceiling);
}

void RunAppend(Timer& timer, int rows, bool decode) {
  const int blocks = decode ? rows : rows / 32;
  auto views = ToDevice(Blocks(blocks, 4));
  auto pages = *DeviceArray<std::uint8_t>::Make(
      static_cast<std::size_t>(blocks) * 8 * kGeometry.PageBytes(), "pages");
  const int width = (kHeads + 2 * kKvHeads) * kDim;
  auto qkv = Random(static_cast<std::size_t>(rows) * width);
  auto channel = ToDevice(std::vector<float>(kKvHeads * kDim, 1.f)),
       center = ToDevice(std::vector<float>(kKvHeads * kDim, 0.f));
  std::vector<std::int32_t> slots(rows), positions(rows);
  for (int i = 0; i < rows; ++i) slots[i] = decode ? 32 * i + i % 32 : i, positions[i] = i;
  auto d_slots = ToDevice(slots), d_positions = ToDevice(positions);
  auto freq = ToDevice(std::vector<float>(kDim / 2, 0.01f));
  auto angles = *DeviceArray<float2>::Make(static_cast<std::size_t>(rows) * kDim / 2, "angles");
  AppendArgs args;
  args.rows = rows;
  args.heads = kHeads;
  args.kv_heads = kKvHeads;
  args.head_dim = kDim;
  args.qkv = qkv.data();
  args.angles = angles.data();
  args.pairs = kDim / 2;
  args.key = args.value = {channel.data(), center.data()};
  args.pages = pages.data();
  args.page_bytes = kGeometry.PageBytes();
  args.blocks = reinterpret_cast<const std::uint32_t*>(views.data());
  args.slots = d_slots.data();
  Line("RoPE angles", rows, rows * (kDim / 2) * 8.0,
       timer.Microseconds(
           [&] {
             LaunchRopeAngles(d_positions.data(), rows, freq.data(), kDim / 2, angles.data(),
                              nullptr);
           },
           9));
  const double bytes = static_cast<double>(rows) *
                       (width * 4.0 + kHeads * kDim * 4.0 + 2.0 * kKvHeads * (kDim * 2 + 2));
  Line(decode ? "QKV to cache, decode" : "QKV to cache, prefill", rows, bytes,
       timer.Microseconds([&] { LaunchAppend(args, nullptr); }, 9));
}

__global__ void ToF16(const float* from, std::int64_t count, __half* to) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) to[i] = __float2half_rn(from[i]);
}
void LaunchToF16(const float* from, std::int64_t count, std::uint16_t* to) {
  ToF16<<<static_cast<unsigned>((count + 255) / 256), 256>>>(from, count,
                                                             reinterpret_cast<__half*>(to));
}

void RunPrefillRows(Timer& timer, int tokens, int rows, const DeviceArray<std::uint16_t>& k,
                    const DeviceArray<std::uint16_t>& v, const DeviceArray<std::uint8_t>& present);

void RunPrefill(Timer& timer, int tokens) {
  const int blocks = tokens / 32;
  auto pages = *DeviceArray<std::uint8_t>::Make(
      static_cast<std::size_t>(blocks) * 8 * kGeometry.PageBytes(), "pages");
  PLIANT_CUDA_CHECK(cudaMemset(pages.data(), 0x3c, pages.bytes()));
  std::vector<int2> sources(blocks);
  for (int b = 0; b < blocks; ++b) sources[b] = make_int2(b, 32);
  auto d_sources = ToDevice(sources);
  const std::size_t elements = static_cast<std::size_t>(tokens) * kKvHeads * kDim;
  auto k = *DeviceArray<std::uint16_t>::Make(elements, "K"),
       v = *DeviceArray<std::uint16_t>::Make(elements, "V");
  auto present = *DeviceArray<std::uint8_t>::Make(blocks, "present");
  for (const int planes : {4, 2, 1}) {
    auto views = ToDevice(Blocks(blocks, planes));
    GatherArgs args{kKvHeads,
                    kDim,
                    pages.data(),
                    kGeometry.PageBytes(),
                    0,
                    reinterpret_cast<const std::uint32_t*>(views.data()),
                    d_sources.data(),
                    blocks,
                    k.data(),
                    v.data(),
                    present.data()};
    const double bytes =
        elements * 4.0 + 2.0 * blocks * kKvHeads * (planes * kGeometry.UnitBytes() + kScaleBytes);
    char name[32];
    std::snprintf(name, sizeof name, "gather, %d bits", 4 * planes);
    Line(name, tokens, bytes, timer.Microseconds([&] { LaunchGather(args, nullptr); }, 9));
  }
  // Real values: constant ones draw less power.
  auto values = Random(elements);
  LaunchToF16(values.data(), static_cast<std::int64_t>(elements), k.data());
  LaunchToF16(values.data(), static_cast<std::int64_t>(elements), v.data());
  for (const int rows : {tokens, 2048, 512, 128})
    RunPrefillRows(timer, tokens, rows, k, v, present);
}

void RunPrefillRows(Timer& timer, int tokens, int rows, const DeviceArray<std::uint16_t>& k,
                    const DeviceArray<std::uint16_t>& v, const DeviceArray<std::uint8_t>& present) {
  const int tile_rows = PrefillTileRows(kDim), context = tokens - rows;
  std::vector<PrefillTile> tiles;
  for (int i = 0; i < rows; i += tile_rows)
    tiles.push_back({i, std::min(tile_rows, rows - i), context + i, 0, 0});
  auto d_tiles = ToDevice(tiles);
  auto q = Random(static_cast<std::size_t>(rows) * kHeads * kDim);
  auto out = *DeviceArray<std::uint16_t>::Make(q.size(), "out");
  PrefillArgs args;
  args.heads = kHeads;
  args.kv_heads = kKvHeads;
  args.head_dim = kDim;
  args.tiles = d_tiles.data();
  args.tile_count = static_cast<int>(tiles.size());
  args.q = q.data();
  args.q_stride = kHeads * kDim;
  args.k = k.data();
  args.v = v.data();
  args.present = present.data();
  args.gathered_blocks = tokens / 32;
  args.out = out.data();
  args.out_stride = kHeads * kDim;
  args.softmax_scale = 0.088f;
  const float us = timer.Microseconds([&] { LaunchPrefillAttention(args, nullptr); }, 5);
  const double pairs = static_cast<double>(rows) * (context + 0.5 * rows);
  std::printf("prefill attention, %5d rows over %6d tokens %10.1f us %9.1f TFLOP/s (causal)\n",
              rows, tokens, us, 4.0 * pairs * kHeads * kDim / us / 1e6);
}

void RunGemm(Timer& timer, int rows) {
  auto gemm = *Gemm::Make();
  const int shapes[4][2] = {{6144, 4096}, {4096, 4096}, {2 * kFeatures, 4096}, {4096, kFeatures}};
  auto x32 = Random(static_cast<std::size_t>(rows) * kFeatures);
  auto x = *DeviceArray<std::uint16_t>::Make(x32.size(), "x");
  LaunchToBf16(x32.data(), static_cast<std::int64_t>(x32.size()), x.data(), nullptr);
  auto w32 = Random(static_cast<std::size_t>(2) * kFeatures * 4096);
  auto w = *DeviceArray<std::uint16_t>::Make(w32.size(), "w");
  LaunchToBf16(w32.data(), static_cast<std::int64_t>(w32.size()), w.data(), nullptr);
  auto out = *DeviceArray<float>::Make(static_cast<std::size_t>(rows) * 2 * kFeatures, "out");
  double total = 0;
  for (const auto& s : shapes) {
    const float us = timer.Microseconds(
        [&] {
          gemm->Run(x.data(), nullptr, w.data(), WeightType::kBf16, nullptr, rows, s[0], s[1],
                    out.data(), false, nullptr);
        },
        9);
    const double bytes = 2.0 * s[0] * s[1] + 2.0 * rows * s[1] + 4.0 * rows * s[0];
    std::printf("product %5d x %5d x %5d %12.1f us %9.1f TFLOP/s %7.0f GB/s %6.1f%%\n", rows, s[0],
                s[1], us, 2.0 * rows * s[0] * s[1] / us / 1e6, bytes / us / 1e3,
                100 * bytes / us / 1e3 / ceiling);
    total += us;
  }
  std::printf("products of 32 layers, %d rows: %.2f ms\n", rows, total * 32 / 1e3);
}

void RunRowwise(Timer& timer, int rows) {
  auto x = Random(static_cast<std::size_t>(rows) * 2 * kFeatures);
  auto weight = ToDevice(std::vector<float>(kHidden, 1.f));
  auto out = *DeviceArray<std::uint16_t>::Make(static_cast<std::size_t>(rows) * kFeatures, "out");
  Line("RMSNorm", rows, rows * (kHidden * 6.0),
       timer.Microseconds(
           [&] {
             LaunchRmsNorm(x.data(), nullptr, weight.data(), 1e-5f, rows, kHidden, out.data(),
                           ElementType::kBf16, nullptr);
           },
           9));
  Line("SiLU * up", rows, rows * (kFeatures * 10.0),
       timer.Microseconds([&] { LaunchSiluMul(x.data(), rows, kFeatures, out.data(), nullptr); },
                          9));
}

}  // namespace
}  // namespace pliant::cuda::bench

int main() {
  using namespace pliant::cuda::bench;
  Timer timer;
  ceiling = timer.ReadCeiling();
  std::printf("plain read of 2 GiB: %.0f GB/s\n", ceiling);
  RunAppend(timer, 1, true);
  RunAppend(timer, 256, true);
  RunAppend(timer, 8192, false);
  for (const int rows : {1, 256, 8192}) RunRowwise(timer, rows);
  for (const int tokens : {4096, 8192, 16384, 32768}) RunPrefill(timer, tokens);
  for (const int rows : {1, 64, 256, 8192}) RunGemm(timer, rows);
  return 0;
}
