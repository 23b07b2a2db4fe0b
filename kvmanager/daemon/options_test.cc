#include "kvmanager/daemon/options.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::StatusOr<CommandLine> Parse(std::vector<std::string> flags) {
  std::vector<const char*> argv = {"kvmanagerd"};
  for (const std::string& flag : flags) argv.push_back(flag.c_str());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
}

const std::vector<std::string> kMinimum = {"--listen", "unix:/tmp/a.sock", "--host-pool-bytes", "64MiB"};

std::vector<std::string> With(std::initializer_list<std::string> more) {
  std::vector<std::string> flags = kMinimum;
  flags.insert(flags.end(), more);
  return flags;
}

std::string WriteFile(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << text;
  return path;
}

TEST(OptionsTest, DefaultsAreThoseOfTheHeader) {
  auto line = Parse(kMinimum);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_TRUE(line->run);
  EXPECT_EQ(line->options.listen, std::vector<std::string>{"unix:/tmp/a.sock"});
  EXPECT_EQ(line->options.host_pool_bytes, uint64_t{64} << 20);
  EXPECT_EQ(line->options.hand_off_lease_ms, 60000);
  EXPECT_EQ(line->options.drain_s, 10);
  EXPECT_EQ(line->options.busy_poll_us, 0);
  EXPECT_EQ(line->options.quality_sample, 64);
  EXPECT_EQ(line->options.log_level, "info");
  EXPECT_TRUE(line->options.peer_local_copy);
  EXPECT_TRUE(line->options.peer_zero_copy);
}

TEST(OptionsTest, PluginsRunInAProcessOfTheirOwnIfAsked) {
  auto plain = Parse(kMinimum);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_FALSE(plain->options.codec_plugin_process);
  std::vector<std::string> flags = kMinimum;
  flags.insert(flags.end(), {"--codec-plugin", "/a.so", "--codec-plugin-process"});
  const std::string file = WriteFile(
      "plugins.conf",
      "listen = \"unix:/tmp/a.sock\"\nhost-pool-bytes = 64MiB\ncodec-plugin = /a.so\ncodec-plugin-process = true\n");
  for (const auto& line : {Parse(flags), Parse({"--config", file})}) {
    ASSERT_TRUE(line.ok()) << line.status();
    EXPECT_EQ(line->options.codec_plugins, std::vector<std::string>{"/a.so"});
    EXPECT_TRUE(line->options.codec_plugin_process);
  }
}

TEST(OptionsTest, AdminIsBesideTheFirstUnixSocket) {
  const auto admin = [](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--host-pool-bytes", "64MiB"});
    const auto line = Parse(std::move(flags));
    EXPECT_TRUE(line.ok()) << line.status();
    return line.ok() ? AdminAddress(line->options) : "?";
  };
  EXPECT_EQ(admin({"--listen", "unix:/tmp/a.sock"}), "unix:/tmp/a.sock.admin");
  EXPECT_EQ(admin({"--listen", "tcp:127.0.0.1:0", "--listen", "unix:/b", "--listen", "unix:/c"}), "unix:/b.admin");
  EXPECT_EQ(admin({"--listen", "tcp:127.0.0.1:0"}), "");
  EXPECT_EQ(admin({"--listen", "tcp:127.0.0.1:0", "--admin-listen", "unix:/x"}), "unix:/x");
  EXPECT_EQ(admin({"--listen", "unix:/tmp/a.sock", "--admin-listen", "unix:/x"}), "unix:/x");
  EXPECT_EQ(admin({"--listen", "unix:/tmp/a.sock", "--admin-listen", "none"}), "");
  EXPECT_EQ(admin({"--listen", "unix:/" + std::string(100, 'p')}), "unix:/" + std::string(100, 'p') + ".admin");
  EXPECT_EQ(admin({"--listen", "unix:/" + std::string(101, 'p')}), "") << "no room for its name";
}

TEST(OptionsTest, WithoutADevicePoolThereIsNone) {
  auto line = Parse(kMinimum);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.device_pool_bytes, 0u);
  EXPECT_EQ(line->options.devices, std::vector<int>{0});
  EXPECT_EQ(line->options.device_slab_bytes, uint64_t{256} << 20);
}

TEST(OptionsTest, DevicesAndTheirPools) {
  auto line = Parse(With({"--device-pool-bytes", "3GiB", "--devices", "2,0", "--device-slab-bytes", "512MiB",
                          "--recompute-device-bytes", "2GiB"}));
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.recompute_device_bytes, uint64_t{2} << 30);
  EXPECT_EQ(line->options.device_pool_bytes, uint64_t{3} << 30);
  EXPECT_EQ(line->options.devices, (std::vector<int>{2, 0}));
  EXPECT_EQ(line->options.device_slab_bytes, uint64_t{512} << 20);
  const std::string path = WriteFile("device.conf",
                                     "listen = \"unix:/tmp/a.sock\"\nhost-pool-bytes = \"64MiB\"\n"
                                     "device-pool-bytes = \"1GiB\"\ndevices = \"1\"\n");
  auto file = Parse({"--config", path});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->options.device_pool_bytes, uint64_t{1} << 30);
  EXPECT_EQ(file->options.devices, std::vector<int>{1});
}

TEST(OptionsTest, DeviceErrorsNameFlagValueAndBound) {
  const struct {
    std::vector<std::string> flags;
    const char* field;
  } cases[] = {
      {{"--device-pool-bytes", "255MiB"}, "--device-pool-bytes"},
      {{"--device-pool-bytes", "1GiB", "--device-slab-bytes", "2GiB"}, "--device-pool-bytes"},
      {{"--device-pool-bytes", "1TiB"}, "--device-pool-bytes"},
      {{"--device-pool-bytes", "lots"}, "--device-pool-bytes"},
      {{"--device-slab-bytes", "128MiB"}, "--device-slab-bytes"},
      {{"--recompute-device-bytes", "1GiB"}, "--recompute-device-bytes"},
      {{"--device-pool-bytes", "1GiB", "--recompute-device-bytes", "1TiB"}, "--recompute-device-bytes"},
      {{"--device-slab-bytes", "257.5MiB"}, "--device-slab-bytes"},
      {{"--device-slab-bytes", "32GiB"}, "--device-slab-bytes"},
      {{"--devices", "0,0"}, "--devices"},
      {{"--devices", "-1"}, "--devices"},
      {{"--devices", "0,"}, "--devices"},
      {{"--devices", "GPU-1"}, "--devices"},
      {{"--devices", "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16"}, "--devices"},
  };
  for (const auto& [more, field] : cases) {
    std::vector<std::string> flags = kMinimum;
    flags.insert(flags.end(), more.begin(), more.end());
    auto line = Parse(flags);
    ASSERT_FALSE(line.ok()) << more.back();
    const ErrorDetail detail = DetailOf(line.status());
    EXPECT_EQ(detail.field, field) << line.status();
    EXPECT_FALSE(detail.bound.empty());
  }
}

// The file and the flags are two spellings of one thing.
TEST(OptionsTest, FileSaysTheSameAsFlags) {
  const std::string path = WriteFile(
      "all.conf",
      "listen = [\"unix:/tmp/a.sock\", \"tcp:127.0.0.1:0\"]\n"
      "host-pool-bytes = \"1.5GiB\"\nmetrics-listen = \"127.0.0.1:9464\"\n"
      "peer-listen = \"[::1]:9470\"\nthreads = 3\nbusy-poll-us = 50\nquality-sample = 0\ntenant-most-percent = "
      "50\narena-bytes = "
      "\"1GiB\"\nslab-bytes = \"4MiB\"\n"
      "hand-off-lease-ms = 1000\ndrain-s = 2\npeer-rate-bytes = 1000000\npeer-window-bytes = \"1MiB\"\npeer-local-copy "
      "= off\npeer-zero-copy = off\nlog-level = warn\nadmin-listen = \"unix:/tmp/b.sock\"\ntenants = "
      "/etc/tenants.json\neviction = s3fifo\ndisk-path = /var/lib/kv\ndisk-bytes = 1GiB\n"
      "state-dir = /var/lib/state\nstate-keep-s = 7\n");
  auto file = Parse({"--config", path});
  auto flags = Parse({"--listen",
                      "unix:/tmp/a.sock",
                      "--listen",
                      "tcp:127.0.0.1:0",
                      "--host-pool-bytes",
                      "1.5GiB",
                      "--metrics-listen",
                      "127.0.0.1:9464",
                      "--peer-listen",
                      "[::1]:9470",
                      "--threads",
                      "3",
                      "--busy-poll-us",
                      "50",
                      "--quality-sample",
                      "0",
                      "--tenant-most-percent",
                      "50",
                      "--arena-bytes",
                      "1GiB",
                      "--slab-bytes",
                      "4MiB",
                      "--hand-off-lease-ms",
                      "1000",
                      "--drain-s",
                      "2",
                      "--peer-rate-bytes",
                      "1000000",
                      "--peer-window-bytes",
                      "1MiB",
                      "--peer-local-copy",
                      "off",
                      "--peer-zero-copy",
                      "off",
                      "--log-level",
                      "warn",
                      "--admin-listen",
                      "unix:/tmp/b.sock",
                      "--tenants",
                      "/etc/tenants.json",
                      "--disk-path",
                      "/var/lib/kv",
                      "--disk-bytes",
                      "1GiB",
                      "--state-dir",
                      "/var/lib/state",
                      "--state-keep-s",
                      "7",
                      "--eviction",
                      "s3fifo"});
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(flags.ok()) << flags.status();
  for (const CommandLine& line : {*file, *flags}) {
    const Options& o = line.options;
    EXPECT_EQ(o.listen, (std::vector<std::string>{"unix:/tmp/a.sock", "tcp:127.0.0.1:0"}));
    EXPECT_EQ(o.host_pool_bytes, uint64_t{3} << 29);
    EXPECT_EQ(o.metrics_listen, "127.0.0.1:9464");
    EXPECT_EQ(o.peer_listen, "[::1]:9470");
    EXPECT_EQ(o.threads, 3);
    EXPECT_EQ(o.busy_poll_us, 50);
    EXPECT_EQ(o.quality_sample, 0);
    EXPECT_EQ(o.tenant_most_percent, 50);
    EXPECT_EQ(o.arena_bytes, uint64_t{1} << 30);
    EXPECT_EQ(o.slab_bytes, uint64_t{4} << 20);
    EXPECT_EQ(o.hand_off_lease_ms, 1000);
    EXPECT_EQ(o.drain_s, 2);
    EXPECT_EQ(o.peer_rate_bytes, 1000000u);
    EXPECT_EQ(o.peer_window_bytes, uint64_t{1} << 20);
    EXPECT_FALSE(o.peer_local_copy);
    EXPECT_FALSE(o.peer_zero_copy);
    EXPECT_EQ(o.log_level, "warn");
    EXPECT_EQ(o.admin_listen, "unix:/tmp/b.sock");
    EXPECT_EQ(o.tenants, "/etc/tenants.json");
    EXPECT_EQ(o.eviction, EvictionKind::kS3Fifo);
    EXPECT_EQ(o.disk_path, "/var/lib/kv");
    EXPECT_EQ(o.disk_bytes, uint64_t{1} << 30);
    EXPECT_EQ(o.state_dir, "/var/lib/state");
    EXPECT_EQ(o.state_keep_s, 7);
  }
  auto both = Parse({"--config", path, "--threads", "7"});
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_EQ(both->options.threads, 7);
}

TEST(OptionsTest, HandOffPeersAreRepeatedOrListed) {
  const std::vector<std::string> expected = {"10.0.0.1:9470", "[::1]:9470", "decode:1"};
  const std::string path = WriteFile("peers.conf",
                                     "listen = \"unix:/tmp/a.sock\"\nhost-pool-bytes = \"64MiB\"\n"
                                     "hand-off-peers = [\"10.0.0.1:9470\", \"[::1]:9470\", \"decode:1\"]\n");
  for (const auto& flags :
       {With({"--hand-off-peers", "10.0.0.1:9470,[::1]:9470", "--hand-off-peers", "decode:1"}),
        With({"--hand-off-peers=10.0.0.1:9470,[::1]:9470,decode:1"}), std::vector<std::string>{"--config", path}}) {
    auto line = Parse(flags);
    ASSERT_TRUE(line.ok()) << line.status();
    EXPECT_EQ(line->options.hand_off_peers, expected);
  }
  std::string many = "a:1";
  for (size_t i = 1; i < Options::kHandOffPeersMax; ++i) many += ",a:1";
  EXPECT_TRUE(Parse(With({"--hand-off-peers", many})).ok());
  const auto refused = Parse(With({"--hand-off-peers", many + ",a:1"}));
  EXPECT_EQ(DetailOf(refused.status()).field, "--hand-off-peers");
}

TEST(OptionsTest, HttpHostsAreRepeatedOrListed) {
  EXPECT_TRUE(Parse(kMinimum)->options.http_hosts.empty());
  const auto line = Parse(With({"--http-hosts", "kv1.example,kv1", "--http-hosts", "any"}));
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.http_hosts, (std::vector<std::string>{"kv1.example", "kv1", "any"}));
  std::string many = "a";
  for (size_t i = 1; i < Options::kHttpHostsMax; ++i) many += ",a";
  EXPECT_TRUE(Parse(With({"--http-hosts", many})).ok());
  EXPECT_EQ(DetailOf(Parse(With({"--http-hosts", many + ",a"})).status()).field, "--http-hosts");
  EXPECT_FALSE(Parse(With({"--http-hosts", std::string(Options::kHttpHostBytesMax + 1, 'a')})).ok());
}

TEST(OptionsTest, HelpEndsWithWhatIsGiven) {
  const char* const argv[] = {"kvmanagerd", "--help"};
  const auto line = ParseCommandLine(2, argv, "Limits\n  a\n");
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_FALSE(line->run);
  EXPECT_NE(line->text.find("Limits\n  a\n"), std::string::npos) << line->text;
}

TEST(OptionsTest, ClientsMayNameNoPeerUnlessSaid) {
  EXPECT_TRUE(Parse(kMinimum)->options.hand_off_peers.empty());
  const auto any = Parse(With({"--hand-off-peers", "any"}));
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_EQ(any->options.hand_off_peers, std::vector<std::string>{"any"});
}

TEST(OptionsTest, AnOpenListenerNeedsAKeyOrInsecure) {
  const std::string key = WriteFile("peer.key", std::string(32, 'k'));
  // Each without more, with a key, and with --insecure.
  const struct {
    std::vector<std::string> flags;
    bool plain, keyed, insecure;
    std::vector<std::string> open;  // of those that start with --insecure
  } cases[] = {
      {{}, true, true, true, {}},
      {{"--listen", "tcp:127.0.0.1:9000", "--listen", "tcp:[::1]:0"}, true, true, true, {}},
      {{"--listen", "tcp:localhost:9000"}, true, true, true, {}},
      {{"--listen", "tcp:0.0.0.0:9000"}, false, false, true, {"--listen tcp:0.0.0.0:9000"}},
      {{"--listen", "tcp:engine:9000"}, false, false, true, {"--listen tcp:engine:9000"}},
      {{"--peer-listen", "127.9.9.9:0"}, true, true, true, {}},
      {{"--peer-listen", "[::1]:9470"}, true, true, true, {}},
      {{"--peer-listen", "0.0.0.0:9470", "--peer-tenants", "a"}, false, true, true, {"--peer-listen 0.0.0.0:9470"}},
      {{"--peer-listen", "decode:9470", "--peer-tenants", "any"}, false, true, true, {"--peer-listen decode:9470"}},
      {{"--peer-listen", "[::]:9470"}, false, true, false, {}},
      {{"--metrics-listen", "0.0.0.0:1", "--http-listen", "0.0.0.0:2"}, true, true, true, {}},
  };
  for (const auto& [more, plain, keyed, insecure, open] : cases) {
    std::vector<std::string> flags = kMinimum;
    flags.insert(flags.end(), more.begin(), more.end());
    EXPECT_EQ(Parse(flags).ok(), plain) << more.back() << Parse(flags).status();
    flags.insert(flags.end(), {"--peer-key", key});
    const auto with_key = Parse(flags);
    EXPECT_EQ(with_key.ok(), keyed) << more.back() << with_key.status();
    if (with_key.ok()) {
      EXPECT_TRUE(OpenListeners(with_key->options).empty());
      EXPECT_EQ(with_key->options.peer_key, key);
    }
    flags.resize(flags.size() - 2);
    flags.push_back("--insecure");
    const auto trusting = Parse(flags);
    EXPECT_EQ(trusting.ok(), insecure) << trusting.status();
    if (!trusting.ok()) continue;
    EXPECT_EQ(OpenListeners(trusting->options), open);
  }
  const auto refused = Parse(With({"--peer-listen", "10.0.0.2:9470"}));
  EXPECT_NE(DetailOf(refused.status()).bound.find("--peer-key FILE"), std::string::npos) << refused.status();
  const auto file =
      WriteFile("insecure.conf", "listen = \"tcp:0.0.0.0:0\"\nhost-pool-bytes = \"64MiB\"\ninsecure = true\n");
  EXPECT_TRUE(Parse({"--config", file}).ok());
}

TEST(OptionsTest, TlsOpensListenersAndItsFlagsFit) {
  const std::string cert = WriteFile("tls.crt", "c"), key = WriteFile("tls.key", "k"), ca = WriteFile("ca.crt", "a"),
                    secret = WriteFile("tls.secret", std::string(32, 'k'));
  const auto given = [&](std::vector<std::string> more, bool authority) {
    more.insert(more.end(), {"--tls-cert", cert, "--tls-key", key});
    if (authority) more.insert(more.end(), {"--tls-ca", ca});
    more.insert(more.begin(), kMinimum.begin(), kMinimum.end());
    return Parse(more);
  };
  const auto clients = given({"--listen", "tcp:0.0.0.0:9000"}, false);
  ASSERT_TRUE(clients.ok()) << clients.status();
  EXPECT_EQ(clients->options.tls_cert, cert);
  EXPECT_EQ(clients->options.tls_key, key);
  EXPECT_FALSE(clients->options.tls_clients_required || PeersSpeakTls(clients->options));
  EXPECT_TRUE(OpenListeners(clients->options).empty());
  const auto peers = given({"--listen", "tcp:[::]:9000", "--peer-listen", "0.0.0.0:9470"}, true);
  ASSERT_TRUE(peers.ok()) << peers.status();
  EXPECT_EQ(peers->options.tls_ca, ca);
  EXPECT_TRUE(PeersSpeakTls(peers->options));
  EXPECT_TRUE(OpenListeners(peers->options).empty());
  EXPECT_TRUE(given({"--tls-clients", "require"}, true)->options.tls_clients_required);
  EXPECT_FALSE(given({"--tls-clients", "allow"}, true)->options.tls_clients_required);
  EXPECT_FALSE(PeersSpeakTls(given({"--peer-tls", "off"}, true)->options));
  EXPECT_TRUE(given({"--peer-tls", "off", "--peer-listen", "127.0.0.1:0"}, false).ok());
  EXPECT_TRUE(given({"--peer-tls", "off", "--peer-ucx-key", secret}, true).ok());
  const struct {
    absl::StatusOr<CommandLine> got;
    std::string field;
  } wrong[] = {
      {Parse(With({"--tls-cert", cert})), "--tls-key"},
      {Parse(With({"--tls-key", key})), "--tls-cert"},
      {Parse(With({"--tls-ca", ca})), "--tls-ca"},
      {Parse(With({"--tls-cert", "/nowhere", "--tls-key", key})), "--tls-cert"},
      {given({"--tls-clients", "require"}, false), "--tls-clients"},
      {given({"--tls-clients", "perhaps"}, true), "--tls-clients"},
      {given({"--peer-tls", "on"}, false), "--peer-tls"},
      {given({"--peer-tls", "perhaps"}, true), "--peer-tls"},
      {given({"--peer-listen", "127.0.0.1:0"}, false), "--tls-ca"},
      {given({"--hand-off-peers", "a:1"}, false), "--tls-ca"},
      {given({"--peer-tls", "off", "--peer-listen", "0.0.0.0:9470"}, true), "--peer-listen"},
      {given({"--peer-ucx-key", secret}, true), "--peer-ucx-key"},
  };
  for (const auto& [got, field] : wrong) {
    ASSERT_TRUE(absl::IsInvalidArgument(got.status())) << field;
    EXPECT_EQ(DetailOf(got.status()).field, field) << got.status();
  }
}

TEST(OptionsTest, PeerTenants) {
  const std::vector<std::string> any = {"any"};
  EXPECT_EQ(Parse(kMinimum)->options.peer_tenants, any);
  EXPECT_EQ(Parse(With({"--peer-tenants", "any"}))->options.peer_tenants, any);
  EXPECT_EQ(Parse(With({"--peer-tenants", "a,b c", "--peer-tenants", "d"}))->options.peer_tenants,
            (std::vector<std::string>{"a", "b c", "d"}));
  EXPECT_EQ(Parse(With({"--peer-tenants", "a,"}))->options.peer_tenants, (std::vector<std::string>{"a", ""}));
  EXPECT_EQ(Parse(With({"--peer-tenants", ""}))->options.peer_tenants, std::vector<std::string>{""});
  const std::string path =
      WriteFile("tenants.conf", "listen = \"unix:/tmp/a.sock\"\nhost-pool-bytes = \"64MiB\"\npeer-tenants = \"a,b\"\n");
  const auto file = Parse({"--config", path});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->options.peer_tenants, (std::vector<std::string>{"a", "b"}));
  std::string many = "a";
  for (size_t i = 0; i < Options::kPeerTenantsMax; ++i) many += ",a";
  EXPECT_EQ(DetailOf(Parse(With({"--peer-tenants", many})).status()).field, "--peer-tenants");
}

TEST(OptionsTest, ErrorsNameFlagValueAndBound) {
  struct Case {
    std::vector<std::string> flags;
    std::string field, value;
  };
  for (const Case& c : std::vector<Case>{
           {With({"--threads", "1025"}), "--threads", "1025"},
           {With({"--threads", "-1"}), "--threads", "-1"},
           {With({"--threads", "many"}), "--threads", "many"},
           {With({"--busy-poll-us", "1000001"}), "--busy-poll-us", "1000001"},
           {With({"--quality-sample", "-1"}), "--quality-sample", "-1"},
           {With({"--quality-sample", "1000000001"}), "--quality-sample", "1000000001"},
           {With({"--arena-bytes", "3TiB"}), "--arena-bytes", "3TiB"},
           {With({"--eviction", "arc"}), "--eviction", "arc"},
           {With({"--state-keep-s", "7"}), "--state-dir", "missing"},
           {With({"--state-dir", "/s", "--state-keep-s", "1000001"}), "--state-keep-s", "1000001"},
           {With({"--disk-path", "/d"}), "--disk-bytes", "missing"},
           {With({"--disk-bytes", "1TiB"}), "--disk-path", "missing"},
           {With({"--disk-path", "/d", "--disk-bytes", "63MiB"}), "--disk-bytes", "63MiB"},
           {With({"--disk-path", "/d", "--disk-bytes", "65TiB"}), "--disk-bytes", "65TiB"},
           {With({"--slab-bytes", "3MiB"}), "--slab-bytes", "3MiB"},
           {With({"--slab-bytes", "128MiB"}), "--slab-bytes", "128MiB"},
           {With({"--tenant-most-percent", "0"}), "--tenant-most-percent", "0"},
           {With({"--tenant-most-percent", "101"}), "--tenant-most-percent", "101"},
           {With({"--hand-off-lease-ms", "1"}), "--hand-off-lease-ms", "1"},
           {With({"--drain-s", "3601"}), "--drain-s", "3601"},
           {With({"--peer-rate-bytes", "1"}), "--peer-rate-bytes", "1"},
           {With({"--peer-window-bytes", "1KiB"}), "--peer-window-bytes", "1KiB"},
           {With({"--peer-window-bytes", "8GiB"}), "--peer-window-bytes", "8GiB"},
           {With({"--peer-local-copy", "yes"}), "--peer-local-copy", "yes"},
           {With({"--peer-zero-copy", "maybe"}), "--peer-zero-copy", "maybe"},
           {With({"--peer-ucx-key", "/nowhere"}), "--peer-ucx-key", "/nowhere"},
           {With({"--log-level", "loud"}), "--log-level", "loud"},
           {With({"--hand-off-peers", "nowhere"}), "--hand-off-peers", "nowhere"},
           {With({"--hand-off-peers", "any,a:1"}), "--hand-off-peers", "any"},
           {With({"--peer-key", "/nowhere"}), "--peer-key", "/nowhere"},
           {With({"--peer-listen", "0.0.0.0:9470"}), "--peer-listen", "0.0.0.0:9470"},
           {With({"--listen", "tcp:[::]:9000"}), "--listen", "tcp:[::]:9000"},
           {With({"--insecure", "--peer-listen", "10.0.0.2:9470"}), "--peer-tenants", "missing"},
           {With({"--hand-off-peers", "a:1,b"}), "--hand-off-peers", "b"},
           {With({"--hand-off-peers", "a:1", "--hand-off-peers", "b:0x"}), "--hand-off-peers", "b:0x"},
           {With({"--metrics-listen", "localhost"}), "--metrics-listen", "localhost"},
           {With({"--metrics-listen", "localhost:65536"}), "--metrics-listen", "localhost:65536"},
           {With({"--http-listen", "9465"}), "--http-listen", "9465"},
           {With({"--http-hosts", "kv1:9464"}), "--http-hosts", "kv1:9464"},
           {With({"--peer-listen", "a:b:1"}), "--peer-listen", "a:b:1"},
           {With({"--listen", "http://x"}), "--listen", "http://x"},
           {With({"--admin-listen", "tcp:127.0.0.1:1"}), "--admin-listen", "tcp:127.0.0.1:1"},
           {With({"--admin-listen", "off"}), "--admin-listen", "off"},
           {With({"--admin-listen", "unix:"}), "--admin-listen", "unix:"},
           {With({"--admin-listen", "unix:/tmp/a.sock"}), "--admin-listen", "unix:/tmp/a.sock"},
           {With({"--listen", "unix:"}), "--listen", "unix:"},
           {{"--listen", "unix:/a", "--host-pool-bytes", "1MiB"}, "--host-pool-bytes", "1MiB"},
           {{"--listen", "unix:/a", "--host-pool-bytes", "-1"}, "--host-pool-bytes", "-1"},
           {{"--listen", "unix:/a", "--host-pool-bytes", "99999999999TiB"}, "--host-pool-bytes", "99999999999TiB"},
           {{"--listen", "unix:/a", "--host-pool-bytes", "40TiB"}, "--host-pool-bytes", "40TiB"},
           {{"--listen", "unix:/a", "--host-pool-bytes", "8GB"}, "--host-pool-bytes", "8GB"},
           {{"--listen", "unix:/a"}, "--host-pool-bytes", "missing"},
           {{"--host-pool-bytes", "64MiB"}, "--listen", "missing"},
       }) {
    auto line = Parse(c.flags);
    ASSERT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument) << c.field << " " << c.value;
    const ErrorDetail detail = DetailOf(line.status());
    EXPECT_EQ(detail.field, c.field);
    EXPECT_EQ(detail.value, c.value);
    EXPECT_FALSE(detail.bound.empty());
  }
}

TEST(OptionsTest, UnknownFlagsAndFileKeysAreErrors) {
  EXPECT_FALSE(Parse(With({"--host-pool", "1GiB"})).ok());
  EXPECT_FALSE(Parse(With({"stray"})).ok());
  EXPECT_FALSE(Parse(With({"--threads", "1", "--threads", "2"})).ok());
  EXPECT_FALSE(Parse({"--config", "/nonexistent/file"}).ok());
  const std::string typo = WriteFile("typo.conf", "thread = 2\n");
  auto line = Parse(With({"--config", typo}));
  ASSERT_FALSE(line.ok());
  EXPECT_EQ(DetailOf(line.status()).field, "thread in " + typo) << line.status();
}

TEST(OptionsTest, AFileOfFlagsIsARegularOneAndSmall) {
  EXPECT_FALSE(Parse({"--config", "/dev/zero"}).ok());
  EXPECT_FALSE(Parse({"--config", ::testing::TempDir()}).ok());
  const std::string large = WriteFile("large.conf", "threads = 2\n" + std::string(1 << 20, '\n'));
  const auto refused = Parse(With({"--config", large}));
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("must be at most 1048576"), absl::string_view::npos) << refused.status();
}

TEST(OptionsTest, FlagsOfFilesHaveAValue) {
  for (const char* const flag : {"--tenants", "--tls-cert", "--tls-key", "--tls-ca", "--peer-key", "--admin-listen",
                                 "--disk-path", "--state-dir", "--calibration-dir"}) {
    const auto refused = Parse(With({flag, ""}));
    ASSERT_FALSE(refused.ok()) << flag;
    EXPECT_EQ(DetailOf(refused.status()).field, flag);
  }
}

TEST(OptionsTest, HelpAndVersionDoNotRun) {
  auto help = Parse({"--help"});
  ASSERT_TRUE(help.ok());
  EXPECT_FALSE(help->run);
  for (const char* word : {"--host-pool-bytes", "--peer-listen", "Examples", "SIGTERM", "kvmanagerd ready"}) {
    EXPECT_NE(help->text.find(word), std::string::npos) << word;
  }
  auto version = Parse({"--version"});
  ASSERT_TRUE(version.ok());
  EXPECT_EQ(version->text, "kvmanagerd 0.1.0\n");
}

TEST(OptionsTest, ByteSuffixes) {
  EXPECT_EQ(ParseBytes("f", "0").value(), 0u);
  EXPECT_EQ(ParseBytes("f", "1KiB").value(), 1024u);
  EXPECT_EQ(ParseBytes("f", "0.5MiB").value(), 512u << 10);
  EXPECT_EQ(ParseBytes("f", "2TiB").value(), uint64_t{2} << 40);
  for (const char* bad :
       {"", "KiB", "1.5", "1e300GiB", "nanGiB", "-1KiB", "1 GB", "0x10", "18446744073709551616", "17179869184GiB"}) {
    EXPECT_FALSE(ParseBytes("f", bad).ok()) << bad;
  }
}

// Whatever is wrong with a size, the error says which sizes are right.
TEST(OptionsTest, SizesAreRefusedWithTheirBounds) {
  for (const char* const bad : {"16EiB", "16PB", "many", "", "1e9TiB", "99999999999999999999", "99999999999999TiB",
                                "17179869184GiB", "8.5KiB", "65"}) {
    const ErrorDetail detail = DetailOf(ParseBytes("--size", bad, 10, 64).status());
    EXPECT_EQ(detail.field, "--size");
    EXPECT_EQ(detail.value, bad);
    EXPECT_NE(detail.bound.find("10..64 bytes"), std::string::npos) << detail.bound;
  }
  EXPECT_EQ(ParseBytes("--size", "64", 10, 64).value(), 64u);
  EXPECT_EQ(ParseBytes("--size", "0.03125KiB", 10, 64).value(), 32u);
  const std::string bound = absl::StrCat(Options::kHostPoolBytesMin, "..", Options::kHostPoolBytesMax, " bytes");
  for (const char* const bad : {"16EiB", "16777216TiB", "40TiB"}) {
    const auto line = Parse({"--listen", "unix:/a", "--host-pool-bytes", bad});
    EXPECT_EQ(DetailOf(line.status()).field, "--host-pool-bytes");
    EXPECT_EQ(DetailOf(line.status()).value, bad);
    EXPECT_NE(DetailOf(line.status()).bound.find(bound), std::string::npos) << line.status();
  }
}

TEST(OptionsTest, TwoFlagsThatNameOnePlaceAreBothNamed) {
  const std::string folder = ::testing::TempDir() + "/places";
  std::filesystem::create_directories(folder + "/real");
  std::filesystem::remove(folder + "/link");
  std::filesystem::create_directory_symlink("real", folder + "/link");
  const auto disk = [](const std::string& disk, const std::string& state) {
    return With({"--disk-path", disk, "--disk-bytes", "1GiB", "--state-dir", state});
  };
  struct Case {
    std::vector<std::string> flags;
    std::string field, value, other;
  };
  for (const Case& c : std::vector<Case>{
           {disk("/d/x", "/d/x"), "--state-dir", "/d/x", "--disk-path /d/x"},
           {disk("/d/x/", "/d/y/../x"), "--state-dir", "/d/y/../x", "--disk-path /d/x/"},
           {disk(folder + "/real", folder + "/link"), "--state-dir", folder + "/link", "--disk-path " + folder},
           {disk(folder + "/link/new", folder + "/real/new"), "--state-dir", folder + "/real/new", "--disk-path "},
           {With({"--listen", "unix:/tmp/a.sock"}), "--listen", "unix:/tmp/a.sock", "--listen unix:/tmp/a.sock"},
           {With({"--listen", "unix:/tmp//a.sock"}), "--listen", "unix:/tmp//a.sock", "--listen unix:/tmp/a.sock"},
           {With({"--listen", "unix:/tmp/a.sock.admin"}), "--admin-listen", "unix:/tmp/a.sock.admin", "--listen"},
           {With({"--admin-listen", "unix:/tmp/./a.sock"}), "--admin-listen", "unix:/tmp/./a.sock", "--listen"},
           {With({"--listen", "tcp:[::1]:7", "--listen", "tcp:[::1]:7"}), "--listen", "tcp:[::1]:7",
            "--listen tcp:[::1]:7"},
           {With({"--listen", "tcp:127.0.0.1:7", "--metrics-listen", "127.0.0.1:7"}), "--metrics-listen", "127.0.0.1:7",
            "--listen tcp:127.0.0.1:7"},
           {With({"--peer-listen", "127.0.0.1:7", "--http-listen", "127.0.0.1:7"}), "--peer-listen", "127.0.0.1:7",
            "--http-listen 127.0.0.1:7"},
       }) {
    const auto line = Parse(c.flags);
    ASSERT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument) << c.field << " " << c.value;
    const ErrorDetail detail = DetailOf(line.status());
    EXPECT_EQ(detail.field, c.field) << line.status();
    EXPECT_EQ(detail.value, c.value);
    EXPECT_NE(detail.bound.find(c.other), std::string::npos) << detail.bound;
    EXPECT_NE(detail.bound.find("which this command names too"), std::string::npos) << detail.bound;
  }
  for (const std::vector<std::string>& flags : {
           disk("/d/x", "/d/xy"),
           disk("/d/x", "/d/x/state"),
           disk(folder + "/real/a", folder + "/link/b"),
           With({"--listen", "tcp:127.0.0.1:0", "--listen", "tcp:127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"}),
           With({"--listen", "tcp:127.0.0.1:7", "--metrics-listen", "127.0.0.2:7"}),
           With({"--listen", "unix:a.sock", "--listen", "unix:b.sock", "--admin-listen", "none"}),
       }) {
    const auto line = Parse(flags);
    EXPECT_TRUE(line.ok()) << line.status();
  }
}

}  // namespace
}  // namespace kvmanager
