// Expressions.
#include "text/jinja_eval.h"

#include <algorithm>

#include "text/jinja_filters.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"

namespace pliant::jinja {

void Scope::Set(NameId name, Value value) {
  Charge(variables.size() / 16);
  for (auto& [other, old] : variables) {
    if (other == name) {
      old = std::move(value);
      return;
    }
  }
  variables.emplace_back(name, std::move(value));
}

Value Evaluator::EvalOptional(const ExprPtr& expr, Scope& scope) {
  return expr ? Eval(*expr, scope) : Value();
}

Value Evaluator::EvalName(NameId name, Scope& scope) {
  for (const Scope* at = &scope; at->parent != nullptr; at = at->parent) {
    Charge(1 + at->variables.size() / 16);
    for (const auto& [other, value] : at->variables) {
      if (other == name) return value;
    }
  }
  if (root_[name]) return *root_[name];
  return UndefinedVariable(program_.names[name]);
}

std::vector<Value> Evaluator::EvalAll(const std::vector<ExprPtr>& parts, Scope& scope) {
  std::vector<Value> values;
  values.reserve(parts.size());
  for (const ExprPtr& part : parts) values.push_back(Eval(*part, scope));
  return values;
}

Value Evaluator::Eval(const Expr& expr, Scope& scope) {
  Charge(1);
  if (expr.kind != ExprKind::kConst) {
    CheckStack();
    line_ = expr.line;
  }
  switch (expr.kind) {
    case ExprKind::kConst:
      return expr.constant;
    case ExprKind::kName:
      return EvalName(expr.name, scope);
    case ExprKind::kTuple:
      return Tuple(EvalAll(expr.parts, scope));
    case ExprKind::kList:
      return List(EvalAll(expr.parts, scope));
    case ExprKind::kDict:
      return EvalDict(expr, scope);
    case ExprKind::kAttribute:
      return GetAttribute(Eval(*expr.parts[0], scope), expr.text);
    case ExprKind::kItem: {
      const Value object = Eval(*expr.parts[0], scope);
      return GetItem(object, Eval(*expr.parts[1], scope));
    }
    case ExprKind::kSlice: {
      const Value object = Eval(*expr.parts[0], scope);
      const Value start = EvalOptional(expr.parts[1], scope);
      const Value stop = EvalOptional(expr.parts[2], scope);
      return GetSlice(object, start, stop, EvalOptional(expr.parts[3], scope));
    }
    case ExprKind::kCall: {
      const Value callee = Eval(*expr.parts[0], scope);
      Args args = EvalArgs(*expr.args, scope);
      line_ = expr.line;
      return Call(callee, args);
    }
    case ExprKind::kFilter:
      return EvalFilter(expr, scope);
    case ExprKind::kTest:
      return Value(EvalTest(expr, scope));
    case ExprKind::kNot:
      return Value(!Truthy(Eval(*expr.parts[0], scope)));
    case ExprKind::kNegate:
      return Negate(Eval(*expr.parts[0], scope));
    case ExprKind::kPlus:
      return Plus(Eval(*expr.parts[0], scope));
    case ExprKind::kBinary: {
      const Value left = Eval(*expr.parts[0], scope);
      return Arithmetic(expr.op, left, Eval(*expr.parts[1], scope));
    }
    case ExprKind::kConcat:
      return EvalConcat(expr, scope);
    case ExprKind::kCompare:
      return EvalCompare(expr, scope);
    case ExprKind::kAnd:
    case ExprKind::kOr: {
      // The value of `a and b` is that of the part that decides.
      for (std::size_t i = 0; i + 1 < expr.parts.size(); ++i) {
        Value value = Eval(*expr.parts[i], scope);
        if (Truthy(value) == (expr.kind == ExprKind::kOr)) return value;
      }
      return Eval(*expr.parts.back(), scope);
    }
    case ExprKind::kConditional:
      return EvalConditional(expr, scope);
    case ExprKind::kNamespaceRef:
      break;  // only a target
  }
  return Value();
}

Value Evaluator::EvalCompare(const Expr& expr, Scope& scope) {
  Value left = Eval(*expr.parts[0], scope);
  for (std::size_t i = 0; i < expr.ops.size(); ++i) {
    Value right = Eval(*expr.parts[i + 1], scope);
    if (!Compare(expr.ops[i], left, right)) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Evaluator::EvalConcat(const Expr& expr, Scope& scope) {
  TextBuilder out;
  for (const ExprPtr& part : expr.parts) AppendText(out, Eval(*part, scope));
  return String(out.Take());
}

Value Evaluator::EvalConditional(const Expr& expr, Scope& scope) {
  if (Truthy(Eval(*expr.parts[0], scope))) return Eval(*expr.parts[1], scope);
  if (expr.parts[2]) return Eval(*expr.parts[2], scope);
  return UndefinedHint("the inline if-expression on line " + std::to_string(expr.line) +
                       " evaluated to false and no else section was defined.");
}

Value Evaluator::EvalDict(const Expr& expr, Scope& scope) {
  std::vector<Dict::Entry> entries;
  entries.reserve(expr.parts.size() / 2);
  for (std::size_t i = 0; i + 1 < expr.parts.size(); i += 2) {
    Value key = Eval(*expr.parts[i], scope);
    entries.emplace_back(std::move(key), Eval(*expr.parts[i + 1], scope));
  }
  return MakeDict(std::move(entries));
}

Args Evaluator::EvalArgs(const CallArgs& args, Scope& scope) {
  Args out;
  out.positional = EvalAll(args.positional, scope);
  for (const auto& [key, expr] : args.keyword) out.keyword.emplace_back(key, Eval(*expr, scope));
  if (args.star) {
    for (Value& value : Collect(Eval(*args.star, scope)))
      out.positional.push_back(std::move(value));
  }
  if (args.star_star) {
    const Value mapping = Eval(*args.star_star, scope);
    if (!mapping.Is(Type::kDict)) {
      Fail(ErrorKind::kType, "argument after ** must be a mapping, not " + TypeName(mapping));
    }
    for (const auto& [key, value] : mapping.dict().entries) {
      if (!key.Is(Type::kString)) Fail(ErrorKind::kType, "keywords must be strings");
      for (const auto& [other, unused] : args.keyword) {
        if (other == key.text()) {
          Fail(ErrorKind::kType, "got multiple values for keyword argument '" + other + "'");
        }
      }
      Charge(1 + args.keyword.size() / 8);
      out.keyword.emplace_back(key.text(), value);
    }
  }
  return out;
}

Value Evaluator::EvalFilter(const Expr& expr, Scope& scope) {
  const Value value = expr.parts[0] ? Eval(*expr.parts[0], scope) : filter_inputs_.back();
  const FilterFn filter = FindFilter(expr.text);
  if (filter == nullptr) Fail(ErrorKind::kRuntime, "No filter named '" + expr.text + "' found.");
  Args args = EvalArgs(*expr.args, scope);
  line_ = expr.line;
  return filter(value, args);
}

bool Evaluator::EvalTest(const Expr& expr, Scope& scope) {
  const Value value = Eval(*expr.parts[0], scope);
  const TestFn test = FindTest(expr.text);
  if (test == nullptr) Fail(ErrorKind::kRuntime, "No test named '" + expr.text + "' found.");
  Args args = EvalArgs(*expr.args, scope);
  line_ = expr.line;
  return test(value, args);
}

}  // namespace pliant::jinja
