#include "kv/page_pool.h"

#include <string>

namespace pliant {

PageReservation& PageReservation::operator=(PageReservation&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(pages_, other.pages_);
  return *this;
}

PageReservation::~PageReservation() {
  for (OwnedPage& page : pages_) pool_->ReturnUnread(std::move(page));
}

OwnedPage PageReservation::Take() {
  PLIANT_CHECK(!pages_.empty(), "reservation used up");
  OwnedPage page = std::move(pages_.back());
  pages_.pop_back();
  return page;
}

PagePool::PagePool(std::uint32_t pages) : total_(pages) {
  free_.reserve(pages);
  for (std::uint32_t i = pages; i-- > 0;) free_.push_back(PageId(i));
}

PagePool::~PagePool() { PLIANT_CHECK(owned() == 0, "pool destroyed while pages are owned"); }

Result<PageReservation> PagePool::Reserve(std::uint32_t count) {
  if (count > free()) {
    return OutOfMemory(std::to_string(count) + " pages wanted, " + std::to_string(free()) + " of " +
                       std::to_string(total_) + " free");
  }
  PageReservation reservation;
  reservation.pool_ = this;
  reservation.pages_.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) reservation.pages_.push_back(Take());
  return reservation;
}

OwnedPage PagePool::Take() {
  PLIANT_CHECK(!free_.empty(), "page taken from an empty pool");
  const PageId id = free_.back();
  free_.pop_back();
  return OwnedPage(id);
}

void PagePool::Return(OwnedPage&& page) {
  if (!page.valid()) return;
  const PageId id = std::exchange(page.id_, {});
  if (step_in_flight()) {
    fenced_.push_back({begun_, id});
  } else {
    free_.push_back(id);
  }
}

void PagePool::ReturnUnread(OwnedPage&& page) {
  if (!page.valid()) return;
  free_.push_back(std::exchange(page.id_, {}));
}

void PagePool::BeginStep(std::uint64_t step) {
  PLIANT_CHECK(step == begun_ + 1, "steps begin in order");
  begun_ = step;
}

void PagePool::EndStep(std::uint64_t step) {
  PLIANT_CHECK(step == ended_ + 1 && step <= begun_, "steps end in the order they began");
  ended_ = step;
  while (!fenced_.empty() && fenced_.front().step <= ended_) {
    free_.push_back(fenced_.front().page);
    fenced_.pop_front();
  }
}

}  // namespace pliant
