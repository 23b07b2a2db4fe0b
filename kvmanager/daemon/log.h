// The log, on stderr. Where that is the journal of systemd, lines have its priorities and no time. A thread of its own
// writes it, so that the daemon does not wait for whoever reads stderr: where nobody does, the oldest of kLinesMax
// lines are lost.
#pragma once

#include <cstddef>
#include <string>

namespace kvmanager {

/// spdlog's default logger. One in the process, made once signals are blocked, as its thread must take none.
class Log {
 public:
  static constexpr size_t kLinesMax = 8192;
  static constexpr int kEndMs = 1000;

  /// level: debug, info, warn, error or off.
  explicit Log(const std::string& level);
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  /// Writes what is left; nothing may be logged any more. If stderr does not take it within kEndMs, the process ends
  /// here with `status`. Returns `status`, for main.
  int End(int status);
};

}  // namespace kvmanager
