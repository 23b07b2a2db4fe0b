// What benchmarks of the client share: a kvmanagerd of their own, a clock, percentiles.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace kvmanager::client {

inline double NowUs() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) * 1e6 + double(t.tv_nsec) * 1e-3;
}

struct Percentiles {
  double p50_us = 0, p99_us = 0;
  nlohmann::json Json() const { return {{"p50_us", p50_us}, {"p99_us", p99_us}}; }
};

inline Percentiles Of(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 99 / 100]};
}

/// A kvmanagerd of this benchmark's own, which answers at address() soon.
class BenchDaemon {
 public:
  static absl::StatusOr<BenchDaemon> Start(const std::string& program, const std::vector<std::string>& flags) {
    char directory[] = "/tmp/kv_bench_XXXXXX";
    if (::mkdtemp(directory) == nullptr) return absl::InternalError("no temporary directory");
    BenchDaemon daemon;
    daemon.directory_ = directory;
    std::vector<std::string> words = {program, "--listen", daemon.address(), "--metrics-listen", "127.0.0.1:0"};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    daemon.pid_ = ::fork();
    if (daemon.pid_ == 0) {
      const int null = ::open("/dev/null", O_WRONLY);
      ::dup2(null, 1);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    return daemon;
  }
  BenchDaemon() = default;
  BenchDaemon(BenchDaemon&& other) noexcept
      : directory_(std::move(other.directory_)), pid_(std::exchange(other.pid_, -1)) {}
  ~BenchDaemon() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, nullptr, 0);
    ::unlink((directory_ + "/s").c_str());
    ::rmdir(directory_.c_str());
  }
  std::string address() const { return absl::StrCat("unix:", directory_, "/s"); }

 private:
  std::string directory_;
  pid_t pid_ = -1;
};

}  // namespace kvmanager::client
