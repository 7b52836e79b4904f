// Room: backend/cuda. The tables of one history with a capacity in device memory: how they grow,
// and where its originals lie. Owned by the RetainedHistory; used by the thread that owns the
// stream, between steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/history/history_tables.h"
#include "backend/retained_history.h"

namespace pliant::cuda {

/// Device buffers of ended histories, for the next ones. All of them are used by one stream, so
/// that work in flight ends before another owner's begins. Shared by a backend and its histories.
class HistoryMemory {
 public:
  explicit HistoryMemory(const Stream& stream) : stream_(&stream) {}
  /// At least so many bytes.
  Result<DeviceArray<std::byte>> Take(std::size_t bytes);
  void Give(DeviceArray<std::byte> buffer);
  /// The weights of short means, then of long ones; one copy for all histories that have them.
  Result<const float*> Put(std::shared_ptr<const GrowthWeights> weights);
  const Stream& stream() const { return *stream_; }
  /// The backend ends: histories that are left no longer touch its stream.
  void Close() {
    buffers_.clear();
    weights_.clear();
  }

 private:
  const Stream* stream_;
  std::multimap<std::size_t, DeviceArray<std::byte>> buffers_;  // by size
  std::map<std::shared_ptr<const GrowthWeights>, DeviceArray<float>> weights_;
};

class DeviceHistory final : public RemoteTables {
 public:
  DeviceHistory(const KvGeometry& geometry, const RetainedHistory& history,
                std::shared_ptr<HistoryMemory> memory);
  ~DeviceHistory() override;

  Unit Read(int unit, std::int32_t tokens) const override;

  /// Room for a sequence of so many blocks with so many kept ones; what is there stays.
  /// OutOfMemory: nothing has changed.
  Status Reserve(const RetainedHistory& history, std::int32_t blocks, std::int32_t kept_blocks);
  const HistoryTables& tables() const { return tables_; }
  /// The next keys noted are the first ones, of so many tokens.
  void SetKeysSummed(std::int32_t tokens) { tables_.keys_summed = tokens; }
  /// After a drop.
  void SetDropped(std::int32_t frontier, std::int32_t kept_blocks) {
    frontier_ = frontier;
    kept_blocks_ = kept_blocks;
  }
  /// Do the means hold queries? From now on they do.
  bool TakeQueriesSeen() { return std::exchange(queries_seen_, true); }

  /// Where the planes of a block lie now: addresses of pages from `pages` on, or of pinned memory.
  BlockPlaces Find(RowSource& source, std::int32_t block, const std::uint8_t* pages) const;
  /// Makes the places of the first `blocks` blocks known to the device, where they have changed.
  void UpdatePlaces(RowSource& source, std::int32_t blocks, const std::uint8_t* pages);
  void SetPlaces(std::int32_t block, const BlockPlaces& places);

 private:
  /// Calls put(array, units, elements a block of 32) for every array of tokens, and of slots.
  template <typename Put>
  void TokenArrays(HistoryTables& tables, Put&& put) const;
  template <typename Put>
  void SlotArrays(HistoryTables& tables, Put&& put) const;
  Status MakeFixed();
  Status Grow(std::int64_t tokens, std::int64_t slots, std::int32_t frontier);
  void CopyTables(HistoryTables& next, std::int32_t frontier);

  const KvGeometry geometry_;
  const std::shared_ptr<HistoryMemory> memory_;
  DeviceArray<std::byte> fixed_, of_tokens_, of_slots_;
  std::vector<float> weights_;    // of signs, sent with the first Reserve
  std::size_t query_floats_ = 0;  // of each of the means
  std::shared_ptr<const GrowthWeights> growth_weights_;
  HistoryTables tables_;
  std::int32_t frontier_ = 0, kept_blocks_ = 0;
  bool queries_seen_ = false;
  std::uint64_t place_changes_ = 0;  // of the source, when places were asked for
  std::vector<BlockPlaces> known_;  // by block: what the device knows
};

}  // namespace pliant::cuda
