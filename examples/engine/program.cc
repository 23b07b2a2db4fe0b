#include "examples/engine/program.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {

absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t bytes_max) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file)
    return absl::NotFoundError(absl::StrCat("cannot read ", path, error ? ": " + error.message() : ""));
  std::string content(std::min(size, bytes_max), '\0');
  file.read(content.data(), std::streamsize(content.size()));
  content.resize(size_t(file.gcount()));
  return content;
}

absl::Status WriteFile(const std::string& path, absl::string_view content) {
  const std::string temporary = absl::StrCat(path, ".", getpid());
  std::ofstream file(temporary, std::ios::binary);
  file.write(content.data(), std::streamsize(content.size()));
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    std::filesystem::remove(temporary, error);
    return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

absl::Status CheckWritable(absl::string_view option, const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return InvalidField(option, path, "a file, not a directory");
  std::string directory = std::filesystem::path(path).parent_path().string();
  if (directory.empty()) directory = ".";
  if (!std::filesystem::is_directory(directory, error)) {
    return absl::NotFoundError(absl::StrCat("no directory ", directory, " for ", option, " ", path));
  }
  // Not access(): it says yes to root where writing fails.
  const std::string probe = absl::StrCat(path, ".probe.", getpid());
  KV_RETURN_IF_ERROR(WriteFile(probe, ""));
  std::filesystem::remove(probe, error);
  return absl::OkStatus();
}

absl::Status CheckTensorsOut(absl::string_view option, const std::string& path) {
  if (path.empty()) return Misuse(InvalidField(option, "empty", "a file's path"));
  if (!absl::EndsWith(path, ".safetensors")) return Misuse(InvalidField(option, path, "FILE.safetensors"));
  return CheckWritable(option, path);
}

Progress::Progress(std::string what, bool quiet)
    : what_(std::move(what)), quiet_(quiet), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (terminal_ && shown_ >= 0) std::fprintf(stderr, "\r\033[K");
}

void Progress::Update(int64_t done, int64_t total) {
  const int64_t steps = terminal_ ? 40 : 10, step = total > 0 ? done * steps / total : steps;
  if (quiet_ || step == shown_) return;
  shown_ = step;
  if (terminal_) {
    std::fprintf(stderr, "\r%s [%s%s] %lld/%lld\033[K", what_.c_str(), std::string(step, '#').c_str(),
                 std::string(steps - step, '-').c_str(), static_cast<long long>(done), static_cast<long long>(total));
    std::fflush(stderr);
  } else {
    std::fprintf(stderr, "%s: %lld of %lld\n", what_.c_str(), static_cast<long long>(done),
                 static_cast<long long>(total));
  }
}

void Progress::Say(absl::string_view line) {
  if (quiet_) return;
  std::fprintf(stderr, "%s%s: %.*s\n", terminal_ ? "\r\033[K" : "", what_.c_str(), int(line.size()), line.data());
  shown_ = -1;
}

int ExitCode(const char* program, const absl::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", program, status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
  }
  return ExitCodeOf(status);
}

int CoreCount() { return std::max(1u, std::thread::hardware_concurrency()); }

}  // namespace kvmanager::engine
