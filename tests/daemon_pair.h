// Two daemons, with a client and a cache at each: what tests of hand-offs from the first to the second share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/model.h"

namespace kvmanager::testing {

class DaemonPairTest : public ::testing::Test {
 protected:
  static constexpr int64_t kPeerMs = 5000;  // until a dead or silent peer is given up (docs/design.md, section 6)

  explicit DaemonPairTest(const client::CacheOptions& options = SmallCache("raw", 1)) : options_(options) {}
  /// With two workers each, besides what is asked for.
  void Start(DaemonOptions sender = {}, DaemonOptions receiver = {});
  void TearDown() override;

  static uint64_t UsedBytes(client::Client& client);
  /// Once what is under way has ended: a daemon has no used slot, published block, lease or waiting hand-off.
  static void ExpectNothingAt(client::Client& client);
  /// What a daemon holds, by name: gauges that must be the same before and after a hand-off that came to nothing.
  static std::map<std::string, double> Held(const DaemonProcess& daemon);
  static double Metric(const DaemonProcess& daemon, const std::string& name,
                       const std::vector<std::string>& labels = {});

  const client::CacheOptions options_;
  std::unique_ptr<DaemonProcess> sender_, receiver_;
  std::unique_ptr<client::Client> here_, there_;  // of the sender, and of the receiver
  std::unique_ptr<client::Cache> cache_, other_;  // likewise
};

}  // namespace kvmanager::testing
