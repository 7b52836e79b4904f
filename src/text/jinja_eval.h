// Room: text. Runs a Program over variables. An Evaluator belongs to one rendering and its thread,
// and needs a current Budget.
//
// Scopes form a chain: a `for` body, macro, call, with, set and filter block open one; `if` does
// not. Scopes in which a macro is made live until the end of the rendering, because the macro
// refers to them; others live on the stack.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja_ast.h"
#include "text/jinja_value.h"

namespace pliant::jinja {

/// The variable `loop`. Looks one item ahead only when it is asked for the last or the next item.
struct LoopState final : Object {
  using RecurseFn = std::function<Value(const Value& items, int depth)>;
  LoopState(const Value& iterable, Reader::NextFn next, int depth0, RecurseFn recurse);

  bool Next(Value& item);
  std::optional<Value> Attribute(std::string_view name, const Value& self);
  /// Lets go of all items: the loop has ended.
  void Finish();

  std::int64_t index0 = -1;

 private:
  bool Peek();
  std::int64_t Length();
  Value Cycle(Args& args) const;
  Value Changed(Args& args);

  Value iterable_;
  Reader::NextFn next_;
  int depth0_;
  RecurseFn recurse_;
  std::optional<Value> after_, current_, before_;
  std::optional<std::vector<Value>> last_changed_;
  std::optional<std::int64_t> length_;
  bool exhausted_ = false;
  bool finished_ = false;

 public:
  Value Recurse(Args& args);
};

struct Scope {
  explicit Scope(Scope* parent) : parent(parent) {}
  Scope* parent;
  std::vector<std::pair<NameId, Value>> variables;
  void Set(NameId name, Value value);
};

class Evaluator {
 public:
  using Time = std::chrono::system_clock::time_point;
  Evaluator(const Program& program, Time now);
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  /// Fails with Failure. `context` is an object.
  std::string Render(const nlohmann::ordered_json& context);
  /// The line that was being evaluated.
  int line() const { return line_; }

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  class ScopeHolder;
  class CallLevel;

  // Statements (jinja_eval_stmt.cc).
  Flow Run(const Block& block, Scope& scope, TextBuilder& out);
  Flow RunOne(const Stmt& stmt, Scope& scope, TextBuilder& out);
  Flow RunIf(const Stmt& stmt, Scope& scope, TextBuilder& out);
  void RunLoop(const Stmt& stmt, const Value& iterable, int depth0, Scope& scope, TextBuilder& out);
  void RunSetBlock(const Stmt& stmt, Scope& scope);
  Flow RunWith(const Stmt& stmt, Scope& scope, TextBuilder& out);
  void RunCallBlock(const Stmt& stmt, Scope& scope, TextBuilder& out);
  Flow RunFilterBlock(const Stmt& stmt, Scope& scope, TextBuilder& out);
  void Assign(const Expr& target, const Value& value, Scope& scope);
  Value MakeMacro(const Macro& macro, Scope& scope);
  Value CallMacro(const Macro& macro, Scope& closure, Args& args);

  // Expressions (jinja_eval.cc).
  Value Eval(const Expr& expr, Scope& scope);
  Value EvalOptional(const ExprPtr& expr, Scope& scope);
  Value EvalName(NameId name, Scope& scope);
  Value EvalCompare(const Expr& expr, Scope& scope);
  Value EvalConcat(const Expr& expr, Scope& scope);
  Value EvalConditional(const Expr& expr, Scope& scope);
  Value EvalFilter(const Expr& expr, Scope& scope);
  bool EvalTest(const Expr& expr, Scope& scope);
  Value EvalDict(const Expr& expr, Scope& scope);
  std::vector<Value> EvalAll(const std::vector<ExprPtr>& parts, Scope& scope);
  Args EvalArgs(const CallArgs& args, Scope& scope);

  // Names (jinja_globals.cc).
  void AddGlobals();
  void AddGlobal(std::string_view name, Callable::Fn fn);
  void SetRoot(NameId name, Value value);

  const Program& program_;
  const Time now_;
  int line_ = 0;
  int calls_ = 0;
  NamespaceArena namespaces_;
  std::vector<std::optional<Value>> root_;  // variables of the outermost scope, by name
  Scope root_scope_{nullptr};
  std::deque<Scope> kept_scopes_;
  std::vector<Value> filter_inputs_;  // texts of the filter and set blocks around
};

/// The functions that need no evaluator (jinja_globals.cc).
Value MakeRange(Args& args);
Value DictFromArgs(Args& args);
Value StrftimeNow(Args& args, Evaluator::Time now);

}  // namespace pliant::jinja
