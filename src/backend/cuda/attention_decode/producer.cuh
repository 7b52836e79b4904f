// Room: backend/cuda, decode attention. The ring of slots between a producer warp and its
// consumers, and the producer. Part of attention_decode.cu alone.
#pragma once

#include <cstdint>

#include "backend/cuda/attention_decode/kernel_args.cuh"

namespace pliant::cuda {
namespace {

// Arrivals that make a slot full: the elected lane's, or every lane's copies and the note.
#if __CUDA_ARCH__ >= 900
constexpr int kFullArrivals = 1;
#else
constexpr int kFullArrivals = 33;
#endif

// Arrivals of a consumer warp that make a slot empty: lane 0's, once the warp has read it.
// compute-sanitizer's racecheck does not see that __syncwarp orders the other lanes' reads before
// that; built with this macro it does.
#if defined(PLIANT_ARRIVE_BY_LANE)
constexpr int kEmptyArrivals = 32;
#else
constexpr int kEmptyArrivals = 1;
#endif

/// What the slot of a query, or of a block's first planes, says about the segment and the block. In
/// shared memory.
struct Note {
  int segment;                  // -1: the end
  int state;                    // planes of K | planes of V << 4 | last block of the segment << 8
  int row, tail, first, count;  // of the segment
  int pad[2];
};
static_assert(sizeof(Note) == 32);

/// What a group's warps share: a ring of slots, each one pair of planes (or a single one) of K or
/// of V of a block for all heads of the group, with a barrier that says it is full and one that
/// says it is empty.
struct Ring {
  std::uint8_t* slots;
  int slot_bytes;
  std::uint32_t full, empty;  // shared addresses of the barriers
  Note* notes;
  int count;

  int slot = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void Next() {
    if (++slot == count) {
      slot = 0;
      parity ^= 1;
    }
  }
};

/// Fills the ring: for every segment of the range sends the query, then every resident plane of its
/// blocks. `pages` and `queries` point to what the group sees of page 0 and row 0; `page_bytes` and
/// `query_bytes` (0: too large for a slot) are how much. Run by one whole warp.
template <int D>
__device__ __forceinline__ void Produce(const KernelArgs& args, Ring ring,
                                        const std::uint8_t* pages, std::uint32_t page_bytes,
                                        const float* queries, std::uint32_t query_bytes,
                                        const Range& range) {
  const int lane = threadIdx.x & 31;
  const DecodeArgs& a = args.a;
  const std::uint32_t second =
      args.launch.heads * UnitStride(D);  // where the pair's second plane lies in a slot
  ring.parity = 1;                        // a fresh ring is empty
  // Sends one or two pages; `note` belongs to the first planes of a block and to the end.
  auto send = [&](int pieces, const std::uint8_t* from0, const std::uint8_t* from1,
                  std::uint32_t bytes, bool with_note, const Segment& segment, int index,
                  int state) {
    BarrierWait(ring.empty + ring.slot * 8, ring.parity);
    const std::uint32_t full = ring.full + ring.slot * 8;
    const std::uint32_t to = SharedAddress(ring.slots + ring.slot * ring.slot_bytes);
    auto write_note = [&] {
      if (!with_note) return;
      int4* const note = reinterpret_cast<int4*>(ring.notes + ring.slot);
      note[0] = make_int4(index, state, segment.row, segment.tail);
      note[1] = make_int4(segment.first, segment.count, 0, 0);
    };
#if __CUDA_ARCH__ >= 900
    if (ElectOne()) {
      write_note();
      BarrierExpect(full, pieces * bytes);
      if (pieces > 0) BulkCopy(to, from0, bytes, full);
      if (pieces > 1) BulkCopy(to + second, from1, bytes, full);
    }
    __syncwarp();
#else
    for (int p = 0; p < pieces; ++p) {
      const std::uint8_t* from = p == 0 ? from0 : from1;
      for (std::uint32_t at = lane * 16; at < bytes; at += 512)
        AsyncCopy16(to + p * second + at, from + at);
    }
    AsyncArrive(full);
    if (lane == 0) {
      write_note();
      BarrierArrive(full);
    }
    __syncwarp();
#endif
    ring.Next();
  };
  if (range.segments != 0) {
    int next_block = range.first_block, left = range.blocks, index = range.segment;
    const int end = range.segment + range.segments;
    Segment next = a.segments[index];
    auto fetch = [&](int count) {
      return (lane >> 3) < count ? a.blocks[static_cast<std::size_t>(next_block) * 8 + lane] : kAll;
    };
    std::uint32_t upcoming = (lane >> 3) < left ? range.first_pages[lane >> 3][lane & 7] : kAll;
    bool opens = true;  // the coming blocks are the first of their segment
    while (index < end) {
      const std::uint32_t entry = upcoming;
      const int count = min(4, left);
      const bool last = left == count;
      const int own = index;
      const Segment segment = next;
      next_block += count;
      left -= count;
      if (last && ++index < end) {
        next = a.segments[index];
        next_block = next.first_block;
        left = next.blocks;
      }
      if (index < end) upcoming = fetch(min(4, left));
      const std::uint32_t resident = __ballot_sync(kAll, entry != kAll);
      if (opens) {
        const float* const query = queries + segment.row * a.q_stride;
        send(query_bytes != 0 ? 1 : 0, reinterpret_cast<const std::uint8_t*>(query), nullptr,
             query_bytes, true, segment, own, 0);
      }
      opens = last;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        int k_planes = __popc((resident >> (8 * i)) & 0x0fu),
            v_planes = __popc((resident >> (8 * i)) & 0xf0u);
        if (k_planes == 0 || v_planes == 0)
          k_planes = v_planes = 0;  // takes no part; an empty slot says so
        const int state = k_planes | v_planes << 4 | (last && i + 1 == count ? 1 << 8 : 0);
        const int k_pairs = max(1, (k_planes + 1) >> 1), pairs = k_pairs + ((v_planes + 1) >> 1);
#pragma unroll 1
        for (int p = 0; p < pairs; ++p) {
          const bool is_v = p >= k_pairs;
          const int pair = is_v ? p - k_pairs : p;
          const int from = 8 * i + (is_v ? 4 : 0) + 2 * pair;
          const std::uint32_t page0 = __shfl_sync(kAll, entry, from),
                              page1 = __shfl_sync(kAll, entry, from + 1);
          send(min(2, (is_v ? v_planes : k_planes) - 2 * pair), pages + page0 * a.page_bytes,
               pages + page1 * a.page_bytes, page_bytes, p == 0, segment, own, state);
        }
      }
    }
  }
  send(0, nullptr, nullptr, 0, true, Segment{}, -1, 0);
}

}  // namespace
}  // namespace pliant::cuda
