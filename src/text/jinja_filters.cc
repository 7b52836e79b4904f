// Look-up of filters, and what several of them share.
#include "text/jinja_filters.h"

#include <algorithm>
#include <map>

#include "text/jinja_ops.h"
#include "text/jinja_text.h"
#include "text/jinja_unicode.h"

namespace pliant::jinja {

FilterFn FindFilter(std::string_view name) {
  static const std::map<std::string_view, FilterFn> kFilters = [] {
    std::map<std::string_view, FilterFn> all;
    for (const FilterTable table : {TextFilters(), SequenceFilters(), SelectFilters()}) {
      for (std::size_t i = 0; i < table.count; ++i)
        all.emplace(table.entries[i].name, table.entries[i].fn);
    }
    return all;
  }();
  const auto found = kFilters.find(name);
  return found == kFilters.end() ? nullptr : found->second;
}

FilterFn NeedFilter(std::string_view name) {
  if (const FilterFn filter = FindFilter(name)) return filter;
  Fail(ErrorKind::kRuntime, "No filter named '" + std::string(name) + "'.");
}

TestFn NeedTest(std::string_view name) {
  if (const TestFn test = FindTest(name)) return test;
  Fail(ErrorKind::kRuntime, "No test named '" + std::string(name) + "'.");
}

AttributeGetter::AttributeGetter(const Value& path, Value fallback, bool ignore_case)
    : fallback_(std::move(fallback)), ignore_case_(ignore_case) {
  if (path.Is(Type::kNone)) return;
  if (!path.Is(Type::kString)) {
    parts_.push_back(path);
    return;
  }
  std::string_view rest = path.text();
  for (;;) {
    const std::size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    const bool digits =
        !part.empty() && part.size() < 18 &&
        std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (digits) {
      std::int64_t index = 0;
      for (const char c : part) index = index * 10 + (c - '0');
      parts_.emplace_back(index);
    } else {
      parts_.push_back(String(std::string(part)));
    }
    if (dot == std::string_view::npos) break;
    rest.remove_prefix(dot + 1);
  }
}

Value AttributeGetter::operator()(Value item) const {
  Charge(parts_.size());
  for (const Value& part : parts_) {
    item = GetItem(item, part);
    if (item.Is(Type::kUndefined) && !fallback_.Is(Type::kNone)) item = fallback_;
  }
  if (ignore_case_ && item.Is(Type::kString)) {
    ChargeBytes(item.text().size());
    return Like(item, Lower(item.text()));
  }
  return item;
}

std::vector<Value> SortBy(std::vector<Value> items, const std::vector<Value>& keys, bool reverse) {
  std::vector<std::size_t> order(items.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  // Equal items keep their order, also when reversed.
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return reverse ? Ordered(keys[b], keys[a], Order::kLess)
                   : Ordered(keys[a], keys[b], Order::kLess);
  });
  std::vector<Value> sorted;
  sorted.reserve(items.size());
  for (const std::size_t i : order) sorted.push_back(std::move(items[i]));
  return sorted;
}

}  // namespace pliant::jinja
