// Attributes, items and slices, with the rules of the immutable sandbox.
#include <algorithm>
#include <limits>

#include "text/jinja_eval.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

// Index from the front, or nothing when out of range.
std::optional<std::size_t> Position(std::int64_t index, std::size_t length) {
  if (index < 0) index += static_cast<std::int64_t>(length);
  if (index < 0 || static_cast<std::uint64_t>(index) >= length) return std::nullopt;
  return static_cast<std::size_t>(index);
}

Value CharacterAt(const Value& text, std::size_t index) {
  const Str& str = text.str();
  std::size_t start = index;
  if (!str.ascii()) {
    ChargeBytes(str.text.size());
    start = ByteOffset(str.text, index);
  }
  std::size_t end = start;
  DecodeNext(str.text, end);
  return Like(text, str.text.substr(start, end - start));
}

// The item, or nothing when the object has no such item or no items at all.
std::optional<Value> FindItem(const Value& object, const Value& key) {
  switch (object.type()) {
    case Type::kUndefined:
      FailUndefined(object);
    case Type::kDict: {
      if (key.Is(Type::kList) || key.Is(Type::kDict)) return std::nullopt;  // unhashable
      const Value* found = key.Is(Type::kString) ? object.dict().Find(std::string_view(key.text()))
                                                 : object.dict().Find(key);
      if (found == nullptr) return std::nullopt;
      return *found;
    }
    case Type::kString: {
      if (!key.IsIntLike()) return std::nullopt;
      const auto position = Position(key.AsInt(), object.str().length);
      if (!position) return std::nullopt;
      return CharacterAt(object, *position);
    }
    case Type::kList:
    case Type::kTuple: {
      if (!key.IsIntLike()) return std::nullopt;
      const auto position = Position(key.AsInt(), object.items().size());
      if (!position) return std::nullopt;
      return object.items()[*position];
    }
    case Type::kRange: {
      if (!key.IsIntLike()) return std::nullopt;
      const auto position = Position(key.AsInt(), object.range().length);
      if (!position) return std::nullopt;
      return Value(object.range().start +
                   static_cast<std::int64_t>(*position) * object.range().step);
    }
    default:
      return std::nullopt;
  }
}

// The attribute or method, or nothing.
std::optional<Value> FindAttribute(const Value& object, std::string_view name) {
  switch (object.type()) {
    case Type::kUndefined:
      if (name.starts_with("__") && name.ends_with("__")) return std::nullopt;
      FailUndefined(object);
    case Type::kNamespace:
      if (const Value* found = object.ns().Find(name)) return *found;
      return std::nullopt;
    case Type::kLoop:
      return object.As<LoopState>().Attribute(name, object);
    case Type::kTuple:
      if (object.seq().grouped && name == "grouper") return object.items()[0];
      if (object.seq().grouped && name == "list") return object.items()[1];
      break;
    case Type::kCycler: {
      const auto& cycler = object.As<Cycler>();
      if (name == "current") return cycler.items.items()[cycler.position];
      break;
    }
    default:
      break;
  }
  if (IsForbiddenMethod(object, name)) return UnsafeAttribute(object, name);
  if (const MethodFn method = FindMethod(object, name)) {
    return MakeCallable(std::string(name), "builtin_function_or_method", DepthOf(object),
                        [object, method](Args& args) { return method(object, args); });
  }
  return std::nullopt;
}

struct SliceBounds {
  std::int64_t start, step;
  std::size_t count;
};

// Python's rules for slices of a sequence of `length`.
SliceBounds Resolve(const Value& start, const Value& stop, const Value& step, std::size_t length) {
  const auto bound = [](const Value& value) {
    if (value.IsIntLike()) return value.AsInt();
    Fail(ErrorKind::kType, "slice indices must be integers or None or have an __index__ method");
  };
  const auto size = static_cast<std::int64_t>(length);
  const std::int64_t by =
      step.Is(Type::kNone) ? 1 : std::max(bound(step), -std::numeric_limits<std::int64_t>::max());
  if (by == 0) Fail(ErrorKind::kValue, "slice step cannot be zero");
  const std::int64_t lowest = by < 0 ? -1 : 0;
  const std::int64_t highest = by < 0 ? size - 1 : size;
  const auto clamp = [&](const Value& value, std::int64_t fallback) {
    if (value.Is(Type::kNone)) return fallback;
    std::int64_t i = bound(value);
    if (i < 0) i += size;
    return std::clamp(i, lowest, highest);
  };
  const std::int64_t first = clamp(start, by < 0 ? highest : lowest);
  const std::int64_t last = clamp(stop, by < 0 ? lowest : highest);
  const std::int64_t span = by > 0 ? last - first : first - last;
  const std::int64_t stride = by > 0 ? by : -by;
  return {first, by, span > 0 ? static_cast<std::size_t>((span - 1) / stride + 1) : 0};
}

Value SliceText(const Value& object, const SliceBounds& bounds) {
  const Str& str = object.str();
  ChargeBytes(str.text.size());
  if (bounds.count == 0) return Like(object, "");
  const auto start = static_cast<std::size_t>(bounds.start);
  if (str.ascii() && bounds.step == 1) return Like(object, str.text.substr(start, bounds.count));
  if (bounds.step == 1) {
    const std::size_t from = ByteOffset(str.text, start);
    const std::string_view rest = std::string_view(str.text).substr(from);
    return Like(object, std::string(rest.substr(0, ByteOffset(rest, bounds.count))));
  }
  std::u32string all;
  Charge(str.length / 8);
  for (std::size_t i = 0; i < str.text.size();) all += DecodeNext(str.text, i);
  std::string out;
  for (std::size_t i = 0; i < bounds.count; ++i) {
    AppendUtf8(
        out,
        all[static_cast<std::size_t>(bounds.start + static_cast<std::int64_t>(i) * bounds.step)]);
  }
  return Like(object, std::move(out));
}

}  // namespace

Value GetAttribute(const Value& object, std::string_view name) {
  if (auto attribute = FindAttribute(object, name)) return *std::move(attribute);
  if (object.Is(Type::kDict)) {
    const Value* found = object.dict().Find(name);
    if (found != nullptr) return *found;
  }
  if (object.Is(Type::kUndefined)) FailUndefined(object);
  return UndefinedAttribute(object, String(std::string(name)));
}

Value GetItem(const Value& object, const Value& key) {
  if (auto item = FindItem(object, key)) return *std::move(item);
  if (key.Is(Type::kString)) {
    if (auto attribute = FindAttribute(object, key.text())) return *std::move(attribute);
  }
  return UndefinedAttribute(object, key);
}

Value GetAttributeOnly(const Value& object, std::string_view name) {
  if (auto attribute = FindAttribute(object, name)) return *std::move(attribute);
  return UndefinedAttribute(object, String(std::string(name)));
}

Value GetSlice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.Is(Type::kUndefined)) FailUndefined(object);
  if (object.Is(Type::kString))
    return SliceText(object, Resolve(start, stop, step, object.str().length));
  if (object.IsSequence()) {
    const SliceBounds bounds = Resolve(start, stop, step, object.items().size());
    std::vector<Value> items;
    items.reserve(bounds.count);
    for (std::size_t i = 0; i < bounds.count; ++i) {
      items.push_back(object.items()[static_cast<std::size_t>(
          bounds.start + static_cast<std::int64_t>(i) * bounds.step)]);
    }
    return object.Is(Type::kList) ? List(std::move(items)) : Tuple(std::move(items));
  }
  if (object.Is(Type::kRange)) {
    const Range& range = object.range();
    const SliceBounds bounds = Resolve(start, stop, step, range.length);
    if (bounds.count == 0) return Value(Type::kRange, std::make_shared<Range>(0, 0, 1, 0));
    // A range has at most 100,000 items, so only the step can be out of proportion; it matters only
    // between items.
    const std::int64_t by = bounds.count > 1 ? bounds.step * range.step : range.step;
    const std::int64_t first = range.At(static_cast<std::uint64_t>(bounds.start));
    const Wide stop_at = static_cast<Wide>(first) + static_cast<Wide>(bounds.count) * by;
    const auto last = static_cast<std::int64_t>(
        std::clamp<Wide>(stop_at, std::numeric_limits<std::int64_t>::min(),
                         std::numeric_limits<std::int64_t>::max()));
    return Value(Type::kRange, std::make_shared<Range>(first, last, by, bounds.count));
  }
  if (object.Is(Type::kDict)) Fail(ErrorKind::kType, "unhashable type: 'slice'");
  Fail(ErrorKind::kType, "'" + TypeName(object) + "' object is not subscriptable");
}

}  // namespace pliant::jinja
