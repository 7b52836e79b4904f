// Room: text. The parsed form of a template. Immutable after parsing; shared by all threads that
// render it. No node lies deeper than TemplateLimits::max_depth, so walking and destroying the tree
// may recurse.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja_value.h"

namespace pliant::jinja {

using NameId = std::uint32_t;  // index into Program::names

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct CallArgs {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> keyword;
  ExprPtr star;       // *args
  ExprPtr star_star;  // **kwargs
};

enum class ExprKind : std::uint8_t {
  kConst,  // constant
  kName,   // name
  kTuple,
  kList,
  kDict,       // key, value, key, value, ...
  kAttribute,  // parts[0].text
  kItem,       // parts[0][parts[1]]
  kSlice,      // parts[0][parts[1]:parts[2]:parts[3]]; absent bounds are null
  kCall,       // parts[0](args)
  kFilter,     // parts[0]|text(args); parts[0] is null for the text of a filter or set block
  kTest,       // parts[0] is text(args)
  kNot,
  kNegate,
  kPlus,
  kBinary,   // parts[0] op parts[1]
  kConcat,   // a ~ b ~ c
  kCompare,  // parts[0] ops[0] parts[1] ops[1] parts[2] ...
  kAnd,
  kOr,
  kConditional,   // parts[1] if parts[0] else parts[2], which may be null
  kNamespaceRef,  // target only: name.text
};

enum class Op : std::uint8_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kFloorDiv,
  kMod,
  kPow,
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kIn,
  kNotIn,
};

struct Expr {
  ExprKind kind;
  Op op = Op::kAdd;
  bool checked_late =
      false;  // a filter or test of unknown name inside an `if`: fails only when it is used
  int line = 0;
  int height = 1;  // 1 + the highest part
  NameId name = 0;
  std::string text;
  Value constant;
  std::vector<ExprPtr> parts;
  std::vector<Op> ops;
  std::unique_ptr<CallArgs> args;
};

struct Stmt;
using Block = std::vector<std::unique_ptr<Stmt>>;

enum class StmtKind : std::uint8_t {
  kData,         // text
  kPrint,        // expr
  kSet,          // target = expr
  kSetBlock,     // target, filter (may be null), body
  kFor,          // target in expr if filter; body, otherwise
  kIf,           // branches, otherwise
  kWith,         // assignments, body
  kMacro,        // macro
  kCallBlock,    // expr (a call), macro
  kFilterBlock,  // filter, body
  kBlock,        // body
  kGeneration,   // body
  kBreak,
  kContinue,
  kUnsupported,  // include, import, extends: need files; text says which
};

struct Macro {
  std::string name;
  struct Parameter {
    NameId name;
    std::string text;
    ExprPtr fallback;  // null: none
  };
  std::vector<Parameter> parameters;
  bool uses_caller = false, uses_kwargs = false,
       uses_varargs = false;     // mentioned, and not a parameter
  bool explicit_caller = false;  // a parameter is called "caller"
  bool has_closure = false;
  Block body;
};

struct Stmt {
  StmtKind kind;
  int line = 0;
  bool recursive = false;    // for
  bool uses_loop = false;    // for: the body mentions `loop`
  bool has_closure = false;  // a macro is made somewhere inside: scopes of the body must outlive it
  bool required = false;     // block
  std::string text;
  ExprPtr target, expr, filter;
  Block body, otherwise;
  std::vector<std::pair<ExprPtr, Block>> branches;
  std::vector<std::pair<ExprPtr, ExprPtr>> assignments;  // with
  std::unique_ptr<Macro> macro;
};

// Names with a meaning of their own; every Program begins with them.
inline constexpr NameId kLoopName = 0, kCallerName = 1, kKwargsName = 2, kVarargsName = 3;

struct Program {
  std::vector<std::string> names;
  std::set<std::string, std::less<>>
      free_names;  // read somewhere where the template has not set them
  Block body;
};

}  // namespace pliant::jinja
