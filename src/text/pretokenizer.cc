#include "text/pretokenizer.h"

#include <algorithm>

#include "text/unicode_ranges.h"
#include "text/utf8.h"

namespace pliant {
namespace {

constexpr std::size_t kMaxSteps = 16;

Result<ReferenceRegex> CompileStep(const PreTokenizerStep& step) {
  switch (step.kind) {
    case PreTokenizerStep::Kind::kSplit:
      return ReferenceRegex::Compile(step.pattern);
    case PreTokenizerStep::Kind::kDigits:
      // The reference's Digits step knows a few more digits than its regular expressions do
      // (unicode_ranges.inc).
      return ReferenceRegex::Compile("[\\p{N}" + ClassText(kDigitsStepOnly) +
                                     (step.individual ? "]" : "]+"));
    case PreTokenizerStep::Kind::kByteLevel:
      return ReferenceRegex::Compile(kGpt2Pattern);
  }
  return Internal("pre-tokenizer step of no kind");
}

/// End of the character at `at`, or `at` + 1 at the end of the text.
std::size_t AfterCharacter(std::string_view text, std::size_t at) {
  return at + (at < text.size() ? NextUtf8(text.substr(at)).size : 1);
}

}  // namespace

Result<PreTokenizer> PreTokenizer::Create(const std::vector<PreTokenizerStep>& steps) {
  if (steps.empty()) return InvalidArgument("pre-tokenizer without a step");
  if (steps.size() > kMaxSteps) {
    return TooLarge("pre-tokenizer of " + std::to_string(steps.size()) + " steps, limit " +
                    std::to_string(kMaxSteps));
  }
  PreTokenizer result;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const PreTokenizerStep& step = steps[i];
    if (step.kind == PreTokenizerStep::Kind::kByteLevel && i + 1 != steps.size()) {
      return Unimplemented("pre-tokenizer step " + std::to_string(i) +
                           ": ByteLevel before another step");
    }
    Step made{.behavior = step.behavior,
              .invert = step.invert,
              .add_prefix_space = step.add_prefix_space};
    if (step.kind != PreTokenizerStep::Kind::kByteLevel || step.use_regex) {
      Result<ReferenceRegex> regex = CompileStep(step);
      if (!regex.ok()) return regex.status().WithContext("pre-tokenizer step " + std::to_string(i));
      made.matcher = static_cast<int>(result.regexes_.size());
      result.regexes_.push_back(std::make_unique<ReferenceRegex>(std::move(regex).value()));
    }
    result.steps_.push_back(made);
  }
  return result;
}

PreTokenizer::Session::Session(const PreTokenizer& pre_tokenizer) : pre_tokenizer_(&pre_tokenizer) {
  matchers_.reserve(pre_tokenizer.regexes_.size());
  for (const auto& regex : pre_tokenizer.regexes_) matchers_.emplace_back(*regex);
}

Status PreTokenizer::Session::RunStep(std::size_t step, std::string_view text, PieceSink* sink) {
  if (text.empty()) return {};
  if (step == pre_tokenizer_->steps_.size()) return sink->Take(text);
  const PreTokenizer::Step& s = pre_tokenizer_->steps_[step];
  std::string prefixed;
  if (s.add_prefix_space && !text.starts_with(' ')) {
    prefixed.reserve(text.size() + 1);
    prefixed += ' ';
    prefixed += text;
    text = prefixed;
  }
  if (s.matcher < 0) return RunStep(step + 1, text, sink);
  if (s.behavior == PreTokenizerStep::Behavior::kIsolated) return Isolate(step, text, sink);
  return Regroup(step, text, sink);
}

/// The next match as the reference's iterator gives it: an empty one right behind the last match
/// does not count.
Result<bool> PreTokenizer::Session::FindMatch(std::size_t step, std::string_view text,
                                              std::size_t from, std::size_t last_end,
                                              std::size_t* begin, std::size_t* end) {
  auto& matcher = matchers_[static_cast<std::size_t>(pre_tokenizer_->steps_[step].matcher)];
  while (from <= text.size()) {
    PLIANT_ASSIGN_OR_RETURN(const bool found, matcher.Find(text, from, begin, end));
    if (!found) return false;
    if (*begin != *end || *begin != last_end) return true;
    from = AfterCharacter(text, *end);
  }
  return false;
}

Status PreTokenizer::Session::Isolate(std::size_t step, std::string_view text, PieceSink* sink) {
  const bool last = step + 1 == pre_tokenizer_->steps_.size();
  const auto emit = [&](std::size_t begin, std::size_t end) -> Status {
    if (begin == end) return {};
    const std::string_view piece = text.substr(begin, end - begin);
    return last ? sink->Take(piece) : RunStep(step + 1, piece, sink);
  };
  std::size_t done = 0, from = 0, last_end = std::string_view::npos, begin = 0, end = 0;
  while (true) {
    PLIANT_ASSIGN_OR_RETURN(const bool found, FindMatch(step, text, from, last_end, &begin, &end));
    if (!found) break;
    PLIANT_RETURN_IF_ERROR(emit(done, begin));
    PLIANT_RETURN_IF_ERROR(emit(begin, end));
    done = last_end = end;
    from = begin == end ? AfterCharacter(text, end) : end;
  }
  return emit(done, text.size());
}

Status PreTokenizer::Session::Regroup(std::size_t step, std::string_view text, PieceSink* sink) {
  using Behavior = PreTokenizerStep::Behavior;
  const PreTokenizer::Step& s = pre_tokenizer_->steps_[step];
  std::vector<Span> spans;
  std::size_t done = 0, from = 0, last_end = std::string_view::npos, begin = 0, end = 0;
  while (true) {
    PLIANT_ASSIGN_OR_RETURN(const bool found, FindMatch(step, text, from, last_end, &begin, &end));
    if (!found) break;
    if (done != begin) spans.push_back({done, begin, s.invert});
    spans.push_back({begin, end, !s.invert});
    done = last_end = end;
    from = begin == end ? AfterCharacter(text, end) : end;
  }
  if (done != text.size()) spans.push_back({done, text.size(), s.invert});

  std::vector<Span> groups;
  const auto add = [&](const Span& span,
                       bool joins) {  // spans touch, so joining is taking the hull
    if (joins && !groups.empty()) {
      groups.back().begin = std::min(groups.back().begin, span.begin);
      groups.back().end = std::max(groups.back().end, span.end);
    } else {
      groups.push_back(span);
    }
  };
  bool previous = false;
  if (s.behavior == Behavior::kMergedWithNext) {
    for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
      add(*span, span->match && !previous);
      previous = span->match;
    }
    std::reverse(groups.begin(), groups.end());
  } else {
    bool first = true;
    for (const Span& span : spans) {
      if (s.behavior == Behavior::kRemoved) {
        if (!span.match) groups.push_back(span);
      } else if (s.behavior == Behavior::kContiguous) {
        add(span, !first && span.match == previous);
      } else {
        add(span, span.match && !previous);
      }
      previous = span.match;
      first = false;
    }
  }
  for (const Span& g : groups)
    PLIANT_RETURN_IF_ERROR(RunStep(step + 1, text.substr(g.begin, g.end - g.begin), sink));
  return {};
}

}  // namespace pliant
