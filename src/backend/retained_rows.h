// Room: backend. Moving the rows that a RetainedHistory decides on, for backends whose pages lie in
// host memory the way plane_code.h says. Called by a backend for one sequence at a time between
// steps, and for different units at the same time within one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "backend/backend.h"
#include "backend/history_keys.h"
#include "backend/retained_history.h"
#include "base/status.h"

namespace pliant {

struct PageMemory {
  std::byte* base = nullptr;
  std::size_t page_bytes = 0;
  std::uint32_t pages = 0;
  KvGeometry geometry;
  const KeyKernel* kernel = &ScalarKeyKernel();
  std::byte* Page(PageId page) const { return base + page.value() * page_bytes; }
};

/// The planes of one original block, wherever they lie.
class OriginalBlock {
 public:
  /// The first `k` planes of K and `v` of V: what they hold of `unit`, or of all. False when one is
  /// gone or spoiled.
  bool Load(const PageMemory& memory, RowSource& source, std::int32_t block, int unit, int k,
            int v);
  const std::byte* K(int plane) const { return k_[plane]; }
  const std::byte* V(int plane) const { return v_[plane]; }

 private:
  std::array<const std::byte*, kPlanes> k_{}, v_{};
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t buffer_bytes_ = 0;
};

/// Copies rows of one unit from `original`, whose first token is first_token, to slots of `kept`:
/// every plane that those have, and scales.
void CopyRows(const PageMemory& memory, const OriginalBlock& original, std::int32_t first_token,
              int layer, int kv_head, std::span<const RetainedHistory::Move> moves,
              std::span<const BlockView> kept);

/// What un-codes K: as in ChannelCode and RopeTable; empty code: scale 1, center 0.
struct KeyDecoding {
  const ChannelCode* code = nullptr;
  std::span<const float> inv_freq;
};

/// Backend::NoteHistory, DropFromHistory and RefillHistory.
Status NoteRows(const PageMemory& memory, RetainedHistory& history, const KeyDecoding& decoding,
                std::int32_t blocks);
Status DropRows(const PageMemory& memory, RetainedHistory& history,
                std::span<const BlockView> kept);
Status RefillRows(const PageMemory& memory, RetainedHistory& history,
                  std::span<const BlockView> kept);
/// In a step: the dropped tokens of `page` come back to one unit. False: they could not be read,
/// and nothing has changed but that the page is lost.
bool ReturnRows(const PageMemory& memory, RetainedHistory& history, int layer, int kv_head,
                std::int32_t page, std::span<const BlockView> kept);

}  // namespace pliant
