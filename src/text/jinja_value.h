// Room: text. The values of the Jinja interpreter, after Python's: None, bool, int, float, str
// (code points), list, tuple, dict (ordered), views, ranges, iterators, callables, namespaces.
// Values are immutable except iterators, namespaces and loop state. One thread at a time, except
// constants of the source, which are shared and never change.
//
// Containers know their depth when they are made, and refuse to nest deeper than
// TemplateLimits::max_depth: so printing, comparing, hashing and destroying may recurse.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja_budget.h"

namespace pliant::jinja {

class Value;
struct Args;

enum class Type : std::uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kView,  // dict.keys(), .values(), .items()
  kRange,
  kIterator,  // a generator: can be read once
  kCallable,  // global function, bound method, macro
  kNamespace,
  kLoop,  // the variable `loop`
  kCycler,
  kJoiner,
};

/// Anything too big for the Value itself. Pays for its memory while a Budget is current.
struct Object {
  explicit Object(std::size_t bytes, int depth = 0);
  virtual ~Object();
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  const std::size_t charged;  // bytes that were taken from the budget
  const int depth;            // 1 + the deepest part; 0 for what has no parts
};

struct Str;
struct Seq;
struct Dict;
struct View;
struct Range;
struct Iterator;
struct Callable;
struct Namespace;
struct UndefinedInfo;

class Value {
 public:
  Value() : type_(Type::kNone) {}
  Value(bool b) : type_(Type::kBool) { bits_.b = b; }         // NOLINT(google-explicit-constructor)
  Value(std::int64_t i) : type_(Type::kInt) { bits_.i = i; }  // NOLINT(google-explicit-constructor)
  Value(double d) : type_(Type::kFloat) { bits_.d = d; }      // NOLINT(google-explicit-constructor)
  Value(const char*) = delete;
  Value(Type type, std::shared_ptr<Object> object) : type_(type), object_(std::move(object)) {}

  Type type() const { return type_; }
  bool Is(Type type) const { return type_ == type; }
  bool b() const { return bits_.b; }
  std::int64_t i() const { return bits_.i; }
  double d() const { return bits_.d; }
  /// bool or int as an integer.
  std::int64_t AsInt() const { return type_ == Type::kBool ? bits_.b : bits_.i; }
  bool IsIntLike() const { return type_ == Type::kBool || type_ == Type::kInt; }
  bool IsNumber() const { return IsIntLike() || type_ == Type::kFloat; }
  double AsDouble() const { return type_ == Type::kFloat ? bits_.d : static_cast<double>(AsInt()); }
  bool IsSequence() const { return type_ == Type::kList || type_ == Type::kTuple; }

  const Str& str() const;
  const std::string& text() const;  // of a string
  const Seq& seq() const;
  const std::vector<Value>& items() const;  // of a list or tuple
  const Dict& dict() const;
  const View& view() const;
  const Range& range() const;
  Iterator& iterator() const;
  Callable& callable() const;
  Namespace& ns() const;
  const UndefinedInfo& undefined() const;
  const std::shared_ptr<Object>& object() const { return object_; }
  template <typename T>
  T& As() const {
    return static_cast<T&>(*object_);
  }

 private:
  Type type_;
  union {
    bool b;
    std::int64_t i;
    double d;
  } bits_{.i = 0};
  std::shared_ptr<Object> object_;
};

struct Str final : Object {
  Str(std::string text, bool markup);
  const std::string text;    // valid UTF-8
  const std::size_t length;  // code points
  const bool
      markup;  // came through `safe` or `escape`: joining it with other text escapes that text
  bool ascii() const { return length == text.size(); }
};

struct Seq final : Object {
  explicit Seq(std::vector<Value> items, bool grouped = false);
  const std::vector<Value> items;
  const bool grouped;  // a pair of groupby: has .grouper and .list
};

/// Keys keep the order in which they were first put in.
struct Dict final : Object {
  using Entry = std::pair<Value, Value>;
  /// Later entries replace the values of equal keys. Keys must be hashable.
  static std::shared_ptr<Dict> Make(std::vector<Entry> entries);
  const Value* Find(const Value& key) const;  // fails on an unhashable key
  const Value* Find(std::string_view key) const;

  const std::vector<Entry> entries;

 private:
  Dict(std::vector<Entry> entries, std::vector<std::uint32_t> index, int depth);
  const std::vector<std::uint32_t>
      index_;  // open addressing, size a power of two; empty for small dicts
};

struct View final : Object {
  enum class Kind : std::uint8_t { kKeys, kValues, kItems };
  View(Kind kind, Value dict);
  const Kind kind;
  const Value owner;
};

struct Range final : Object {
  Range(std::int64_t start, std::int64_t stop, std::int64_t step, std::size_t length)
      : Object(sizeof(Range)), start(start), stop(stop), step(step), length(length) {}
  /// Item `index`. Unsigned inside: the product may pass 64 bits where the sum, an item, does not.
  std::int64_t At(std::uint64_t index) const {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(start) +
                                     index * static_cast<std::uint64_t>(step));
  }
  const std::int64_t start, stop, step;
  const std::size_t length;
};

struct Iterator final : Object {
  using NextFn = std::function<bool(Value&)>;
  /// `source_depth`: depth of what the function holds.
  Iterator(const char* name, int source_depth, NextFn next);
  const char* const name;  // its Python type
  NextFn next;             // gives the next item, or false at the end and ever after
};

/// Arguments of a call.
struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
  /// Removes and returns a keyword argument.
  std::optional<Value> TakeKeyword(std::string_view name);
};

struct Callable final : Object {
  using Fn = std::function<Value(Args&)>;
  Callable(std::string name, const char* python_type, int source_depth, Fn fn);
  const std::string name;
  const char* const python_type;
  const Fn fn;
};

/// Namespaces are owned by the rendering (NamespaceArena), so that cycles of them are neither
/// leaked nor walked.
struct Namespace final : Object {
  Namespace() : Object(sizeof(Namespace)) {}
  std::vector<std::pair<std::string, Value>> attributes;
  const Value* Find(std::string_view name) const;
  void Set(std::string_view name, Value value);
};

struct Cycler final : Object {
  explicit Cycler(Value items);
  const Value items;  // a tuple, not empty
  std::size_t position = 0;
};

struct Joiner final : Object {
  explicit Joiner(Value separator);
  const Value separator;
  bool used = false;
};

/// Why a value is undefined; printed when it is used in a way that undefined values do not allow.
struct UndefinedInfo final : Object {
  UndefinedInfo(std::string hint, std::string owner, Value name, bool unsafe)
      : Object(sizeof(UndefinedInfo) + hint.size() + owner.size()),
        hint(std::move(hint)),
        owner(std::move(owner)),
        name(std::move(name)),
        unsafe(unsafe) {}
  const std::string hint;   // the whole message when not empty
  const std::string owner;  // type of the object that has no such attribute; empty: a variable
  const Value name;
  const bool unsafe;  // the sandbox forbids it
  std::string Message() const;
};

// Making values.
Value String(std::string text, bool markup = false);
/// A part of a string value keeps its `markup`.
inline Value Like(const Value& model, std::string text) {
  return String(std::move(text), model.str().markup);
}
Value List(std::vector<Value> items);
Value Tuple(std::vector<Value> items);
Value MakeDict(std::vector<Dict::Entry> entries);
Value MakeIterator(const char* name, int source_depth, Iterator::NextFn next);
Value MakeCallable(std::string name, const char* python_type, int source_depth, Callable::Fn fn);
Value UndefinedVariable(std::string_view name);
Value UndefinedHint(std::string hint);
Value UndefinedAttribute(const Value& owner, Value name);
Value UnsafeAttribute(const Value& owner, std::string_view name);
/// Fails on invalid UTF-8 and on depth.
Value FromJson(const nlohmann::ordered_json& json);

// Python's view of them.
std::string TypeName(const Value& value);
int DepthOf(const Value& value);
bool Truthy(const Value& value);
bool Equal(const Value& a, const Value& b);
enum class Order : std::uint8_t { kLess, kLessEqual, kGreater, kGreaterEqual };
/// Fails with Python's TypeError where the types have no order.
bool Ordered(const Value& a, const Value& b, Order order);
/// Python's `is`.
bool Same(const Value& a, const Value& b);
/// Fails on lists and dicts.
std::size_t Hash(const Value& value);
bool Contains(const Value& container, const Value& item);
/// Nothing for types without len().
std::optional<std::size_t> LengthOf(const Value& value);
std::size_t Length(const Value& value);  // fails instead
bool Iterable(const Value& value);
bool IsCallable(const Value& value);
[[noreturn]] void FailUndefined(const Value& undefined);

/// Reads any iterable once, from the front.
class Reader {
 public:
  using NextFn = std::function<bool(Value&)>;
  /// Fails when the value is not iterable.
  explicit Reader(Value source);
  bool Next(Value& item);

 private:
  Value source_;
  std::size_t position_ = 0;
};
/// All items.
std::vector<Value> Collect(const Value& iterable);

/// Keeps the namespaces of one rendering and empties them at its end.
class NamespaceArena {
 public:
  ~NamespaceArena();
  Value Make();

 private:
  std::vector<std::shared_ptr<Namespace>> all_;
};

inline const Str& Value::str() const { return static_cast<const Str&>(*object_); }
inline const std::string& Value::text() const { return str().text; }
inline const Seq& Value::seq() const { return static_cast<const Seq&>(*object_); }
inline const std::vector<Value>& Value::items() const { return seq().items; }
inline const Dict& Value::dict() const { return static_cast<const Dict&>(*object_); }
inline const View& Value::view() const { return static_cast<const View&>(*object_); }
inline const Range& Value::range() const { return static_cast<const Range&>(*object_); }
inline Iterator& Value::iterator() const { return static_cast<Iterator&>(*object_); }
inline Callable& Value::callable() const { return static_cast<Callable&>(*object_); }
inline Namespace& Value::ns() const { return static_cast<Namespace&>(*object_); }
inline const UndefinedInfo& Value::undefined() const {
  return static_cast<const UndefinedInfo&>(*object_);
}

}  // namespace pliant::jinja
