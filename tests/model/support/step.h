// Test support: one sequence through Forward, its blocks at full precision, and the golden files
// beside the tiny models. One thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/model.h"

namespace pliant::testing_support {

/// What make_golden.py wrote for a model.
struct Golden {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> rows;
  std::int32_t vocabulary = 0;
  std::vector<float> logits;  // [rows][vocabulary]
};
Golden ReadGolden(const std::string& path);

/// Feeds one sequence in pieces. Blocks take pages 0, 1, 2, ... of the backend.
class OneSequence {
 public:
  OneSequence(Model& model, Backend& backend) : model_(model), backend_(backend) {}
  /// Runs the next tokens; `logit_rows` count from the first of them.
  Status Feed(std::vector<std::int32_t> tokens, std::vector<std::int32_t> logit_rows);

 private:
  Model& model_;
  Backend& backend_;
  std::int32_t context_ = 0;
  std::vector<BlockView> blocks_;
};

}  // namespace pliant::testing_support
