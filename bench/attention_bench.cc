// Attention over planes on the CPU: decode (bound by the bytes of the planes) and prefill (bound by
// the softmax), on the KV shapes of SmolLM2-135M and of an 8B Llama. In the same run: how fast the
// machine reads memory, and the error against the reference.
//
//   pliant_attention_bench [--level auto|amx|avx512|avx2|plain] [--threads N] [--quick]
//   [--cpu-time]
//
// Decode reads every sequence's whole context once a step and layer; GB/s counts plane rows and
// scales. Sequences rotate so that no step finds its planes in a cache. Prefill times are of all
// layers of one step, without projections.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/cpu_level.h"
#include "backend/cpu/kv.h"
#include "backend/ref/ref_kv.h"
#include "backend/step_check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pliant {
namespace {

/// With --cpu-time: what the calling thread has run, for one thread on a machine that others use.
bool use_cpu_time = false;

struct Clock {
  static double now() {
    timespec t{};
    clock_gettime(use_cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
};

double SecondsSince(double start) { return Clock::now() - start; }

struct Model {
  const char* name;
  int layers, heads, kv_heads, dim;
  KvGeometry Geometry() const { return {layers, kv_heads, dim}; }
  int Columns() const { return (heads + 2 * kv_heads) * dim; }
};

struct Options {
  std::string level = "auto";
  int threads = 0;
  bool quick = false;
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) std::uint64_t ReadAll(const std::byte* p, std::size_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (std::size_t i = 0; i + 256 <= bytes; i += 256) {
    a = _mm512_xor_si512(a, _mm512_loadu_si512(p + i));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(p + i + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(p + i + 192));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  alignas(64) std::uint64_t words[8];
  _mm512_store_si512(words, a);
  return words[0] ^ words[3] ^ words[7];
}
#endif

/// Bytes a second of plain sequential reading by all threads, the best of some passes over
/// `memory`.
double ReadCeiling(ThreadPool& pool, std::span<const std::byte> memory) {
#if defined(__x86_64__)
  if (MachineLevel() >= CpuLevel::kAvx512) {
    double best = 0;
    volatile std::uint64_t sink = 0;
    for (int pass = 0; pass < 5; ++pass) {
      const auto start = Clock::now();
      const std::size_t part = memory.size() / pool.threads() / 256 * 256;
      pool.Run([&](int worker) { sink = sink + ReadAll(memory.data() + worker * part, part); });
      best = std::max(best, static_cast<double>(part) * pool.threads() / SecondsSince(start));
    }
    return best;
  }
#endif
  (void)pool, (void)memory;
  return std::nan("");
}

/// Fills every page with random codes and scales around 1.
void FillPages(CpuKv& kv, const Model& model, std::uint32_t pages) {
  const KvGeometry geometry = model.Geometry();
  std::mt19937_64 random(1);
  std::vector<std::byte> page(kv.PageBytes(geometry));
  for (std::size_t i = 0; i + 8 <= page.size(); i += 8) {
    const std::uint64_t value = random();
    std::memcpy(&page[i], &value, 8);
  }
  for (std::size_t i = geometry.ScaleOffset(0, 0, 0); i < geometry.PageBytes(); i += 2) {
    const std::uint16_t scale = FloatToBf16(0.5f + static_cast<float>(random() % 1000) / 1000);
    std::memcpy(&page[i], &scale, 2);
  }
  for (std::uint32_t p = 0; p < pages; ++p) {
    std::ranges::copy(page, kv.Page(PageId(p)).begin());
    // Not all pages the same: rotate the codes a little.
    std::byte* start = kv.Page(PageId(p)).data();
    std::rotate(start, start + p % 61, start + 64);
  }
}

struct Step {
  std::vector<std::int32_t> tokens, positions;
  std::vector<SequenceSlice> sequences;
  std::vector<BlockView> blocks;
  StepBatch Batch() const { return {tokens, positions, sequences, blocks, {}}; }
  void Add(int context, int rows, std::uint32_t& next_page, int k, int v) {
    SequenceSlice slice;
    slice.first_row = static_cast<std::int32_t>(tokens.size());
    slice.rows = rows;
    slice.context = context;
    slice.first_block = static_cast<std::int32_t>(blocks.size());
    slice.blocks = (context + rows + kBlockTokens - 1) / kBlockTokens;
    for (int b = 0; b < slice.blocks; ++b) {
      BlockView block;
      for (int p = 0; p < k; ++p) block.k[p] = PageId(next_page++);
      for (int p = 0; p < v; ++p) block.v[p] = PageId(next_page++);
      blocks.push_back(block);
    }
    sequences.push_back(slice);
    tokens.resize(tokens.size() + rows);
    for (int i = 0; i < rows; ++i) positions.push_back(context + i);
  }
};

std::vector<float> RandomRows(std::size_t rows, std::size_t columns) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> data(rows * columns);
  for (float& x : data) x = normal(random);
  return data;
}

/// Largest error of a mixed batch, in units of the largest scale of V.
double ErrorAgainstReference(const Model& shape, const Options& options, int k, int v) {
  Model model = shape;
  model.layers = 1;
  ThreadPool pool(options.threads);
  auto kv = CpuKv::Make(&pool, options.level).value();
  constexpr std::uint32_t kPages = 400;
  if (!kv->AllocatePages(model.Geometry(), kPages).ok()) return std::nan("");
  FillPages(*kv, model, kPages);
  Step step;
  std::uint32_t next = 0;
  step.Add(1100, 1, next, k, v);
  step.Add(50, 40, next, k, v);
  const std::vector<float> query = RandomRows(step.tokens.size(), model.Columns());
  const std::int64_t out_columns = std::int64_t{model.heads} * model.dim;
  std::vector<float> got(step.tokens.size() * out_columns), expected = got, q = query;
  const float scale = 1 / std::sqrt(static_cast<float>(model.dim));
  if (!kv->BeginStep(step.Batch()).ok()) return std::nan("");
  kv->Attention(0, model.heads, scale, {q.data(), model.Columns()}, {got.data(), out_columns});
  RefKv ref;
  if (!ref.AllocatePages(model.Geometry(), kPages).ok()) return std::nan("");
  for (std::uint32_t p = 0; p < kPages; ++p) {
    const auto page = ref.Page(PageId(p));
    std::copy_n(kv->Page(PageId(p)).begin(), page.size(), page.begin());
  }
  for (const SequenceSlice& slice : step.sequences) {
    const auto blocks = std::span(step.blocks).subspan(slice.first_block, slice.blocks);
    for (int i = 0; i < slice.rows; ++i) {
      const std::size_t row = slice.first_row + i;
      ref.AttendRow(0, model.heads, scale, blocks, slice.context + i,
                    {0, std::span(q).subspan(row * model.Columns(), model.Columns()),
                     std::span(expected).subspan(row * out_columns, out_columns)});
    }
  }
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::fabs(double{got[i]} - expected[i]) / 1.5);
  }
  return largest;
}

void Decode(CpuKv& kv, const Model& model, std::uint32_t pages, double ceiling, int sequences,
            int context, int k, int v, const Options& options) {
  // As many different batches as the pages hold, up to 8, used in turn.
  std::vector<Step> steps;
  std::uint32_t next = 0;
  const std::uint32_t need =
      static_cast<std::uint32_t>(sequences) * ((context + kBlockTokens) / kBlockTokens) * (k + v);
  while (steps.size() < 8 && next + need <= pages) {
    Step step;
    for (int s = 0; s < sequences; ++s) step.Add(context - 1, 1, next, k, v);
    steps.push_back(std::move(step));
  }
  if (steps.empty()) return;
  std::vector<float> query = RandomRows(sequences, model.Columns());
  const std::int64_t out_columns = std::int64_t{model.heads} * model.dim;
  std::vector<float> out(sequences * out_columns);
  std::vector<double> seconds;
  const int passes = options.quick ? 3 : 12;
  for (int pass = 0; pass < passes; ++pass) {
    if (!kv.BeginStep(steps[pass % steps.size()].Batch()).ok()) return;
    const auto start = Clock::now();
    for (int layer = 0; layer < model.layers; ++layer) {
      kv.Attention(layer, model.heads, 0.125f, {query.data(), model.Columns()},
                   {out.data(), out_columns});
    }
    seconds.push_back(SecondsSince(start));
  }
  std::sort(seconds.begin(), seconds.end());
  const double best = seconds[0];
  const double median = seconds[seconds.size() / 2];
  const double rows = 1.0 * sequences * context * model.layers * model.kv_heads;
  const double bytes = rows * ((k + v) * model.dim / 2.0 + 4);
  std::printf(
      "%-8s decode %2d x %5d  K%-2d V%-2d %8.2f ms (median %8.2f) %8.1f MB %6.1f GB/s  %4.0f %% of "
      "read\n",
      model.name, sequences, context, 4 * k, 4 * v, best * 1e3, median * 1e3, bytes / 1e6,
      bytes / best / 1e9, 100 * bytes / best / ceiling);
  std::fflush(stdout);
}

void Prefill(CpuKv& kv, const Model& model, std::uint32_t pages, int context, int rows, int k,
             int v, const Options& options) {
  Step step;
  std::uint32_t next = 0;
  step.Add(context, rows, next, k, v);
  if (next > pages) return;
  const std::vector<float> input = RandomRows(rows, model.Columns());
  const std::int64_t out_columns = std::int64_t{model.heads} * model.dim;
  std::vector<float> out(rows * out_columns);
  RopeTable rope;
  for (int i = 0; i < model.dim / 2; ++i)
    rope.inv_freq.push_back(std::pow(1e4f, -2.f * i / model.dim));
  double attention = 1e9, write = 1e9;
  for (int pass = 0; pass < (options.quick ? 2 : 6); ++pass) {
    if (!kv.BeginStep(step.Batch()).ok()) return;
    std::vector<float> qkv = input;
    double both[2] = {0, 0};
    for (int layer = 0; layer < model.layers; ++layer) {
      auto start = Clock::now();
      kv.QkvToCache({layer, model.heads, {}, {}, 0}, rope, {qkv.data(), model.Columns()});
      both[0] += SecondsSince(start);
      start = Clock::now();
      kv.Attention(layer, model.heads, 0.125f, {qkv.data(), model.Columns()},
                   {out.data(), out_columns});
      both[1] += SecondsSince(start);
    }
    write = std::min(write, both[0]);
    attention = std::min(attention, both[1]);
  }
  const double pairs =
      (1.0 * context * rows + 0.5 * rows * (rows + 1)) * model.heads * model.layers;
  std::printf(
      "%-8s prefill %4d after %4d K%-2d V%-2d %8.2f ms attention (%5.2f ns a score, %5.0f GFLOP/s) "
      " %8.2f ms write\n",
      model.name, rows, context, 4 * k, 4 * v, attention * 1e3, attention / pairs * 1e9,
      4 * pairs * model.dim / attention / 1e9, write * 1e3);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--level" && i + 1 < argc) {
      options.level = argv[++i];
    } else if (word == "--threads" && i + 1 < argc) {
      options.threads = std::atoi(argv[++i]);
    } else if (word == "--cpu-time") {
      use_cpu_time = true;
      options.threads = 1;
    } else if (word == "--quick") {
      options.quick = true;
    } else {
      std::fprintf(stderr, "attention_bench: unknown option %s\n", word.c_str());
      return 2;
    }
  }
  constexpr std::pair<int, int> kStates[] = {{4, 4}, {3, 3}, {3, 2}, {2, 2}, {2, 1}, {1, 1}};
  // The 8B shape with 4 of its 32 layers: the time of a layer does not depend on their number.
  for (const Model& model : {Model{"SmolLM2", 30, 9, 3, 64}, Model{"8B/4", 4, 32, 8, 128}}) {
    ThreadPool pool(options.threads);
    auto made = CpuKv::Make(&pool, options.level);
    if (!made.ok()) {
      std::fprintf(stderr, "attention_bench: %s\n", made.status().ToString().c_str());
      return 2;
    }
    CpuKv& kv = **made;
    const std::uint32_t pages = 16 * (4096 / kBlockTokens + 1) * 8;
    if (const Status status = kv.AllocatePages(model.Geometry(), pages); !status.ok()) {
      std::fprintf(stderr, "attention_bench: %s\n", status.ToString().c_str());
      return 1;
    }
    FillPages(kv, model, pages);
    const std::span<const std::byte> all(kv.Page(PageId(0)).data(),
                                         pages * kv.PageBytes(model.Geometry()));
    const double ceiling = ReadCeiling(pool, all);
    std::printf(
        "%s: %d layers, %d heads, %d KV heads, head dim %d; level %s, %d threads; reading memory "
        "%.1f GB/s\n",
        model.name, model.layers, model.heads, model.kv_heads, model.dim,
        std::string(kv.Level()).c_str(), pool.threads(), ceiling / 1e9);
    for (const auto& [k, v] : kStates) {
      std::printf("%-8s error K%-2d V%-2d against the reference: %.1e of V's scale\n", model.name,
                  4 * k, 4 * v, ErrorAgainstReference(model, options, k, v));
    }
    for (const auto& [sequences, context] : {std::pair{1, 4096}, {16, 1024}, {16, 4096}}) {
      for (const auto& [k, v] : kStates)
        Decode(kv, model, pages, ceiling, sequences, context, k, v, options);
    }
    for (const int rows : {512, 2048}) Prefill(kv, model, pages, 0, rows, 4, 4, options);
    Prefill(kv, model, pages, 0, 2048, 2, 2, options);
    Prefill(kv, model, pages, 3584, 512, 4, 4, options);
  }
  return 0;
}

}  // namespace
}  // namespace pliant

int main(int argc, char** argv) { return pliant::Main(argc, argv); }
