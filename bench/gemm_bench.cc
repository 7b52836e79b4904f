// Products of the CPU backend at SmolLM2-135M's shapes, their error, and the machine's ceilings,
// measured in the same run: how fast memory can be read and how fast tiles (or FMAs) multiply.
// oneDNN, with weights dequantised to bf16 before the clock starts, runs beside it.
//
//   gemm_bench [threads] [level] [rows,rows,...]
//
// Each line: the shape, the time of the fastest of several runs, the bytes of weights and
// activations moved, GB/s, GFLOP/s, the time over the larger of the two bounds (1.0 is the
// ceiling), the largest error against double sums, and oneDNN's time. Weights are copies enough
// that a run does not find the last one's in a cache (as a decode step does not).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <dnnl.hpp>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/gemm_runner.h"
#include "backend/dequant.h"
#include "backend/plane_code.h"
#include "ceilings.h"

namespace pliant {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from) {
  return std::chrono::duration<double>(Clock::now() - from).count();
}

struct Shape {
  const char* name;
  std::int64_t rows, cols;  // of the weight
  DType type;
};

constexpr Shape kShapes[] = {
    {"qkv", 960, 576, DType::kQ4_1},       {"attn_out", 576, 576, DType::kQ4_1},
    {"gate_up", 3072, 576, DType::kQ4_1},  {"down", 576, 1536, DType::kQ4_1},
    {"lm_head", 49152, 576, DType::kQ8_0},
};

std::vector<std::byte> RandomBytes(const Shape& shape, std::mt19937& random) {
  std::vector<std::byte> bytes(shape.rows * RowBytes(shape.type, shape.cols));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const auto put = [](std::byte* p, float value) {
    const std::uint16_t bits = FloatToF16(value);
    std::copy_n(reinterpret_cast<const std::byte*>(&bits), 2, p);
  };
  const std::size_t block = Traits(shape.type).block_bytes;
  for (std::size_t at = 0; at < bytes.size(); at += block) {
    put(&bytes[at], shape.type == DType::kQ8_0 ? 1e-3f : 1e-2f);
    if (shape.type == DType::kQ4_1) put(&bytes[at + 2], -0.08f);
  }
  return bytes;
}

// The fastest of enough runs to fill about `budget` seconds.
template <typename F>
double Fastest(double budget, int least, const F& run) {
  double best = 1e9;
  const auto start = Clock::now();
  for (int i = 0; i < least || (Seconds(start) < budget && i < 2000); ++i) {
    const auto from = Clock::now();
    run(i);
    best = std::min(best, Seconds(from));
  }
  return best;
}

// y = x W^T, bf16 by bf16 to f32, weights in the layout oneDNN likes best.
class OneDnn {
 public:
  OneDnn(const std::vector<float>& weights, std::int64_t n, std::int64_t k, std::int64_t m)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using dt = dnnl::memory::data_type;
    using tag = dnnl::memory::format_tag;
    const dnnl::memory::desc x({m, k}, dt::bf16, tag::ab);
    const dnnl::memory::desc w({k, n}, dt::bf16, tag::any);
    const dnnl::memory::desc y({m, n}, dt::f32, tag::ab);
    const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(x, w, y), engine_);
    product_ = dnnl::matmul(desc);
    dnnl::memory plain({{k, n}, dt::f32, tag::ba}, engine_, const_cast<float*>(weights.data()));
    w_ = dnnl::memory(desc.weights_desc(), engine_);
    dnnl::reorder(plain, w_).execute(stream_, plain, w_);
    stream_.wait();
    x_ = dnnl::memory(x, engine_);
    y_ = dnnl::memory(y, engine_);
  }
  void Run() {
    product_.execute(stream_, {{DNNL_ARG_SRC, x_}, {DNNL_ARG_WEIGHTS, w_}, {DNNL_ARG_DST, y_}});
    stream_.wait();
  }

 private:
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul product_;
  dnnl::memory w_, x_, y_;
};

struct Bench {
  ThreadPool pool;
  CpuLevel level;
  double read_bytes = 0;  // a second
  double flops = 0;       // a second

  void Run(const Shape& shape, const std::vector<std::int64_t>& row_counts);
};

void Bench::Run(const Shape& shape, const std::vector<std::int64_t>& row_counts) {
  std::mt19937 random(1);
  const std::vector<std::byte> bytes = RandomBytes(shape, random);
  HostMatrix host;
  host.type = shape.type;
  host.rows = shape.rows;
  host.cols = shape.cols;
  host.data = bytes;
  GemmRunner runner(&pool, level, false);
  Arena arena;
  std::vector<PackedMatrix> copies;
  do {
    auto packed = PackMatrix({&host, 1}, false, arena, pool);
    copies.push_back(std::move(packed).value());
  } while (arena.used() < (std::size_t{96} << 20));
  const std::size_t weight_bytes = arena.used() / copies.size();
  if (!runner.Reserve(copies[0].blocks).ok()) std::abort();

  const std::int64_t most = *std::max_element(row_counts.begin(), row_counts.end());
  std::normal_distribution<float> normal;
  std::vector<float> x(most * shape.cols);
  for (float& v : x) v = normal(random);
  std::vector<std::uint16_t> x_bf16((most + 31) / 32 * 32 * shape.cols);
  if (level >= CpuLevel::kAvx512) {
    ConvertRowsToBf16(x.data(), shape.cols, shape.cols, 0, most, x_bf16.data(), shape.cols);
  }
  std::vector<float> weights(shape.rows * shape.cols);
  for (std::int64_t n = 0; n < shape.rows; ++n) {
    DequantizeRow(shape.type, bytes.data() + n * RowBytes(shape.type, shape.cols),
                  std::span(weights).subspan(n * shape.cols, shape.cols));
  }
  for (const std::int64_t m : row_counts) {
    if (shape.rows > 10000 && m > 64) continue;  // logits are wanted of the last rows only
    std::vector<float> out(m * shape.rows);
    GemmCall call;
    call.rows = m;
    call.x = x.data();
    call.x_stride = shape.cols;
    if (runner.kernel().wants_bf16(m)) {
      call.x_bf16 = x_bf16.data();
      call.x_bf16_stride = shape.cols;
    }
    call.out = out.data();
    call.out_stride = shape.rows;
    const double seconds = Fastest(0.4, 5, [&](int i) {
      call.weight = &copies[i % copies.size()];
      runner.Run(call);
    });
    double error = 0;
    for (std::int64_t i = 0; i < 500; ++i) {
      const std::int64_t r = random() % m;
      const std::int64_t n = random() % shape.rows;
      double sum = 0, squares = 0;
      for (std::int64_t k = 0; k < shape.cols; ++k) {
        const double term = double{weights[n * shape.cols + k]} * x[r * shape.cols + k];
        sum += term;
        squares += term * term;
      }
      error = std::max(error, std::abs(sum - out[r * shape.rows + n]) / std::sqrt(squares));
    }
    const double moved = static_cast<double>(weight_bytes) +
                         4.0 * static_cast<double>(m * (shape.cols + shape.rows));
    const double flop = 2.0 * static_cast<double>(m * shape.rows * shape.cols);
    const double bound = std::max(static_cast<double>(weight_bytes) / read_bytes, flop / flops);
    OneDnn dnn(weights, shape.rows, shape.cols, m);
    const double dnn_seconds = Fastest(0.2, 5, [&](int) { dnn.Run(); });
    std::printf("%-9s %6ld %9.4f %9.2f %8.1f %9.1f %7.2f %9.1e %10.4f\n", shape.name,
                static_cast<long>(m), seconds * 1e3, moved / 1e6, moved / seconds / 1e9,
                flop / seconds / 1e9, seconds / bound, error, dnn_seconds * 1e3);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace pliant

int main(int argc, char** argv) {
  using namespace pliant;
  const int threads = argc > 1 ? std::atoi(argv[1]) : 0;
  const auto level = ChooseCpuLevel(argc > 2 ? argv[2] : "auto");
  if (!level.ok()) {
    std::fprintf(stderr, "%s\n", level.status().ToString().c_str());
    return 1;
  }
  std::vector<std::int64_t> rows = {1, 4, 16, 64, 512, 2048};
  if (argc > 3) {
    rows.clear();
    for (const char* p = argv[3]; *p != '\0';) {
      char* end = nullptr;
      rows.push_back(std::max(1L, std::strtol(p, &end, 10)));
      p = *end == ',' ? end + 1 : end;
      if (end == p && *p != '\0') break;
    }
  }
  Bench bench{ThreadPool(threads), *level};
  bench.read_bytes = MeasureReadBytes(bench.pool);
  bench.flops = MeasureFlops(bench.pool, *level);
  std::printf("%d threads, level %s: reads %.1f GB/s, multiplies %.0f GFLOP/s\n",
              bench.pool.threads(), std::string(CpuLevelName(*level)).c_str(),
              bench.read_bytes / 1e9, bench.flops / 1e9);
  std::printf("%-9s %6s %9s %9s %8s %9s %7s %9s %10s\n", "shape", "rows", "ms", "MB", "GB/s",
              "GFLOP/s", "x bound", "error", "oneDNN ms");
  for (const Shape& shape : kShapes) bench.Run(shape, rows);
  return 0;
}
