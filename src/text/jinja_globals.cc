// Functions that every template finds: range, dict, namespace, cycler, joiner, raise_exception,
// strftime_now.
#include <algorithm>
#include <ctime>
#include <limits>

#include "text/jinja_eval.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

constexpr std::size_t kMaxRange = 100'000;  // as the reference sandbox
constexpr std::size_t kMaxTimeFormat = 1024;

void CheckNamespaceName(std::string_view name) {
  if (!name.starts_with('_')) return;
  Fail(ErrorKind::kSecurity,
       "Chat templates cannot store underscore-prefixed attributes on a namespace, but got " +
           Quote(name) + ". Please rename the attribute.");
}

}  // namespace

Value MakeRange(Args& args) {
  if (!args.keyword.empty()) Fail(ErrorKind::kType, "range() takes no keyword arguments");
  const std::size_t count = args.positional.size();
  if (count == 0) Fail(ErrorKind::kType, "range expected at least 1 argument, got 0");
  if (count > 3)
    Fail(ErrorKind::kType, "range expected at most 3 arguments, got " + std::to_string(count));
  for (const Value& value : args.positional) {
    if (value.Is(Type::kUndefined)) {
      Fail(ErrorKind::kType, "'Undefined' object cannot be interpreted as an integer");
    }
  }
  const std::int64_t start = count > 1 ? ToInteger(args.positional[0]) : 0;
  const std::int64_t stop = ToInteger(args.positional[count > 1 ? 1 : 0]);
  const std::int64_t step = count > 2 ? ToInteger(args.positional[2]) : 1;
  if (step == 0) Fail(ErrorKind::kValue, "range() arg 3 must not be zero");
  const Wide span = step > 0 ? static_cast<Wide>(stop) - start : static_cast<Wide>(start) - stop;
  const Wide stride = step > 0 ? static_cast<Wide>(step) : -static_cast<Wide>(step);
  const Wide length = span > 0 ? (span - 1) / stride + 1 : 0;
  if (length > static_cast<Wide>(kMaxRange)) {
    Fail(ErrorKind::kOverflow, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (" +
                                   std::to_string(kMaxRange) + ").");
  }
  return Value(Type::kRange,
               std::make_shared<Range>(start, stop, step, static_cast<std::size_t>(length)));
}

Value DictFromArgs(Args& args) {
  std::vector<Dict::Entry> entries;
  if (args.positional.size() > 1) {
    Fail(ErrorKind::kType,
         "dict expected at most 1 argument, got " + std::to_string(args.positional.size()));
  }
  if (!args.positional.empty()) {
    const Value& source = args.positional[0];
    if (source.Is(Type::kDict)) {
      Charge(source.dict().entries.size() / 4);
      entries = source.dict().entries;
    } else {
      Reader reader(source);
      for (Value item; reader.Next(item);) {
        const std::vector<Value> pair = Collect(item);
        if (pair.size() != 2) {
          Fail(ErrorKind::kValue, "dictionary update sequence element #" +
                                      std::to_string(entries.size()) + " has length " +
                                      std::to_string(pair.size()) + "; 2 is required");
        }
        entries.emplace_back(pair[0], pair[1]);
      }
    }
  }
  for (auto& [key, value] : args.keyword) entries.emplace_back(String(key), value);
  return MakeDict(std::move(entries));
}

Value StrftimeNow(Args& args, Evaluator::Time now) {
  const Bound bound("strftime_now", args, {"format"}, 1);
  if (!bound[0].Is(Type::kString)) {
    Fail(ErrorKind::kType, "strftime() argument 1 must be str, not " + TypeName(bound[0]));
  }
  const std::string& format = bound[0].text();
  if (format.size() > kMaxTimeFormat) {
    Fail(ErrorKind::kLimit,
         "a time format has more than " + std::to_string(kMaxTimeFormat) + " bytes");
  }
  const auto since = now.time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(since);
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(since - seconds).count();
  const std::time_t time = seconds.count();
  std::tm local{};
  localtime_r(&time, &local);
  // A time without zone, as datetime.now() gives: %z and %Z are empty, and %f is Python's own.
  std::string expanded;
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] == '\0') Fail(ErrorKind::kValue, "embedded null character");
    if (format[i] != '%' || i + 1 == format.size()) {
      expanded += format[i];
    } else if (const char c = format[++i]; c == 'f') {
      std::string digits = std::to_string(micros);
      expanded += std::string(6 - digits.size(), '0') + digits;
    } else if (c != 'z' && c != 'Z') {
      expanded += '%';
      expanded += c;
    }
  }
  if (expanded.empty()) return String("");
  std::string buffer(std::max<std::size_t>(1024, 256 * expanded.size()), '\0');
  ChargeBytes(buffer.size());
  buffer.resize(std::strftime(buffer.data(), buffer.size(), expanded.c_str(), &local));
  if (!IsValidUtf8(buffer)) Fail(ErrorKind::kValue, "a time format gives text that is not UTF-8");
  return String(std::move(buffer));
}

void Evaluator::AddGlobal(std::string_view name, Callable::Fn fn) {
  const auto found = std::find(program_.names.begin(), program_.names.end(), name);
  if (found == program_.names.end()) return;
  SetRoot(static_cast<NameId>(found - program_.names.begin()),
          MakeCallable(std::string(name), "function", 0, std::move(fn)));
}

void Evaluator::AddGlobals() {
  AddGlobal("range", MakeRange);
  AddGlobal("dict", DictFromArgs);
  AddGlobal("namespace", [this](Args& args) {
    const Value attributes = DictFromArgs(args);
    const Value ns = namespaces_.Make();
    for (const auto& [key, value] : attributes.dict().entries) {
      if (!key.Is(Type::kString)) continue;  // cannot be read again
      CheckNamespaceName(key.text());
      ns.ns().Set(key.text(), value);
    }
    return ns;
  });
  AddGlobal("cycler", [](Args& args) {
    if (args.positional.empty()) Fail(ErrorKind::kRuntime, "at least one item has to be provided");
    const Value items = Tuple(args.positional);
    CheckValueDepth(DepthOf(items) + 1);
    return Value(Type::kCycler, std::make_shared<Cycler>(items));
  });
  AddGlobal("joiner", [](Args& args) {
    const Bound bound("joiner", args, {"sep"});
    const Value separator = bound.Has(0) ? bound[0] : String(", ");
    CheckValueDepth(DepthOf(separator) + 1);
    return Value(Type::kJoiner, std::make_shared<Joiner>(separator));
  });
  AddGlobal("raise_exception", [](Args& args) -> Value {
    const Bound bound("raise_exception", args, {"message"}, 1);
    Fail(ErrorKind::kRaised, Text(bound[0]));
  });
  AddGlobal("strftime_now", [this](Args& args) { return StrftimeNow(args, now_); });
}

}  // namespace pliant::jinja
