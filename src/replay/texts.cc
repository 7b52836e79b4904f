#include "replay/texts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string_view>

namespace pliant {
namespace {

using Words = std::vector<std::string_view>;

// What a {kind} in a pattern may become.
const std::map<std::string_view, Words>& Vocabulary() {
  static const std::map<std::string_view, Words> words = {
      {"name",
       {"Maria", "Jonas", "Amara", "Viktor", "Leila", "Tomas", "Ingrid", "Samuel", "Priya", "Oskar",
        "Nadia", "Felix", "Rosa", "Henrik", "Yuki", "Daniel"}},
      {"thing", {"lantern", "letter", "boat",     "map",   "bridge", "window", "bicycle",
                 "garden",  "violin", "ladder",   "clock", "coat",   "kettle", "basket",
                 "mirror",  "wheel",  "notebook", "key",   "stone",  "chair"}},
      {"place",
       {"the harbour", "the old mill", "the station", "the market", "the library", "the hill",
        "the river", "the kitchen", "the workshop", "the lighthouse", "the school", "the town hall",
        "the orchard", "the cellar"}},
      {"act",
       {"repaired", "carried", "painted", "hid", "found", "sold", "measured", "borrowed", "cleaned",
        "watched", "forgot", "described", "returned", "lost"}},
      {"kind",
       {"quiet", "narrow", "bright", "heavy", "early", "broken", "patient", "distant", "wooden",
        "cold", "careful", "familiar"}},
      {"when",
       {"In the morning", "After the storm", "Before supper", "Late in autumn", "That evening",
        "Two days later", "When the bell rang", "Without a word", "Years afterwards", "At noon"}},
      {"level", {"info", "info", "info", "warning"}},
      {"state", {"paid", "paid", "returned"}},
      {"german",
       {"Die Brücke wurde später erneuert.", "Man findet sie heute im Museum.",
        "Über ihren Ursprung weiß man wenig.", "Im Winter bleibt der Weg geschlossen.",
        "Viele Gäste kommen im Frühling.", "Der Bau dauerte sieben Jahre.",
        "Das Wasser fließt nach Süden.", "Er schrieb darüber ein kurzes Buch."}},
  };
  return words;
}

// Fills patterns, left to right, so that a seed gives the same text with every compiler and
// library. {kind} is a word of that kind, {kind=x} also remembers it as {x}, {3-99} a number.
class Writer {
 public:
  explicit Writer(std::uint64_t seed) : random_(seed) {}

  int Between(int low, int high) {
    return low + static_cast<int>((random_() >> 33) % static_cast<std::uint64_t>(high - low + 1));
  }

  std::string Fill(std::string_view pattern) {
    std::string out;
    known_.clear();
    while (!pattern.empty()) {
      const std::size_t open = pattern.find('{');
      out += pattern.substr(0, open);
      if (open == std::string_view::npos) break;
      const std::size_t close = pattern.find('}', open);
      out += Choose(pattern.substr(open + 1, close - open - 1));
      pattern.remove_prefix(close + 1);
    }
    return out;
  }

 private:
  std::string Choose(std::string_view what) {
    const std::size_t dash = what.find('-');
    if (dash != std::string_view::npos) {
      const int low = std::stoi(std::string(what.substr(0, dash)));
      return std::to_string(Between(low, std::stoi(std::string(what.substr(dash + 1)))));
    }
    const std::size_t equals = what.find('=');
    if (const auto known = known_.find(what); known != known_.end()) return known->second;
    const Words& words = Vocabulary().at(what.substr(0, equals));
    std::string word(
        words[static_cast<std::size_t>(Between(0, static_cast<int>(words.size()) - 1))]);
    if (equals != std::string_view::npos) known_[what.substr(equals + 1)] = word;
    return word;
  }

  std::mt19937_64 random_;
  std::map<std::string_view, std::string> known_;
};

std::string Arithmetic(Writer& writer) {
  const int a = writer.Between(11, 99), b = writer.Between(3, 19), d = writer.Between(5, 30);
  const std::string left = std::to_string(a * b - d), all = std::to_string(a * b);
  return writer.Fill("Question: {name} packs " + std::to_string(a) + " crates with " +
                     std::to_string(b) + " {thing=x}s each and gives " + std::to_string(d) +
                     " {x}s away to {name}. How many are left?\n") +
         "Answer: " + std::to_string(a) + " * " + std::to_string(b) + " = " + all + "; " + all +
         " - " + std::to_string(d) + " = " + left + ". So " + left + " are left.\n\n";
}

struct TextKind {
  const char* name;
  const char* head;
  Words patterns;  // one is chosen for each piece; none: Arithmetic
};

const std::vector<TextKind>& TextKinds() {
  static const std::vector<TextKind> kinds = {
      {"narrative",
       "",
       {"{when} {name} {act} the {kind} {thing=x} near {place=p}. Nobody asked why, because {name} "
        "had once {act} a {x} just like it and never spoke of {p} again. ",
        "{when} {name=n} {act} the {thing} behind {place}. It was a {kind} day, and the road to "
        "{place} seemed longer than {n} remembered.\n\n",
        "The {thing} had belonged to {name=n}, who kept it beside a {kind} {thing} for {2-40} "
        "years. {n} {act} it only once, at {place}. ",
        "{name=n} counted {3-99} steps, stopped, and looked back at {place}. {when} {name} would "
        "ask what {n} had {act} there. "}},
      {"dialogue",
       "",
       {"{name=a}: Where did you leave the {thing=x}?\n{name=b}: Near {place}, next to the {kind} "
        "{thing}. Why do you ask?\n{a}: Because {name} needs it by {1-12} o'clock, and you "
        "promised.\n{b}: Then tell {name} that I {act} the {x} already. [a {kind} pause]\n\n",
        "{name=a}: {when}, you said. It has been {2-30} days!\n{name=b}: {name} {act} my {thing}. "
        "What was I supposed to do at {place}?\n{a}: Wait, as everyone does.\n\n"}},
      {"table",
       "date,name,item,count,price,state\n",
       {"{2019-2025}-{10-12}-{10-28},{name},{thing},{1-250},{1-999}.{10-99},{state}\n"}},
      {"log",
       "",
       {"time=2025-03-{10-28}T{10-23}:{10-59}:{10-59}Z level={level} host=node-{1-16} user={name} "
        "path=\"/v1/{thing}/{100-9999}\" status={200-204} milliseconds={0-900}.{0-9}\n"}},
      {"code",
       "\"\"\"Helpers for the inventory.\"\"\"\n\n\n",
       {"def {act=v}_{thing=x}({thing=y}s, limit={2-64}):\n    \"\"\"Returns each {x} that was "
        "{v}, "
        "at most `limit` of them.\"\"\"\n    found = []\n    for index, {y} in enumerate({y}s):\n"
        "        if {y}.{kind} and index % {2-9} == 0:\n            found.append({y}.{x})\n"
        "        if len(found) >= limit:\n            break\n    return found\n\n\n",
        "class {name=n}{thing=x}:\n    def __init__(self, {kind=k}, {thing=y}={1-99}):\n"
        "        self.{k} = {k}\n        self.{y} = {y}\n\n    def {act}(self):\n"
        "        return self.{y} * {2-12} if self.{k} else None\n\n\n"}},
      {"arithmetic", "", {}},
      {"encyclopaedia",
       "",
       {"== {name}'s {thing} ==\nThe {kind} {thing} (built {1480-1700}, rebuilt {1701-1960}) "
        "stands "
        "at {place}, {2-80} km from {place}. {german} {german} See also: {thing}, {thing}.\n\n"}},
  };
  return kinds;
}

}  // namespace

std::vector<SampleText> BuiltInTexts(std::size_t bytes, std::uint64_t seed) {
  std::vector<SampleText> texts;
  for (const TextKind& kind : TextKinds()) {
    Writer writer(seed * 1000 + texts.size());
    SampleText text{kind.name, kind.head};
    while (text.text.size() < bytes) {
      if (kind.patterns.empty()) {
        text.text += Arithmetic(writer);
        continue;
      }
      const int last = static_cast<int>(kind.patterns.size()) - 1;
      text.text += writer.Fill(kind.patterns[static_cast<std::size_t>(writer.Between(0, last))]);
    }
    texts.push_back(std::move(text));
  }
  return texts;
}

Result<std::vector<SampleText>> ReadTexts(const std::string& folder, std::size_t max_bytes,
                                          std::size_t max_files) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<fs::path> paths;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored)) paths.push_back(it->path());
  }
  if (error) return NotFound(folder + ": " + error.message());
  std::sort(paths.begin(), paths.end());
  if (paths.size() > max_files) paths.resize(max_files);
  std::vector<SampleText> texts;
  for (const fs::path& path : paths) {
    std::ifstream in(path, std::ios::binary);
    if (!in) return IoError(path.string() + ": cannot be opened");
    SampleText text{path.filename().string(), std::string(max_bytes, '\0')};
    in.read(text.text.data(), static_cast<std::streamsize>(max_bytes));
    text.text.resize(static_cast<std::size_t>(in.gcount()));
    texts.push_back(std::move(text));
  }
  if (texts.empty()) return NotFound(folder + ": no files");
  return texts;
}

}  // namespace pliant
