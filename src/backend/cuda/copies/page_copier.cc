#include "backend/cuda/copies/page_copier.h"

#include <algorithm>
#include <cstring>

namespace pliant::cuda {
namespace {

constexpr std::size_t kHalfBytes = 16u << 20;  // from here on the link runs at its full speed

bool IsPinned(const void* pointer) {
  cudaPointerAttributes attributes{};
  PLIANT_CUDA_CHECK(cudaPointerGetAttributes(&attributes, pointer));
  return attributes.type == cudaMemoryTypeHost;
}

}  // namespace

Result<std::unique_ptr<PageCopier>> PageCopier::Make(std::size_t page_bytes) {
  const std::size_t half = std::max(kHalfBytes / page_bytes, std::size_t{1}) * page_bytes;
  auto staging = PinnedArray<std::byte>::Make(2 * half, "staging for page copies");
  if (!staging.ok()) return staging.status();
  return std::unique_ptr<PageCopier>(new PageCopier(page_bytes, std::move(staging).value()));
}

PageCopier::PageCopier(std::size_t page_bytes, PinnedArray<std::byte> staging)
    : page_bytes_(page_bytes),
      staging_(std::move(staging)),
      half_pages_(staging_.size() / 2 / page_bytes) {
  int device = 0;
  PLIANT_CUDA_CHECK(cudaGetDevice(&device));
  thread_ = std::thread([this, device] { Loop(device); });
}

PageCopier::~PageCopier() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_one();
  thread_.join();
}

CopyTicket PageCopier::Start(Direction direction, std::vector<Piece> pieces, const Stream* after) {
  Job job;
  job.direction = direction;
  job.pieces = std::move(pieces);
  if (after != nullptr) job.after.emplace().Record(*after);
  std::lock_guard lock(mutex_);
  job.ticket = next_ticket_++;
  const CopyTicket ticket(job.ticket);
  jobs_.push_back(std::move(job));
  work_.notify_one();
  return ticket;
}

CopyTicket PageCopier::Refuse() {
  std::lock_guard lock(mutex_);
  Job job;  // goes through the queue, so that tickets end in order
  job.ticket = next_ticket_++;
  refused_.insert(job.ticket);
  const CopyTicket ticket(job.ticket);
  jobs_.push_back(std::move(job));
  work_.notify_one();
  return ticket;
}

CopyState PageCopier::StateLocked(std::uint64_t ticket) const {
  if (refused_.contains(ticket)) return CopyState::kFailed;
  return ticket < done_below_ ? CopyState::kDone : CopyState::kPending;
}

CopyState PageCopier::Poll(CopyTicket ticket) {
  std::lock_guard lock(mutex_);
  PLIANT_CHECK(ticket.value() < next_ticket_, "a ticket that was never given");
  return StateLocked(ticket.value());
}

CopyState PageCopier::Wait(CopyTicket ticket) {
  std::unique_lock lock(mutex_);
  PLIANT_CHECK(ticket.value() < next_ticket_, "a ticket that was never given");
  finished_.wait(lock, [&] { return StateLocked(ticket.value()) != CopyState::kPending; });
  return StateLocked(ticket.value());
}

void PageCopier::Loop(int device) {
  PLIANT_CUDA_CHECK(cudaSetDevice(device));
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    Run(job);
    lock.lock();
    done_below_ = job.ticket + 1;
    finished_.notify_all();
  }
}

void PageCopier::Run(const Job& job) {
  if (job.pieces.empty()) return;
  if (job.after) job.after->Block(stream_);
  const bool out = job.direction == Direction::kOut;
  auto on_link = [&](const Piece& piece, std::byte* host) {
    if (out) {
      PLIANT_CUDA_CHECK(
          cudaMemcpyAsync(host, piece.device, page_bytes_, cudaMemcpyDeviceToHost, stream_.get()));
    } else {
      PLIANT_CUDA_CHECK(
          cudaMemcpyAsync(piece.device, host, page_bytes_, cudaMemcpyHostToDevice, stream_.get()));
    }
  };
  std::vector<const Piece*> staged;
  for (const Piece& piece : job.pieces) {
    if (IsPinned(piece.host)) {
      on_link(piece, piece.host);
    } else {
      staged.push_back(&piece);
    }
  }
  // Part i uses half i % 2: while it is on the link, the host works on the part before (out) or
  // after (in) it.
  const std::size_t parts = (staged.size() + half_pages_ - 1) / half_pages_;
  auto each = [&](std::size_t part, auto&& f) {
    std::byte* at = staging_.data() + (part % 2) * half_pages_ * page_bytes_;
    for (std::size_t i = part * half_pages_; i < std::min(staged.size(), (part + 1) * half_pages_);
         ++i, at += page_bytes_)
      f(*staged[i], at);
  };
  auto to_host = [&](std::size_t part) {
    half_done_[part % 2].Synchronize();
    each(part,
         [&](const Piece& piece, std::byte* at) { std::memcpy(piece.host, at, page_bytes_); });
  };
  for (std::size_t part = 0; part < parts; ++part) {
    if (!out && part >= 2) half_done_[part % 2].Synchronize();
    if (out && part >= 2) to_host(part - 2);
    if (!out)
      each(part,
           [&](const Piece& piece, std::byte* at) { std::memcpy(at, piece.host, page_bytes_); });
    each(part, on_link);
    half_done_[part % 2].Record(stream_);
  }
  if (out) {
    for (std::size_t part = parts >= 2 ? parts - 2 : 0; part < parts; ++part) to_host(part);
  }
  stream_.Synchronize();
}

}  // namespace pliant::cuda
