// Room: engine. Builds a running engine from its parts. Any thread, once.
#pragma once

#include <functional>
#include <memory>

#include "backend/backend.h"
#include "engine/engine.h"
#include "kv/kv_options.h"
#include "model/model.h"
#include "sched/scheduler.h"
#include "text/tokenizer.h"

namespace pliant {

struct EngineOptions {
  KvOptions kv;
  SchedulerOptions sched;  // max_context 0: the model's
  bool calibrate = true;   // measure K's channel scales at start; off: 1 for all
  // Plan the next step while a device works on this one (a CPU never does).
  bool steps_ahead = true;
};

/// Reserves the KV pages, calibrates, and starts the engine thread. The model must have been loaded
/// into the backend for steps of sched.max_batch_tokens rows and max_running logit rows. The engine
/// owns the backend; model and tokenizer must outlive it.
Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           std::unique_ptr<Backend> backend, Model* model,
                                           const Tokenizer* tokenizer);

}  // namespace pliant
