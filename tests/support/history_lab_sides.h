// The two sides of HistoryLab (history_lab.h): a small model on a backend, seen through the Backend
// contract alone, and the same model on the oracle (RefKv). Weights are small integers over powers
// of two, so that both cache exactly the same K and V.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/page_layout.h"
#include "backend/ref/ref_kv.h"
#include "backend/step_check.h"

namespace pliant::testing {

struct LabShape {
  int heads = 4, kv_heads = 2, dim = 64, layers = 1;
};
/// Leading planes of K and of V of a block.
struct LabPlanes {
  int k = kPlanes, v = kPlanes;
};

inline BlockView OnlyPlanes(const BlockView& block, LabPlanes planes) {
  BlockView out;
  for (int p = 0; p < planes.k; ++p) out.k[p] = block.k[p];
  for (int p = 0; p < planes.v; ++p) out.v[p] = block.v[p];
  return out;
}

struct LabModel {
  static constexpr int kVocabulary = 400, kHidden = 64;

  explicit LabModel(const LabShape& shape)
      : shape(shape),
        geometry{shape.layers, shape.kv_heads, shape.dim},
        columns((shape.heads + 2 * shape.kv_heads) * shape.dim) {
    std::mt19937 random(3);
    const auto exact = [&](std::size_t n, int range, float scale) {
      std::vector<float> v(n);
      for (float& x : v)
        x = static_cast<float>(static_cast<int>(random() % (2 * range + 1)) - range) * scale;
      return v;
    };
    table = exact(std::size_t{kVocabulary} * kHidden, 15, 1 / 8.f);
    for (int l = 0; l < shape.layers; ++l)
      qkv.push_back(exact(static_cast<std::size_t>(columns) * kHidden, 7, 1 / 16.f));
    for (std::size_t i = 0; i < geometry.Units() * shape.dim; ++i) {
      const std::size_t pair = i % shape.dim % (shape.dim / 2);
      code.key.scale.push_back(0.25f * static_cast<float>(1 + (pair * 7 + i / shape.dim) % 13));
      code.key.center.push_back(0.25f * static_cast<float>(static_cast<int>(i % 9) - 4));
      code.value.scale.push_back(1 - 0.0625f * static_cast<float>(i % 11));
      code.value.center.push_back(0.125f * static_cast<float>(static_cast<int>(i % 7) - 3));
    }
    for (int i = 0; i < shape.dim / 2; ++i)
      rope.inv_freq.push_back(std::pow(10000.f, -2.f * i / shape.dim));
  }
  int Width() const { return shape.heads * shape.dim; }

  const LabShape shape;
  const KvGeometry geometry;
  const int columns;
  std::vector<float> table;
  std::vector<std::vector<float>> qkv;  // [layers] of [columns][kHidden]
  KvCode code;
  RopeTable rope;
};

/// The backend under test with the model's tensors.
class LabBackend {
 public:
  LabBackend(std::unique_ptr<Backend> backend, const LabModel& model, std::uint32_t pages, int rows)
      : backend_(std::move(backend)), model_(model) {
    table_ = Add(model.table, LabModel::kVocabulary);
    for (const auto& qkv : model.qkv) qkv_.push_back(Add(qkv, model.columns));
    const auto width = static_cast<std::size_t>(model.Width());
    std::vector<float> identity(width * width, 0.f);
    for (std::size_t i = 0; i < width; ++i) identity[i * width + i] = 1.f;
    identity_ = Add(identity, model.Width());
    ones_ = *backend_->AddVector(std::vector<float>(width, 1.f));
    x_ = *backend_->AddTensor(rows, LabModel::kHidden);
    qkv_out_ = *backend_->AddTensor(rows, model.columns);
    attention_ = *backend_->AddTensor(rows, model.Width());
    result_ = *backend_->AddTensor(rows, model.Width());
    EXPECT_TRUE(backend_->AllocatePages(model.geometry, pages).ok());
    EXPECT_TRUE(backend_->SetKvCode(model.code).ok());
  }
  Backend* operator->() { return backend_.get(); }

  /// Attention of `layer` for the logit rows, each divided by its rms; with sampling in the batch
  /// nothing (SampledTokens).
  std::vector<float> Step(const StepBatch& batch, int layer, float softmax_scale) {
    const Status begun = backend_->BeginStep(batch);
    EXPECT_TRUE(begun.ok()) << begun.ToString();
    backend_->Embed(table_, x_);
    for (int l = 0; l < model_.shape.layers; ++l) {
      backend_->MatMul(x_, qkv_[l], VectorId(), qkv_out_, false);
      backend_->QkvToCache({l, model_.shape.heads, {}, {}, 0}, model_.rope, qkv_out_);
      backend_->Attention(l, model_.shape.heads, softmax_scale, qkv_out_, attention_);
      if (l != layer) continue;
      backend_->MatMul(attention_, identity_, VectorId(), result_, false);
      backend_->Logits(result_, ones_, 0.f, identity_);
    }
    EXPECT_TRUE(backend_->EndStep().ok());
    const auto rows = backend_->LogitRows();
    return {rows.begin(), rows.end()};
  }

  std::size_t PageBytes() const { return backend_->PageBytes(model_.geometry); }
  void Read(PageId page, std::byte* to) {
    const PageCopy copy{page, to};
    EXPECT_EQ(backend_->Wait(backend_->CopyOut({&copy, 1})), CopyState::kDone);
  }
  /// What was in the page is gone.
  void Spoil(PageId page) {
    if (!page.valid()) return;
    std::vector<std::byte> garbage(PageBytes(), std::byte{0xa7});
    const PageCopy copy{page, garbage.data()};
    EXPECT_EQ(backend_->Wait(backend_->CopyIn({&copy, 1})), CopyState::kDone);
  }
  HostMemory Host(std::size_t bytes) {
    HostMemory memory = backend_->AllocateHost(bytes).value();
    if (memory != nullptr) return memory;
    return HostMemory(new std::byte[bytes], [](std::byte* p) { delete[] p; });
  }

  /// The digit of a plane's page as the backend lays it out.
  int Digit(const std::byte* page, bool is_v, int layer, int head, int token, int dim) const {
    const KvGeometry& g = model_.geometry;
    std::size_t at = g.RowOffset(layer, head, token) + dim / 2;
    if (backend_->Name() == "cuda") {
      at = cuda::UnitOffset(g.kv_heads, g.head_dim, layer, head) +
           (is_v ? cuda::VByte(g.head_dim, token, dim) : cuda::KByte(g.head_dim, token, dim));
    }
    return static_cast<int>(page[at]) >> (dim % 2 * 4) & 15;
  }
  /// The bits of a row's scale in a page of plane 0.
  std::uint16_t Scale(const std::byte* page, int layer, int head, int token) const {
    const KvGeometry& g = model_.geometry;
    std::size_t at = g.ScaleOffset(layer, head, token);
    if (backend_->Name() == "cuda")
      at = cuda::UnitOffset(g.kv_heads, g.head_dim, layer, head) +
           cuda::ScaleByte(g.head_dim, token);
    std::uint16_t bits;
    std::memcpy(&bits, page + at, sizeof bits);
    return bits;
  }

 private:
  MatrixId Add(const std::vector<float>& values, std::int64_t rows) {
    HostMatrix m;
    m.type = DType::kF32;
    m.rows = rows;
    m.cols = static_cast<std::int64_t>(values.size()) / rows;
    m.data = std::as_bytes(std::span(values));
    return *backend_->AddMatrix({&m, 1});
  }

  std::unique_ptr<Backend> backend_;
  const LabModel& model_;
  MatrixId table_, identity_;
  std::vector<MatrixId> qkv_;
  VectorId ones_;
  TensorId x_, qkv_out_, attention_, result_;
};

/// The oracle, step by step with the backend.
class LabOracle {
 public:
  LabOracle(const LabModel& model, std::uint32_t pages) : model_(model) {
    EXPECT_TRUE(kv_.AllocatePages(model.geometry, pages).ok());
    EXPECT_TRUE(kv_.SetKvCode(model.code).ok());
  }
  RefKv& kv() { return kv_; }

  /// As LabBackend::Step, of all rows; attends false: K and V are written, nothing else.
  std::vector<float> Step(const StepBatch& batch, int layer, float softmax_scale, bool attends) {
    const int heads = model_.shape.heads, width = model_.Width();
    std::vector<float> out(batch.tokens.size() * static_cast<std::size_t>(width), 0.f);
    closest_.assign(batch.sequences.size(), {});
    for (int l = 0; l < model_.shape.layers; ++l) {
      std::vector<float> all = Qkv(batch.tokens, l);
      std::vector<float> unused(out.size());
      const auto row = [&](std::int32_t r) -> RefKv::Row {
        std::vector<float>& to = l == layer ? out : unused;
        return {
            batch.positions[r],
            std::span(all).subspan(static_cast<std::size_t>(r) * model_.columns, model_.columns),
            std::span(to).subspan(static_cast<std::size_t>(r) * width, width)};
      };
      for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
        const SequenceSlice& slice = batch.sequences[s];
        const auto blocks = batch.blocks.subspan(slice.first_block, slice.blocks);
        if (slice.history != nullptr && slice.history->options().query_means)
          NoteQueries(*slice.history, slice, l, all);
        for (int i = 0; i < slice.rows; ++i)
          kv_.WriteRow({l, heads, {}, {}, 0}, {}, {}, model_.rope, blocks, slice.context + i,
                       row(slice.first_row + i));
        closest_[s].push_back(std::numeric_limits<double>::infinity());
        if (!attends) continue;
        if (slice.history != nullptr && slice.rows == 1) {
          kv_.AttendHistory(l, heads, softmax_scale, *slice.history,
                            batch.blocks.subspan(slice.first_kept, slice.history->kept_blocks()),
                            blocks, slice.context, row(slice.first_row));
          closest_[s].back() = kv_.closest_decision();
          continue;
        }
        for (int i = 0; i < slice.rows; ++i) {
          const RefKv::Row r = row(slice.first_row + i);
          if (l == layer) kv_.AttendRow(l, heads, softmax_scale, blocks, slice.context + i, r);
          if (slice.history == nullptr) continue;
          kv_.ScoreRow(l, heads, softmax_scale, *slice.history, blocks, slice.context + i, r);
        }
      }
    }
    for (std::size_t r = 0; r < batch.tokens.size(); ++r)
      RefRmsNorm(std::span(out).subspan(r * width, width), std::vector<float>(width, 1.f), 0);
    return out;
  }
  /// Of the last step: how close a decision of slice `s` was, by layer.
  double closest(std::size_t s, int layer) const { return closest_[s][layer]; }

 private:
  void NoteQueries(RetainedHistory& history, const SequenceSlice& slice, int layer,
                   const std::vector<float>& qkv) const {
    for (int r = slice.first_row; r < slice.first_row + slice.rows; ++r) {
      const float* const row = &qkv[static_cast<std::size_t>(r) * model_.columns];
      for (int head = 0; head < model_.shape.heads; ++head)
        history.NoteQuery(layer, head, row + static_cast<std::size_t>(head) * model_.shape.dim);
    }
  }
  std::vector<float> Qkv(std::span<const std::int32_t> tokens, int layer) const {
    std::vector<float> out;
    for (const std::int32_t token : tokens) {
      const float* const x = &model_.table[std::size_t{LabModel::kHidden} * token];
      for (int c = 0; c < model_.columns; ++c) {
        const float* const w = &model_.qkv[layer][std::size_t{LabModel::kHidden} * c];
        float sum = 0;
        for (int i = 0; i < LabModel::kHidden; ++i) sum += x[i] * w[i];  // exact
        out.push_back(sum);
      }
    }
    return out;
  }

  const LabModel& model_;
  RefKv kv_;
  std::vector<std::vector<double>> closest_;
};

/// Where the originals of a sequence are.
class LabOriginals final : public RowSource {
 public:
  std::vector<BlockView> device;       // planes that are pages
  std::vector<const std::byte*> host;  // by block: all planes, K's then V's, or null
  std::set<std::int32_t> gone, host_first;
  std::size_t page_bytes = 0;

  PlanePlace Find(std::int32_t block, bool is_v, int plane, int, std::span<std::byte>) override {
    return Place(block, is_v, plane);
  }
  PlanePlace Place(std::int32_t block, bool is_v, int plane) override {
    const auto b = static_cast<std::size_t>(block);
    if (b >= device.size() || gone.contains(block)) return {};
    const PageId page = (is_v ? device[b].v : device[b].k)[plane];
    if (page.valid() && !host_first.contains(block)) return {.page = page};
    if (b >= host.size() || host[b] == nullptr) return {};
    return {{}, host[b] + page_bytes * (is_v ? kPlanes + plane : plane)};
  }
};

/// One sequence, on both sides.
struct LabSequence {
  bool retains = false;
  int context = 0;
  std::vector<BlockView> blocks;  // as steps see them
  std::vector<BlockView> kept;
  std::vector<HostMemory> copies;  // of full blocks, as the backend wrote them
  std::shared_ptr<LabOriginals> got_source, want_source;
  std::optional<RetainedHistory> got, want;

  int FullBlocks() const { return context / kBlockTokens; }
};

}  // namespace pliant::testing
