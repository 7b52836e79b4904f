// Room: engine. Measures K's static channel scale (DESIGN.md section 2) by running one built-in text through the model before
// the first request. Deterministic. Runs on the thread that sets the engine up, before the engine thread starts.
#pragma once

#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "model/model.h"
#include "text/tokenizer.h"

namespace pliant {

/// The text that is read: English, code, numbers and other scripts in a few hundred tokens.
std::string_view CalibrationText();

/// From the largest |K| of each channel to its scale: the two channels of a RoPE pair (i, i + head_dim / 2) share the larger;
/// channels that stayed at zero, or were not finite, get 1.
std::vector<float> ChannelScales(const KvGeometry& geometry, std::vector<float> maxima);

/// Runs the text (as much of it as `pages` hold and `max_rows` allow a step) and sets the backend's channel scales. The pages'
/// contents are undefined afterwards; no request may hold any yet.
Status Calibrate(Backend& backend, Model& model, const Tokenizer& tokenizer, std::uint32_t pages, int max_rows);

}  // namespace pliant
