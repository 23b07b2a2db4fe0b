// What the tests of two tenants on one daemon share: users, a daemon that both reach, and blocks that one publishes.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "kvmanager/base/status.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

inline constexpr uid_t kAlice = 61001, kBob = 61002;

/// What is done while it lives is done as `uid`. REQUIRES: this process is root's.
class As {
 public:
  explicit As(uid_t uid) { KV_CHECK(seteuid(uid) == 0); }
  ~As() { KV_CHECK(seteuid(0) == 0); }
};

#define NEEDS_ROOT() \
  if (getuid() != 0) GTEST_SKIP() << "needs root: only root can be several users"

inline absl::StatusOr<std::unique_ptr<Client>> ConnectAs(uid_t uid, const std::string& address,
                                                         const Client::Options& options = {}) {
  const As as(uid);
  return Client::Connect(address, options);
}

class TwoTenantsTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0); }

  std::string PathOf(const char* name) const { return absl::StrCat(directory_.path(), "/", name); }
  /// A daemon whose engines' socket is open to everybody.
  absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const std::vector<std::string>& more_flags = {},
                                                       const char* socket = "kv.sock") {
    DaemonOptions options;
    options.listen = absl::StrCat("unix:", PathOf(socket));
    options.more_flags = more_flags;
    const mode_t before = umask(0);
    auto daemon = DaemonProcess::Start(options);
    umask(before);
    return daemon;
  }
  void WriteTenants(const std::string& text) {
    const std::string next = PathOf("next.json");
    std::ofstream(next) << text;
    ASSERT_EQ(chmod(next.c_str(), 0600), 0);
    ASSERT_EQ(rename(next.c_str(), PathOf("tenants.json").c_str()), 0);
  }
  static CacheOptions Options(const std::string& tenant) {
    CacheOptions options = SmallCache("raw", 0);
    options.tenant = tenant;
    return options;
  }
  static absl::Status OpenStatus(Client& client, const std::string& tenant) {
    return client.OpenCache(Options(tenant)).status();
  }
  static int Hits(Cache& cache, const std::vector<BlockName>& names) {
    const auto found = cache.Match({{names}});
    EXPECT_OK(found);
    return found.ok() ? (*found)[0].hit_blocks : -1;
  }
  /// A published sequence of `source`: four blocks under `names`.
  static void Publish(Cache& cache, const Source& source, const std::vector<BlockName>& names) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache.CreateSequence());
    ASSERT_OK(Load(cache, made.sequence->id(), source, 0, 4 * 64 + 1, 65));
    ASSERT_OK_AND_ASSIGN(const client::PublishOutcome outcome, made.sequence->Publish(names));
    EXPECT_EQ(outcome.published, 4);
  }

  TempDir directory_;
};

}  // namespace kvmanager::testing
