// Room: text. The filters and tests of the template language. Free functions on the rendering
// thread.
#pragma once

#include <string_view>

#include "text/jinja_value.h"

namespace pliant::jinja {

using FilterFn = Value (*)(const Value& value, Args& args);
using TestFn = bool (*)(const Value& value, Args& args);

/// Null when there is no such filter or test.
FilterFn FindFilter(std::string_view name);
TestFn FindTest(std::string_view name);
/// Fails with the reference engine's message when there is no such filter or test.
FilterFn NeedFilter(std::string_view name);
TestFn NeedTest(std::string_view name);

struct FilterEntry {
  std::string_view name;
  FilterFn fn;
};
// The parts of the table of filters.
struct FilterTable {
  const FilterEntry* entries;
  std::size_t count;
};
FilterTable TextFilters();      // jinja_filters_text.cc
FilterTable SequenceFilters();  // jinja_filters_sequence.cc
FilterTable SelectFilters();    // jinja_filters_select.cc

/// Looks a dotted attribute path up in an item (`map(attribute="a.b.0")`).
class AttributeGetter {
 public:
  /// None: the item itself. `fallback` replaces what is undefined, when given and not None.
  explicit AttributeGetter(const Value& path, Value fallback = {}, bool ignore_case = false);
  Value operator()(Value item) const;
  int depth() const { return DepthOf(fallback_); }

 private:
  std::vector<Value> parts_;
  Value fallback_;
  bool ignore_case_;
};
/// Sorts stably by keys that have an order.
std::vector<Value> SortBy(std::vector<Value> items, const std::vector<Value>& keys, bool reverse);

}  // namespace pliant::jinja
