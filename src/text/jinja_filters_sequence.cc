// Filters that look at or rearrange a sequence.
#include <algorithm>
#include <unordered_map>

#include "text/jinja_filters.h"
#include "text/jinja_ops.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {
namespace {

Value DefaultFilter(const Value& value, Args& args) {
  const Bound bound("default", args, {"default_value", "boolean"});
  if (value.Is(Type::kUndefined) || (bound.Bool(1, false) && !Truthy(value))) {
    return bound.Has(0) ? bound[0] : String("");
  }
  return value;
}

Value LengthFilter(const Value& value, Args& args) {
  const Bound bound("length", args, {});
  return Value(static_cast<std::int64_t>(Length(value)));
}

Value ListFilter(const Value& value, Args& args) {
  const Bound bound("list", args, {});
  return List(Collect(value));
}

Value JoinFilter(const Value& value, Args& args) {
  const Bound bound("join", args, {"d", "attribute"});
  const std::string separator = Text(bound.Has(0) ? bound[0] : String(""));
  const AttributeGetter getter(bound[1]);
  TextBuilder out;
  Reader reader(value);
  bool first = true;
  for (Value item; reader.Next(item);) {
    if (!first) out.Append(separator);
    first = false;
    AppendText(out, bound[1].Is(Type::kNone) ? item : getter(item));
  }
  return String(out.Take());
}

Value FirstFilter(const Value& value, Args& args) {
  const Bound bound("first", args, {});
  Reader reader(value);
  Value item;
  return reader.Next(item) ? item : UndefinedHint("No first item, sequence was empty.");
}

// Items from the last to the first; fails on what cannot be read backwards.
std::vector<Value> Reversed(const Value& value) {
  if (value.Is(Type::kUndefined) || value.Is(Type::kIterator) || !Iterable(value)) {
    Fail(ErrorKind::kType, "'" + TypeName(value) + "' object is not reversible");
  }
  std::vector<Value> items = Collect(value);
  std::reverse(items.begin(), items.end());
  return items;
}

Value LastFilter(const Value& value, Args& args) {
  const Bound bound("last", args, {});
  if (value.IsSequence() && !value.items().empty()) return value.items().back();
  // Undefined has a length and items by number, so Python can read it backwards.
  if (value.Is(Type::kUndefined)) return UndefinedHint("No last item, sequence was empty.");
  const std::vector<Value> items = Reversed(value);
  return items.empty() ? UndefinedHint("No last item, sequence was empty.") : items.front();
}

// A list that is read as a generator.
Value IteratorOver(const char* name, std::vector<Value> items) {
  const Value list = List(std::move(items));
  auto reader = std::make_shared<Reader>(list);
  return MakeIterator(name, DepthOf(list), [reader](Value& item) { return reader->Next(item); });
}

Value ReverseFilter(const Value& value, Args& args) {
  const Bound bound("reverse", args, {});
  if (value.Is(Type::kString)) return GetSlice(value, Value(), Value(), Value(std::int64_t{-1}));
  if (!Iterable(value)) Fail(ErrorKind::kRuntime, "argument must be iterable");
  std::vector<Value> items = Collect(value);
  std::reverse(items.begin(), items.end());
  switch (value.type()) {
    case Type::kList:
      return IteratorOver("list_reverseiterator", std::move(items));
    case Type::kDict:
      return IteratorOver("dict_reversekeyiterator", std::move(items));
    case Type::kRange:
      return IteratorOver("range_iterator", std::move(items));
    case Type::kIterator:
      return List(std::move(items));
    default:
      return IteratorOver("reversed", std::move(items));
  }
}

Value ItemsFilter(const Value& value, Args& args) {
  const Bound bound("items", args, {});
  auto reader = std::make_shared<std::optional<Reader>>();
  return MakeIterator("generator", DepthOf(value) + 1, [value, reader](Value& item) {
    if (value.Is(Type::kUndefined)) return false;
    if (!value.Is(Type::kDict)) Fail(ErrorKind::kType, "Can only get item pairs from a mapping.");
    if (!*reader)
      reader->emplace(Value(Type::kView, std::make_shared<View>(View::Kind::kItems, value)));
    return (*reader)->Next(item);
  });
}

std::vector<Value> KeysOf(const std::vector<Value>& items,
                          const std::vector<AttributeGetter>& getters) {
  std::vector<Value> keys;
  keys.reserve(items.size());
  for (const Value& item : items) {
    if (getters.size() == 1) {
      keys.push_back(getters[0](item));
      continue;
    }
    std::vector<Value> parts;
    for (const AttributeGetter& getter : getters) parts.push_back(getter(item));
    keys.push_back(List(std::move(parts)));
  }
  return keys;
}

Value SortFilter(const Value& value, Args& args) {
  const Bound bound("sort", args, {"reverse", "case_sensitive", "attribute"});
  const bool ignore_case = !bound.Bool(1, false);
  std::vector<AttributeGetter> getters;
  if (bound[2].Is(Type::kString)) {
    std::string_view rest = bound[2].text();
    for (;;) {
      const std::size_t comma = rest.find(',');
      getters.emplace_back(String(std::string(rest.substr(0, comma))), Value(), ignore_case);
      if (comma == std::string_view::npos) break;
      rest.remove_prefix(comma + 1);
    }
  } else {
    getters.emplace_back(bound[2], Value(), ignore_case);
  }
  std::vector<Value> items = Collect(value);
  const std::vector<Value> keys = KeysOf(items, getters);
  return List(SortBy(std::move(items), keys, bound.Bool(0, false)));
}

Value DictSortFilter(const Value& value, Args& args) {
  const Bound bound("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = bound.Has(1) ? Text(bound[1]) : "key";
  if (by != "key" && by != "value")
    Fail(ErrorKind::kRuntime, "You can only sort by either \"key\" or \"value\"");
  if (value.Is(Type::kUndefined)) FailUndefined(value);
  if (!value.Is(Type::kDict)) {
    Fail(ErrorKind::kType, "'" + TypeName(value) + "' object has no attribute 'items'");
  }
  const bool ignore_case = !bound.Bool(0, false);
  std::vector<Value> items, keys;
  const AttributeGetter lower(Value(), Value(), ignore_case);
  for (const auto& [key, item] : value.dict().entries) {
    items.push_back(Tuple({key, item}));
    keys.push_back(lower(by == "key" ? key : item));
  }
  return List(SortBy(std::move(items), keys, bound.Bool(2, false)));
}

template <bool Max>
Value ExtremeFilter(const Value& value, Args& args) {
  const Bound bound(Max ? "max" : "min", args, {"case_sensitive", "attribute"});
  const AttributeGetter getter(bound[1], Value(), !bound.Bool(0, false));
  Reader reader(value);
  Value best;
  if (!reader.Next(best)) return UndefinedHint("No aggregated item, sequence was empty.");
  Value best_key = getter(best);
  for (Value item; reader.Next(item);) {
    Value key = getter(item);
    if (Ordered(key, best_key, Max ? Order::kGreater : Order::kLess)) {
      best = item;
      best_key = std::move(key);
    }
  }
  return best;
}

// Keys already seen, by hash.
class SeenKeys {
 public:
  /// False when an equal key is there already.
  bool Add(const Value& key) {
    auto& same = keys_[Hash(key)];
    for (const Value& other : same) {
      if (Same(other, key) || Equal(other, key)) return false;
    }
    same.push_back(key);
    return true;
  }

 private:
  std::unordered_map<std::size_t, std::vector<Value>> keys_;
};

Value UniqueFilter(const Value& value, Args& args) {
  const Bound bound("unique", args, {"case_sensitive", "attribute"});
  const AttributeGetter getter(bound[1], Value(), !bound.Bool(0, false));
  auto reader = std::make_shared<std::optional<Reader>>();
  auto seen = std::make_shared<SeenKeys>();
  return MakeIterator("generator", DepthOf(value), [value, getter, reader, seen](Value& item) {
    if (!*reader) reader->emplace(value);
    while ((*reader)->Next(item)) {
      if (seen->Add(getter(item))) return true;
    }
    return false;
  });
}

Value GroupByFilter(const Value& value, Args& args) {
  const Bound bound("groupby", args, {"attribute", "default", "case_sensitive"}, 1);
  const bool ignore_case = !bound.Bool(2, false);
  std::vector<Value> items = Collect(value);
  const std::vector<AttributeGetter> getters = {AttributeGetter(bound[0], bound[1], ignore_case)};
  const AttributeGetter shown(bound[0], bound[1], false);
  items = SortBy(items, KeysOf(items, getters), false);
  const std::vector<Value> keys = KeysOf(items, getters);
  std::vector<Value> groups;
  for (std::size_t i = 0; i < items.size();) {
    std::vector<Value> members;
    const std::size_t start = i;
    for (; i < items.size() && (i == start || Equal(keys[i], keys[start])); ++i)
      members.push_back(items[i]);
    auto pair = std::make_shared<Seq>(
        std::vector<Value>{shown(items[start]), List(std::move(members))}, true);
    CheckValueDepth(pair->depth);
    groups.emplace_back(Type::kTuple, std::move(pair));
  }
  return List(std::move(groups));
}

Value SumFilter(const Value& value, Args& args) {
  const Bound bound("sum", args, {"attribute", "start"});
  const AttributeGetter getter(bound[0]);
  Value sum = bound.Has(1) ? bound[1] : Value(std::int64_t{0});
  if (sum.Is(Type::kString))
    Fail(ErrorKind::kType, "sum() can't sum strings [use ''.join(seq) instead]");
  Reader reader(value);
  for (Value item; reader.Next(item);) sum = Arithmetic(Op::kAdd, sum, getter(item));
  return sum;
}

// A generator whose items are all made when the first is asked for.
Value Deferred(const Value& source, std::function<std::vector<Value>()> make) {
  auto reader = std::make_shared<std::optional<Reader>>();
  return MakeIterator("generator", DepthOf(source) + 1,
                      [make = std::move(make), reader](Value& item) {
                        if (!*reader) reader->emplace(List(make()));
                        return (*reader)->Next(item);
                      });
}

Value BatchFilter(const Value& value, Args& args) {
  const Bound bound("batch", args, {"linecount", "fill_with"}, 1);
  const Value size = bound[0];
  const Value fill = bound[1];
  return Deferred(value, [value, size, fill] {
    std::vector<Value> lines, line;
    Reader reader(value);
    for (Value item; reader.Next(item);) {
      if (Equal(Value(static_cast<std::int64_t>(line.size())), size)) {
        lines.push_back(List(std::move(line)));
        line.clear();
      }
      line.push_back(item);
    }
    if (!line.empty()) {
      if (!fill.Is(Type::kNone)) {
        const std::int64_t wanted = ToInteger(size);
        CheckStringSize(static_cast<std::size_t>(std::max<std::int64_t>(wanted, 0)));
        while (static_cast<std::int64_t>(line.size()) < wanted) {
          Charge(1);
          line.push_back(fill);
        }
      }
      lines.push_back(List(std::move(line)));
    }
    return lines;
  });
}

Value SliceFilter(const Value& value, Args& args) {
  const Bound bound("slice", args, {"slices", "fill_with"}, 1);
  const std::int64_t slices = ToInteger(bound[0]);
  const Value fill = bound[1];
  return Deferred(value, [value, slices, fill] {
    const std::vector<Value> items = Collect(value);
    if (slices == 0) Fail(ErrorKind::kOverflow, "integer division or modulo by zero");
    std::vector<Value> columns;
    if (slices < 0) return columns;
    const std::size_t count = static_cast<std::size_t>(slices);
    const std::size_t each = items.size() / count;
    const std::size_t longer = items.size() % count;
    std::size_t at = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t size = each + (i < longer);
      std::vector<Value> column(items.begin() + static_cast<std::ptrdiff_t>(at),
                                items.begin() + static_cast<std::ptrdiff_t>(at + size));
      at += size;
      if (!fill.Is(Type::kNone) && i >= longer) column.push_back(fill);
      Charge(1);
      columns.push_back(List(std::move(column)));
    }
    return columns;
  });
}

Value AttrFilter(const Value& value, Args& args) {
  const Bound bound("attr", args, {"name"}, 1);
  if (!bound[0].Is(Type::kString))
    Fail(ErrorKind::kType, "attribute name must be string, not '" + TypeName(bound[0]) + "'");
  return GetAttributeOnly(value, bound[0].text());
}

constexpr FilterEntry kSequenceFilters[] = {
    {"attr", AttrFilter},       {"batch", BatchFilter},       {"count", LengthFilter},
    {"d", DefaultFilter},       {"default", DefaultFilter},   {"dictsort", DictSortFilter},
    {"first", FirstFilter},     {"groupby", GroupByFilter},   {"items", ItemsFilter},
    {"join", JoinFilter},       {"last", LastFilter},         {"length", LengthFilter},
    {"list", ListFilter},       {"max", ExtremeFilter<true>}, {"min", ExtremeFilter<false>},
    {"reverse", ReverseFilter}, {"slice", SliceFilter},       {"sort", SortFilter},
    {"sum", SumFilter},         {"unique", UniqueFilter},
};

}  // namespace

FilterTable SequenceFilters() { return {kSequenceFilters, std::size(kSequenceFilters)}; }

}  // namespace pliant::jinja
