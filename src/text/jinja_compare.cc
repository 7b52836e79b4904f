// Equality, order, hashing and membership of values, as Python defines them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "text/jinja_ops.h"
#include "text/jinja_value.h"

namespace pliant::jinja {
namespace {

// int against float without rounding: 2^53 + 1 is not equal to 2^53 as a float.
int CompareIntDouble(std::int64_t i, double d) {
  if (d >= 9223372036854775808.0) return -1;
  if (d < -9223372036854775808.0) return 1;
  const auto whole = static_cast<std::int64_t>(d);
  if (i != whole) return i < whole ? -1 : 1;
  const double fraction = d - static_cast<double>(whole);
  return fraction > 0 ? -1 : fraction < 0 ? 1 : 0;
}

// -1, 0, 1, or 2 when one is not a number (NaN).
int CompareNumbers(const Value& a, const Value& b) {
  if (a.IsIntLike() && b.IsIntLike()) {
    return a.AsInt() < b.AsInt() ? -1 : a.AsInt() > b.AsInt() ? 1 : 0;
  }
  if (std::isnan(a.AsDouble()) || std::isnan(b.AsDouble())) return 2;
  if (a.IsIntLike()) return CompareIntDouble(a.AsInt(), b.d());
  if (b.IsIntLike()) return -CompareIntDouble(b.AsInt(), a.d());
  return a.d() < b.d() ? -1 : a.d() > b.d() ? 1 : 0;
}

bool EqualItems(const std::vector<Value>& a, const std::vector<Value>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!Same(a[i], b[i]) && !Equal(a[i], b[i])) return false;
  }
  return true;
}

bool EqualDicts(const Dict& a, const Dict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const Value* other = b.Find(key);
    if (other == nullptr || !(Same(value, *other) || Equal(value, *other))) return false;
  }
  return true;
}

bool EqualRanges(const Range& a, const Range& b) {
  if (a.length != b.length) return false;
  if (a.length == 0) return true;
  return a.start == b.start && (a.length == 1 || a.step == b.step);
}

bool EqualViews(const View& a, const View& b) {
  if (a.kind != b.kind || a.kind == View::Kind::kValues) return &a == &b;
  const Dict& da = a.owner.dict();
  const Dict& db = b.owner.dict();
  if (a.kind == View::Kind::kItems) return EqualDicts(da, db);
  if (da.entries.size() != db.entries.size()) return false;
  return std::all_of(da.entries.begin(), da.entries.end(),
                     [&](const Dict::Entry& entry) { return db.Find(entry.first) != nullptr; });
}

const char* OrderName(Order order) {
  switch (order) {
    case Order::kLess:
      return "<";
    case Order::kLessEqual:
      return "<=";
    case Order::kGreater:
      return ">";
    case Order::kGreaterEqual:
      return ">=";
  }
  return "?";
}

bool Holds(int comparison, Order order) {
  switch (order) {
    case Order::kLess:
      return comparison < 0;
    case Order::kLessEqual:
      return comparison <= 0;
    case Order::kGreater:
      return comparison > 0;
    case Order::kGreaterEqual:
      return comparison >= 0;
  }
  return false;
}

}  // namespace

bool Equal(const Value& a, const Value& b) {
  Charge(1);
  if (a.IsNumber() && b.IsNumber()) return CompareNumbers(a, b) == 0;
  if (a.type() != b.type()) return false;
  switch (a.type()) {
    case Type::kUndefined:
    case Type::kNone:
      return true;
    case Type::kString:
      if (a.text().size() != b.text().size()) return false;
      ChargeBytes(a.text().size());
      return a.text() == b.text();
    case Type::kList:
    case Type::kTuple:
      CheckStack();
      return EqualItems(a.items(), b.items());
    case Type::kDict:
      CheckStack();
      return EqualDicts(a.dict(), b.dict());
    case Type::kRange:
      return EqualRanges(a.range(), b.range());
    case Type::kView:
      return EqualViews(a.view(), b.view());
    default:
      return a.object() == b.object();
  }
}

bool Ordered(const Value& a, const Value& b, Order order) {
  Charge(1);
  if (a.Is(Type::kUndefined)) FailUndefined(a);
  if (b.Is(Type::kUndefined)) FailUndefined(b);
  if (a.IsNumber() && b.IsNumber()) {
    const int comparison = CompareNumbers(a, b);
    return comparison != 2 && Holds(comparison, order);
  }
  if (a.Is(Type::kString) && b.Is(Type::kString)) {
    ChargeBytes(std::min(a.text().size(), b.text().size()));
    return Holds(a.text().compare(b.text()), order);  // UTF-8 keeps the order of code points
  }
  if (a.IsSequence() && a.type() == b.type()) {
    CheckStack();
    const auto& x = a.items();
    const auto& y = b.items();
    for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!Same(x[i], y[i]) && !Equal(x[i], y[i])) return Ordered(x[i], y[i], order);
    }
    return Holds(x.size() < y.size() ? -1 : x.size() > y.size() ? 1 : 0, order);
  }
  Fail(ErrorKind::kType, std::string("'") + OrderName(order) +
                             "' not supported between instances of '" + TypeName(a) + "' and '" +
                             TypeName(b) + "'");
}

std::size_t Hash(const Value& value) {
  switch (value.type()) {
    case Type::kUndefined:
      return 7;
    case Type::kNone:
      return 11;
    case Type::kBool:
    case Type::kInt:
      return std::hash<std::int64_t>()(value.AsInt());
    case Type::kFloat: {
      const double d = value.d();
      if (d >= -9.2e18 && d <= 9.2e18 && d == std::floor(d)) {
        return std::hash<std::int64_t>()(static_cast<std::int64_t>(d));
      }
      return std::hash<double>()(d);
    }
    case Type::kString:
      ChargeBytes(value.text().size());
      return std::hash<std::string_view>()(value.text());
    case Type::kTuple: {
      CheckStack();
      std::size_t hash = 17;
      Charge(value.items().size());
      for (const Value& item : value.items()) hash = hash * 1000003 ^ Hash(item);
      return hash;
    }
    case Type::kList:
    case Type::kDict:
      Fail(ErrorKind::kType, "unhashable type: '" + TypeName(value) + "'");
    case Type::kRange:
      return 19 + value.range().length;
    case Type::kView:
      if (value.view().kind != View::Kind::kValues) {
        Fail(ErrorKind::kType, "unhashable type: '" + TypeName(value) + "'");
      }
      return std::hash<const void*>()(value.object().get());
    default:
      return std::hash<const void*>()(value.object().get());
  }
}

bool Contains(const Value& container, const Value& item) {
  switch (container.type()) {
    case Type::kString:
      if (!item.Is(Type::kString)) {
        Fail(ErrorKind::kType,
             "'in <string>' requires string as left operand, not " + TypeName(item));
      }
      return FindText(container.text(), item.text(), 0) != std::string_view::npos;
    case Type::kDict:
      return container.dict().Find(item) != nullptr;
    case Type::kView:
      if (container.view().kind == View::Kind::kKeys) {
        return container.view().owner.dict().Find(item) != nullptr;
      }
      break;
    case Type::kRange:
      if (item.IsIntLike()) {
        const Range& range = container.range();
        if (range.length == 0) return false;
        const std::int64_t last = range.At(range.length - 1);
        const std::int64_t i = item.AsInt();
        if (i < std::min(range.start, last) || i > std::max(range.start, last)) return false;
        return (static_cast<Wide>(i) - range.start) % range.step == 0;
      }
      break;
    default:
      break;
  }
  if (!Iterable(container)) {
    Fail(ErrorKind::kType, "argument of type '" + TypeName(container) + "' is not iterable");
  }
  Reader reader(container);
  for (Value other; reader.Next(other);) {
    if (Same(other, item) || Equal(other, item)) return true;
  }
  return false;
}

}  // namespace pliant::jinja
