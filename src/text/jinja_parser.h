// Room: text. From source to Program. Recursive descent; the depth of the source is limited before
// the stack can be. A Parser belongs to one call of Parse.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja_ast.h"
#include "text/jinja_lexer.h"

namespace pliant::jinja {

class Parser {
 public:
  /// Fails with kSyntax or kLimit, with the line.
  static std::unique_ptr<Program> Parse(std::string_view source, const TemplateLimits& limits);

 private:
  explicit Parser(std::vector<Token> tokens, int max_depth)
      : tokens_(std::move(tokens)), max_depth_(max_depth), program_(std::make_unique<Program>()) {}

  // Counts one level of nesting while it lives.
  class Level {
   public:
    explicit Level(Parser& parser);
    ~Level() { --parser_.depth_; }

   private:
    Parser& parser_;
  };
  // Names set while it lives are forgotten at its end.
  class NameScope;
  using EndTags = std::vector<std::string_view>;

  // Tokens.
  const Token& Current() const { return tokens_[position_]; }
  const Token& Ahead() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }
  const Token& Take();
  bool IsOp(std::string_view op) const {
    return Current().type == Tok::kOperator && Current().text == op;
  }
  bool IsWord(std::string_view word) const {
    return Current().type == Tok::kName && Current().text == word;
  }
  bool TakeOp(std::string_view op);
  bool TakeWord(std::string_view word);
  void ExpectOp(std::string_view op);
  void ExpectWord(std::string_view word);
  std::string ExpectName();
  void ExpectBlockEnd();
  [[noreturn]] void FailExpected(std::string_view what) const;
  [[noreturn]] void FailAt(int line, std::string message) const;

  // Statements (jinja_parser.cc).
  Block ParseBlock(
      const EndTags& end_tags);  // until one of the tags; leaves its name as the current token
  Block ParseBody(const EndTags& end_tags);  // the same after the end of the opening tag
  std::unique_ptr<Stmt> ParseStatement();
  std::unique_ptr<Stmt> ParseFor();
  std::unique_ptr<Stmt> ParseIf();
  std::unique_ptr<Stmt> ParseSet();
  std::unique_ptr<Stmt> ParseWith();
  std::unique_ptr<Stmt> ParseMacro();
  std::unique_ptr<Stmt> ParseCallBlock();
  std::unique_ptr<Stmt> ParseFilterBlock();
  std::unique_ptr<Stmt> ParseNamedBlock();
  std::unique_ptr<Stmt> ParseGeneration();
  std::unique_ptr<Stmt> ParsePrint();
  std::unique_ptr<Stmt> ParseUnsupported();
  std::unique_ptr<Stmt> ParseLoopControl();
  void ParseSignature(Macro& macro);
  void ParseMacroBody(Macro& macro, std::string_view end_tag);
  std::unique_ptr<Stmt> NewStmt(StmtKind kind) const;
  [[noreturn]] void FailUnknownTag(const std::string& name) const;

  // Expressions (jinja_parse_expr.cc).
  ExprPtr ParseExpression(bool conditional = true);
  ExprPtr ParseConditional();
  ExprPtr ParseOr();
  ExprPtr ParseAnd();
  ExprPtr ParseNot();
  ExprPtr ParseCompare();
  ExprPtr ParseSum();
  ExprPtr ParseConcat();
  ExprPtr ParseProduct();
  ExprPtr ParsePower();
  ExprPtr ParseUnary(bool with_filter = true);
  ExprPtr ParsePrimary(bool is_target = false);
  ExprPtr ParseTuple(bool is_target, bool conditional, bool parentheses,
                     std::string_view end_word = {});
  ExprPtr ParseListLiteral();
  ExprPtr ParseDictLiteral();
  ExprPtr ParsePostfix(ExprPtr node);
  ExprPtr ParseFilterOrTest(ExprPtr node);
  ExprPtr ParseSubscript(ExprPtr node);
  ExprPtr ParseFilters(ExprPtr node, bool first_without_pipe);
  ExprPtr ParseTest(ExprPtr node);
  std::unique_ptr<CallArgs> ParseCallArgs();
  ExprPtr ParseTarget(bool with_namespace, std::string_view end_word = {});
  bool AtTupleEnd(std::string_view end_word) const;
  ExprPtr NewExpr(ExprKind kind, int line) const;
  ExprPtr Binary(Op op, ExprPtr left, ExprPtr right, int line) const;
  void AddPart(Expr& node, ExprPtr part) const;
  void AddArgs(Expr& node, std::unique_ptr<CallArgs> args) const;
  void Measure(Expr& node, const Expr& part) const;
  void CheckKnown(Expr& node);

  // Names.
  NameId Intern(std::string_view name);
  void NoteRead(std::string_view name);
  void NoteSet(const Expr& target);
  void NoteSet(std::string_view name);

  const std::vector<Token> tokens_;
  const int max_depth_;
  std::unique_ptr<Program> program_;
  std::size_t position_ = 0;
  int depth_ = 0;
  int loops_ = 0;      // enclosing loops of this macro
  int all_loops_ = 0;  // enclosing loops at all
  bool soft_ = false;  // directly in an `if`: unknown filters and tests fail late
  int maybe_ = 0;      // > 0: in a branch that may not run, so that setting a name proves nothing
  std::size_t loop_reads_ = 0;    // how often `loop` was read
  std::size_t closures_ = 0;      // how many macros were made
  std::vector<Failure> unknown_;  // filters and tests that do not exist, outside of any condition
  std::vector<Macro*> macros_;    // enclosing macros
  std::vector<std::string> open_tags_;
  std::vector<EndTags> end_tags_;
  std::map<std::string, NameId, std::less<>> ids_;
  std::vector<std::set<std::string, std::less<>>> set_names_{1};
};

}  // namespace pliant::jinja
