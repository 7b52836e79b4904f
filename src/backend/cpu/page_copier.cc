#include "backend/cpu/page_copier.h"

#include <cstring>
#include <utility>

#include "base/check.h"

namespace pliant {

PageCopier::~PageCopier() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_one();
  if (thread_.joinable()) thread_.join();
}

CopyTicket PageCopier::Start(Direction direction, std::vector<Piece> pieces, std::size_t bytes) {
  if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  std::uint64_t ticket;
  {
    const std::lock_guard lock(mutex_);
    ticket = next_ticket_++;
    jobs_.push_back({ticket, direction, bytes, std::move(pieces)});
  }
  work_.notify_one();
  return CopyTicket(ticket);
}

CopyTicket PageCopier::Refuse() {
  const std::lock_guard lock(mutex_);
  refused_.insert(next_ticket_);
  // Jobs end in ticket order, so a refused ticket must not hold up those below it: it is looked up
  // on its own.
  return CopyTicket(next_ticket_++);
}

CopyState PageCopier::StateLocked(std::uint64_t ticket) const {
  PLIANT_CHECK(ticket < next_ticket_, "a copy ticket that was never given");
  if (refused_.contains(ticket)) return CopyState::kFailed;
  return ticket < done_below_ ? CopyState::kDone : CopyState::kPending;
}

CopyState PageCopier::Poll(CopyTicket ticket) {
  const std::lock_guard lock(mutex_);
  return StateLocked(ticket.value());
}

CopyState PageCopier::Wait(CopyTicket ticket) {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return StateLocked(ticket.value()) != CopyState::kPending; });
  return StateLocked(ticket.value());
}

void PageCopier::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    for (const Piece& piece : job.pieces) {
      if (job.direction == Direction::kOut) {
        std::memcpy(piece.host, piece.page, job.bytes);
      } else {
        std::memcpy(piece.page, piece.host, job.bytes);
      }
    }
    lock.lock();
    done_below_ = job.ticket + 1;
    finished_.notify_all();
  }
}

}  // namespace pliant
