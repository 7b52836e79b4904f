#include "sched/support/fake_backend.h"

#include <cstring>

namespace pliant::testing {

CopyTicket FakeBackend::CopyOut(std::span<const PageCopy> copies) {
  for (const PageCopy& c : copies) std::memcpy(c.host, Page(c.page).data(), page_bytes_);
  return CopyTicket(++tickets_);
}

CopyTicket FakeBackend::CopyIn(std::span<const PageCopy> copies) {
  for (const PageCopy& c : copies) std::memcpy(Page(c.page).data(), c.host, page_bytes_);
  return CopyTicket(++tickets_);
}

CopyTicket FaultyBackend::Start(std::span<const PageCopy> copies, bool out) {
  Copy copy{{copies.begin(), copies.end()}, out, false, faults.delay_polls};
  const int every = out ? faults.fail_every_out : faults.fail_every_in;
  int& count = out ? outs_ : ins_;
  copy.fails = every > 0 && ++count % every == 0;
  if (!out) {
    for (const PageCopy& c : copies) fake_.Poison(c.page);
  }
  copies_.emplace(++tickets_, std::move(copy));
  return CopyTicket(tickets_);
}

CopyState FaultyBackend::Poll(CopyTicket ticket) {
  const auto it = copies_.find(ticket.value());
  PLIANT_CHECK(it != copies_.end(), "copy polled after its end");
  Copy& copy = it->second;
  if (copy.polls_left-- > 0) return CopyState::kPending;
  if (!copy.fails) {
    if (copy.out) {
      inner_.CopyOut(copy.pages);
    } else {
      inner_.CopyIn(copy.pages);
    }
  }
  const bool fails = copy.fails;
  copies_.erase(it);
  return fails ? CopyState::kFailed : CopyState::kDone;
}

CopyState FaultyBackend::Wait(CopyTicket ticket) {
  CopyState state;
  do {
    state = Poll(ticket);
  } while (state == CopyState::kPending);
  return state;
}

}  // namespace pliant::testing
