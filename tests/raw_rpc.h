// Cap'n Proto calls without the client library, for requests that it would never make.
//
// One RawRpc per thread, and no client::Client on that thread: each has the thread's event loop.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "tests/harness.h"
#include "tests/model.h"

namespace kvmanager::testing {

class RawRpc {
 public:
  RawRpc() : io_(kj::setupAsyncIo()) {}
  kj::WaitScope& wait() { return io_.waitScope; }
  kj::Timer& timer() { return io_.provider->getTimer(); }

  /// One connection to the daemon at "unix:PATH" or "tcp:HOST:PORT".
  struct Connection {
    kj::Own<kj::AsyncCapabilityStream> stream;
    std::unique_ptr<capnp::TwoPartyClient> rpc;
    api::Daemon::Client daemon = nullptr;
  };
  std::unique_ptr<Connection> Connect(const std::string& address, bool hello = true) {
    const int fd = ConnectSocket(address);
    if (fd < 0) return nullptr;
    auto connection = std::make_unique<Connection>();
    connection->stream = io_.lowLevelProvider->wrapUnixSocketFd(
        fd, kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP | kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC);
    connection->rpc = std::make_unique<capnp::TwoPartyClient>(*connection->stream, 1);
    connection->daemon = connection->rpc->bootstrap().castAs<api::Daemon>();
    if (hello) {
      auto request = connection->daemon.helloRequest();
      request.initRequest().setApiMajor(api::API_MAJOR);
      request.getRequest().setClient("raw");
      auto reply = request.send().wait(wait());
      EXPECT_EQ(reply.getReply().getStatus().getCode(), 0);
    }
    return connection;
  }

  /// What a request must leave unchanged: sequences, caches, leases and the pool's use, as text.
  std::string Fingerprint(Connection& connection) {
    api::Admin::Client admin = connection.daemon.adminRequest().send().wait(wait()).getAdmin();
    auto sequences = admin.sequencesRequest().send().wait(wait());
    auto caches = admin.cachesRequest().send().wait(wait());
    auto status = admin.statusRequest().send().wait(wait());
    std::string text = kj::str(sequences, caches).cStr();
    const api::DaemonStatus::Reader s = status.getStatus();
    absl::StrAppend(&text, " leases ", s.getLeases(), " blocks ", s.getPublishedBlocks());
    for (const auto pool : s.getPools()) absl::StrAppend(&text, " used ", pool.getUsedBytes());
    return text;
  }

 private:
  kj::AsyncIoContext io_;
};

inline void FillConfig(const client::CacheOptions& options, api::CacheConfig::Builder to) {
  to.setModel(options.model);
  to.setRevision(options.revision);
  to.setTenant(options.tenant);
  to.setRope(options.rope);
  to.setLayers(options.layers);
  to.setKvHeads(options.kv_heads);
  to.setQueryHeads(options.query_heads);
  to.setHeadDim(options.head_dim);
  to.setPageTokens(options.page_tokens);
  to.setDtype(options.dtype == DType::kBFloat16 ? api::DType::BFLOAT16 : api::DType::FLOAT16);
  to.setTensorParallelSize(options.tensor_parallel_size);
  to.setCodec(options.codec);
  to.setLagPages(options.lag_pages);
}

/// An error of `code` about `field`, with its value and bound.
inline ::testing::AssertionResult Refuses(api::Status::Reader status, int code, absl::string_view field) {
  const std::string got_field = status.getField().cStr();
  if (status.getCode() == code && got_field.find(std::string(field)) != std::string::npos &&
      status.getBound().size() > 0 && status.getMessage().size() > 0) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "code " << status.getCode() << " \"" << status.getMessage().cStr()
                                       << "\" field \"" << got_field << "\" value \"" << status.getValue().cStr()
                                       << "\" bound \"" << status.getBound().cStr() << "\", expected code " << code
                                       << " about " << std::string(field);
}

}  // namespace kvmanager::testing
