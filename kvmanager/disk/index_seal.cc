#include "kvmanager/disk/index_seal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kFileBytesMax = size_t{64} << 20;  // of those that are read whole

// nullopt: it is not there, no file, or larger.
std::optional<std::string> ReadFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return std::nullopt;
  struct stat of;
  std::optional<std::string> text;
  if (fstat(fd, &of) == 0 && S_ISREG(of.st_mode) && static_cast<uint64_t>(of.st_size) <= kFileBytesMax) {
    text.emplace(static_cast<size_t>(of.st_size), '\0');
    for (size_t at = 0; text.has_value() && at < text->size();) {
      const ssize_t got = pread(fd, text->data() + at, text->size() - at, static_cast<off_t>(at));
      if (got == 0 || (got < 0 && errno != EINTR)) text.reset();
      if (got > 0) at += static_cast<size_t>(got);
    }
  }
  close(fd);
  return text;
}

// Lines by name.
absl::StatusOr<std::map<std::string, std::string>> LinesOf(const std::string& index) {
  std::map<std::string, std::string> lines;
  std::error_code error;
  std::filesystem::directory_iterator it(index, error), end;
  for (; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    const bool is_table = absl::EndsWith(name, ".sst");
    if (!is_table && name != "CURRENT" && !absl::StartsWith(name, "MANIFEST-") && !absl::EndsWith(name, ".log"))
      continue;
    uint64_t checksum = 0, bytes = 0;
    if (is_table) {
      std::error_code gone;
      bytes = it->file_size(gone);
    } else {
      const std::optional<std::string> text = ReadFile(it->path());
      if (!text.has_value()) return absl::UnavailableError(absl::StrCat("reading ", it->path().string()));
      checksum = Checksum(text->data(), text->size());
      bytes = text->size();
    }
    lines[name] = absl::StrFormat("%016x %u %s\n", checksum, bytes, name);
  }
  if (error) return absl::UnavailableError(absl::StrCat("reading ", index, ": ", error.message()));
  return lines;
}

// The number of "MANIFEST-NUMBER".
std::optional<uint64_t> ManifestNumber(absl::string_view name) {
  uint64_t number;
  if (!absl::ConsumePrefix(&name, "MANIFEST-") || !absl::SimpleAtoi(name, &number)) return std::nullopt;
  return number;
}

// RocksDB makes a manifest of a higher number each time. A daemon of an earlier version knows no seal.
bool WasOpenedSince(absl::string_view said, const std::string& index) {
  const std::optional<std::string> current = ReadFile(index + "/CURRENT");
  const auto now = ManifestNumber(absl::StripTrailingAsciiWhitespace(current.value_or("")));
  if (!now.has_value() || !ReadFile(absl::StrCat(index, "/", absl::StripTrailingAsciiWhitespace(*current))))
    return false;
  for (const absl::string_view line : absl::StrSplit(said, '\n')) {
    const auto then = ManifestNumber(line.substr(std::min(line.size(), line.rfind(' ') + 1)));
    if (then.has_value() && *then >= *now) return false;
  }
  return true;
}

std::string LastLine(const std::string& lines) {
  return absl::StrFormat("%016x\n", Checksum(lines.data(), lines.size()));
}

}  // namespace

absl::StatusOr<std::string> SealIndex(const std::string& index) {
  KV_ASSIGN_OR_RETURN(const auto lines, LinesOf(index));
  std::string text;
  for (const auto& [name, line] : lines) text += line;
  return text + LastLine(text);
}

absl::Status CheckIndexSeal(const std::string& sealed, const std::string& index) {
  const std::optional<std::string> text = ReadFile(sealed);
  if (!text.has_value()) return absl::OkStatus();
  constexpr size_t kLastBytes = 17;
  if (text->size() < kLastBytes) return absl::OkStatus();
  const std::string said = text->substr(0, text->size() - kLastBytes);
  if (text->substr(said.size()) != LastLine(said)) return absl::OkStatus();
  if (WasOpenedSince(said, index)) return absl::OkStatus();
  absl::StatusOr<std::map<std::string, std::string>> lines = LinesOf(index);
  if (!lines.ok()) return absl::DataLossError(lines.status().message());
  for (const absl::string_view line : absl::StrSplit(said, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 2));
    if (words.size() != 3) return absl::OkStatus();
    const auto found = lines->find(words[2]);
    const std::string path = absl::StrCat(index, "/", words[2]);
    if (found == lines->end()) return absl::DataLossError(absl::StrCat(path, " is missing"));
    if (found->second != absl::StrCat(line, "\n")) {
      return absl::DataLossError(absl::StrCat(path, " is not as the last daemon left it"));
    }
    lines->erase(found);
  }
  if (lines->empty()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(index, "/", lines->begin()->first, " was not there when the last daemon ended"));
}

}  // namespace kvmanager
