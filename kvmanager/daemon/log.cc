#include "kvmanager/daemon/log.h"

#include <spdlog/async.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "kvmanager/base/journal.h"

namespace kvmanager {
namespace {

class JournalPriority final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& line, const std::tm&, spdlog::memory_buf_t& to) override {
    const char* const prefix = line.level >= spdlog::level::err     ? kJournalError
                               : line.level == spdlog::level::warn  ? kJournalWarning
                               : line.level == spdlog::level::debug ? kJournalDebug
                                                                    : kJournalInfo;
    to.append(prefix, prefix + std::strlen(prefix));
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<JournalPriority>(); }
};

}  // namespace

Log::Log(const std::string& level) {
  spdlog::init_thread_pool(kLinesMax, 1);
  auto log =
      std::make_shared<spdlog::async_logger>("kvmanagerd", std::make_shared<spdlog::sinks::stderr_sink_mt>(),
                                             spdlog::thread_pool(), spdlog::async_overflow_policy::overrun_oldest);
  log->set_level(spdlog::level::from_str(level));
  auto pattern = std::make_unique<spdlog::pattern_formatter>();
  if (IsJournal()) {
    pattern->add_flag<JournalPriority>('*').set_pattern("%*%v");
  } else {
    pattern->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  }
  log->set_formatter(std::move(pattern));
  spdlog::set_default_logger(std::move(log));
}

int Log::End(int status) {
  std::promise<void> written;
  std::thread writer([&written] {
    spdlog::shutdown();
    written.set_value();
  });
  if (written.get_future().wait_for(std::chrono::milliseconds(kEndMs)) != std::future_status::ready) _exit(status);
  writer.join();
  return status;
}

}  // namespace kvmanager
