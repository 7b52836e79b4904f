// Room: engine. The live picture of the KV cache that GET /v1/kv and `pliant top` show, as JSON. Built on the engine thread.
#pragma once

#include <string>
#include <vector>

#include "kv/kv_manager.h"
#include "sched/scheduler.h"

namespace pliant {

struct KvReport {
  struct Request {
    RequestId id;
    std::string_view state;
    std::int64_t prompt_tokens = 0, produced = 0;
    RequestKvFacts facts;
  };
  const KvManager* kv = nullptr;
  const Scheduler* scheduler = nullptr;
  std::vector<Request> requests;
};

/// {"pages": {...}, "blocks": {...}, "store": {...}, "requests": [{..., "map": "16/16*4 8/8*2"}], "cached_map": "...", "decisions": [...],
/// "reasons": {...}}. A map lists a request's blocks in order, equal neighbours counted together.
std::string KvReportJson(const KvReport& report);

}  // namespace pliant
