#include "kv/copy_engine.h"

#include <thread>

#include "base/check.h"

namespace pliant {

CopyEngine::~CopyEngine() { PLIANT_CHECK(Idle(), "copy engine destroyed with copies under way"); }

void CopyEngine::Submit(CopyJob job) {
  PLIANT_CHECK(store_ != nullptr && !job.items.empty(), "copy without a store or without pages");
  if (job.kind == CopyJob::Kind::kBring)
    arriving_pages_ += static_cast<std::int64_t>(job.items.size());
  if (job.background) bytes_queued_ += job.items.size() * store_->page_bytes();
  (job.background ? background_ : urgent_).push_back(std::move(job));
}

bool CopyEngine::Start(CopyJob& job) {
  for (const CopyJob::Item& item : job.items) {
    if (store_->Map(item.slot) == nullptr) {
      UnmapAll(job);
      return false;
    }
  }
  if (job.kind == CopyJob::Kind::kBring) {
    for (const CopyJob::Item& item : job.items) store_->StartFetch(item.slot);
    job.stage = CopyJob::Stage::kFetching;
  } else {
    StartTransfer(job);
  }
  return true;
}

void CopyEngine::StartTransfer(CopyJob& job) {
  const bool bring = job.kind == CopyJob::Kind::kBring;
  scratch_.clear();
  for (const CopyJob::Item& item : job.items) {
    scratch_.push_back({bring ? item.arriving.id() : item.page, store_->Map(item.slot)});
  }
  job.ticket = bring ? backend_.CopyIn(scratch_) : backend_.CopyOut(scratch_);
  job.stage = CopyJob::Stage::kCopying;
}

IoState CopyEngine::PollStore(const CopyJob& job) {
  // The slots' states are looked at only when none is pending, so that no buffer is given up while
  // the store still uses it.
  IoState worst = IoState::kDone;
  for (const CopyJob::Item& item : job.items) {
    const IoState state = store_->Poll(item.slot);
    if (state == IoState::kPending) return IoState::kPending;
    if (state > worst) worst = state;
  }
  return worst;
}

void CopyEngine::UnmapAll(const CopyJob& job) {
  for (const CopyJob::Item& item : job.items) store_->Unmap(item.slot);
}

void CopyEngine::Advance(CopyJob& job) {
  using End = CopyJob::End;
  const auto finish = [&](End end) {
    UnmapAll(job);
    job.end = end;
  };
  if (job.stage == CopyJob::Stage::kFetching) {
    const IoState state = PollStore(job);
    if (state == IoState::kPending) return;
    if (state != IoState::kDone) {
      return finish(state == IoState::kCorrupt ? End::kCorrupt : End::kFailed);
    }
    StartTransfer(job);
  }
  if (job.stage == CopyJob::Stage::kCopying) {
    const CopyState state = backend_.Poll(job.ticket);
    if (state == CopyState::kPending) return;
    if (state == CopyState::kFailed) return finish(End::kFailed);
    if (job.kind == CopyJob::Kind::kBring) return finish(End::kDone);
    for (const CopyJob::Item& item : job.items) store_->StartSave(item.slot);
    job.stage = CopyJob::Stage::kStoring;
  }
  if (job.stage == CopyJob::Stage::kStoring) {
    const IoState state = PollStore(job);
    if (state == IoState::kPending) return;
    finish(state == IoState::kDone ? End::kDone : End::kFailed);
  }
}

void CopyEngine::Poll(std::vector<CopyJob>& ended) {
  for (auto* queue : {&urgent_, &background_}) {
    while (!queue->empty() && Start(queue->front())) {
      active_.push_back(std::move(queue->front()));
      queue->pop_front();
    }
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < active_.size(); ++i) {
    CopyJob& job = active_[i];
    Advance(job);
    if (job.end == CopyJob::End::kRunning) {
      if (kept != i) active_[kept] = std::move(job);
      ++kept;
      continue;
    }
    if (job.kind == CopyJob::Kind::kBring)
      arriving_pages_ -= static_cast<std::int64_t>(job.items.size());
    if (job.background) bytes_queued_ -= job.items.size() * store_->page_bytes();
    ended.push_back(std::move(job));
  }
  active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(kept), active_.end());
  if (store_ != nullptr) store_->Flush();
}

void CopyEngine::Finish(std::vector<CopyJob>& ended) {
  while (!Idle()) {
    Poll(ended);
    if (!Idle()) std::this_thread::yield();
  }
}

}  // namespace pliant
