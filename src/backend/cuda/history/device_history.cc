#include "backend/cuda/history/device_history.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "backend/cuda/history_changes/history_changes.h"

namespace pliant::cuda {
namespace {

constexpr std::int64_t kLeastTokens = 512, kLeastRing = 128, kLeastSlots = 128;
constexpr std::size_t kAlign = 256;

/// Lays arrays one behind the other; without a base it only counts.
struct Layer {
  std::byte* base = nullptr;
  std::size_t used = 0;
  template <typename T>
  void Put(T*& to, std::size_t count) {
    to = reinterpret_cast<T*>(base + used);
    used += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
  }
};

/// An array of a table: `bytes` a block of 32 tokens or slots, for each of `units`.
struct Rows {
  std::byte* data;
  std::size_t units, bytes;
};

/// Copies blocks `first` .. first + count - 1 of arrays with room for so many blocks, to where they
/// are in others.
void CopyBlocks(const std::vector<Rows>& from, std::size_t from_room, std::size_t from_first,
                const std::vector<Rows>& to, std::size_t to_room, std::size_t to_first,
                std::size_t count, const Stream& stream) {
  for (std::size_t i = 0; i < from.size() && count > 0; ++i) {
    const std::size_t bytes = from[i].bytes;
    PLIANT_CUDA_CHECK(cudaMemcpy2DAsync(
        to[i].data + to_first * bytes, to_room * bytes, from[i].data + from_first * bytes,
        from_room * bytes, count * bytes, from[i].units, cudaMemcpyDeviceToDevice, stream.get()));
  }
}

std::uint64_t AddressOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

}  // namespace

Result<DeviceArray<std::byte>> HistoryMemory::Take(std::size_t bytes) {
  const std::size_t size = std::bit_ceil(bytes);
  if (const auto at = buffers_.find(size); at != buffers_.end()) {
    DeviceArray<std::byte> buffer = std::move(at->second);
    buffers_.erase(at);
    return Result<DeviceArray<std::byte>>(std::move(buffer));
  }
  auto made = DeviceArray<std::byte>::Make(size, "tables of a history");
  if (made.ok() || buffers_.empty()) return made;
  stream_->Synchronize();
  buffers_.clear();
  return DeviceArray<std::byte>::Make(size, "tables of a history");
}

void HistoryMemory::Give(DeviceArray<std::byte> buffer) {
  if (buffer.size() != 0) buffers_.emplace(buffer.size(), std::move(buffer));
}

Result<const float*> HistoryMemory::Put(std::shared_ptr<const GrowthWeights> weights) {
  if (const auto at = weights_.find(weights); at != weights_.end()) return at->second.data();
  const std::size_t size = weights->short_mean.size();
  PLIANT_ASSIGN_OR_RETURN(DeviceArray<float> array,
                          DeviceArray<float>::Make(2 * size, "growth weights"));
  Upload<float>(weights->short_mean, array.data());
  Upload<float>(weights->long_mean, array.data() + size);
  return weights_.emplace(std::move(weights), std::move(array)).first->second.data();
}

DeviceHistory::DeviceHistory(const KvGeometry& geometry, const RetainedHistory& history,
                             std::shared_ptr<HistoryMemory> memory)
    : geometry_(geometry),
      memory_(std::move(memory)),
      weights_(history.weights_by_signs().begin(), history.weights_by_signs().end()) {
  const RetentionOptions& options = history.options();
  tables_.words = (geometry.head_dim + 63) / 64;
  tables_.sink_tokens = options.sink_tokens;
  tables_.most_returns = options.most_returns;
  tables_.return_weight = options.return_weight;
  tables_.redundancy = options.redundancy;
  tables_.returns = options.returns;
  tables_.squared = options.squared;
  growth_weights_ = options.growth_weights;
  if (options.query_means)
    query_floats_ = static_cast<std::size_t>(geometry.layers) * history.heads() * geometry.head_dim;
}

DeviceHistory::~DeviceHistory() {
  for (DeviceArray<std::byte>* buffer : {&fixed_, &of_tokens_, &of_slots_})
    memory_->Give(std::move(*buffer));
}

template <typename Put>
void DeviceHistory::TokenArrays(HistoryTables& t, Put&& put) const {
  const std::size_t units = geometry_.Units(), dim = static_cast<std::size_t>(geometry_.head_dim);
  put(t.token_score, units, kBlockTokens);
  put(t.token_weight, units, kBlockTokens);
  if (t.returns) {
    put(t.signs, units, kBlockTokens * static_cast<std::size_t>(t.words));
    put(t.kept, units, 1);
    put(t.lost, units, kBlockTokens / kReturnTokens);
  } else {
    put(t.token_codes, units, kBlockTokens * dim);
    put(t.token_norm, units, kBlockTokens);
  }
  put(t.places, 1, 1);
}

template <typename Put>
void DeviceHistory::SlotArrays(HistoryTables& t, Put&& put) const {
  const std::size_t units = geometry_.Units(), dim = static_cast<std::size_t>(geometry_.head_dim);
  put(t.slot_token, units, kBlockTokens);
  put(t.slot_score, units, kBlockTokens);
  put(t.slot_weight, units, kBlockTokens);
  if (t.returns) return;
  put(t.slot_codes, units, kBlockTokens * dim);
  put(t.slot_norm, units, kBlockTokens);
}

Status DeviceHistory::Reserve(const RetainedHistory& history, std::int32_t blocks,
                              std::int32_t kept_blocks) {
  const bool ring = !tables_.returns;
  const std::int32_t part = ring ? blocks - history.frontier() : blocks;
  const auto room = [](std::int64_t now, std::int64_t wanted, std::int64_t least) {
    return wanted <= now ? now : std::max({least, 2 * now, (wanted + 31) / 32 * 32});
  };
  std::int64_t tokens =
      room(tables_.token_room, std::int64_t{part} * kBlockTokens, ring ? kLeastRing : kLeastTokens);
  if (ring) tokens = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(tokens)));
  const std::int64_t slots =
      room(tables_.slot_room, std::int64_t{kept_blocks} * kBlockTokens, kLeastSlots);
  if (tokens == tables_.token_room && slots == tables_.slot_room) return {};
  return Grow(tokens, slots, history.frontier());
}

Status DeviceHistory::MakeFixed() {
  if (growth_weights_ != nullptr) {
    PLIANT_ASSIGN_OR_RETURN(tables_.short_weight, memory_->Put(growth_weights_));
    tables_.long_weight = tables_.short_weight + query_floats_;
    tables_.weight_bias = growth_weights_->bias;
  }
  const std::size_t sums = geometry_.Units() * static_cast<std::size_t>(geometry_.head_dim);
  PLIANT_ASSIGN_OR_RETURN(
      fixed_, memory_->Take(sums * sizeof(double) +
                            (weights_.size() + 2 * query_floats_) * sizeof(float) + 4 * kAlign));
  Layer layer{fixed_.data()};
  float* weight_at = nullptr;
  layer.Put(tables_.key_sum, sums);
  layer.Put(weight_at, weights_.size());
  if (query_floats_ > 0) {
    layer.Put(tables_.short_mean, query_floats_);
    layer.Put(tables_.long_mean, query_floats_);
  }
  memory_->stream().Synchronize();  // who had the buffer before may still read it
  Upload<float>(weights_, weight_at);
  tables_.weight_at = weight_at;
  return {};
}

Status DeviceHistory::Grow(std::int64_t token_room, std::int64_t slot_room, std::int32_t frontier) {
  const Stream& stream = memory_->stream();
  if (fixed_.size() == 0) PLIANT_RETURN_IF_ERROR(MakeFixed());
  HistoryTables next = tables_;
  next.token_room = static_cast<std::int32_t>(token_room);
  next.slot_room = static_cast<std::int32_t>(slot_room);
  if (!next.returns) next.token_mask = next.token_room - 1;
  const auto token_blocks = static_cast<std::size_t>(token_room / kBlockTokens);
  const auto slot_blocks = static_cast<std::size_t>(slot_room / kBlockTokens);
  // Counts without a base, then lays.
  const auto lay = [&](std::byte* tokens, std::byte* slots) {
    Layer of_tokens{tokens}, of_slots{slots};
    TokenArrays(next, [&](auto*& array, std::size_t units, std::size_t each) {
      of_tokens.Put(array, units * each * token_blocks);
    });
    SlotArrays(next, [&](auto*& array, std::size_t units, std::size_t each) {
      of_slots.Put(array, units * each * slot_blocks);
    });
    return std::pair(of_tokens.used, of_slots.used);
  };
  const auto [token_bytes, slot_bytes] = lay(nullptr, nullptr);
  DeviceArray<std::byte> of_tokens, of_slots;
  PLIANT_ASSIGN_OR_RETURN(of_tokens, memory_->Take(token_bytes));
  if (auto taken = memory_->Take(slot_bytes); taken.ok()) {
    of_slots = std::move(taken).value();
  } else {
    memory_->Give(std::move(of_tokens));
    return taken.status();
  }
  lay(of_tokens.data(), of_slots.data());
  LaunchHistoryClear(next, static_cast<int>(geometry_.Units()), stream.get());
  CopyTables(next, frontier);
  memory_->Give(std::exchange(of_tokens_, std::move(of_tokens)));
  memory_->Give(std::exchange(of_slots_, std::move(of_slots)));
  tables_ = next;
  if (!tables_.returns) known_.clear();  // a ring's places are others now
  known_.resize(token_blocks);
  return {};
}

void DeviceHistory::CopyTables(HistoryTables& next, std::int32_t frontier) {
  const Stream& stream = memory_->stream();
  const auto rows_of = [&](HistoryTables& tables, bool tokens) {
    std::vector<Rows> rows;
    const auto add = [&](auto*& array, std::size_t units, std::size_t each) {
      rows.push_back({reinterpret_cast<std::byte*>(array), units, each * sizeof(*array)});
    };
    tokens ? TokenArrays(tables, add) : SlotArrays(tables, add);
    return rows;
  };
  const auto slots = static_cast<std::size_t>(tables_.slot_room / kBlockTokens);
  CopyBlocks(rows_of(tables_, false), slots, 0, rows_of(next, false),
             static_cast<std::size_t>(next.slot_room / kBlockTokens), 0, slots, stream);
  const auto before = static_cast<std::size_t>(tables_.token_room / kBlockTokens);
  const auto after = static_cast<std::size_t>(next.token_room / kBlockTokens);
  if (before == 0) return;
  const auto from = rows_of(tables_, true), to = rows_of(next, true);
  // A ring holds `before` blocks from the frontier on: two runs.
  const auto first = next.returns ? 0 : static_cast<std::size_t>(frontier);
  const std::size_t at = first % before, run = before - at;
  CopyBlocks(from, before, at, to, after, first % after, run, stream);
  CopyBlocks(from, before, 0, to, after, (first + run) % after, at, stream);
}

BlockPlaces DeviceHistory::Find(RowSource& source, std::int32_t block,
                                const std::uint8_t* pages) const {
  std::array<PlanePlace, 2 * kPlanes> found;
  source.Places(block, found);
  BlockPlaces places{};
  for (int p = 0; p < 2 * kPlanes; ++p) {
    places.plane[p] = found[p].page.valid()
                          ? AddressOf(pages + found[p].page.value() * geometry_.PageBytes())
                          : AddressOf(found[p].host);
  }
  return places;
}

void DeviceHistory::SetPlaces(std::int32_t block, const BlockPlaces& places) {
  const std::int32_t at = tables_.At(block * kBlockTokens) / kBlockTokens;
  BlockPlaces& known = known_[static_cast<std::size_t>(at)];
  if (known == places) return;
  known = places;
  // From pageable memory: the bytes are taken before the call returns.
  PLIANT_CUDA_CHECK(cudaMemcpyAsync(tables_.places + at, &places, sizeof places,
                                    cudaMemcpyHostToDevice, memory_->stream().get()));
}

void DeviceHistory::UpdatePlaces(RowSource& source, std::int32_t blocks,
                                 const std::uint8_t* pages) {
  const std::uint64_t changes = source.PlaceChanges();
  const bool same = changes != 0 && changes == place_changes_;
  place_changes_ = changes;
  if (same && !kChecked) return;
  for (std::int32_t block = 0; block < blocks; ++block) {
    const BlockPlaces places = Find(source, block, pages);
    PLIANT_CHECK(!same || known_[static_cast<std::size_t>(block)] == places,
                 "a block's place changed and was not counted");
    SetPlaces(block, places);
  }
}

RemoteTables::Unit DeviceHistory::Read(int unit, std::int32_t tokens) const {
  memory_->stream().Synchronize();
  Unit read;
  if (tables_.token_room == 0) return read;
  const auto room = static_cast<std::size_t>(tables_.token_room);
  const auto slots = static_cast<std::size_t>(tables_.slot_room);
  const auto at = static_cast<std::size_t>(unit);
  std::vector<float> score(room), weight(room), slot_score(slots), slot_weight(slots);
  Download<float>(tables_.token_score + at * room, score);
  Download<float>(tables_.token_weight + at * room, weight);
  read.kept_token.resize(slots);
  Download<std::int32_t>(tables_.slot_token + at * slots, read.kept_token);
  Download<float>(tables_.slot_score + at * slots, slot_score);
  Download<float>(tables_.slot_weight + at * slots, slot_weight);
  read.kept_token.resize(static_cast<std::size_t>(kept_blocks_) * kBlockTokens);
  read.score.resize(static_cast<std::size_t>(tokens));
  read.weight.resize(static_cast<std::size_t>(tokens));
  const std::int32_t first = tables_.returns ? 0 : frontier_ * kBlockTokens;
  for (std::int32_t t = first; t < std::min(tokens, first + tables_.token_room); ++t) {
    read.score[t] = score[tables_.At(t)];
    read.weight[t] = weight[tables_.At(t)];
  }
  for (std::size_t s = 0; s < read.kept_token.size(); ++s) {
    const std::int32_t token = read.kept_token[s];
    if (token >= tokens) continue;
    read.score[token] = slot_score[s];
    read.weight[token] = slot_weight[s];
  }
  return read;
}

}  // namespace pliant::cuda
