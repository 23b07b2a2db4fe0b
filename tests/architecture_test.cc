// docs/design.md: its folders and places are there, BUILD files depend along its arrows only, and it is short.
// docs/decisions.md: its records are whole.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "tests/harness.h"

namespace kvmanager::testing {
namespace {

/// The source tree: the file behind the runfile's symbolic link lies in it.
const std::filesystem::path& Root() {
  static const std::filesystem::path root =
      std::filesystem::canonical(DataPath("docs/design.md")).parent_path().parent_path();
  return root;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(Root() / path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

/// Folders with a BUILD file.
std::vector<std::string> Packages() {
  std::vector<std::string> packages;
  std::filesystem::recursive_directory_iterator it(Root()), end;
  for (; it != end; ++it) {
    const std::string name = it->path().filename();
    if (it->is_symlink() || absl::StartsWith(name, ".") || absl::StartsWith(name, "bazel-")) {
      it.disable_recursion_pending();
    } else if (name == "BUILD") {
      const std::string package = std::filesystem::relative(it->path().parent_path(), Root());
      if (package != ".") packages.push_back(package);
    }
  }
  return packages;
}

// The rooms of the daemon, from the ground up: each may depend on those before it, and none on one behind it.
constexpr const char* kRooms[] = {"kvmanager/base", "kvmanager/memory", "kvmanager/eviction", "kvmanager/disk",
                                  "kvmanager/keep", "kvmanager/store",  "kvmanager/gpu",      "kvmanager/handoff",
                                  "kvmanager/rpc",  "kvmanager/daemon"};

/// The module of section 3 that a package belongs to.
std::string ModuleOf(absl::string_view package) {
  for (const char* const module : {"kvmanager/api",
                                   "kvmanager/base",
                                   "kvmanager/memory",
                                   "kvmanager/eviction",
                                   "kvmanager/disk",
                                   "kvmanager/keep",
                                   "kvmanager/store",
                                   "kvmanager/gpu",
                                   "kvmanager/handoff",
                                   "kvmanager/rpc",
                                   "kvmanager/daemon",
                                   "codecs",
                                   "attention",
                                   "transport",
                                   "client",
                                   "kvmanager/simulator",
                                   "monitoring",
                                   "examples",
                                   "bench",
                                   "tests",
                                   "bazel"}) {
    if (package == module || absl::StartsWith(package, absl::StrCat(module, "/"))) return module;
  }
  return std::string(package);
}

/// docs/design.md from the heading of section `from` up to the heading of section `to`.
std::string Sections(int from, int to) {
  const std::string design = ReadFile("docs/design.md");
  const size_t begin = design.find(absl::StrCat("\n## ", from, ". ")),
               end = design.find(absl::StrCat("\n## ", to, ". "));
  return begin == std::string::npos || end == std::string::npos || end < begin ? "" : design.substr(begin, end - begin);
}

std::map<std::string, std::set<std::string>> ReadArrows() {
  // A line of section 3's second block: module -> module module. Rooms are named without kvmanager/.
  const auto path = [](const std::string& name) {
    return std::filesystem::is_directory(Root() / "kvmanager" / name) ? "kvmanager/" + name : name;
  };
  const std::string section = Sections(3, 4);
  static const std::regex kLine(R"re(\n([a-z]+) +->((?: [a-z]+)*)(?=\n))re");
  std::map<std::string, std::set<std::string>> arrows;
  for (std::sregex_iterator it(section.begin(), section.end(), kLine), end; it != end; ++it) {
    std::set<std::string>& to = arrows[path((*it)[1])];
    std::istringstream names((*it)[2]);
    for (std::string name; names >> name;) to.insert(path(name));
  }
  return arrows;
}

/// The modules that a module may depend on.
const std::map<std::string, std::set<std::string>>& Arrows() {
  static const std::map<std::string, std::set<std::string>> arrows = ReadArrows();
  return arrows;
}

/// A target of a BUILD file: whether it is a test or testonly, and the labels in its deps.
struct Target {
  std::string name;
  bool for_tests = false;
  bool is_program = false;
  std::vector<std::string> deps;
};

std::vector<Target> Targets(const std::string& text) {
  std::vector<Target> targets;
  static const std::regex kRule(R"(^(cc_\w+|capnp_library|genrule)\($)"), kName(R"re(^\s+name = "([^"]+)")re"),
      kLabel(R"re("(//[^"]+)")re");
  std::istringstream in(text);
  std::string line;
  bool in_deps = false, in_rule = false;
  while (std::getline(in, line)) {
    std::smatch match;
    if (std::regex_match(line, match, kRule)) {
      targets.emplace_back();
      targets.back().for_tests = absl::EndsWith(match[1].str(), "_test");
      targets.back().is_program = match[1].str() == "cc_binary";
      in_rule = true;
      in_deps = false;
    } else if (line == ")") {
      in_rule = false;
    } else if (in_rule) {
      if (std::regex_search(line, match, kName)) targets.back().name = match[1];
      if (absl::StrContains(line, "testonly = True")) targets.back().for_tests = true;
      if (absl::StrContains(line, "deps = [")) in_deps = true;
      if (in_deps) {
        for (std::sregex_iterator it(line.begin(), line.end(), kLabel), end; it != end; ++it) {
          targets.back().deps.push_back((*it)[1]);
        }
      }
      if (in_deps && absl::StrContains(line, "]")) in_deps = false;
    }
  }
  return targets;
}

/// Packages whose targets ship nothing.
bool IsOutside(const std::string& module) {
  return module == "bench" || module == "tests" || module == "bazel" || module == "docs" || module == "tools" ||
         module == "packaging";
}

TEST(ArchitectureTest, TheFoldersOfTheDesignAreThere) {
  for (const char* const folder :
       {"bazel", "kvmanager/api", "codecs/raw", "codecs/hack", "attention", "transport/tcp", "client/cli", "monitoring",
        "examples/engine", "examples/model", "tests", "docs", "tools"}) {
    EXPECT_TRUE(std::filesystem::is_directory(Root() / folder)) << folder;
  }
  for (const char* const file : {"WORKSPACE", "BUILD", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md",
                                 ".bazelrc", ".clang-format", ".ci/run", "docs/codecs.md", "docs/api.md",
                                 "docs/operating.md", "docs/metrics.md", "tools/setup", "tools/demo", "tools/test"}) {
    EXPECT_TRUE(std::filesystem::is_regular_file(Root() / file)) << file;
  }
}

// A test counts as well: what it needs of a higher room belongs there, with the test.
TEST(ArchitectureTest, NoArrowBetweenRoomsRunsUp) {
  std::set<std::string> higher(std::begin(kRooms), std::end(kRooms));
  for (const char* const room : kRooms) {
    higher.erase(room);
    ASSERT_TRUE(std::filesystem::is_directory(Root() / room)) << room;
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(Root() / room)) {
      const std::string name = entry.path().filename();
      if (!absl::EndsWith(name, ".h") && !absl::EndsWith(name, ".cc")) continue;
      ++files;
      std::istringstream text(ReadFile(absl::StrCat(room, "/", name)));
      for (std::string line; std::getline(text, line);) {
        if (!absl::StartsWith(line, "#include \"kvmanager/")) continue;
        const std::string included = line.substr(10, line.rfind('/') - 10);
        EXPECT_EQ(higher.count(included), 0u) << room << "/" << name << ": " << line;
      }
    }
    EXPECT_GE(files, 4) << room;
  }
  EXPECT_FALSE(std::filesystem::exists(Root() / "kvmanager/server"));
}

// What differs between kinds of memory is behind MemoryBackend (store/) and MemoryCalls (rpc/). A line counts that asks
// for the kind, or for what only one kind can do.
TEST(ArchitectureTest, FewBranchesAskForTheKindOfMemory) {
  static const std::regex kBranch(
      R"re([!=]= CacheConfig::kHost|CacheConfig::kHost [!=]=|\b(on_device|follows_tables|writes_at_once)\(\))re"),
      kDeclared(R"re(^\s*(///?|virtual |bool )|\) const override)re"),
      kNoProduct(R"re(_test\.|testing|fixture|simulated|_walk)re");
  std::vector<std::string> branches;
  int files = 0;
  for (const char* const room : {"kvmanager/store", "kvmanager/rpc"}) {
    for (const auto& entry : std::filesystem::directory_iterator(Root() / room)) {
      const std::string name = entry.path().filename();
      if ((!absl::EndsWith(name, ".h") && !absl::EndsWith(name, ".cc")) || std::regex_search(name, kNoProduct))
        continue;
      ++files;
      std::istringstream text(ReadFile(absl::StrCat(room, "/", name)));
      for (std::string line; std::getline(text, line);) {
        if (std::regex_search(line, kBranch) && !std::regex_search(line, kDeclared)) {
          branches.push_back(absl::StrCat(name, ": ", line));
        }
      }
    }
  }
  EXPECT_GT(files, 60);
  EXPECT_GE(branches.size(), 1u);  // they are found
  EXPECT_LE(branches.size(), 8u) << absl::StrJoin(branches, "\n");
}

TEST(ArchitectureTest, ThePageStoreIsSmall) {
  const std::string header = ReadFile("kvmanager/store/page_store.h");
  EXPECT_LE(std::count(header.begin(), header.end(), '\n'), 180);
  const size_t begin = header.find("class PageStore {"), end = header.find("\n};", begin);
  ASSERT_NE(end, std::string::npos);
  const std::string body = header.substr(begin, end - begin);
  static const std::regex kMethod(R"re(\n  virtual [^~])re");
  const auto methods = std::distance(std::sregex_iterator(body.begin(), body.end(), kMethod), std::sregex_iterator());
  EXPECT_GE(methods, 5);
  EXPECT_LE(methods, 16);
}

TEST(ArchitectureTest, EveryPlaceThatTheDesignNamesIsThere) {
  // Section 4's list: - Where ...? `folder/file.cc` `Class::Function`, `Other`; `folder/other.h` `Type`.
  const std::string section = Sections(4, 5);
  static const std::regex kItem(R"re(\n- ([^`]*\?)(.*))re"), kCode(R"re(`([^`]+)`)re"),
      kFile(R"re(([a-z_]+/)+[a-z_]+\.(h|cc|cu))re");
  int items = 0;
  for (std::sregex_iterator it(section.begin(), section.end(), kItem), end; it != end; ++it, ++items) {
    const std::string places = (*it)[2];
    std::string file, text;
    int names = 0;
    for (std::sregex_iterator code(places.begin(), places.end(), kCode); code != end; ++code) {
      const std::string word = (*code)[1];
      if (std::regex_match(word, kFile)) {
        EXPECT_TRUE(file.empty() || names > 0) << (*it)[1] << " names nothing in " << file;
        file = std::filesystem::exists(Root() / "kvmanager" / word) ? "kvmanager/" + word : word;
        text = ReadFile(file);
        names = 0;
        EXPECT_FALSE(text.empty()) << (*it)[1] << " there is no " << file;
        continue;
      }
      ++names;
      ASSERT_FALSE(file.empty()) << (*it)[1] << " names no file before " << word;
      // A function with its class stands where it is defined; any other name stands somewhere.
      const std::string pattern = absl::StrContains(word, "::") ? word + "\\(" : "\\b" + word + "\\b";
      EXPECT_TRUE(std::regex_search(text, std::regex(pattern)))
          << (*it)[1] << " there is no " << word << " in " << file;
    }
    EXPECT_GT(names, 0) << (*it)[1];
  }
  EXPECT_GE(items, 12);
  EXPECT_EQ(items, std::count(section.begin(), section.end(), '?'));  // none was passed over
}

TEST(ArchitectureTest, TheDesignIsShort) {
  const std::string design = ReadFile("docs/design.md");
  EXPECT_LE(design.find("\n## 7. "), 15u * 1024) << "sections 0 to 6 of docs/design.md";
}

TEST(ArchitectureTest, ADecisionHasContextDecisionAndConsequences) {
  // ### title, then the three parts, each a paragraph.
  const std::string decisions = ReadFile("docs/decisions.md");
  static const std::regex kRecord(
      R"re(\n\n\*\*Context\.\*\* \S.*\n\n\*\*Decision\.\*\* \S.*\n\n\*\*Consequences\.\*\* \S.*\n+)re");
  std::set<std::string> titles;
  for (size_t at = decisions.find("\n### "); at != std::string::npos;) {
    const size_t next = decisions.find("\n### ", at + 1), body = decisions.find('\n', at + 1);
    const std::string title = decisions.substr(at + 5, body - at - 5);
    EXPECT_TRUE(titles.insert(title).second) << title << " stands twice";
    std::string record = decisions.substr(body, next == std::string::npos ? next : next - body + 1);
    record = record.substr(0, record.find("\n## "));  // of the next group
    EXPECT_TRUE(std::regex_match(record, kRecord)) << title;
    at = next;
  }
  EXPECT_GE(titles.size(), 30u);
}

TEST(ArchitectureTest, EveryFolderIsOneOfTheDesigns) {
  for (const std::string& package : Packages()) {
    const std::string module = ModuleOf(package);
    EXPECT_TRUE(IsOutside(module) || Arrows().count(module) > 0) << package << " is in no module of docs/design.md";
  }
}

TEST(ArchitectureTest, DependenciesFollowTheArrows) {
  int checked = 0;
  for (const std::string& package : Packages()) {
    const std::string module = ModuleOf(package);
    const auto arrows = Arrows().find(module);
    if (arrows == Arrows().end()) continue;
    for (const Target& target : Targets(ReadFile(package + "/BUILD"))) {
      // kvctl wires what it commands and shows together; the client's library stays small.
      if (target.for_tests || package == "client/cli") continue;
      for (const std::string& label : target.deps) {
        const std::string to = ModuleOf(label.substr(2, label.find(':') - 2));
        if (to == "bazel" || to == module) continue;
        ++checked;
        EXPECT_TRUE(arrows->second.count(to) > 0) << package << ":" << target.name << " depends on " << label;
      }
    }
  }
  EXPECT_GT(checked, 20);
}

TEST(ArchitectureTest, OnlyAttentionInItsOwnProcessTakesMoreOfTheClient) {
  for (const Target& target : Targets(ReadFile("client/BUILD"))) {
    if (target.for_tests || target.name == "in_process") continue;
    for (const std::string& label : target.deps) {
      const std::string to = ModuleOf(label.substr(2, label.find(':') - 2));
      EXPECT_TRUE(to != "codecs" && to != "attention") << "client:" << target.name << " depends on " << label;
    }
  }
}

TEST(ArchitectureTest, NeverTheStoreBehindTheClientsBack) {
  for (const std::string& package : Packages()) {
    const std::string module = ModuleOf(package);
    if (module != "client" && module != "examples") continue;
    for (const Target& target : Targets(ReadFile(package + "/BUILD"))) {
      for (const std::string& label : target.deps) {
        EXPECT_NE(ModuleOf(label.substr(2, label.find(':') - 2)), "kvmanager/store") << package << ":" << target.name;
      }
    }
  }
}

TEST(ArchitectureTest, ACodecIsOneFolderAndALineInBuiltin) {
  for (const std::string& package : Packages()) {
    const std::string module = ModuleOf(package);
    if (module == "codecs" || IsOutside(module)) continue;
    for (const Target& target : Targets(ReadFile(package + "/BUILD"))) {
      if (target.for_tests) continue;
      for (const std::string& label : target.deps) {
        // Raw pages are the store's own form, and attention merges them with any codec's; training is no codec, nor
        // are the adapter of plug-ins and their process, what all codecs' kernels share, nor pages that are lowered.
        EXPECT_TRUE(!absl::StartsWith(label, "//codecs/") || label == "//codecs/raw:raw_attention" ||
                    label == "//codecs/abi:plugin_codec" || label == "//codecs/abi:plugin_process" ||
                    label == "//codecs/abi:plugin_host" || absl::StartsWith(label, "//codecs/device:") ||
                    absl::StartsWith(label, "//codecs/calibrate:") || label == "//codecs/zack_hack:sensitivity" ||
                    label == "//codecs/ladder:lower_pages")
            << package << ":" << target.name << " depends on " << label;
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager::testing
