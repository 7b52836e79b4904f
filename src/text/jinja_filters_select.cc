// map, select, reject, selectattr, rejectattr: generators that apply another filter or test.
#include <memory>

#include "text/jinja_filters.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"

namespace pliant::jinja {
namespace {

int DepthOfArgs(const Args& args) {
  int depth = 0;
  for (const Value& value : args.positional) depth = std::max(depth, DepthOf(value));
  for (const auto& [key, value] : args.keyword) depth = std::max(depth, DepthOf(value));
  return depth;
}

std::string NameOf(const Value& value, const char* what) {
  if (value.Is(Type::kString)) return value.text();
  Fail(ErrorKind::kRuntime, std::string("No ") + what + " named " + Repr(value) + ".");
}

// What `map` does with an item.
std::function<Value(const Value&)> Mapper(Args args) {
  if (args.positional.empty()) {
    if (std::optional<Value> attribute = args.TakeKeyword("attribute")) {
      const std::optional<Value> fallback = args.TakeKeyword("default");
      if (!args.keyword.empty()) {
        Fail(ErrorKind::kRuntime,
             "Unexpected keyword argument " + Quote(args.keyword.front().first));
      }
      return AttributeGetter(*attribute, fallback.value_or(Value()));
    }
    Fail(ErrorKind::kRuntime, "map requires a filter argument");
  }
  const FilterFn filter = NeedFilter(NameOf(args.positional[0], "filter"));
  args.positional.erase(args.positional.begin());
  return [filter, args](const Value& item) {
    Args copy = args;
    return filter(item, copy);
  };
}

Value MapFilter(const Value& value, Args& args) {
  struct State {
    Args args;
    std::optional<Reader> reader;
    std::function<Value(const Value&)> map;
  };
  auto state = std::make_shared<State>();
  state->args = args;
  return MakeIterator("generator", std::max(DepthOf(value), DepthOfArgs(args)),
                      [value, state](Value& item) {
                        if (!Truthy(value)) return false;
                        if (!state->reader) {
                          state->map = Mapper(state->args);
                          state->reader.emplace(value);
                        }
                        Value source;
                        if (!state->reader->Next(source)) return false;
                        item = state->map(source);
                        return true;
                      });
}

template <bool Wanted, bool ByAttribute>
Value SelectFilter(const Value& value, Args& args) {
  struct State {
    Args args;
    std::optional<Reader> reader;
    std::optional<AttributeGetter> attribute;
    TestFn test = nullptr;
  };
  auto state = std::make_shared<State>();
  state->args = args;
  return MakeIterator(
      "generator", std::max(DepthOf(value), DepthOfArgs(args)), [value, state](Value& item) {
        if (!Truthy(value)) return false;
        if (!state->reader) {
          auto& positional = state->args.positional;
          if (ByAttribute) {
            if (positional.empty())
              Fail(ErrorKind::kRuntime, "Missing parameter for attribute name");
            state->attribute.emplace(positional.front());
            positional.erase(positional.begin());
          }
          if (!positional.empty()) {
            state->test = NeedTest(NameOf(positional.front(), "test"));
            positional.erase(positional.begin());
          }
          state->reader.emplace(value);
        }
        while (state->reader->Next(item)) {
          const Value looked_at = state->attribute ? (*state->attribute)(item) : item;
          bool holds;
          if (state->test != nullptr) {
            Args copy = state->args;
            holds = state->test(looked_at, copy);
          } else {
            holds = Truthy(looked_at);
          }
          if (holds == Wanted) return true;
        }
        return false;
      });
}

constexpr FilterEntry kSelectFilters[] = {
    {"map", MapFilter},
    {"reject", SelectFilter<false, false>},
    {"rejectattr", SelectFilter<false, true>},
    {"select", SelectFilter<true, false>},
    {"selectattr", SelectFilter<true, true>},
};

}  // namespace

FilterTable SelectFilters() { return {kSelectFilters, std::size(kSelectFilters)}; }

}  // namespace pliant::jinja
