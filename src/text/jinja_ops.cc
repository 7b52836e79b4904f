#include "text/jinja_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "text/jinja_eval.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int64_t>::max();

const char* OpText(Op op) {
  switch (op) {
    case Op::kAdd:
      return "+";
    case Op::kSub:
      return "-";
    case Op::kMul:
      return "*";
    case Op::kDiv:
      return "/";
    case Op::kFloorDiv:
      return "//";
    case Op::kMod:
      return "%";
    default:
      return "** or pow()";
  }
}

[[noreturn]] void FailOverflow() {
  Fail(ErrorKind::kOverflow, "an integer does not fit into 64 bits");
}

std::int64_t FloorDiv(std::int64_t a, std::int64_t b) {
  if (b == 0) Fail(ErrorKind::kOverflow, "integer division or modulo by zero");
  if (a == std::numeric_limits<std::int64_t>::min() && b == -1) FailOverflow();
  const std::int64_t q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}

std::int64_t FloorMod(std::int64_t a, std::int64_t b) {
  if (b == 0) Fail(ErrorKind::kOverflow, "integer modulo by zero");
  if (b == -1) return 0;
  const std::int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

Value IntPower(std::int64_t base, std::int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) Fail(ErrorKind::kOverflow, "0.0 cannot be raised to a negative power");
    return Value(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  std::int64_t result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) FailOverflow();
    if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) FailOverflow();
  }
  return Value(result);
}

Value IntArithmetic(Op op, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  switch (op) {
    case Op::kAdd:
      if (__builtin_add_overflow(a, b, &result)) FailOverflow();
      return Value(result);
    case Op::kSub:
      if (__builtin_sub_overflow(a, b, &result)) FailOverflow();
      return Value(result);
    case Op::kMul:
      if (__builtin_mul_overflow(a, b, &result)) FailOverflow();
      return Value(result);
    case Op::kDiv:
      if (b == 0) Fail(ErrorKind::kOverflow, "division by zero");
      return Value(static_cast<double>(a) / static_cast<double>(b));
    case Op::kFloorDiv:
      return Value(FloorDiv(a, b));
    case Op::kMod:
      return Value(FloorMod(a, b));
    default:
      return IntPower(a, b);
  }
}

double FloatMod(double a, double b) {
  if (b == 0) Fail(ErrorKind::kOverflow, "float modulo");
  double r = std::fmod(a, b);
  if (r != 0) {
    if ((r < 0) != (b < 0)) r += b;
  } else {
    r = std::copysign(0.0, b);
  }
  return r;
}

Value FloatArithmetic(Op op, double a, double b) {
  switch (op) {
    case Op::kAdd:
      return Value(a + b);
    case Op::kSub:
      return Value(a - b);
    case Op::kMul:
      return Value(a * b);
    case Op::kDiv:
      if (b == 0) Fail(ErrorKind::kOverflow, "float division by zero");
      return Value(a / b);
    case Op::kFloorDiv: {
      if (b == 0) Fail(ErrorKind::kOverflow, "float floor division by zero");
      const double quotient = (a - FloatMod(a, b)) / b;
      const double floor = std::floor(quotient);
      return Value(quotient - floor > 0.5 ? floor + 1 : floor);
    }
    case Op::kMod:
      return Value(FloatMod(a, b));
    default: {
      if (a == 0 && b < 0) Fail(ErrorKind::kOverflow, "0.0 cannot be raised to a negative power");
      if (a < 0 && std::isfinite(b) && b != std::floor(b)) {
        Fail(ErrorKind::kUnsupported, "complex numbers are not supported");
      }
      const double result = std::pow(a, b);
      if (std::isinf(result) && std::isfinite(a) && std::isfinite(b)) {
        Fail(ErrorKind::kOverflow, "Result too large");
      }
      return Value(result);
    }
  }
}

Value ConcatStrings(const Value& a, const Value& b) {
  const bool markup = a.str().markup || b.str().markup;
  CheckStringSize(a.text().size() + b.text().size());
  ChargeBytes(a.text().size() + b.text().size());
  if (!markup) return String(a.text() + b.text());
  std::string left = a.str().markup ? a.text() : EscapeHtml(a.text());
  return String(left + (b.str().markup ? b.text() : EscapeHtml(b.text())), true);
}

Value RepeatSequence(const Value& value, std::int64_t count) {
  const auto& items = value.items();
  count = std::max<std::int64_t>(count, 0);
  if (!items.empty()) {
    CheckStringSize(static_cast<std::size_t>(std::min<double>(
        static_cast<double>(items.size()) * static_cast<double>(count) * sizeof(Value) / 4, 1e18)));
  }
  std::vector<Value> out;
  out.reserve(items.empty() ? 0 : items.size() * static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count && !items.empty(); ++i)
    out.insert(out.end(), items.begin(), items.end());
  return value.Is(Type::kList) ? List(std::move(out)) : Tuple(std::move(out));
}

}  // namespace

std::size_t FindText(std::string_view text, std::string_view needle, std::size_t from) {
  if (from > text.size()) return std::string_view::npos;
  ChargeBytes(text.size() - from);
  const void* found = memmem(text.data() + from, text.size() - from, needle.data(), needle.size());
  if (found == nullptr) return needle.empty() ? from : std::string_view::npos;
  return static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
}

std::size_t FindLastText(std::string_view text, std::string_view needle, std::size_t end) {
  text = text.substr(0, end);
  if (needle.size() > text.size()) return std::string_view::npos;
  // Backwards over reversed copies: linear, where std::string::rfind may take the product of both
  // lengths.
  if (needle.size() == 1) return text.rfind(needle[0]);
  const std::string reversed(text.rbegin(), text.rend());
  const std::string pattern(needle.rbegin(), needle.rend());
  const std::size_t found = FindText(reversed, pattern, 0);
  return found == std::string_view::npos ? found : text.size() - found - needle.size();
}

Value Repeat(const Value& text, std::int64_t count) {
  const std::string& unit = text.text();
  if (count <= 0 || unit.empty()) return Like(text, "");
  if (static_cast<std::uint64_t>(count) > static_cast<std::uint64_t>(kMaxInt) / unit.size()) {
    CheckStringSize(std::numeric_limits<std::size_t>::max());
  }
  CheckStringSize(unit.size() * static_cast<std::size_t>(count));
  ChargeBytes(unit.size() * static_cast<std::size_t>(count));
  std::string out;
  out.reserve(unit.size() * static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) out += unit;
  return Like(text, std::move(out));
}

Value Arithmetic(Op op, const Value& a, const Value& b) {
  if (a.IsNumber() && b.IsNumber()) {
    if (a.IsIntLike() && b.IsIntLike()) return IntArithmetic(op, a.AsInt(), b.AsInt());
    return FloatArithmetic(op, a.AsDouble(), b.AsDouble());
  }
  if (op == Op::kMod && a.Is(Type::kString)) return PercentFormat(a, b);
  if (a.Is(Type::kUndefined)) FailUndefined(a);
  if (b.Is(Type::kUndefined)) FailUndefined(b);
  if (op == Op::kAdd) {
    if (a.Is(Type::kString) && b.Is(Type::kString)) return ConcatStrings(a, b);
    if (a.IsSequence() && a.type() == b.type()) {
      Charge((a.items().size() + b.items().size()) / 8);
      std::vector<Value> items = a.items();
      items.insert(items.end(), b.items().begin(), b.items().end());
      return a.Is(Type::kList) ? List(std::move(items)) : Tuple(std::move(items));
    }
    if (a.Is(Type::kString) || a.IsSequence()) {
      if (!a.Is(Type::kString)) {
        Fail(ErrorKind::kType, "can only concatenate " + TypeName(a) + " (not \"" + TypeName(b) +
                                   "\") to " + TypeName(a));
      }
      Fail(ErrorKind::kType, "can only concatenate str (not \"" + TypeName(b) + "\") to str");
    }
  }
  if (op == Op::kMul) {
    if (a.Is(Type::kString) && b.IsIntLike()) return Repeat(a, b.AsInt());
    if (b.Is(Type::kString) && a.IsIntLike()) return Repeat(b, a.AsInt());
    if (a.IsSequence() && b.IsIntLike()) return RepeatSequence(a, b.AsInt());
    if (b.IsSequence() && a.IsIntLike()) return RepeatSequence(b, a.AsInt());
    if (a.Is(Type::kString) || a.IsSequence()) {
      Fail(ErrorKind::kType, "can't multiply sequence by non-int of type '" + TypeName(b) + "'");
    }
    if (b.Is(Type::kString) || b.IsSequence()) {
      Fail(ErrorKind::kType, "can't multiply sequence by non-int of type '" + TypeName(a) + "'");
    }
  }
  Fail(ErrorKind::kType, std::string("unsupported operand type(s) for ") + OpText(op) + ": '" +
                             TypeName(a) + "' and '" + TypeName(b) + "'");
}

Value Negate(const Value& value) {
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (value.Is(Type::kFloat)) return Value(-value.d());
  if (!value.IsIntLike())
    Fail(ErrorKind::kType, "bad operand type for unary -: '" + TypeName(value) + "'");
  if (value.AsInt() == std::numeric_limits<std::int64_t>::min()) FailOverflow();
  return Value(-value.AsInt());
}

Value Plus(const Value& value) {
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (value.Is(Type::kFloat)) return value;
  if (!value.IsIntLike())
    Fail(ErrorKind::kType, "bad operand type for unary +: '" + TypeName(value) + "'");
  return Value(value.AsInt());
}

bool Compare(Op op, const Value& a, const Value& b) {
  switch (op) {
    case Op::kEq:
      return Equal(a, b);
    case Op::kNe:
      return !Equal(a, b);
    case Op::kLt:
      return Ordered(a, b, Order::kLess);
    case Op::kLe:
      return Ordered(a, b, Order::kLessEqual);
    case Op::kGt:
      return Ordered(a, b, Order::kGreater);
    case Op::kGe:
      return Ordered(a, b, Order::kGreaterEqual);
    case Op::kIn:
      return Contains(b, a);
    default:
      return !Contains(b, a);
  }
}

std::int64_t ToInteger(const Value& value) {
  if (value.IsIntLike()) return value.AsInt();
  Fail(ErrorKind::kType, "'" + TypeName(value) + "' object cannot be interpreted as an integer");
}

// ---- calls

Value Call(const Value& callee, Args& args) {
  switch (callee.type()) {
    case Type::kUndefined:
      FailUndefined(callee);
    case Type::kCallable:
      CheckStack();
      return callee.callable().fn(args);
    case Type::kLoop:
      return callee.As<LoopState>().Recurse(args);
    case Type::kJoiner: {
      auto& joiner = callee.As<Joiner>();
      if (joiner.used) return joiner.separator;
      joiner.used = true;
      return String("");
    }
    default:
      Fail(ErrorKind::kType, "'" + TypeName(callee) + "' object is not callable");
  }
}

Bound::Bound(std::string_view function, Args& args,
             std::initializer_list<std::string_view> parameters, std::size_t required) {
  const auto name = [&] { return std::string(function) + "()"; };
  if (args.positional.size() > parameters.size()) {
    Fail(ErrorKind::kType, name() + " takes at most " + std::to_string(parameters.size()) +
                               " argument(s) (" + std::to_string(args.positional.size()) +
                               " given)");
  }
  for (std::size_t i = 0; i < args.positional.size(); ++i) {
    values_[i] = args.positional[i];
    given_[i] = true;
  }
  for (auto& [key, value] : args.keyword) {
    const auto found = std::find(parameters.begin(), parameters.end(), key);
    if (found == parameters.end()) {
      Fail(ErrorKind::kType, name() + " got an unexpected keyword argument '" + key + "'");
    }
    const auto i = static_cast<std::size_t>(found - parameters.begin());
    if (given_[i])
      Fail(ErrorKind::kType, name() + " got multiple values for argument '" + key + "'");
    values_[i] = value;
    given_[i] = true;
  }
  for (std::size_t i = 0; i < required; ++i) {
    if (!given_[i]) {
      Fail(ErrorKind::kType,
           name() + " missing required argument: '" + std::string(parameters.begin()[i]) + "'");
    }
  }
}

std::int64_t Bound::Int(std::size_t i, std::int64_t fallback) const {
  return given_[i] ? ToInteger(values_[i]) : fallback;
}

}  // namespace pliant::jinja
