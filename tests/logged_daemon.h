// A kvmanagerd whose log a test reads: DaemonOptions::program of one that writes it to a file.
#pragma once

#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/harness.h"

namespace kvmanager::testing {

class DaemonLog {
 public:
  /// directory: outlives the daemon.
  explicit DaemonLog(const std::string& directory)
      : program_(absl::StrCat(directory, "/logged_kvmanagerd")), log_(absl::StrCat(directory, "/log")) {
    std::ofstream(program_) << "#!/bin/sh\nexec '" << DataPath("kvmanager/daemon/kvmanagerd") << "' \"$@\" 2>>'" << log_
                            << "'\n";
    (void)chmod(program_.c_str(), 0700);
  }

  const std::string& program() const { return program_; }
  std::string Text() const {
    std::ifstream file(log_);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  /// Whether it says `words` within some seconds.
  bool Says(const std::string& words) const {
    return Eventually([&] { return Text().find(words) != std::string::npos; });
  }

 private:
  const std::string program_, log_;
};

}  // namespace kvmanager::testing
