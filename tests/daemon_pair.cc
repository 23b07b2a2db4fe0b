#include "tests/daemon_pair.h"

#include "tests/matchers.h"

namespace kvmanager::testing {

using client::Client;

void DaemonPairTest::Start(DaemonOptions sender, DaemonOptions receiver) {
  for (DaemonOptions* const options : {&sender, &receiver}) {
    options->more_flags.insert(options->more_flags.end(), {"--threads", "2"});
  }
  ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start(sender));
  ASSERT_OK_AND_ASSIGN(receiver_, DaemonProcess::Start(receiver));
  ASSERT_OK_AND_ASSIGN(here_, Client::Connect(sender_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(there_, Client::Connect(receiver_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(cache_, here_->OpenCache(options_));
  ASSERT_OK_AND_ASSIGN(other_, there_->OpenCache(options_));
}

void DaemonPairTest::TearDown() {
  cache_.reset();
  other_.reset();
  here_.reset();
  there_.reset();
}

uint64_t DaemonPairTest::UsedBytes(Client& client) {
  absl::StatusOr<client::DaemonDescription> status = client.Status();
  EXPECT_OK(status);
  return status.ok() ? status->pools.at(0).used_bytes : UINT64_MAX;
}

void DaemonPairTest::ExpectNothingAt(Client& client) {
  EXPECT_TRUE(Eventually([&] { return UsedBytes(client) == 0; }, kPeerMs)) << UsedBytes(client);
  ASSERT_OK_AND_ASSIGN(const client::DaemonDescription status, client.Status());
  EXPECT_EQ(status.published_blocks, 0u);
  EXPECT_EQ(status.waiting_hand_offs, 0u);
}

std::map<std::string, double> DaemonPairTest::Held(const DaemonProcess& daemon) {
  const absl::StatusOr<MetricsPage> page = Scrape(daemon);
  EXPECT_OK(page);
  std::map<std::string, double> held;
  if (!page.ok()) return held;
  for (const char* const name : {"kvmanager_pool_used_bytes", "kvmanager_pages", "kvmanager_page_bytes",
                                 "kvmanager_published_blocks", "kvmanager_held_sequences", "kvmanager_tickets",
                                 "kvmanager_transport_active_transfers", "kvmanager_hand_offs_waiting"}) {
    EXPECT_GT(page->families.count(name), 0u) << name;
    held[name] = page->Sum(name);
  }
  return held;
}

double DaemonPairTest::Metric(const DaemonProcess& daemon, const std::string& name,
                              const std::vector<std::string>& labels) {
  const absl::StatusOr<MetricsPage> page = Scrape(daemon);
  EXPECT_OK(page);
  return page.ok() ? page->Sum(name, labels) : -1;
}

}  // namespace kvmanager::testing
