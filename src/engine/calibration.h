// Room: engine. Measures the static code of K's and V's channels (DESIGN.md section 2) by running
// one built-in text through the model before the first request. Deterministic. Runs on the thread
// that sets the engine up, before the engine thread starts.
#pragma once

#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "model/model.h"
#include "text/tokenizer.h"

namespace pliant {

inline constexpr int kCalibrationPlaces = 4;
/// Positions beyond are not calibrated for: few requests reach them, and what reaches them only
/// loses some of the gain.
inline constexpr int kCalibrationContext = 8192;
/// A channel of V that the text hardly moved may move with another; its scale bounds what that does
/// to the head's other channels.
inline constexpr float kLeastValueScale = 1.0f / 16;

/// The text that is read: English, code, numbers and other scripts in a few hundred tokens.
std::string_view CalibrationText();

/// How K is coded, from what a text's keys and queries were like. The center of a channel is the
/// middle of its range. Its scale is the square root of half the range, the larger of a RoPE pair
/// (i, i + head_dim / 2), over the fourth root of the queries' energy in the pair. As channels are
/// mixed, the noise of a logit is the sum over channels of (query * scale)^2 times that of (key /
/// scale)^2, and this is where the product is least. Relative to the head's largest scale. Measured
/// against others: docs/decisions.md. Channels that did not move, or were not finite, get scale 1
/// and center 0.
ChannelCode KeyCodeFor(const KvGeometry& geometry, const ChannelStatistics& statistics);

/// How V is coded, from what a text's values were like: a channel's scale is its root mean square,
/// relative to the head's largest and at least kLeastValueScale. So each channel sets a token's
/// step as often as any other, and wide channels do not set that of all. The center is 0,
/// which was measured to be better than the channel's mean (docs/decisions.md). Channels that were
/// silent or not finite get scale 1.
ChannelCode ValueCodeFor(const KvGeometry& geometry, const ChannelStatistics& statistics);

/// Runs the text (as much of it as `pages` hold) at kCalibrationPlaces positions spread over the
/// context, since RoPE turns the slow channels' range as positions grow, and sets the backend's
/// code. `max_rows` rows a step. The pages' contents are undefined afterwards; no request may hold
/// any yet.
Status Calibrate(Backend& backend, Model& model, const Tokenizer& tokenizer, std::uint32_t pages,
                 int max_rows);

}  // namespace pliant
