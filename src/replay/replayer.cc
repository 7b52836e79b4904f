#include "replay/replayer.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/clock.h"

namespace pliant {
namespace {

double Seconds(Nanoseconds from, Nanoseconds to) {
  return static_cast<double>(to - from) / static_cast<double>(kNanosPerSecond);
}

/// What half of the waits between two readings did not pass, in seconds; 0 without any.
double IdleMedian(const EngineStats& before, const EngineStats& after) {
  std::int64_t all = 0, so_far = 0;
  for (std::size_t i = 0; i < after.idle_counts.size(); ++i)
    all += after.idle_counts[i] - before.idle_counts[i];
  for (std::size_t i = 0; i < after.idle_counts.size(); ++i) {
    so_far += after.idle_counts[i] - before.idle_counts[i];
    if (all > 0 && 2 * so_far >= all) return IdleBound(i) * 1e-9;
  }
  return 0;
}

// What is known of one request; written by the engine thread under the mutex of Run.
struct Track {
  Nanoseconds due = 0, first = 0, last = 0;
  std::int64_t tokens = 0;
  Usage usage;
  bool ended = false;
};

class Run {
 public:
  Run(Engine& engine, const std::vector<WorkloadRequest>& workload, const ReplayOptions& options,
      const std::function<void(const ReplayProgress&)>& progress)
      : engine_(engine), workload_(workload), options_(options), progress_(progress) {}

  ReplayResult Go() {
    before_ = engine_.Stats();
    tracks_.resize(workload_.size());
    ids_.resize(workload_.size());
    result_.requests = static_cast<std::int64_t>(workload_.size());
    start_ = clock_.Now();
    for (std::size_t i = 0; i < workload_.size(); ++i) {
      // The prompt is made before its arrival, so that the client's work is not part of the
      // waiting.
      GenerateRequest request = MakeRequest(workload_[i]);
      const Nanoseconds due = start_ + static_cast<Nanoseconds>(workload_[i].arrival * 1e9);
      WaitUntil(due, /*all_ended=*/false);
      Submit(i, due, std::move(request));
    }
    submitted_all_ = true;
    WaitUntil(0, /*all_ended=*/true);
    Summarise();
    return std::move(result_);
  }

 private:
  GenerateRequest MakeRequest(const WorkloadRequest& from) const {
    GenerateRequest request;
    request.prompt = WorkloadPrompt(from, options_.vocabulary);
    request.sampling.temperature = 0;
    request.stop.ignore_eos = true;
    request.stop.max_tokens = from.output;
    request.kv.min_bits = options_.min_bits;
    return request;
  }

  void Submit(std::size_t index, Nanoseconds due, GenerateRequest request) {
    {
      const std::lock_guard lock(mutex_);
      tracks_[index].due = due;
    }
    Result<RequestId> id = engine_.Submit(
        std::move(request),
        [this, index](RequestId, TokenEvent event) { Take(index, std::move(event)); });
    const std::lock_guard lock(mutex_);
    ++submitted_;
    if (id.ok()) {
      ids_[index] = *id;
      return;
    }
    tracks_[index].ended = true;
    ++ended_;
    ++result_.refused;
    if (result_.first_error.empty()) result_.first_error = id.status().message();
  }

  void Take(std::size_t index, TokenEvent event) {
    const Nanoseconds now = clock_.Now();
    const std::lock_guard lock(mutex_);
    Track& track = tracks_[index];
    for (std::size_t i = 0; i < event.tokens.size(); ++i) {
      if (track.tokens == 0) {
        track.first = now;
      } else {
        gaps_.push_back(Seconds(track.last, now));
      }
      track.last = now;
      ++track.tokens;
      ++result_.output_tokens;
    }
    if (!event.finish) return;
    track.usage = event.usage;
    track.ended = true;
    ++ended_;
    last_end_ = now;
    switch (*event.finish) {
      case FinishReason::kError:
        ++result_.failed;
        if (result_.first_error.empty()) result_.first_error = event.error.message();
        break;
      case FinishReason::kCancelled:
        ++result_.cancelled;
        break;
      default:
        ++result_.finished;
    }
    changed_.notify_all();
  }

  // Samples and reports until `when`, or until every request has ended.
  void WaitUntil(Nanoseconds when, bool all_ended) {
    while (true) {
      const Nanoseconds now = clock_.Now();
      if (now >= next_sample_) {
        Sample(now);
        next_sample_ = now + static_cast<Nanoseconds>(options_.sample_seconds * 1e9);
      }
      GiveUp(now);
      std::unique_lock lock(mutex_);
      if (all_ended ? ended_ == workload_.size() : now >= when) return;
      const Nanoseconds until = all_ended ? next_sample_ : std::min(when, next_sample_);
      const auto pause = std::chrono::nanoseconds(std::max<Nanoseconds>(until - now, 0));
      if (all_ended) {
        changed_.wait_for(lock, pause, [&] { return ended_ == workload_.size(); });
      } else {
        changed_.wait_for(lock, pause, [] { return false; });
      }
    }
  }

  void Sample(Nanoseconds now) {
    const EngineStats stats = engine_.Stats();
    ReplaySample sample;
    sample.seconds = Seconds(start_, now);
    sample.running = stats.running;
    sample.waiting = stats.waiting;
    if (stats.pages_total > 0) {
      sample.pages_used =
          static_cast<double>(stats.pages_total - stats.pages_free - stats.pages_cached) /
          static_cast<double>(stats.pages_total);
    }
    std::copy(&stats.blocks_by_state[0][0], &stats.blocks_by_state[0][0] + 25,
              &sample.blocks[0][0]);
    result_.peak_running = std::max(result_.peak_running, stats.running);
    result_.peak_waiting = std::max(result_.peak_waiting, stats.waiting);
    result_.samples.push_back(sample);
    if (!progress_) return;
    ReplayProgress report{.total = static_cast<std::int64_t>(workload_.size()),
                          .running = stats.running,
                          .waiting = stats.waiting,
                          .seconds = sample.seconds};
    {
      const std::lock_guard lock(mutex_);
      report.submitted = static_cast<std::int64_t>(submitted_);
      report.ended = static_cast<std::int64_t>(ended_);
      report.output_tokens = result_.output_tokens;
    }
    progress_(report);
  }

  void GiveUp(Nanoseconds now) {
    if (options_.give_up_seconds <= 0 || gave_up_ || !submitted_all_ ||
        Seconds(start_, now) < options_.give_up_seconds) {
      return;
    }
    gave_up_ = true;
    std::vector<RequestId> open;
    {
      const std::lock_guard lock(mutex_);
      for (std::size_t i = 0; i < tracks_.size(); ++i) {
        if (!tracks_[i].ended) open.push_back(ids_[i]);
      }
    }
    for (const RequestId id : open) engine_.Cancel(id);
  }

  void Summarise() {
    // The last step's counters are published after its events.
    EngineStats after = engine_.Stats();
    for (int i = 0; i < 1000 && after.running + after.waiting > 0; ++i) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(1), [] { return false; });
      lock.unlock();
      after = engine_.Stats();
    }
    const std::lock_guard lock(mutex_);
    std::vector<double> ttft, latency;
    for (const Track& track : tracks_) {
      if (track.tokens > 0) {
        ttft.push_back(Seconds(track.due, track.first));
        latency.push_back(Seconds(track.due, track.last));
      }
      result_.prompt_tokens += track.usage.prompt_tokens;
      result_.cached_tokens += track.usage.cached_tokens;
      result_.tokens_below_16_bits += track.usage.tokens_below_16_bits;
      result_.lowest_k_bits = std::min(result_.lowest_k_bits, track.usage.lowest_k_bits);
      result_.lowest_v_bits = std::min(result_.lowest_v_bits, track.usage.lowest_v_bits);
    }
    result_.ttft = Describe(std::move(ttft));
    result_.latency = Describe(std::move(latency));
    result_.itl = Describe(std::move(gaps_));
    result_.seconds = last_end_ > start_ ? Seconds(start_, last_end_) : 0;
    result_.preemptions = after.preemptions - before_.preemptions;
    result_.demotions = after.demotions - before_.demotions;
    result_.restores = after.restores - before_.restores;
    result_.offloads = after.offloads - before_.offloads;
    result_.steps = after.steps - before_.steps;
    result_.step_seconds = Seconds(before_.step_nanoseconds, after.step_nanoseconds);
    result_.plan_seconds = Seconds(before_.plan_nanoseconds, after.plan_nanoseconds);
    result_.settle_seconds = Seconds(before_.settle_nanoseconds, after.settle_nanoseconds);
    result_.hidden_seconds = Seconds(before_.hidden_nanoseconds, after.hidden_nanoseconds);
    result_.idle_p50 = IdleMedian(before_, after);
    result_.steps_ahead = after.steps_ahead - before_.steps_ahead;
  }

  Engine& engine_;
  const std::vector<WorkloadRequest>& workload_;
  const ReplayOptions& options_;
  const std::function<void(const ReplayProgress&)>& progress_;
  const Clock& clock_ = SystemClock::Instance();
  Nanoseconds start_ = 0, next_sample_ = 0;
  bool submitted_all_ = false, gave_up_ = false;
  EngineStats before_;
  std::vector<RequestId> ids_;

  std::mutex mutex_;  // guards what follows, and result_'s counters of ends and tokens
  std::condition_variable changed_;
  std::vector<Track> tracks_;
  std::vector<double> gaps_;
  std::size_t submitted_ = 0, ended_ = 0;
  Nanoseconds last_end_ = 0;
  ReplayResult result_;
};

}  // namespace

ReplayResult Replay(Engine& engine, const std::vector<WorkloadRequest>& workload,
                    const ReplayOptions& options,
                    const std::function<void(const ReplayProgress&)>& progress) {
  return Run(engine, workload, options, progress).Go();
}

}  // namespace pliant
