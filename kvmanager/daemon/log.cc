#include "kvmanager/daemon/log.h"

#include <spdlog/async.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>

namespace kvmanager {

Log::Log(const std::string& level) {
  spdlog::init_thread_pool(kLinesMax, 1);
  auto log =
      std::make_shared<spdlog::async_logger>("kvmanagerd", std::make_shared<spdlog::sinks::stderr_sink_mt>(),
                                             spdlog::thread_pool(), spdlog::async_overflow_policy::overrun_oldest);
  log->set_level(spdlog::level::from_str(level));
  log->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
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
