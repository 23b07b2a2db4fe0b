#include "tests/golden.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/harness.h"

namespace kvmanager::testing {
namespace {

bool write_golden = false;  // set by GoldenMain before the tests run

std::string PathOf(const GoldenFile& file) {
  const std::string path = absl::StrCat("tests/golden/", file.name, ".txt");
  const char* const tree = std::getenv("BUILD_WORKSPACE_DIRECTORY");  // of `bazel run`
  return write_golden && tree != nullptr ? absl::StrCat(tree, "/", path) : DataPath(path);
}

std::map<std::string, std::string> ReadGolden(const std::string& path) {
  std::map<std::string, std::string> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t colon = line.find(": ");
    EXPECT_NE(colon, std::string::npos) << path << " has a line that is not \"key: value\": " << line;
    if (colon == std::string::npos) continue;
    EXPECT_TRUE(lines.emplace(line.substr(0, colon), line.substr(colon + 2)).second) << path << " says twice " << line;
  }
  return lines;
}

void WriteGolden(const GoldenFile& file, const std::string& path, const std::vector<GoldenLine>& lines) {
  std::ofstream out(path, std::ios::trunc);
  for (absl::string_view line : absl::StrSplit(file.about, '\n')) out << "# " << std::string(line) << "\n";
  for (const GoldenLine& line : lines) out << line.key << ": " << line.value << "\n";
  out.close();
  EXPECT_TRUE(out.good()) << "cannot write " << path;
}

}  // namespace

std::string GoldenValue(const GoldenFile& file, const std::string& key) {
  const std::map<std::string, std::string> golden = ReadGolden(PathOf(file));
  const auto found = golden.find(key);
  return found == golden.end() ? "" : found->second;
}

void ExpectGolden(const GoldenFile& file, const std::vector<GoldenLine>& lines) {
  const std::string path = PathOf(file);
  std::map<std::string, std::string> golden = ReadGolden(path);
  std::string changed, added, missing;
  for (const GoldenLine& line : lines) {
    const auto found = golden.find(line.key);
    if (found == golden.end()) {
      absl::StrAppend(&added, "  ", line.key, ": ", line.value, "\n");
      continue;
    }
    if (found->second != line.value) {
      absl::StrAppend(&changed, "  ", line.key, "\n    was ", found->second, "\n    is  ", line.value, "\n");
    }
    golden.erase(found);
  }
  for (const auto& [key, value] : golden) absl::StrAppend(&missing, "  ", key, ": ", value, "\n");
  const std::string lines_of = absl::StrCat("These lines of tests/golden/", file.name, ".txt ");
  if (!changed.empty()) ADD_FAILURE() << lines_of << "have another value now. " << file.advice << "\n" << changed;
  if (!missing.empty() && !(write_golden && file.may_drop)) {
    ADD_FAILURE() << lines_of << "do not come out now. " << file.advice << "\n" << missing;
  }
  if (write_golden) {
    if (!::testing::Test::HasFailure()) WriteGolden(file, path, lines);
    return;
  }
  if (!added.empty()) {
    ADD_FAILURE() << "tests/golden/" << file.name << ".txt lacks these lines. If they are meant, write them: bazel run "
                  << "--config=opt //tests:golden_" << file.name << "_test -- --write_golden\n"
                  << added;
  }
}

std::string HexOf(const std::string& bytes) { return absl::BytesToHexString(bytes); }

int GoldenMain(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  write_golden = argc == 2 && std::string(argv[1]) == "--write_golden";
  if (argc > 1 && !write_golden) {
    std::fprintf(stderr, "unknown option %s; this test has --write_golden\n", argv[1]);
    return 2;
  }
  return RUN_ALL_TESTS();
}

}  // namespace kvmanager::testing
