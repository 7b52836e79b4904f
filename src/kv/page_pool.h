// Room: kv. The plane pages of one device as ids: which are free, which are owned, and which are
// fenced, that is, given back while a step that may read them is still in flight. Owned by the
// engine thread.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "base/status.h"

namespace pliant {

/// Sole ownership of one page. Move-only; must be given back to its pool before it dies, or the
/// process stops (a leaked page).
class OwnedPage {
 public:
  OwnedPage() = default;
  OwnedPage(OwnedPage&& other) noexcept : id_(std::exchange(other.id_, {})) {}
  OwnedPage& operator=(OwnedPage&& other) noexcept {
    PLIANT_CHECK(!id_.valid(), "page overwritten while owned");
    id_ = std::exchange(other.id_, {});
    return *this;
  }
  OwnedPage(const OwnedPage&) = delete;
  OwnedPage& operator=(const OwnedPage&) = delete;
  ~OwnedPage() { PLIANT_CHECK(!id_.valid(), "page leaked"); }

  PageId id() const { return id_; }
  bool valid() const { return id_.valid(); }

 private:
  friend class PagePool;
  explicit OwnedPage(PageId id) : id_(id) {}
  PageId id_;
};

class PagePool;

/// Pages set aside together, all or none; what is not taken out goes back to the pool.
class PageReservation {
 public:
  PageReservation() = default;
  PageReservation(PageReservation&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), pages_(std::move(other.pages_)) {}
  PageReservation& operator=(PageReservation&& other) noexcept;
  ~PageReservation();
  std::size_t size() const { return pages_.size(); }
  OwnedPage Take();

 private:
  friend class PagePool;
  PagePool* pool_ = nullptr;
  std::vector<OwnedPage> pages_;
};

class PagePool {
 public:
  explicit PagePool(std::uint32_t pages);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  std::uint32_t total() const { return total_; }
  std::uint32_t free() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t fenced() const { return static_cast<std::uint32_t>(fenced_.size()); }
  std::uint32_t owned() const { return total_ - free() - fenced(); }
  bool step_in_flight() const { return begun_ != ended_; }

  /// OutOfMemory, with both numbers, when fewer than `count` are free; nothing is taken then.
  Result<PageReservation> Reserve(std::uint32_t count);
  /// One page; the caller has checked free().
  OwnedPage Take();
  /// Free at once when no step is in flight, else when every step begun so far has ended. An empty
  /// owner is ignored.
  void Return(OwnedPage&& page);
  /// A page that no step can ever have read (fresh from Take): free at once.
  void ReturnUnread(OwnedPage&& page);

  /// Steps are numbered 1, 2, ... and end in that order.
  void BeginStep(std::uint64_t step);
  void EndStep(std::uint64_t step);

 private:
  struct Fenced {
    std::uint64_t step;
    PageId page;
  };
  std::uint32_t total_;
  std::vector<PageId> free_;  // a stack: lately used pages are warm
  std::deque<Fenced> fenced_;
  std::uint64_t begun_ = 0, ended_ = 0;
};

}  // namespace pliant
