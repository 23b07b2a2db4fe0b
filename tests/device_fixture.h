// The fixture of tests that have a daemon on the first GPU and one client of it. All on the test's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/device.h"
#include "kvmanager/memory/device_testing.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {

/// In every test that includes this: streams that wait must not hold up those of the test itself.
inline const bool kManyStreams = [] {
  AllowManyStreams();
  return true;
}();

class DeviceDaemonTest : public GpuTest {
 protected:
  /// flags: more of kvmanagerd's.
  void Start(const std::string& pool_bytes = "1GiB", const std::vector<std::string>& flags = {},
             uint64_t host_pool_bytes = 64 << 20) {
    DaemonOptions options;
    options.host_pool_bytes = host_pool_bytes;
    options.more_flags = {"--device-pool-bytes", pool_bytes, "--calibration-dir", artifacts_.path()};
    options.more_flags.insert(options.more_flags.end(), flags.begin(), flags.end());
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, client::Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(device_, client::DeviceClient::Open(client_.get(), 0));
  }
  void TearDown() override {
    device_.reset();
    client_.reset();
    daemon_.reset();
  }
  /// The sum of the daemon's series of this name, kvmanager_ before it; -1: there is no page.
  double Metric(const std::string& name) {
    const auto page = Scrape(*daemon_);
    return page.ok() ? page->Sum(absl::StrCat("kvmanager_", name)) : -1;
  }

  TempDir artifacts_;  // the daemon's, empty at first
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::DeviceClient> device_;
};

}  // namespace kvmanager::testing
