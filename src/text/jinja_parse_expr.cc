// Expressions of the template language.
#include <algorithm>

#include "text/jinja_filters.h"
#include "text/jinja_parser.h"

namespace pliant::jinja {

ExprPtr Parser::NewExpr(ExprKind kind, int line) const {
  auto node = std::make_unique<Expr>();
  node->kind = kind;
  node->line = line;
  return node;
}

void Parser::Measure(Expr& node, const Expr& part) const {
  node.height = std::max(node.height, part.height + 1);
  if (node.height > max_depth_) {
    throw Failure{
        ErrorKind::kLimit,
        "an expression nests more than " + std::to_string(max_depth_) + " deep (max_depth)",
        node.line};
  }
}

void Parser::AddPart(Expr& node, ExprPtr part) const {
  if (part) Measure(node, *part);
  node.parts.push_back(std::move(part));
}

void Parser::AddArgs(Expr& node, std::unique_ptr<CallArgs> args) const {
  for (const auto& arg : args->positional) Measure(node, *arg);
  for (const auto& [key, arg] : args->keyword) Measure(node, *arg);
  if (args->star) Measure(node, *args->star);
  if (args->star_star) Measure(node, *args->star_star);
  node.args = std::move(args);
}

ExprPtr Parser::Binary(Op op, ExprPtr left, ExprPtr right, int line) const {
  ExprPtr node = NewExpr(ExprKind::kBinary, line);
  node->op = op;
  AddPart(*node, std::move(left));
  AddPart(*node, std::move(right));
  return node;
}

ExprPtr Parser::ParseExpression(bool conditional) {
  const Level level(*this);
  return conditional ? ParseConditional() : ParseOr();
}

ExprPtr Parser::ParseConditional() {
  int line = Current().line;
  const std::size_t unknown_before = unknown_.size();
  ExprPtr value = ParseOr();
  while (TakeWord("if")) {
    ExprPtr node = NewExpr(ExprKind::kConditional, line);
    AddPart(*node, ParseOr());
    AddPart(*node, std::move(value));
    if (TakeWord("else")) {
      const Level level(*this);
      AddPart(*node, ParseConditional());
    } else {
      AddPart(*node, nullptr);
    }
    // The reference engine looks up filters of a conditional expression only when they are used.
    unknown_.resize(unknown_before);
    value = std::move(node);
    line = Current().line;
  }
  return value;
}

ExprPtr Parser::ParseOr() {
  const int line = Current().line;
  ExprPtr left = ParseAnd();
  if (!IsWord("or")) return left;
  ExprPtr node = NewExpr(ExprKind::kOr, line);
  AddPart(*node, std::move(left));
  while (TakeWord("or")) AddPart(*node, ParseAnd());
  return node;
}

ExprPtr Parser::ParseAnd() {
  const int line = Current().line;
  ExprPtr left = ParseNot();
  if (!IsWord("and")) return left;
  ExprPtr node = NewExpr(ExprKind::kAnd, line);
  AddPart(*node, std::move(left));
  while (TakeWord("and")) AddPart(*node, ParseNot());
  return node;
}

ExprPtr Parser::ParseNot() {
  const int line = Current().line;
  if (!TakeWord("not")) return ParseCompare();
  const Level level(*this);
  ExprPtr node = NewExpr(ExprKind::kNot, line);
  AddPart(*node, ParseNot());
  return node;
}

ExprPtr Parser::ParseCompare() {
  static constexpr std::pair<std::string_view, Op> kOps[] = {{"==", Op::kEq}, {"!=", Op::kNe},
                                                             {"<", Op::kLt},  {"<=", Op::kLe},
                                                             {">", Op::kGt},  {">=", Op::kGe}};
  const int line = Current().line;
  ExprPtr first = ParseSum();
  ExprPtr node;
  for (;;) {
    std::optional<Op> op;
    for (const auto& [text, candidate] : kOps) {
      if (IsOp(text)) op = candidate;
    }
    if (op) {
      Take();
    } else if (TakeWord("in")) {
      op = Op::kIn;
    } else if (IsWord("not") && Ahead().type == Tok::kName && Ahead().text == "in") {
      Take();
      Take();
      op = Op::kNotIn;
    } else {
      break;
    }
    if (!node) {
      node = NewExpr(ExprKind::kCompare, line);
      AddPart(*node, std::move(first));
    }
    node->ops.push_back(*op);
    AddPart(*node, ParseSum());
  }
  return node ? std::move(node) : std::move(first);
}

ExprPtr Parser::ParseSum() {
  int line = Current().line;
  ExprPtr left = ParseConcat();
  while (IsOp("+") || IsOp("-")) {
    const Op op = Take().text == "+" ? Op::kAdd : Op::kSub;
    left = Binary(op, std::move(left), ParseConcat(), line);
    line = Current().line;
  }
  return left;
}

ExprPtr Parser::ParseConcat() {
  const int line = Current().line;
  ExprPtr first = ParseProduct();
  if (!IsOp("~")) return first;
  ExprPtr node = NewExpr(ExprKind::kConcat, line);
  AddPart(*node, std::move(first));
  while (TakeOp("~")) AddPart(*node, ParseProduct());
  return node;
}

ExprPtr Parser::ParseProduct() {
  int line = Current().line;
  ExprPtr left = ParsePower();
  for (;;) {
    Op op;
    if (IsOp("*")) {
      op = Op::kMul;
    } else if (IsOp("/")) {
      op = Op::kDiv;
    } else if (IsOp("//")) {
      op = Op::kFloorDiv;
    } else if (IsOp("%")) {
      op = Op::kMod;
    } else {
      return left;
    }
    Take();
    left = Binary(op, std::move(left), ParsePower(), line);
    line = Current().line;
  }
}

ExprPtr Parser::ParsePower() {
  int line = Current().line;
  ExprPtr left = ParseUnary();
  while (TakeOp("**")) {
    left = Binary(Op::kPow, std::move(left), ParseUnary(), line);
    line = Current().line;
  }
  return left;
}

ExprPtr Parser::ParseUnary(bool with_filter) {
  const int line = Current().line;
  ExprPtr node;
  if (IsOp("-") || IsOp("+")) {
    const Level level(*this);
    node = NewExpr(Take().text == "-" ? ExprKind::kNegate : ExprKind::kPlus, line);
    AddPart(*node, ParseUnary(false));
  } else {
    node = ParsePrimary();
  }
  node = ParsePostfix(std::move(node));
  return with_filter ? ParseFilterOrTest(std::move(node)) : std::move(node);
}

ExprPtr Parser::ParsePrimary(bool is_target) {
  const Token& token = Current();
  ExprPtr node = NewExpr(ExprKind::kConst, token.line);
  switch (token.type) {
    case Tok::kName:
      Take();
      if (token.text == "true" || token.text == "True") {
        node->constant = Value(true);
      } else if (token.text == "false" || token.text == "False") {
        node->constant = Value(false);
      } else if (token.text != "none" && token.text != "None") {
        node->kind = ExprKind::kName;
        if (is_target && IsOp(".")) {
          Take();
          node->kind = ExprKind::kNamespaceRef;
          node->text = ExpectName();
        }
        node->name = Intern(token.text);
        if (!is_target || node->kind == ExprKind::kNamespaceRef) NoteRead(token.text);
      }
      return node;
    case Tok::kString: {
      std::string text;
      while (Current().type == Tok::kString) text += Take().text;
      node->constant = String(std::move(text));
      return node;
    }
    case Tok::kInteger:
      node->constant = Value(Take().integer);
      return node;
    case Tok::kFloat:
      node->constant = Value(Take().real);
      return node;
    default:
      break;
  }
  if (TakeOp("(")) {
    node = ParseTuple(is_target, true, true);
    ExpectOp(")");
    return node;
  }
  if (IsOp("[")) return ParseListLiteral();
  if (IsOp("{")) return ParseDictLiteral();
  FailAt(token.line, "unexpected '" + Describe(token) + "'");
}

bool Parser::AtTupleEnd(std::string_view end_word) const {
  const Tok type = Current().type;
  return type == Tok::kVariableEnd || type == Tok::kBlockEnd || IsOp(")") ||
         (!end_word.empty() && IsWord(end_word));
}

ExprPtr Parser::ParseTuple(bool is_target, bool conditional, bool parentheses,
                           std::string_view end_word) {
  const std::optional<Level> level =
      is_target ? std::optional<Level>(std::in_place, *this) : std::nullopt;
  const int line = Current().line;
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  while (true) {
    if (!items.empty()) ExpectOp(",");
    if (AtTupleEnd(end_word)) break;
    items.push_back(is_target ? ParsePrimary(true) : ParseExpression(conditional));
    if (!IsOp(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!items.empty()) return std::move(items.front());
    if (!parentheses)
      FailAt(Current().line, "Expected an expression, got '" + Describe(Current()) + "'");
  }
  ExprPtr node = NewExpr(ExprKind::kTuple, line);
  for (ExprPtr& item : items) AddPart(*node, std::move(item));
  return node;
}

ExprPtr Parser::ParseListLiteral() {
  ExprPtr node = NewExpr(ExprKind::kList, Current().line);
  ExpectOp("[");
  while (!IsOp("]")) {
    if (!node->parts.empty()) ExpectOp(",");
    if (IsOp("]")) break;
    AddPart(*node, ParseExpression());
  }
  ExpectOp("]");
  return node;
}

ExprPtr Parser::ParseDictLiteral() {
  ExprPtr node = NewExpr(ExprKind::kDict, Current().line);
  ExpectOp("{");
  while (!IsOp("}")) {
    if (!node->parts.empty()) ExpectOp(",");
    if (IsOp("}")) break;
    AddPart(*node, ParseExpression());
    ExpectOp(":");
    AddPart(*node, ParseExpression());
  }
  ExpectOp("}");
  return node;
}

ExprPtr Parser::ParsePostfix(ExprPtr node) {
  for (;;) {
    if (IsOp(".") || IsOp("[")) {
      node = ParseSubscript(std::move(node));
    } else if (IsOp("(")) {
      ExprPtr call = NewExpr(ExprKind::kCall, Current().line);
      AddPart(*call, std::move(node));
      AddArgs(*call, ParseCallArgs());
      node = std::move(call);
    } else {
      return node;
    }
  }
}

ExprPtr Parser::ParseFilterOrTest(ExprPtr node) {
  for (;;) {
    if (IsOp("|")) {
      node = ParseFilters(std::move(node), false);
    } else if (IsWord("is")) {
      node = ParseTest(std::move(node));
    } else if (IsOp("(")) {
      ExprPtr call = NewExpr(ExprKind::kCall, Current().line);
      AddPart(*call, std::move(node));
      AddArgs(*call, ParseCallArgs());
      node = std::move(call);
    } else {
      return node;
    }
  }
}

ExprPtr Parser::ParseSubscript(ExprPtr object) {
  const int line = Current().line;
  if (TakeOp(".")) {
    const Token& token = Take();
    ExprPtr node = NewExpr(ExprKind::kAttribute, line);
    AddPart(*node, std::move(object));
    if (token.type == Tok::kName) {
      node->text = token.text;
      return node;
    }
    if (token.type != Tok::kInteger) FailAt(token.line, "expected name or number");
    node->kind = ExprKind::kItem;
    ExprPtr index = NewExpr(ExprKind::kConst, token.line);
    index->constant = Value(token.integer);
    AddPart(*node, std::move(index));
    return node;
  }
  ExpectOp("[");
  ExprPtr node = NewExpr(ExprKind::kItem, line);
  AddPart(*node, std::move(object));
  std::vector<ExprPtr> items;
  while (!IsOp("]")) {
    if (!items.empty()) ExpectOp(",");
    ExprPtr bounds[3];
    if (!IsOp(":")) bounds[0] = ParseExpression();
    if (!IsOp(":")) {
      items.push_back(std::move(bounds[0]));
      continue;
    }
    Take();
    if (!IsOp(":") && !IsOp("]") && !IsOp(",")) bounds[1] = ParseExpression();
    if (TakeOp(":") && !IsOp("]") && !IsOp(",")) bounds[2] = ParseExpression();
    if (!items.empty() || !IsOp("]"))
      FailAt(line, "slices of several dimensions are not supported");
    Take();
    node->kind = ExprKind::kSlice;
    for (ExprPtr& bound : bounds) AddPart(*node, std::move(bound));
    return node;
  }
  ExpectOp("]");
  if (items.size() == 1) {
    AddPart(*node, std::move(items.front()));
  } else {
    ExprPtr tuple = NewExpr(ExprKind::kTuple, line);
    for (ExprPtr& item : items) AddPart(*tuple, std::move(item));
    AddPart(*node, std::move(tuple));
  }
  return node;
}

std::unique_ptr<CallArgs> Parser::ParseCallArgs() {
  const int line = Current().line;
  ExpectOp("(");
  auto args = std::make_unique<CallArgs>();
  const auto ensure = [&](bool valid) {
    if (!valid) FailAt(line, "invalid syntax for function call expression");
  };
  for (bool first = true; !IsOp(")"); first = false) {
    if (!first) {
      ExpectOp(",");
      if (IsOp(")")) break;
    }
    if (TakeOp("*")) {
      ensure(!args->star && !args->star_star);
      args->star = ParseExpression();
    } else if (TakeOp("**")) {
      ensure(!args->star_star);
      args->star_star = ParseExpression();
    } else if (Current().type == Tok::kName && Ahead().type == Tok::kOperator &&
               Ahead().text == "=") {
      ensure(!args->star_star);
      std::string key = Take().text;
      Take();
      for (const auto& [other, value] : args->keyword) {
        if (other == key) FailAt(line, "keyword argument repeated: " + key);
      }
      args->keyword.emplace_back(std::move(key), ParseExpression());
    } else {
      ensure(!args->star && !args->star_star && args->keyword.empty());
      args->positional.push_back(ParseExpression());
    }
  }
  ExpectOp(")");
  return args;
}

void Parser::CheckKnown(Expr& node) {
  const bool is_filter = node.kind == ExprKind::kFilter;
  if (is_filter ? FindFilter(node.text) != nullptr : FindTest(node.text) != nullptr) return;
  node.checked_late = true;
  if (soft_) return;
  unknown_.push_back(
      Failure{ErrorKind::kSyntax,
              std::string("No ") + (is_filter ? "filter" : "test") + " named '" + node.text + "'.",
              node.line});
}

ExprPtr Parser::ParseFilters(ExprPtr node, bool first_without_pipe) {
  while (first_without_pipe || IsOp("|")) {
    if (!first_without_pipe) Take();
    first_without_pipe = false;
    ExprPtr filter = NewExpr(ExprKind::kFilter, Current().line);
    filter->text = ExpectName();
    while (TakeOp(".")) filter->text += "." + ExpectName();
    AddPart(*filter, std::move(node));
    AddArgs(*filter, IsOp("(") ? ParseCallArgs() : std::make_unique<CallArgs>());
    CheckKnown(*filter);
    node = std::move(filter);
  }
  return node;
}

ExprPtr Parser::ParseTest(ExprPtr value) {
  const int line = Take().line;
  const bool negated = TakeWord("not");
  ExprPtr node = NewExpr(ExprKind::kTest, line);
  node->text = ExpectName();
  while (TakeOp(".")) node->text += "." + ExpectName();
  AddPart(*node, std::move(value));
  const Tok type = Current().type;
  if (IsOp("(")) {
    AddArgs(*node, ParseCallArgs());
  } else if ((type == Tok::kName || type == Tok::kString || type == Tok::kInteger ||
              type == Tok::kFloat || IsOp("[") || IsOp("{")) &&
             !IsWord("else") && !IsWord("or") && !IsWord("and")) {
    if (IsWord("is")) FailAt(Current().line, "You cannot chain multiple tests with is");
    auto args = std::make_unique<CallArgs>();
    const Level level(*this);
    args->positional.push_back(ParsePostfix(ParsePrimary()));
    AddArgs(*node, std::move(args));
  } else {
    node->args = std::make_unique<CallArgs>();
  }
  CheckKnown(*node);
  if (!negated) return node;
  ExprPtr inverse = NewExpr(ExprKind::kNot, line);
  AddPart(*inverse, std::move(node));
  return inverse;
}

ExprPtr Parser::ParseTarget(bool with_namespace, std::string_view end_word) {
  const int line = Current().line;
  ExprPtr target = ParseTuple(true, true, false, end_word);
  const auto check = [&](const Expr& node, const auto& self) -> void {
    switch (node.kind) {
      case ExprKind::kName:
        if (all_loops_ > 0 && program_->names[node.name] == "loop") {
          FailAt(node.line, "Can't assign to special loop variable in for-loop target");
        }
        return;
      case ExprKind::kNamespaceRef:
        if (with_namespace) return;
        break;
      case ExprKind::kTuple:
        for (const ExprPtr& part : node.parts) self(*part, self);
        return;
      case ExprKind::kConst:
        FailAt(line, "can't assign to 'const'");
      case ExprKind::kList:
        FailAt(line, "can't assign to 'list'");
      case ExprKind::kDict:
        FailAt(line, "can't assign to 'dict'");
      default:
        break;
    }
    FailAt(line, "can't assign to this expression");
  };
  check(*target, check);
  return target;
}

}  // namespace pliant::jinja
