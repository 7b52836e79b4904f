// Statements of the template language, names, and what expressions share.
#include "text/jinja_parser.h"

#include <algorithm>

#include "text/jinja_text.h"

namespace pliant::jinja {

Parser::Level::Level(Parser& parser) : parser_(parser) {
  if (++parser.depth_ > parser.max_depth_) {
    throw Failure{
        ErrorKind::kLimit,
        "the source nests more than " + std::to_string(parser.max_depth_) + " deep (max_depth)",
        parser.Current().line};
  }
}

class Parser::NameScope {
 public:
  explicit NameScope(Parser& parser) : parser_(parser), maybe_(std::exchange(parser.maybe_, 0)) {
    parser.set_names_.emplace_back();
  }
  ~NameScope() {
    parser_.set_names_.pop_back();
    parser_.maybe_ = maybe_;
  }
  NameScope(const NameScope&) = delete;
  NameScope& operator=(const NameScope&) = delete;

 private:
  Parser& parser_;
  int maybe_;
};

std::unique_ptr<Program> Parser::Parse(std::string_view source, const TemplateLimits& limits) {
  Parser parser(Tokenize(source), limits.max_depth);
  for (const char* name : {"loop", "caller", "kwargs", "varargs"})
    parser.Intern(name);  // kLoopName, ...
  parser.program_->body = parser.ParseBlock({});
  if (!parser.unknown_.empty()) throw parser.unknown_.front();
  return std::move(parser.program_);
}

// ---- tokens

const Token& Parser::Take() {
  const Token& token = tokens_[position_];
  if (position_ + 1 < tokens_.size()) ++position_;
  return token;
}

bool Parser::TakeOp(std::string_view op) {
  if (!IsOp(op)) return false;
  Take();
  return true;
}

bool Parser::TakeWord(std::string_view word) {
  if (!IsWord(word)) return false;
  Take();
  return true;
}

void Parser::FailAt(int line, std::string message) const {
  throw Failure{ErrorKind::kSyntax, std::move(message), line};
}

void Parser::FailExpected(std::string_view what) const {
  if (Current().type == Tok::kEof) {
    FailAt(Current().line, "unexpected end of template, expected " + Quote(what) + ".");
  }
  FailAt(Current().line, "expected token " + Quote(what) + ", got " + Quote(Describe(Current())));
}

void Parser::ExpectOp(std::string_view op) {
  if (!TakeOp(op)) FailExpected(op);
}

void Parser::ExpectWord(std::string_view word) {
  if (!TakeWord(word)) FailExpected(word);
}

std::string Parser::ExpectName() {
  if (Current().type != Tok::kName) FailExpected("name");
  return Take().text;
}

void Parser::ExpectBlockEnd() {
  if (Current().type != Tok::kBlockEnd) FailExpected("end of statement block");
  Take();
}

// ---- names

NameId Parser::Intern(std::string_view name) {
  if (const auto found = ids_.find(name); found != ids_.end()) return found->second;
  const auto id = static_cast<NameId>(program_->names.size());
  program_->names.emplace_back(name);
  ids_.emplace(std::string(name), id);
  return id;
}

void Parser::NoteRead(std::string_view name) {
  if (name == "loop") ++loop_reads_;
  for (Macro* macro : macros_) {
    if (name == "caller") macro->uses_caller = true;
    if (name == "kwargs") macro->uses_kwargs = true;
    if (name == "varargs") macro->uses_varargs = true;
  }
  for (const auto& names : set_names_) {
    if (names.contains(name)) return;
  }
  program_->free_names.emplace(name);
}

void Parser::NoteSet(std::string_view name) {
  if (maybe_ == 0) set_names_.back().emplace(name);
}

void Parser::NoteSet(const Expr& target) {
  if (target.kind == ExprKind::kName) NoteSet(program_->names[target.name]);
  for (const ExprPtr& part : target.parts) NoteSet(*part);
}

// ---- blocks of statements

std::unique_ptr<Stmt> Parser::NewStmt(StmtKind kind) const {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = kind;
  stmt->line = Current().line;
  return stmt;
}

Block Parser::ParseBody(const EndTags& end_tags) {
  TakeOp(":");
  ExpectBlockEnd();
  end_tags_.push_back(end_tags);
  Block body = ParseBlock(end_tags);
  if (Current().type == Tok::kEof) {
    std::string message = "Unexpected end of template. Jinja was looking for the following tags: ";
    for (std::size_t i = 0; i < end_tags.size(); ++i) {
      message += (i > 0 ? " or " : "") + Quote(end_tags[i]);
    }
    message += ".";
    if (!open_tags_.empty()) {
      message +=
          " The innermost block that needs to be closed is " + Quote(open_tags_.back()) + ".";
    }
    FailAt(Current().line, message);
  }
  end_tags_.pop_back();
  return body;
}

Block Parser::ParseBlock(const EndTags& end_tags) {
  const Level level(*this);
  Block body;
  for (;;) {
    const Token& token = Current();
    switch (token.type) {
      case Tok::kEof:
        return body;
      case Tok::kData: {
        auto stmt = NewStmt(StmtKind::kData);
        stmt->text = Take().text;
        body.push_back(std::move(stmt));
        break;
      }
      case Tok::kVariableBegin: {
        Take();
        auto stmt = NewStmt(StmtKind::kPrint);
        stmt->expr = ParseTuple(false, true, false);
        if (Current().type != Tok::kVariableEnd) FailExpected("end of print statement");
        Take();
        body.push_back(std::move(stmt));
        break;
      }
      case Tok::kBlockBegin: {
        Take();
        if (Current().type == Tok::kName &&
            std::find(end_tags.begin(), end_tags.end(), Current().text) != end_tags.end()) {
          return body;
        }
        body.push_back(ParseStatement());
        ExpectBlockEnd();
        break;
      }
      default:
        FailAt(token.line, "unexpected '" + Describe(token) + "'");
    }
  }
}

void Parser::FailUnknownTag(const std::string& name) const {
  std::string message = "Encountered unknown tag " + Quote(name) + ".";
  if (!end_tags_.empty()) {
    bool expected = false;
    for (const EndTags& tags : end_tags_) {
      expected |= std::find(tags.begin(), tags.end(), name) != tags.end();
    }
    message += expected ? " You probably made a nesting mistake. Jinja is expecting this tag, but "
                          "currently looking for "
                        : " Jinja was looking for the following tags: ";
    for (std::size_t i = 0; i < end_tags_.back().size(); ++i) {
      message += (i > 0 ? " or " : "") + Quote(end_tags_.back()[i]);
    }
    message += ".";
  }
  if (!open_tags_.empty()) {
    message += " The innermost block that needs to be closed is " + Quote(open_tags_.back()) + ".";
  }
  FailAt(Current().line, message);
}

std::unique_ptr<Stmt> Parser::ParseStatement() {
  if (Current().type != Tok::kName) FailAt(Current().line, "tag name expected");
  const std::string name = Current().text;
  using Method = std::unique_ptr<Stmt> (Parser::*)();
  static const std::map<std::string_view, Method> kStatements = {
      {"for", &Parser::ParseFor},
      {"if", &Parser::ParseIf},
      {"set", &Parser::ParseSet},
      {"with", &Parser::ParseWith},
      {"macro", &Parser::ParseMacro},
      {"call", &Parser::ParseCallBlock},
      {"filter", &Parser::ParseFilterBlock},
      {"block", &Parser::ParseNamedBlock},
      {"generation", &Parser::ParseGeneration},
      {"print", &Parser::ParsePrint},
      {"break", &Parser::ParseLoopControl},
      {"continue", &Parser::ParseLoopControl},
      {"include", &Parser::ParseUnsupported},
      {"import", &Parser::ParseUnsupported},
      {"from", &Parser::ParseUnsupported},
      {"extends", &Parser::ParseUnsupported},
      {"autoescape", &Parser::ParseUnsupported},
  };
  const auto found = kStatements.find(name);
  if (found == kStatements.end()) FailUnknownTag(name);
  open_tags_.push_back(name);
  auto stmt = (this->*found->second)();
  open_tags_.pop_back();
  return stmt;
}

// ---- statements

std::unique_ptr<Stmt> Parser::ParseFor() {
  auto stmt = NewStmt(StmtKind::kFor);
  Take();
  ++all_loops_;  // the targets of a loop may not be called "loop" either
  stmt->target = ParseTarget(false, "in");
  --all_loops_;
  ExpectWord("in");
  stmt->expr = ParseTuple(false, false, false, "recursive");
  const bool soft = std::exchange(soft_, false);
  const std::size_t closures = closures_;
  const std::size_t loop_reads_before = loop_reads_;
  {
    const NameScope scope(*this);
    NoteSet(*stmt->target);
    if (TakeWord("if")) stmt->filter = ParseExpression();
    stmt->recursive = TakeWord("recursive");
    NoteSet("loop");
    ++loops_;
    ++all_loops_;
    stmt->body = ParseBody({"endfor", "else"});
    --loops_;
    --all_loops_;
  }
  stmt->uses_loop = stmt->recursive || loop_reads_ != loop_reads_before;
  if (Take().text == "else") {
    const NameScope scope(*this);
    stmt->otherwise = ParseBody({"endfor"});
    Take();
  }
  soft_ = soft;
  stmt->has_closure = closures_ != closures;
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseIf() {
  auto stmt = NewStmt(StmtKind::kIf);
  Take();
  const bool soft = std::exchange(soft_, true);
  for (;;) {
    ExprPtr test = ParseTuple(false, false, false);
    ++maybe_;
    Block body = ParseBody({"elif", "else", "endif"});
    --maybe_;
    stmt->branches.emplace_back(std::move(test), std::move(body));
    const std::string tag = Take().text;
    if (tag == "elif") continue;
    if (tag == "else") {
      ++maybe_;
      stmt->otherwise = ParseBody({"endif"});
      --maybe_;
      Take();
    }
    break;
  }
  soft_ = soft;
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseSet() {
  auto stmt = NewStmt(StmtKind::kSet);
  Take();
  stmt->target = ParseTarget(true);
  if (TakeOp("=")) {
    stmt->expr = ParseTuple(false, true, false);
  } else {
    stmt->kind = StmtKind::kSetBlock;
    const bool soft = std::exchange(soft_, false);
    const std::size_t closures = closures_;
    stmt->filter = ParseFilters(nullptr, false);
    {
      const NameScope scope(*this);
      stmt->body = ParseBody({"endset"});
    }
    Take();
    soft_ = soft;
    stmt->has_closure = closures_ != closures;
  }
  NoteSet(*stmt->target);
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseWith() {
  auto stmt = NewStmt(StmtKind::kWith);
  Take();
  const bool soft = std::exchange(soft_, false);
  const std::size_t closures = closures_;
  while (Current().type != Tok::kBlockEnd && Current().type != Tok::kEof) {
    if (!stmt->assignments.empty()) ExpectOp(",");
    ExprPtr target = ParseTarget(false);
    ExpectOp("=");
    stmt->assignments.emplace_back(std::move(target), ParseExpression());
  }
  const NameScope scope(*this);
  for (const auto& [target, value] : stmt->assignments) NoteSet(*target);
  stmt->body = ParseBody({"endwith"});
  Take();
  soft_ = soft;
  stmt->has_closure = closures_ != closures;
  return stmt;
}

void Parser::ParseSignature(Macro& macro) {
  ExpectOp("(");
  while (!IsOp(")")) {
    if (!macro.parameters.empty()) ExpectOp(",");
    Macro::Parameter parameter;
    parameter.text = ExpectName();
    parameter.name = Intern(parameter.text);
    for (const auto& other : macro.parameters) {
      if (other.text == parameter.text) {
        FailAt(Current().line, "duplicate argument '" + parameter.text + "' in macro definition");
      }
    }
    if (TakeOp("=")) {
      parameter.fallback = ParseExpression();
    } else if (!macro.parameters.empty() && macro.parameters.back().fallback) {
      FailAt(Current().line, "non-default argument follows default argument");
    }
    macro.parameters.push_back(std::move(parameter));
  }
  ExpectOp(")");
}

void Parser::ParseMacroBody(Macro& macro, std::string_view end_tag) {
  ++closures_;
  const std::size_t closures = closures_;
  const bool soft = std::exchange(soft_, false);
  const int loops = std::exchange(loops_, 0);
  const int line = Current().line;
  {
    const NameScope scope(*this);
    for (const auto& parameter : macro.parameters) NoteSet(parameter.text);
    for (const char* special : {"caller", "kwargs", "varargs"}) NoteSet(special);
    macros_.push_back(&macro);
    macro.body = ParseBody({end_tag});
    macros_.pop_back();
  }
  Take();
  for (const auto& parameter : macro.parameters) {
    if (parameter.text == "kwargs") macro.uses_kwargs = false;
    if (parameter.text == "varargs") macro.uses_varargs = false;
    if (parameter.text != "caller") continue;
    macro.explicit_caller = true;
    if (macro.uses_caller && !parameter.fallback) {
      FailAt(line,
             "When defining macros or call blocks the special \"caller\" argument must be omitted "
             "or be given a default.");
    }
  }
  soft_ = soft;
  loops_ = loops;
  macro.has_closure = closures_ != closures;
}

std::unique_ptr<Stmt> Parser::ParseMacro() {
  auto stmt = NewStmt(StmtKind::kMacro);
  Take();
  stmt->macro = std::make_unique<Macro>();
  stmt->macro->name = ExpectName();
  ExprPtr target = NewExpr(ExprKind::kName, stmt->line);
  target->name = Intern(stmt->macro->name);
  stmt->target = std::move(target);
  ParseSignature(*stmt->macro);
  NoteSet(stmt->macro->name);
  ParseMacroBody(*stmt->macro, "endmacro");
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseCallBlock() {
  auto stmt = NewStmt(StmtKind::kCallBlock);
  Take();
  stmt->macro = std::make_unique<Macro>();
  stmt->macro->name = "caller";
  if (IsOp("(")) ParseSignature(*stmt->macro);
  stmt->expr = ParseExpression();
  if (stmt->expr->kind != ExprKind::kCall) FailAt(stmt->line, "expected call");
  ParseMacroBody(*stmt->macro, "endcall");
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseFilterBlock() {
  auto stmt = NewStmt(StmtKind::kFilterBlock);
  Take();
  const bool soft = std::exchange(soft_, false);
  const std::size_t closures = closures_;
  stmt->filter = ParseFilters(nullptr, true);
  {
    const NameScope scope(*this);
    stmt->body = ParseBody({"endfilter"});
  }
  Take();
  soft_ = soft;
  stmt->has_closure = closures_ != closures;
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseNamedBlock() {
  auto stmt = NewStmt(StmtKind::kBlock);
  Take();
  stmt->text = ExpectName();
  TakeWord("scoped");
  stmt->required = TakeWord("required");
  if (IsOp("-")) {
    FailAt(Current().line,
           "Block names in Jinja have to be valid Python identifiers and may not contain hyphens, "
           "use an underscore "
           "instead.");
  }
  const bool soft = std::exchange(soft_, false);
  const int loops = std::exchange(loops_, 0);
  {
    const NameScope scope(*this);
    stmt->body = ParseBody({"endblock"});
  }
  Take();
  TakeWord(stmt->text);
  soft_ = soft;
  loops_ = loops;
  stmt->has_closure = true;
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseGeneration() {
  auto stmt = NewStmt(StmtKind::kGeneration);
  Take();
  const bool soft = std::exchange(soft_, false);
  const int loops = std::exchange(loops_, 0);
  const std::size_t closures = closures_;
  {
    const NameScope scope(*this);
    stmt->body = ParseBody({"endgeneration"});
  }
  Take();
  soft_ = soft;
  loops_ = loops;
  stmt->has_closure = closures_ != closures;
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParsePrint() {
  auto stmt = NewStmt(StmtKind::kPrint);
  Take();
  // Several expressions print one after the other: the same as joining them.
  ExprPtr all = NewExpr(ExprKind::kConcat, stmt->line);
  while (Current().type != Tok::kBlockEnd && Current().type != Tok::kEof) {
    if (!all->parts.empty()) ExpectOp(",");
    AddPart(*all, ParseExpression());
  }
  stmt->expr = std::move(all);
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseLoopControl() {
  const bool is_break = Current().text == "break";
  auto stmt = NewStmt(is_break ? StmtKind::kBreak : StmtKind::kContinue);
  Take();
  if (loops_ == 0)
    FailAt(stmt->line, is_break ? "'break' outside loop" : "'continue' not properly in loop");
  return stmt;
}

std::unique_ptr<Stmt> Parser::ParseUnsupported() {
  auto stmt = NewStmt(StmtKind::kUnsupported);
  stmt->text = Take().text;
  if (stmt->text == "autoescape") FailAt(stmt->line, "the statement 'autoescape' is not supported");
  while (Current().type != Tok::kBlockEnd && Current().type != Tok::kEof) Take();
  return stmt;
}

}  // namespace pliant::jinja
