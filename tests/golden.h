// Golden files: lines "key: value" in tests/golden, made when a format was fixed, that must come out again.
//
// Each golden test is a program of its own with one option: `bazel run --config=opt //tests:golden_NAME_test --
// --write_golden` writes the file in the source tree. It adds lines and refuses to change the value of a key, because a
// format that others have read or written never changes in place: a new one has a new version, which is in the key.
#pragma once

#include <string>
#include <vector>

namespace kvmanager::testing {

struct GoldenFile {
  std::string name;      // tests/golden/NAME.txt
  std::string about;     // comment at its head, without '#'
  bool may_drop = true;  // whether --write_golden removes keys that come out no more
  std::string advice;    // what to do about a line that does not come out again
};

/// "key: value"; keys are unique.
struct GoldenLine {
  std::string key, value;
};

/// What the file says of `key`; empty: nothing.
std::string GoldenValue(const GoldenFile& file, const std::string& key);

/// Compares `lines` with the file, or writes it.
void ExpectGolden(const GoldenFile& file, const std::vector<GoldenLine>& lines);

/// main() of a golden test.
int GoldenMain(int argc, char** argv);

/// Lower-case hexadecimal.
std::string HexOf(const std::string& bytes);

}  // namespace kvmanager::testing
