// Clients of a FakeDaemon, and what they open there.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "client/client.h"
#include "client/fake_daemon.h"

namespace kvmanager::client {

inline std::unique_ptr<Client> ConnectTo(const FakeDaemon& daemon, Client::Options options = {}) {
  auto client = Client::Connect(daemon.address(), options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

inline CacheOptions SmallCache() {
  CacheOptions options;
  options.model = std::string("m");
  options.layers = 1;
  options.kv_heads = 2;
  options.query_heads = 8;
  options.head_dim = 128;
  return options;
}

}  // namespace kvmanager::client
