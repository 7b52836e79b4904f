// The variable `loop`.
#include <algorithm>

#include "text/jinja_eval.h"
#include "text/jinja_ops.h"

namespace pliant::jinja {

LoopState::LoopState(const Value& iterable, Reader::NextFn next, int depth0, RecurseFn recurse)
    : Object(sizeof(LoopState), DepthOf(iterable) + 1),
      iterable_(iterable),
      next_(std::move(next)),
      depth0_(depth0),
      recurse_(std::move(recurse)) {}

void LoopState::Finish() {
  finished_ = true;
  exhausted_ = true;
  iterable_ = Value();
  next_ = nullptr;
  recurse_ = nullptr;
  after_.reset();
  current_.reset();
  before_.reset();
  last_changed_.reset();
}

bool LoopState::Peek() {
  if (after_) return true;
  if (exhausted_) return false;
  Value item;
  if (!next_(item)) {
    exhausted_ = true;
    return false;
  }
  after_ = std::move(item);
  return true;
}

bool LoopState::Next(Value& item) {
  if (!Peek()) return false;
  item = *std::move(after_);
  after_.reset();
  ++index0;
  before_ = std::move(current_);
  current_ = item;
  return true;
}

std::int64_t LoopState::Length() {
  if (length_) return *length_;
  if (const auto length = LengthOf(iterable_); length && !finished_) {
    length_ = static_cast<std::int64_t>(*length);
    return *length_;
  }
  // A generator: read it to its end now.
  std::vector<Value> rest;
  for (Value item; !exhausted_ && next_(item);) {
    rest.push_back(std::move(item));
    if ((rest.size() & 0xfff) == 0) CheckStringSize(rest.size() * sizeof(Value) / 4);
  }
  length_ = static_cast<std::int64_t>(rest.size()) + index0 + 1 + (after_ ? 1 : 0);
  const Value list = List(std::move(rest));
  if (!exhausted_) {
    auto reader = std::make_shared<Reader>(list);
    next_ = [reader](Value& item) { return reader->Next(item); };
  }
  return *length_;
}

Value LoopState::Cycle(Args& args) const {
  if (args.positional.empty()) Fail(ErrorKind::kType, "no items for cycling given");
  return args.positional[static_cast<std::size_t>(index0) % args.positional.size()];
}

Value LoopState::Changed(Args& args) {
  const bool same =
      last_changed_ && last_changed_->size() == args.positional.size() &&
      std::equal(args.positional.begin(), args.positional.end(), last_changed_->begin(), Equal);
  if (!same) last_changed_ = args.positional;
  return Value(!same);
}

Value LoopState::Recurse(Args& args) {
  const Bound bound("loop", args, {"iterable"}, 1);
  if (!recurse_) {
    Fail(ErrorKind::kType, "The loop must have the 'recursive' marker to be called recursively.");
  }
  return recurse_(bound[0], depth0_ + 1);
}

std::optional<Value> LoopState::Attribute(std::string_view name, const Value& self) {
  if (finished_ && name != "index" && name != "index0") return std::nullopt;
  if (name == "index0") return Value(index0);
  if (name == "index") return Value(index0 + 1);
  if (name == "first") return Value(index0 == 0);
  if (name == "last") return Value(!Peek());
  if (name == "length") return Value(Length());
  if (name == "revindex") return Value(Length() - index0);
  if (name == "revindex0") return Value(Length() - index0 - 1);
  if (name == "depth") return Value(static_cast<std::int64_t>(depth0_ + 1));
  if (name == "depth0") return Value(static_cast<std::int64_t>(depth0_));
  if (name == "previtem")
    return index0 == 0 ? UndefinedHint("there is no previous item") : before_.value_or(Value());
  if (name == "nextitem") return Peek() ? *after_ : UndefinedHint("there is no next item");
  if (name == "cycle") {
    return MakeCallable("cycle", "method", DepthOf(self),
                        [self](Args& args) { return self.As<LoopState>().Cycle(args); });
  }
  if (name == "changed") {
    return MakeCallable("changed", "method", DepthOf(self),
                        [self](Args& args) { return self.As<LoopState>().Changed(args); });
  }
  return std::nullopt;
}

}  // namespace pliant::jinja
