// Room: text. Operators, attributes, subscripts and calls of the Jinja interpreter, with the rules
// of the immutable sandbox. Free functions on the rendering thread.
#pragma once

#include <string_view>

#include "text/jinja_ast.h"
#include "text/jinja_value.h"

namespace pliant::jinja {

/// For sums and differences of 64-bit integers that must not overflow.
__extension__ typedef __int128 Wide;

/// + - * / // % **
Value Arithmetic(Op op, const Value& a, const Value& b);
Value Negate(const Value& value);
Value Plus(const Value& value);
/// == != < <= > >= in, not in
bool Compare(Op op, const Value& a, const Value& b);

/// object.name: attributes and methods first, then items.
Value GetAttribute(const Value& object, std::string_view name);
/// object[key]: items first, then attributes.
Value GetItem(const Value& object, const Value& key);
/// The attribute only (the filter `attr`); undefined when there is none.
Value GetAttributeOnly(const Value& object, std::string_view name);
/// object[start:stop:step]; None where a bound is absent.
Value GetSlice(const Value& object, const Value& start, const Value& stop, const Value& step);

Value Call(const Value& callee, Args& args);

/// A method of a string, list, tuple, dict, number, cycler; null when there is no such method
/// (jinja_methods.cc).
using MethodFn = Value (*)(const Value& self, Args& args);
MethodFn FindMethod(const Value& self, std::string_view name);
/// A method that the sandbox refuses because it changes its object, or that is left out.
bool IsForbiddenMethod(const Value& self, std::string_view name);

/// str % values, and the filter `format` (jinja_format.cc).
Value PercentFormat(const Value& format, const Value& values);
/// str.format(*args, **kwargs).
Value BraceFormat(const Value& format, const Args& args);

/// Position of the first `needle` at or after `from`, in linear time; npos when there is none.
std::size_t FindText(std::string_view text, std::string_view needle, std::size_t from);
/// Position of the last `needle` that ends at or before `end`.
std::size_t FindLastText(std::string_view text, std::string_view needle, std::size_t end);
/// text repeated.
Value Repeat(const Value& text, std::int64_t count);

/// An integer argument: bool or int, else TypeError.
std::int64_t ToInteger(const Value& value);

/// Binds arguments to the parameters of a built-in function. Unknown or repeated ones fail as in
/// Python.
class Bound {
 public:
  Bound(std::string_view function, Args& args, std::initializer_list<std::string_view> parameters,
        std::size_t required = 0);
  bool Has(std::size_t i) const { return given_[i]; }
  const Value& operator[](std::size_t i) const { return values_[i]; }  // None when absent
  std::int64_t Int(std::size_t i, std::int64_t fallback) const;
  bool Bool(std::size_t i, bool fallback) const {
    return given_[i] ? Truthy(values_[i]) : fallback;
  }

 private:
  static constexpr std::size_t kMax = 6;
  Value values_[kMax];
  bool given_[kMax] = {};
};

}  // namespace pliant::jinja
