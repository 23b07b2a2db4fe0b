#include "kvmanager/base/address.h"

#include <gtest/gtest.h>

#include <string>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

TEST(AddressTest, HostsAndPorts) {
  const auto name = ParseHostPort("f", "example.org:9464");
  ASSERT_TRUE(name.ok()) << name.status();
  EXPECT_EQ(name->host, "example.org");
  EXPECT_EQ(name->port, 9464);
  const auto six = ParseHostPort("f", "[::1]:0");
  ASSERT_TRUE(six.ok()) << six.status();
  EXPECT_EQ(six->host, "::1");
  EXPECT_EQ(six->port, 0);
  for (const char* const bad :
       {"", "host", ":80", "host:", "host:65536", "host:-1", "host:8o", "::1:80", "[::1:80", "[]:80"}) {
    const auto refused = ParseHostPort("--flag", bad);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << bad;
    EXPECT_EQ(DetailOf(refused.status()).field, "--flag") << bad;
    EXPECT_EQ(DetailOf(refused.status()).value, bad);
  }
}

TEST(AddressTest, WithTheKernelsPort) {
  EXPECT_EQ(WithPort("127.0.0.1:0", 9464), "127.0.0.1:9464");
  EXPECT_EQ(WithPort("tcp:[::1]:0", 65535), "tcp:[::1]:65535");
}

TEST(AddressTest, Loopback) {
  for (const char* const host : {"127.0.0.1", "127.255.255.254", "::1", "0:0:0:0:0:0:0:1", "localhost"}) {
    EXPECT_TRUE(IsLoopback(host)) << host;
  }
  for (const char* const host : {"0.0.0.0", "10.0.0.2", "128.0.0.1", "::", "::2", "fe80::1", "::ffff:10.0.0.2", "127.1",
                                 "localhost.example.org", "127.0.0.1.example.org", "decode", ""}) {
    EXPECT_FALSE(IsLoopback(host)) << host;
  }
}

TEST(AddressTest, ListenAddresses) {
  const auto path = ParseListenAddress("f", "unix:/run/a");
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(path->unix_path, "/run/a");
  const auto tcp = ParseListenAddress("f", "tcp:0.0.0.0:1");
  ASSERT_TRUE(tcp.ok()) << tcp.status();
  EXPECT_TRUE(tcp->unix_path.empty());
  EXPECT_EQ(tcp->tcp.port, 1);
  EXPECT_TRUE(ParseListenAddress("f", "unix:" + std::string(107, 'a')).ok());
  for (const std::string& bad : {std::string("unix:"), "unix:" + std::string(108, 'a'), std::string("unix:a\0b", 8),
                                 std::string("tcp:1"), std::string("udp:h:1"), std::string("/run/a")}) {
    const auto refused = ParseListenAddress("--listen", bad);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << bad;
    EXPECT_EQ(DetailOf(refused.status()).field, "--listen") << bad;
  }
}

}  // namespace
}  // namespace kvmanager
