#include "model/support/step.h"

#include <cstring>

#include "base/check.h"
#include "model/support/gguf_builder.h"

namespace pliant::testing_support {

Golden ReadGolden(const std::string& path) {
  const std::vector<std::byte> bytes = FileBytes(path);
  std::size_t at = 0;
  const auto take = [&](void* out, std::size_t size) {
    PLIANT_CHECK(at + size <= bytes.size(), path);
    std::memcpy(out, bytes.data() + at, size);
    at += size;
  };
  Golden golden;
  std::uint32_t count = 0;
  take(&count, 4);
  golden.tokens.resize(count);
  take(golden.tokens.data(), 4 * count);
  take(&count, 4);
  golden.rows.resize(count);
  take(golden.rows.data(), 4 * count);
  take(&golden.vocabulary, 4);
  golden.logits.resize(golden.rows.size() * static_cast<std::size_t>(golden.vocabulary));
  take(golden.logits.data(), 4 * golden.logits.size());
  PLIANT_CHECK(at == bytes.size(), path);
  return golden;
}

Status OneSequence::Feed(std::vector<std::int32_t> tokens, std::vector<std::int32_t> logit_rows) {
  const auto rows = static_cast<std::int32_t>(tokens.size());
  const auto blocks = static_cast<std::size_t>((context_ + rows + kBlockTokens - 1) / kBlockTokens);
  while (blocks_.size() < blocks) {
    BlockView block;
    auto page = static_cast<std::uint32_t>(blocks_.size() * 2 * kPlanes);
    for (PageId& id : block.k) id = PageId(page++);
    for (PageId& id : block.v) id = PageId(page++);
    blocks_.push_back(block);
  }
  std::vector<std::int32_t> positions(tokens.size());
  for (std::int32_t i = 0; i < rows; ++i) positions[static_cast<std::size_t>(i)] = context_ + i;
  const std::vector<SequenceSlice> sequences = {
      {0, rows, context_, 0, static_cast<std::int32_t>(blocks)}};
  const Status status =
      model_.Forward(backend_, {tokens, positions, sequences, blocks_, logit_rows});
  if (status.ok()) context_ += rows;
  return status;
}

}  // namespace pliant::testing_support
