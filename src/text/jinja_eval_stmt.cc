// Statements, loops and macros.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "text/jinja_eval.h"
#include "text/jinja_filters.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"

namespace pliant::jinja {

// A scope on the stack, or a kept one when a macro may refer to it.
class Evaluator::ScopeHolder {
 public:
  ScopeHolder(Evaluator& evaluator, Scope& parent, bool keep) {
    if (keep) {
      // What a kept scope holds is not freed before the end: pay for it, as loops may make many.
      Charge(16);
      scope_ = &evaluator.kept_scopes_.emplace_back(&parent);
    } else {
      scope_ = &local_.emplace(&parent);
    }
  }
  Scope& operator*() { return *scope_; }
  Scope* operator->() { return scope_; }

 private:
  std::optional<Scope> local_;
  Scope* scope_;
};

// Counts calls of macros and recursive loops that have not returned.
class Evaluator::CallLevel {
 public:
  explicit CallLevel(Evaluator& evaluator) : evaluator_(evaluator) {
    const int limit = Budget::Current()->limits().max_depth;
    if (++evaluator_.calls_ > limit) {
      --evaluator_.calls_;
      Fail(ErrorKind::kLimit,
           "calls nest more than " + std::to_string(limit) + " deep (max_depth)");
    }
  }
  ~CallLevel() { --evaluator_.calls_; }
  CallLevel(const CallLevel&) = delete;
  CallLevel& operator=(const CallLevel&) = delete;

 private:
  Evaluator& evaluator_;
};

Evaluator::Evaluator(const Program& program, Time now)
    : program_(program), now_(now), root_(program.names.size()) {}

Evaluator::~Evaluator() = default;

void Evaluator::SetRoot(NameId name, Value value) { root_[name] = std::move(value); }

std::string Evaluator::Render(const nlohmann::ordered_json& context) {
  AddGlobals();
  for (NameId name = 0; name < program_.names.size(); ++name) {
    const auto found = context.find(program_.names[name]);
    if (found != context.end()) root_[name] = FromJson(*found);
  }
  TextBuilder out;
  Run(program_.body, root_scope_, out);
  return out.Take();
}

Evaluator::Flow Evaluator::Run(const Block& block, Scope& scope, TextBuilder& out) {
  for (const auto& stmt : block) {
    const Flow flow = RunOne(*stmt, scope, out);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Evaluator::Flow Evaluator::RunOne(const Stmt& stmt, Scope& scope, TextBuilder& out) {
  Charge(1);
  CheckStack();
  line_ = stmt.line;
  switch (stmt.kind) {
    case StmtKind::kData:
      out.Append(stmt.text);
      break;
    case StmtKind::kPrint:
      AppendText(out, Eval(*stmt.expr, scope));
      break;
    case StmtKind::kSet:
      Assign(*stmt.target, Eval(*stmt.expr, scope), scope);
      break;
    case StmtKind::kSetBlock:
      RunSetBlock(stmt, scope);
      break;
    case StmtKind::kFor:
      RunLoop(stmt, Eval(*stmt.expr, scope), 0, scope, out);
      break;
    case StmtKind::kIf:
      return RunIf(stmt, scope, out);
    case StmtKind::kWith:
      return RunWith(stmt, scope, out);
    case StmtKind::kMacro:
      Assign(*stmt.target, MakeMacro(*stmt.macro, scope), scope);
      break;
    case StmtKind::kCallBlock:
      RunCallBlock(stmt, scope, out);
      break;
    case StmtKind::kFilterBlock:
      return RunFilterBlock(stmt, scope, out);
    case StmtKind::kBlock: {
      // Blocks see the variables of the template, not those of the scopes around them.
      if (stmt.required)
        Fail(ErrorKind::kRuntime, "Required block " + Quote(stmt.text) + " not found");
      ScopeHolder inner(*this, root_scope_, true);
      Run(stmt.body, *inner, out);
      break;
    }
    case StmtKind::kGeneration: {
      ScopeHolder inner(*this, scope, stmt.has_closure);
      Run(stmt.body, *inner, out);
      break;
    }
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
    case StmtKind::kUnsupported:
      Fail(ErrorKind::kUnsupported,
           "the statement '" + stmt.text + "' needs other files, which chat templates have not");
  }
  return Flow::kNormal;
}

void Evaluator::Assign(const Expr& target, const Value& value, Scope& scope) {
  switch (target.kind) {
    case ExprKind::kName:
      if (scope.parent == nullptr) {
        SetRoot(target.name, value);
      } else {
        scope.Set(target.name, value);
      }
      return;
    case ExprKind::kNamespaceRef: {
      const Value ns = EvalName(target.name, scope);
      if (!ns.Is(Type::kNamespace)) {
        Fail(ErrorKind::kRuntime, "cannot assign attribute on non-namespace object");
      }
      if (target.text.starts_with('_')) {
        Fail(ErrorKind::kSecurity,
             "Chat templates cannot store underscore-prefixed attributes on a namespace, but got " +
                 Quote(target.text) + ". Please rename the attribute.");
      }
      ns.ns().Set(target.text, value);
      return;
    }
    default:
      break;
  }
  const std::size_t wanted = target.parts.size();
  if (!Iterable(value))
    Fail(ErrorKind::kType, "cannot unpack non-iterable " + TypeName(value) + " object");
  Reader reader(value);
  std::vector<Value> items;
  for (Value item; items.size() <= wanted && reader.Next(item);) items.push_back(std::move(item));
  if (items.size() > wanted) {
    Fail(ErrorKind::kValue, "too many values to unpack (expected " + std::to_string(wanted) + ")");
  }
  if (items.size() < wanted) {
    Fail(ErrorKind::kValue, "not enough values to unpack (expected " + std::to_string(wanted) +
                                ", got " + std::to_string(items.size()) + ")");
  }
  for (std::size_t i = 0; i < wanted; ++i) Assign(*target.parts[i], items[i], scope);
}

Evaluator::Flow Evaluator::RunIf(const Stmt& stmt, Scope& scope, TextBuilder& out) {
  for (const auto& [test, body] : stmt.branches) {
    if (Truthy(Eval(*test, scope))) return Run(body, scope, out);
  }
  return Run(stmt.otherwise, scope, out);
}

void Evaluator::RunLoop(const Stmt& stmt, const Value& iterable, int depth0, Scope& scope,
                        TextBuilder& out) {
  auto reader = std::make_shared<Reader>(iterable);
  Reader::NextFn next = [reader](Value& item) { return reader->Next(item); };
  if (stmt.filter) {
    next = [this, &stmt, &scope, reader](Value& item) {
      while (reader->Next(item)) {
        ScopeHolder inner(*this, scope, stmt.has_closure);
        Assign(*stmt.target, item, *inner);
        if (Truthy(Eval(*stmt.filter, *inner))) return true;
      }
      return false;
    };
  }
  std::shared_ptr<LoopState> loop;
  // However the loop ends, `loop` must not keep its items: a value that held it could grow without
  // bound.
  struct Finisher {
    std::shared_ptr<LoopState>& loop;
    ~Finisher() {
      if (loop) loop->Finish();
    }
  } finisher{loop};
  if (stmt.uses_loop) {
    LoopState::RecurseFn recurse;
    if (stmt.recursive) {
      recurse = [this, &stmt, &scope](const Value& items, int depth) {
        const CallLevel level(*this);
        TextBuilder inner;
        RunLoop(stmt, items, depth, scope, inner);
        return String(inner.Take());
      };
    }
    loop = std::make_shared<LoopState>(stmt.filter ? Value() : iterable, next, depth0,
                                       std::move(recurse));
  }
  // The reference engine takes the `else` branch when no round of the loop came to its end, so also
  // after a `break`.
  bool any = false;
  for (Value item; loop ? loop->Next(item) : next(item);) {
    ScopeHolder inner(*this, scope, stmt.has_closure);
    if (loop) inner->Set(kLoopName, Value(Type::kLoop, loop));
    Assign(*stmt.target, item, *inner);
    const Flow flow = Run(stmt.body, *inner, out);
    if (flow == Flow::kBreak) break;
    any |= flow == Flow::kNormal;
  }
  if (!any && !stmt.otherwise.empty()) {
    ScopeHolder inner(*this, scope, stmt.has_closure);
    Run(stmt.otherwise, *inner, out);
  }
}

void Evaluator::RunSetBlock(const Stmt& stmt, Scope& scope) {
  TextBuilder text;
  {
    ScopeHolder inner(*this, scope, stmt.has_closure);
    Run(stmt.body, *inner, text);
  }
  Value value = String(text.Take());
  if (stmt.filter) {
    filter_inputs_.push_back(value);
    value = Eval(*stmt.filter, scope);
    filter_inputs_.pop_back();
  }
  Assign(*stmt.target, value, scope);
}

Evaluator::Flow Evaluator::RunWith(const Stmt& stmt, Scope& scope, TextBuilder& out) {
  ScopeHolder inner(*this, scope, stmt.has_closure);
  for (const auto& [target, value] : stmt.assignments) Assign(*target, Eval(*value, scope), *inner);
  return Run(stmt.body, *inner, out);
}

Evaluator::Flow Evaluator::RunFilterBlock(const Stmt& stmt, Scope& scope, TextBuilder& out) {
  ScopeHolder inner(*this, scope, stmt.has_closure);
  TextBuilder text;
  const Flow flow = Run(stmt.body, *inner, text);
  if (flow != Flow::kNormal) return flow;
  filter_inputs_.push_back(String(text.Take()));
  AppendText(out, Eval(*stmt.filter, *inner));
  filter_inputs_.pop_back();
  return Flow::kNormal;
}

void Evaluator::RunCallBlock(const Stmt& stmt, Scope& scope, TextBuilder& out) {
  const Value callee = Eval(*stmt.expr->parts[0], scope);
  Args args = EvalArgs(*stmt.expr->args, scope);
  args.keyword.emplace_back("caller", MakeMacro(*stmt.macro, scope));
  AppendText(out, Call(callee, args));
}

// ---- macros

Value Evaluator::MakeMacro(const Macro& macro, Scope& scope) {
  return MakeCallable(macro.name, "Macro", 0,
                      [this, &macro, &scope](Args& args) { return CallMacro(macro, scope, args); });
}

Value Evaluator::CallMacro(const Macro& macro, Scope& closure, Args& args) {
  const CallLevel level(*this);
  const int line = line_;
  ScopeHolder inner(*this, closure, macro.has_closure);
  const std::size_t wanted = macro.parameters.size();
  const std::size_t given = std::min(args.positional.size(), wanted);
  std::vector<std::optional<Value>> values(wanted);
  for (std::size_t i = 0; i < given; ++i) values[i] = args.positional[i];
  bool found_caller = given == wanted && macro.explicit_caller;
  for (std::size_t i = given; i < wanted; ++i) {
    values[i] = args.TakeKeyword(macro.parameters[i].text);
    found_caller |= macro.parameters[i].text == "caller";
  }
  if (macro.uses_caller && !macro.explicit_caller && !found_caller) {
    std::optional<Value> caller = args.TakeKeyword("caller");
    inner->Set(kCallerName,
               caller && !caller->Is(Type::kNone) ? *caller : UndefinedHint("No caller defined"));
  }
  if (macro.uses_kwargs) {
    std::vector<Dict::Entry> entries;
    for (auto& [key, value] : args.keyword) entries.emplace_back(String(key), value);
    inner->Set(kKwargsName, MakeDict(std::move(entries)));
  } else if (!args.keyword.empty()) {
    const std::string name = Quote(macro.name);
    for (const auto& [key, value] : args.keyword) {
      if (key == "caller") {
        Fail(ErrorKind::kType, "macro " + name +
                                   " was invoked with two values for the special caller argument. "
                                   "This is most likely a bug.");
      }
    }
    Fail(ErrorKind::kType,
         "macro " + name + " takes no keyword argument " + Quote(args.keyword.front().first));
  }
  if (macro.uses_varargs) {
    inner->Set(kVarargsName, Tuple(std::vector<Value>(
                                 args.positional.begin() + static_cast<std::ptrdiff_t>(given),
                                 args.positional.end())));
  } else if (args.positional.size() > wanted) {
    Fail(ErrorKind::kType, "macro " + Quote(macro.name) + " takes not more than " +
                               std::to_string(wanted) + " argument(s)");
  }
  for (std::size_t i = 0; i < wanted; ++i) {
    const auto& parameter = macro.parameters[i];
    if (!values[i]) {
      values[i] = parameter.fallback
                      ? Eval(*parameter.fallback, *inner)
                      : UndefinedHint("parameter " + Quote(parameter.text) + " was not provided");
    }
    inner->Set(parameter.name, *values[i]);
  }
  TextBuilder out;
  Run(macro.body, *inner, out);
  line_ = line;
  return String(out.Take());
}

}  // namespace pliant::jinja
