#include "text/jinja_value.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

constexpr std::size_t kSmallDict = 8;

int DeepestOf(const std::vector<Value>& items) {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, DepthOf(item));
  return depth + 1;
}

std::size_t ChargeTake(std::size_t bytes) {
  Budget* budget = Budget::Current();
  if (budget == nullptr) return 0;
  budget->Allocate(bytes);
  return bytes;
}

}  // namespace

Object::Object(std::size_t bytes, int depth) : charged(ChargeTake(bytes)), depth(depth) {}

Object::~Object() {
  if (charged != 0) {
    if (Budget* budget = Budget::Current()) budget->Release(charged);
  }
}

Str::Str(std::string t, bool m)
    : Object(sizeof(Str) + t.size()),
      text(std::move(t)),
      length(CountCodePoints(text)),
      markup(m) {}

Seq::Seq(std::vector<Value> i, bool g)
    : Object(sizeof(Seq) + i.size() * sizeof(Value), DeepestOf(i)),
      items(std::move(i)),
      grouped(g) {}

View::View(Kind k, Value dict)
    : Object(sizeof(View), DepthOf(dict) + 1), kind(k), owner(std::move(dict)) {}

Iterator::Iterator(const char* n, int source_depth, NextFn f)
    : Object(sizeof(Iterator) + 64, source_depth + 1), name(n), next(std::move(f)) {}

Callable::Callable(std::string n, const char* t, int source_depth, Fn f)
    : Object(sizeof(Callable) + 64, source_depth + 1),
      name(std::move(n)),
      python_type(t),
      fn(std::move(f)) {}

Cycler::Cycler(Value i) : Object(sizeof(Cycler), DepthOf(i) + 1), items(std::move(i)) {}
Joiner::Joiner(Value s) : Object(sizeof(Joiner), DepthOf(s) + 1), separator(std::move(s)) {}

// ---- dict

Dict::Dict(std::vector<Entry> e, std::vector<std::uint32_t> index, int depth)
    : Object(sizeof(Dict) + e.size() * sizeof(Entry) + index.size() * 4, depth),
      entries(std::move(e)),
      index_(std::move(index)) {}

std::shared_ptr<Dict> Dict::Make(std::vector<Entry> entries) {
  Charge(entries.size());
  int depth = 0;
  for (const Entry& entry : entries) {
    depth = std::max({depth, DepthOf(entry.first), DepthOf(entry.second)});
  }
  CheckValueDepth(depth + 1);
  std::vector<Entry> kept;
  kept.reserve(entries.size());
  std::vector<std::uint32_t> index;
  if (entries.size() > kSmallDict) {
    std::size_t size = 16;
    while (size < entries.size() * 2) size *= 2;
    index.assign(size, 0);
  }
  for (Entry& entry : entries) {
    const std::size_t hash = Hash(entry.first);
    bool found = false;
    if (index.empty()) {
      for (Entry& other : kept) {
        if (Equal(other.first, entry.first)) {
          other.second = std::move(entry.second);
          found = true;
          break;
        }
      }
      if (!found) kept.push_back(std::move(entry));
      continue;
    }
    const std::size_t mask = index.size() - 1;
    std::size_t slot = hash & mask;
    for (; index[slot] != 0; slot = (slot + 1) & mask) {
      Charge(1);
      Entry& other = kept[index[slot] - 1];
      if (Equal(other.first, entry.first)) {
        other.second = std::move(entry.second);
        found = true;
        break;
      }
    }
    if (!found) {
      kept.push_back(std::move(entry));
      index[slot] = static_cast<std::uint32_t>(kept.size());
    }
  }
  return std::shared_ptr<Dict>(new Dict(std::move(kept), std::move(index), depth + 1));
}

const Value* Dict::Find(const Value& key) const {
  const std::size_t hash = Hash(key);
  if (index_.empty()) {
    for (const Entry& entry : entries) {
      if (Equal(entry.first, key)) return &entry.second;
    }
    return nullptr;
  }
  const std::size_t mask = index_.size() - 1;
  for (std::size_t slot = hash & mask; index_[slot] != 0; slot = (slot + 1) & mask) {
    Charge(1);
    const Entry& entry = entries[index_[slot] - 1];
    if (Equal(entry.first, key)) return &entry.second;
  }
  return nullptr;
}

const Value* Dict::Find(std::string_view key) const {
  const auto matches = [&](const Entry& entry) {
    return entry.first.Is(Type::kString) && entry.first.text() == key;
  };
  if (index_.empty()) {
    for (const Entry& entry : entries) {
      if (matches(entry)) return &entry.second;
    }
    return nullptr;
  }
  const std::size_t mask = index_.size() - 1;
  for (std::size_t slot = std::hash<std::string_view>()(key) & mask; index_[slot] != 0;
       slot = (slot + 1) & mask) {
    Charge(1);
    const Entry& entry = entries[index_[slot] - 1];
    if (matches(entry)) return &entry.second;
  }
  return nullptr;
}

const Value* Namespace::Find(std::string_view name) const {
  Charge(attributes.size() / 8);
  for (const auto& [key, value] : attributes) {
    if (key == name) return &value;
  }
  return nullptr;
}

void Namespace::Set(std::string_view name, Value value) {
  Charge(attributes.size() / 8);
  for (auto& [key, old] : attributes) {
    if (key == name) {
      // The old value may be the last owner of something that leads back here: let it die after the
      // assignment.
      std::swap(old, value);
      return;
    }
  }
  attributes.emplace_back(std::string(name), std::move(value));
}

NamespaceArena::~NamespaceArena() {
  for (const auto& ns : all_) ns->attributes.clear();
}

Value NamespaceArena::Make() {
  auto ns = std::make_shared<Namespace>();
  all_.push_back(ns);
  return Value(Type::kNamespace, std::move(ns));
}

std::optional<Value> Args::TakeKeyword(std::string_view name) {
  Charge(keyword.size() / 8);
  for (auto it = keyword.begin(); it != keyword.end(); ++it) {
    if (it->first == name) {
      Value value = std::move(it->second);
      keyword.erase(it);
      return value;
    }
  }
  return std::nullopt;
}

// ---- making values

Value String(std::string text, bool markup) {
  CheckStringSize(text.size());
  return Value(Type::kString, std::make_shared<Str>(std::move(text), markup));
}

Value List(std::vector<Value> items) {
  Charge(items.size() / 8);
  auto seq = std::make_shared<Seq>(std::move(items));
  CheckValueDepth(seq->depth);
  return Value(Type::kList, std::move(seq));
}

Value Tuple(std::vector<Value> items) {
  Charge(items.size() / 8);
  auto seq = std::make_shared<Seq>(std::move(items));
  CheckValueDepth(seq->depth);
  return Value(Type::kTuple, std::move(seq));
}

Value MakeDict(std::vector<Dict::Entry> entries) {
  return Value(Type::kDict, Dict::Make(std::move(entries)));
}

Value MakeIterator(const char* name, int source_depth, Iterator::NextFn next) {
  CheckValueDepth(source_depth + 1);
  return Value(Type::kIterator, std::make_shared<Iterator>(name, source_depth, std::move(next)));
}

Value MakeCallable(std::string name, const char* python_type, int source_depth, Callable::Fn fn) {
  CheckValueDepth(source_depth + 1);
  return Value(Type::kCallable, std::make_shared<Callable>(std::move(name), python_type,
                                                           source_depth, std::move(fn)));
}

Value UndefinedVariable(std::string_view name) {
  return Value(Type::kUndefined,
               std::make_shared<UndefinedInfo>("", "", String(std::string(name)), false));
}

Value UndefinedHint(std::string hint) {
  return Value(Type::kUndefined,
               std::make_shared<UndefinedInfo>(std::move(hint), "", Value(), false));
}

Value UndefinedAttribute(const Value& owner, Value name) {
  std::string type = owner.Is(Type::kNone) ? "None" : TypeName(owner) + " object";
  CheckValueDepth(DepthOf(name) + 1);
  if (!name.Is(Type::kString) && DepthOf(name) > 0)
    name = String(Repr(name));  // keeps no parts alive
  return Value(Type::kUndefined,
               std::make_shared<UndefinedInfo>("", std::move(type), std::move(name), false));
}

Value UnsafeAttribute(const Value& owner, std::string_view name) {
  std::string hint =
      "access to attribute " + Quote(name) + " of " + Quote(TypeName(owner)) + " object is unsafe.";
  return Value(Type::kUndefined,
               std::make_shared<UndefinedInfo>(std::move(hint), "", Value(), true));
}

std::string UndefinedInfo::Message() const {
  if (!hint.empty()) return hint;
  if (owner.empty()) return Repr(name) + " is undefined";
  if (!name.Is(Type::kString)) return owner + " has no element " + Repr(name);
  return Quote(owner) + " has no attribute " + Repr(name);
}

void FailUndefined(const Value& undefined) {
  const UndefinedInfo& info = undefined.undefined();
  Fail(info.unsafe ? ErrorKind::kSecurity : ErrorKind::kUndefined, info.Message());
}

namespace {

Value FromJsonAt(const nlohmann::ordered_json& json, int depth) {
  using Kind = nlohmann::ordered_json::value_t;
  CheckValueDepth(depth);
  Charge(1);
  switch (json.type()) {
    case Kind::boolean:
      return Value(json.get<bool>());
    case Kind::number_integer:
      return Value(json.get<std::int64_t>());
    case Kind::number_unsigned: {
      const auto number = json.get<std::uint64_t>();
      if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return Value(static_cast<double>(number));
      }
      return Value(static_cast<std::int64_t>(number));
    }
    case Kind::number_float:
      return Value(json.get<double>());
    case Kind::string: {
      const auto& text = json.get_ref<const std::string&>();
      ChargeBytes(text.size());
      if (!IsValidUtf8(text))
        Fail(ErrorKind::kValue, "a string of the template's variables is not valid UTF-8");
      return String(text);
    }
    case Kind::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(FromJsonAt(item, depth + 1));
      return List(std::move(items));
    }
    case Kind::object: {
      std::vector<Dict::Entry> entries;
      entries.reserve(json.size());
      for (const auto& [key, item] : json.items()) {
        if (!IsValidUtf8(key))
          Fail(ErrorKind::kValue, "a key of the template's variables is not valid UTF-8");
        entries.emplace_back(String(key), FromJsonAt(item, depth + 1));
      }
      return MakeDict(std::move(entries));
    }
    default:
      return Value();
  }
}

}  // namespace

Value FromJson(const nlohmann::ordered_json& json) { return FromJsonAt(json, 1); }

// ---- Python's view

std::string TypeName(const Value& value) {
  switch (value.type()) {
    case Type::kUndefined:
      return "Undefined";
    case Type::kNone:
      return "NoneType";
    case Type::kBool:
      return "bool";
    case Type::kInt:
      return "int";
    case Type::kFloat:
      return "float";
    case Type::kString:
      return value.str().markup ? "Markup" : "str";
    case Type::kList:
      return "list";
    case Type::kTuple:
      return "tuple";
    case Type::kDict:
      return "dict";
    case Type::kView:
      switch (value.view().kind) {
        case View::Kind::kKeys:
          return "dict_keys";
        case View::Kind::kValues:
          return "dict_values";
        case View::Kind::kItems:
          return "dict_items";
      }
      return "dict_items";
    case Type::kRange:
      return "range";
    case Type::kIterator:
      return value.iterator().name;
    case Type::kCallable:
      return value.callable().python_type;
    case Type::kNamespace:
      return "Namespace";
    case Type::kLoop:
      return "LoopContext";
    case Type::kCycler:
      return "Cycler";
    case Type::kJoiner:
      return "Joiner";
  }
  return "object";
}

int DepthOf(const Value& value) { return value.object() ? value.object()->depth : 0; }

bool Truthy(const Value& value) {
  switch (value.type()) {
    case Type::kUndefined:
    case Type::kNone:
      return false;
    case Type::kBool:
      return value.b();
    case Type::kInt:
      return value.i() != 0;
    case Type::kFloat:
      return value.d() != 0;
    case Type::kString:
      return !value.text().empty();
    case Type::kList:
    case Type::kTuple:
      return !value.items().empty();
    case Type::kDict:
      return !value.dict().entries.empty();
    case Type::kView:
      return !value.view().owner.dict().entries.empty();
    case Type::kRange:
      return value.range().length != 0;
    default:
      return true;
  }
}

bool Same(const Value& a, const Value& b) {
  if (a.type() != b.type()) return false;
  switch (a.type()) {
    case Type::kNone:
      return true;
    case Type::kBool:
      return a.b() == b.b();
    case Type::kInt:
      return a.i() == b.i();
    case Type::kFloat:
      return a.d() == b.d();
    case Type::kString:
      return a.object() == b.object() ||
             (!a.str().markup && !b.str().markup && a.text() == b.text());
    default:
      return a.object() == b.object();
  }
}

std::optional<std::size_t> LengthOf(const Value& value) {
  switch (value.type()) {
    case Type::kUndefined:
      return 0;
    case Type::kString:
      return value.str().length;
    case Type::kList:
    case Type::kTuple:
      return value.items().size();
    case Type::kDict:
      return value.dict().entries.size();
    case Type::kView:
      return value.view().owner.dict().entries.size();
    case Type::kRange:
      return value.range().length;
    default:
      return std::nullopt;
  }
}

std::size_t Length(const Value& value) {
  if (const auto length = LengthOf(value)) return *length;
  Fail(ErrorKind::kType, "object of type '" + TypeName(value) + "' has no len()");
}

bool Iterable(const Value& value) {
  return value.Is(Type::kIterator) || value.Is(Type::kLoop) || LengthOf(value).has_value();
}

bool IsCallable(const Value& value) {
  switch (value.type()) {
    case Type::kUndefined:
    case Type::kCallable:
    case Type::kLoop:
    case Type::kJoiner:
      return true;
    default:
      return false;
  }
}

Reader::Reader(Value source) : source_(std::move(source)) {
  if (!Iterable(source_) || source_.Is(Type::kLoop)) {
    Fail(ErrorKind::kType, "'" + TypeName(source_) + "' object is not iterable");
  }
}

bool Reader::Next(Value& item) {
  Charge(1);
  switch (source_.type()) {
    case Type::kString: {
      const Str& str = source_.str();
      if (position_ >= str.text.size()) return false;
      const std::size_t start = position_;
      DecodeNext(str.text, position_);
      item = String(str.text.substr(start, position_ - start));
      return true;
    }
    case Type::kList:
    case Type::kTuple: {
      const auto& items = source_.items();
      if (position_ >= items.size()) return false;
      item = items[position_++];
      return true;
    }
    case Type::kDict: {
      const auto& entries = source_.dict().entries;
      if (position_ >= entries.size()) return false;
      item = entries[position_++].first;
      return true;
    }
    case Type::kView: {
      const View& view = source_.view();
      const auto& entries = view.owner.dict().entries;
      if (position_ >= entries.size()) return false;
      const auto& entry = entries[position_++];
      switch (view.kind) {
        case View::Kind::kKeys:
          item = entry.first;
          break;
        case View::Kind::kValues:
          item = entry.second;
          break;
        case View::Kind::kItems:
          item = Tuple({entry.first, entry.second});
          break;
      }
      return true;
    }
    case Type::kRange: {
      const Range& range = source_.range();
      if (position_ >= range.length) return false;
      item = Value(range.At(position_++));
      return true;
    }
    case Type::kIterator: {
      CheckStack();
      return source_.iterator().next(item);
    }
    default:
      return false;
  }
}

std::vector<Value> Collect(const Value& iterable) {
  if (iterable.IsSequence()) {
    Charge(iterable.items().size() / 8);
    return iterable.items();
  }
  Reader reader(iterable);
  std::vector<Value> items;
  // What is collected is not a value yet: its growth is paid for here, and limited by the memory
  // that the list will need.
  for (Value item; reader.Next(item);) {
    items.push_back(std::move(item));
    if ((items.size() & 0xfff) == 0) CheckStringSize(items.size() * sizeof(Value) / 4);
  }
  return items;
}

}  // namespace pliant::jinja
