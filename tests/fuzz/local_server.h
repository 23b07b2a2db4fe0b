// A daemon in this process, on a Unix socket and a thread of its own.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/server.h"
#include "spdlog/spdlog.h"
#include "tests/harness.h"
#include "tests/raw_rpc.h"

namespace kvmanager::fuzz {

class LocalServer {
 public:
  LocalServer() {
    spdlog::set_level(spdlog::level::off);
    Options options;
    options.listen = {absl::StrCat("unix:", directory_.path(), "/kv.sock")};
    options.host_pool_bytes = 32 << 20;
    options.threads = 1;
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(options);
    KV_CHECK(server.ok());
    server_ = std::move(*server);
    // KJ's statics are made here, before the threads: ThreadSanitizer cannot see their guards in the uninstrumented
    // library.
    { testing::RawRpc statics; }
    loop_ = std::thread([this] { server_->Run(); });
  }
  ~LocalServer() {
    server_->Stop();
    loop_.join();
  }
  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

  std::string address() const { return server_->listen_address(); }
  std::string admin() const { return server_->admin_address(); }

 private:
  testing::TempDir directory_;
  std::unique_ptr<Server> server_;
  std::thread loop_;
};

}  // namespace kvmanager::fuzz
