// The tests of the template language: `value is name(args)`.
#include <map>

#include "text/jinja_filters.h"
#include "text/jinja_methods.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"

namespace pliant::jinja {
namespace {

template <Type... Types>
bool IsType(const Value& value, Args& args) {
  const Bound bound("test", args, {});
  return (value.Is(Types) || ...);
}

template <bool Wanted>
bool IsBool(const Value& value, Args& args) {
  const Bound bound("test", args, {});
  return value.Is(Type::kBool) && value.b() == Wanted;
}

bool IsDefined(const Value& value, Args& args) { return !IsType<Type::kUndefined>(value, args); }

std::int64_t Remainder(const Value& value, const Value& divisor) {
  const Value rest = Arithmetic(Op::kMod, value, divisor);
  return rest.IsIntLike()        ? rest.AsInt()
         : rest.Is(Type::kFloat) ? (rest.d() == 0   ? 0
                                    : rest.d() == 1 ? 1
                                                    : 2)
                                 : 2;
}

template <std::int64_t Rest>
bool IsParity(const Value& value, Args& args) {
  const Bound bound("test", args, {});
  return Remainder(value, Value(std::int64_t{2})) == Rest;
}

bool IsDivisible(const Value& value, Args& args) {
  const Bound bound("divisibleby", args, {"num"}, 1);
  return Remainder(value, bound[0]) == 0;
}

bool IsLowerTest(const Value& value, Args& args) {
  const Bound bound("lower", args, {});
  return IsAllLower(Text(value));
}
bool IsUpperTest(const Value& value, Args& args) {
  const Bound bound("upper", args, {});
  return IsAllUpper(Text(value));
}

bool IsSequenceTest(const Value& value, Args& args) {
  const Bound bound("sequence", args, {});
  return LengthOf(value).has_value() && !value.Is(Type::kView);
}

bool IsIterableTest(const Value& value, Args& args) {
  const Bound bound("iterable", args, {});
  return Iterable(value);
}

bool IsCallableTest(const Value& value, Args& args) {
  const Bound bound("callable", args, {});
  return IsCallable(value);
}

bool IsEscaped(const Value& value, Args& args) {
  const Bound bound("escaped", args, {});
  return value.Is(Type::kString) && value.str().markup;
}

bool IsSame(const Value& value, Args& args) {
  const Bound bound("sameas", args, {"other"}, 1);
  return Same(value, bound[0]);
}

bool IsIn(const Value& value, Args& args) {
  const Bound bound("in", args, {"seq"}, 1);
  return Contains(bound[0], value);
}

bool IsFilter(const Value& value, Args& args) {
  const Bound bound("filter", args, {});
  return value.Is(Type::kString) && FindFilter(value.text()) != nullptr;
}
bool IsTest(const Value& value, Args& args) {
  const Bound bound("test", args, {});
  return value.Is(Type::kString) && FindTest(value.text()) != nullptr;
}

template <Op Comparison>
bool Compares(const Value& value, Args& args) {
  const Bound bound("test", args, {"other"}, 1);
  return Compare(Comparison, value, bound[0]);
}

}  // namespace

TestFn FindTest(std::string_view name) {
  static const std::map<std::string_view, TestFn> kTests = {
      {"odd", IsParity<1>},
      {"even", IsParity<0>},
      {"divisibleby", IsDivisible},
      {"defined", IsDefined},
      {"undefined", IsType<Type::kUndefined>},
      {"filter", IsFilter},
      {"test", IsTest},
      {"none", IsType<Type::kNone>},
      {"boolean", IsType<Type::kBool>},
      {"false", IsBool<false>},
      {"true", IsBool<true>},
      {"integer", IsType<Type::kInt>},
      {"float", IsType<Type::kFloat>},
      {"number", IsType<Type::kBool, Type::kInt, Type::kFloat>},
      {"string", IsType<Type::kString>},
      {"mapping", IsType<Type::kDict>},
      {"lower", IsLowerTest},
      {"upper", IsUpperTest},
      {"sequence", IsSequenceTest},
      {"iterable", IsIterableTest},
      {"callable", IsCallableTest},
      {"sameas", IsSame},
      {"escaped", IsEscaped},
      {"in", IsIn},
      {"==", Compares<Op::kEq>},
      {"eq", Compares<Op::kEq>},
      {"equalto", Compares<Op::kEq>},
      {"!=", Compares<Op::kNe>},
      {"ne", Compares<Op::kNe>},
      {">", Compares<Op::kGt>},
      {"gt", Compares<Op::kGt>},
      {"greaterthan", Compares<Op::kGt>},
      {">=", Compares<Op::kGe>},
      {"ge", Compares<Op::kGe>},
      {"<", Compares<Op::kLt>},
      {"lt", Compares<Op::kLt>},
      {"lessthan", Compares<Op::kLt>},
      {"<=", Compares<Op::kLe>},
      {"le", Compares<Op::kLe>},
  };
  const auto found = kTests.find(name);
  return found == kTests.end() ? nullptr : found->second;
}

}  // namespace pliant::jinja
