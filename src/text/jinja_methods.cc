// Methods of lists, tuples, dicts, numbers, ranges and cyclers, and the tables of all methods.
#include "text/jinja_methods.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "text/jinja_ops.h"
#include "text/jinja_text.h"

namespace pliant::jinja {
namespace {

Value DictGet(const Value& self, Args& args) {
  if (!args.keyword.empty()) Fail(ErrorKind::kType, "dict.get() takes no keyword arguments");
  const Bound bound("get", args, {"key", "default"}, 1);
  const Value* found = self.dict().Find(bound[0]);
  return found != nullptr ? *found : bound[1];
}

Value MakeView(View::Kind kind, const Value& self, Args& args, const char* name) {
  const Bound bound(name, args, {});
  CheckValueDepth(DepthOf(self) + 1);
  return Value(Type::kView, std::make_shared<View>(kind, self));
}
Value DictKeys(const Value& self, Args& args) {
  return MakeView(View::Kind::kKeys, self, args, "keys");
}
Value DictValues(const Value& self, Args& args) {
  return MakeView(View::Kind::kValues, self, args, "values");
}
Value DictItems(const Value& self, Args& args) {
  return MakeView(View::Kind::kItems, self, args, "items");
}

Value DictFromKeys(const Value&, Args& args) {
  const Bound bound("fromkeys", args, {"iterable", "value"}, 1);
  std::vector<Dict::Entry> entries;
  for (Value& key : Collect(bound[0])) entries.emplace_back(std::move(key), bound[1]);
  return MakeDict(std::move(entries));
}

// Copies may share: nothing changes them.
Value CopySelf(const Value& self, Args& args) {
  const Bound bound("copy", args, {});
  return self;
}

Value SequenceCount(const Value& self, Args& args) {
  const Bound bound("count", args, {"value"}, 1);
  std::int64_t count = 0;
  Reader reader(self);
  for (Value item; reader.Next(item);) count += Same(item, bound[0]) || Equal(item, bound[0]);
  return Value(count);
}

Value SequenceIndex(const Value& self, Args& args) {
  const Bound bound("index", args, {"value", "start", "stop"}, 1);
  const auto length = static_cast<std::int64_t>(Length(self));
  const auto limit = [&](std::int64_t i) {
    return std::clamp<std::int64_t>(i < 0 ? i + length : i, 0, length);
  };
  const std::int64_t start = limit(bound.Int(1, 0));
  const std::int64_t stop = limit(bound.Int(2, length));
  Reader reader(self);
  std::int64_t i = 0;
  for (Value item; reader.Next(item) && i < stop; ++i) {
    if (i >= start && (Same(item, bound[0]) || Equal(item, bound[0]))) return Value(i);
  }
  Fail(ErrorKind::kValue, Repr(bound[0]) + " is not in " + TypeName(self));
}

Value IntBitLength(const Value& self, Args& args) {
  const Bound bound("bit_length", args, {});
  std::int64_t bits = 0;
  const std::int64_t value = self.AsInt();
  for (std::uint64_t rest = value < 0 ? ~static_cast<std::uint64_t>(value) + 1
                                      : static_cast<std::uint64_t>(value);
       rest > 0; rest >>= 1) {
    ++bits;
  }
  return Value(bits);
}

Value FloatIsInteger(const Value& self, Args& args) {
  const Bound bound("is_integer", args, {});
  return Value(std::isfinite(self.d()) && self.d() == std::floor(self.d()));
}

Value CyclerNext(const Value& self, Args& args) {
  const Bound bound("next", args, {});
  auto& cycler = self.As<Cycler>();
  const auto& items = cycler.items.items();
  const Value item = items[cycler.position];
  cycler.position = (cycler.position + 1) % items.size();
  return item;
}

Value CyclerReset(const Value& self, Args& args) {
  const Bound bound("reset", args, {});
  self.As<Cycler>().position = 0;
  return Value();
}

using Table = std::map<std::string_view, MethodFn>;

MethodFn Find(const Table& table, std::string_view name) {
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace

MethodFn FindMethod(const Value& self, std::string_view name) {
  static const Table kDict = {{"get", DictGet},     {"keys", DictKeys}, {"values", DictValues},
                              {"items", DictItems}, {"copy", CopySelf}, {"fromkeys", DictFromKeys}};
  static const Table kList = {
      {"copy", CopySelf}, {"count", SequenceCount}, {"index", SequenceIndex}};
  static const Table kTuple = {{"count", SequenceCount}, {"index", SequenceIndex}};
  static const Table kInt = {{"bit_length", IntBitLength}};
  static const Table kFloat = {{"is_integer", FloatIsInteger}};
  static const Table kCycler = {{"next", CyclerNext}, {"reset", CyclerReset}};
  switch (self.type()) {
    case Type::kString:
      return FindStringMethod(name);
    case Type::kDict:
      return Find(kDict, name);
    case Type::kList:
      return Find(kList, name);
    case Type::kTuple:
    case Type::kRange:
      return Find(kTuple, name);
    case Type::kBool:
    case Type::kInt:
      return Find(kInt, name);
    case Type::kFloat:
      return Find(kFloat, name);
    case Type::kCycler:
      return Find(kCycler, name);
    default:
      return nullptr;
  }
}

bool IsForbiddenMethod(const Value& self, std::string_view name) {
  static constexpr std::string_view kList[] = {"append", "clear", "pop",    "reverse",
                                               "insert", "sort",  "extend", "remove"};
  static constexpr std::string_view kDict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  static constexpr std::string_view kInternal[] = {
      "__class__", "__doc__",  "__init__",    "__dict__",     "__eq__",        "__getattribute__",
      "__hash__",  "__repr__", "__str__",     "__reduce__",   "__reduce_ex__", "__subclasshook__",
      "__len__",   "__iter__", "__getitem__", "__contains__", "__format__"};
  const auto among = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  if (self.Is(Type::kNamespace)) return false;
  if (name.starts_with("__") && among(kInternal)) return true;
  return (self.Is(Type::kList) && among(kList)) || (self.Is(Type::kDict) && among(kDict));
}

}  // namespace pliant::jinja
