// What tests look at of the log.
#pragma once

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace kvmanager::testing {

/// The lines of the log since it was made.
class CapturedLog {
 public:
  CapturedLog() : before_(spdlog::default_logger()), sink_(std::make_shared<Sink>()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("captured", sink_));
  }
  ~CapturedLog() { spdlog::set_default_logger(before_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  /// Those that have all of these words.
  std::vector<std::string> Lines(const std::vector<std::string>& words) {
    std::vector<std::string> lines = sink_->lines();
    std::erase_if(lines, [&](const std::string& line) {
      return !std::all_of(words.begin(), words.end(),
                          [&](const std::string& word) { return absl::StrContains(line, word); });
    });
    return lines;
  }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::vector<std::string> lines() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return lines_;
    }

   private:
    void sink_it_(const spdlog::details::log_msg& message) override {
      lines_.emplace_back(message.payload.data(), message.payload.size());
    }
    void flush_() override {}
    std::vector<std::string> lines_;
  };

  const std::shared_ptr<spdlog::logger> before_;
  const std::shared_ptr<Sink> sink_;
};

}  // namespace kvmanager::testing
