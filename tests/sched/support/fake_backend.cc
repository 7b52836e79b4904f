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

}  // namespace pliant::testing
