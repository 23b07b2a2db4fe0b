// Texts that people, files and the environment give: flags and their file, tenants, addresses, numbers, failpoints, an
// engine's JSON, a page of metrics.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/c/describe.h"
#include "client/dial.h"
#include "codecs/registry.h"
#include "kvmanager/base/address.h"
#include "kvmanager/base/byte_text.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/handoff/peer_choice.h"
#include "kvmanager/rpc/principals.h"
#include "monitoring/http_server.h"
#include "monitoring/readings.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"
#include "transport/tcp/host_port.h"

namespace kvmanager::fuzz {
namespace {

/// The first byte says whether the rest is a file of --config, or arguments, one a line.
class OptionsTarget final : public FuzzTarget {
 public:
  OptionsTarget() : file_(memfd_create("options", MFD_CLOEXEC)) { KV_CHECK(file_ >= 0); }
  ~OptionsTarget() override { close(file_); }

  std::vector<std::string> Seeds() override {
    return {"a--listen\nunix:/tmp/a.sock\n--host-pool-bytes\n64MiB",
            "a--listen=tcp:127.0.0.1:0\n--host-pool-bytes=1.5GiB\n--devices=0,1\n--device-pool-bytes=1GiB\n--insecure",
            "a--help",
            "a--version",
            "a--listen\ntcp:[::1]:7000\n--host-pool-bytes\n2MiB\n--peer-listen\n127.0.0.1:0\n--peer-tenants\na,b,,c\n"
            "--hand-off-peers\nany\n--peer-local-copy\noff\n--quality-sample\n0\n--log-level\nwarn",
            "flisten = \"unix:/tmp/a.sock\"\nhost-pool-bytes = 64MiB\n# a comment\nhttp-hosts = [\"a\", \"b\"]\n",
            "flisten=[\"unix:/tmp/a\",\"tcp:127.0.0.1:1\"]\nhost-pool-bytes=\"64MiB\"\ninsecure=true\n"
            "drain-s=3\ntenant-most-percent=50\npeer-window-bytes=1MiB\n",
            "f[section]\nx=1\n"};
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    // A text of C ends at its first 0.
    const absl::string_view text = TextOf(input.subspan(1));
    std::vector<std::string> arguments = {"kvmanagerd"};
    if (input[0] % 2 == 0) {
      KV_CHECK(ftruncate(file_, 0) == 0 && pwrite(file_, text.data(), text.size(), 0) == ssize_t(text.size()));
      arguments.push_back("--config");
      arguments.push_back(absl::StrCat("/proc/self/fd/", file_));
    } else {
      for (const absl::string_view line : absl::StrSplit(text, '\n')) {
        // A file that an input names is another input's business, and may be a pipe.
        if (line.find("config") != line.npos) return;
        arguments.emplace_back(line);
      }
    }
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    const absl::StatusOr<CommandLine> line = ParseCommandLine(static_cast<int>(argv.size()), argv.data());
    MustExplain(line.status());
    if (!line.ok()) return;
    KV_CHECK(line->run != !line->text.empty());
    if (!line->run) return;
    const Options& options = line->options;
    KV_CHECK(!options.listen.empty() && options.listen.size() <= Options::kListenMax);
    KV_CHECK(options.host_pool_bytes >= Options::kHostPoolBytesMin &&
             options.host_pool_bytes <= Options::kHostPoolBytesMax);
    KV_CHECK(options.threads >= 0 && options.threads <= Options::kThreadsMax);
    KV_CHECK(!options.devices.empty() && options.devices.size() <= Options::kDevicesMax);
    KV_CHECK(options.tenant_most_percent >= Options::kTenantMostPercentMin &&
             options.tenant_most_percent <= Options::kTenantMostPercentMax);
    (void)AdminAddress(options);
    (void)OpenListeners(options);
  }

 private:
  const int file_;
};

class TenantsTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    const std::string token(64, 'a');
    return {R"({"tenants": []})",
            absl::StrCat(R"({"tenants": [{"name": "team-a", "uids": [1001, 1002], "token_sha256": [")", token,
                         R"("], "certificates": ["team-a.example"], )",
                         R"("host_bytes": {"guaranteed": "8GiB", "most": "32GiB"}, )",
                         R"("gpu_bytes": {"guaranteed": "4GiB"}}, {"name": "b", "uids": [0]}]})")};
  }
  void Run(absl::Span<const uint8_t> input) override {
    const absl::StatusOr<TenantTable> table = ParseTenants(TextOf(input));
    MustExplain(table.status());
    if (!table.ok()) return;
    KV_CHECK(table->size() <= Principals::kTenantsMax);
    (void)Principals::QuotasOf(*table, 50);
    Principals principals(1000);
    principals.SetTable(*table);
    for (const auto& [name, tenant] : *table) {
      KV_CHECK(tenant.uids.size() <= Principals::kUidsMax && tenant.tokens.size() <= Principals::kTokensMax &&
               tenant.certificates.size() <= Principals::kCertificatesMax);
      // Those that are listed have it under its name, and nobody else does.
      for (const uid_t uid : tenant.uids) KV_CHECK(*principals.TenantOf({.uid = uid}, name) == name);
      for (const Digest& token : tenant.tokens) {
        KV_CHECK(*principals.TenantOf({.uid = {}, .token = token}, name) == name);
      }
      for (const std::string& certificate : tenant.certificates) {
        KV_CHECK(*principals.TenantOf({.uid = {}, .token = {}, .certificate = certificate}, name) == name);
      }
      MustExplain(principals.TenantOf({.uid = uid_t{77}}, name).status());
      KV_CHECK(tenant.uids.contains(77) || !principals.TenantOf({.uid = uid_t{77}}, name).ok());
    }
  }
};

/// The first byte, 'a' to 'm', chooses the reader.
class TextTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    return {"a127.0.0.1:9470",
            "b[::1]:0",
            "cunix:/run/a.sock",
            "ctcp:host:1",
            "d1.5GiB",
            "d123",
            "e10.0.0.1:1,10.0.0.2:2",
            "ftls:host:7000",
            "funix:/a",
            "gaccept=1/2,peer.send=0/1000000000,seed=7",
            "h-1.5e3",
            "i[::1]:80",
            "ilocalhost",
            R"(j{"name": "a", "deadline_ms": 1, "token": "t"})",
            R"(k{"model": "m", "layers": 2, "dtype": "bfloat16", "kv_heads": 2, "device": -1})",
            R"(l["a", "b"])",
            "m# TYPE a counter\na{x=\"y\\\"z\",le=\"+Inf\"} 1.5e3 1700000000\na_bucket{le=\"0.1\"} 3\nb 1\n"};
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    const absl::string_view text = TextOf(input.subspan(1));
    switch ((input[0] + 7) % 13) {
      case 0: {
        const auto parsed = tcp::ParseHostPort("field", text, true);
        MustExplain(parsed.status());
        if (parsed.ok()) {
          const auto again = tcp::ParseHostPort("field", tcp::FormatHostPort(parsed->host, parsed->port), true);
          KV_CHECK(again.ok() && again->host == parsed->host && again->port == parsed->port);
        }
        return;
      }
      case 1: {
        const auto parsed = ParseHostPort("field", text);
        MustExplain(parsed.status());
        if (parsed.ok()) (void)IsLoopback(parsed->host);
        return;
      }
      case 2:
        return MustExplain(ParseListenAddress("field", text).status());
      case 3:
        return MustExplain(ParseBytes("field", text).status());
      case 4:
        return MustExplain(ParsePeers(text).status());
      case 5:
        return MustExplain(client::ParseAddress(text).status());
      case 6:
        MustExplain(SetFailpoints(text));
        for (int point = 0; point < kFailpoints; ++point) (void)Fails(static_cast<Failpoint>(point));
        return KV_CHECK(SetFailpoints("").ok());
      case 7: {
        int whole;
        double number;
        const bool is_whole = ParseDecimal(text, &whole), is_number = ParseDecimal(text, &number);
        KV_CHECK(!is_whole || (is_number && number == whole));
        return KV_CHECK(!is_number || std::isfinite(number));
      }
      case 8:
        (void)IsOwnHost(text, {});
        (void)IsLoopbackAddress(text);
        return KV_CHECK(!IsLoopbackHost(text) || IsOwnHost(text, {}));
      case 9:
        return MustExplain(client::c::ParseClientOptions(text).status());
      case 10:
        return MustExplain(client::c::ParseCacheOptions(text).status());
      case 11:
        return MustExplain(client::c::ParseStrings("field", text).status());
      default: {
        const Readings readings = Readings::Parse(text);
        (void)readings.Sum("a", {{"x", "y"}});
        (void)QuantileOf(readings.Buckets("a"), 0.5);
        return;
      }
    }
  }
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeOptionsTarget() { return std::make_unique<OptionsTarget>(); }
std::unique_ptr<FuzzTarget> MakeTenantsTarget() { return std::make_unique<TenantsTarget>(); }
std::unique_ptr<FuzzTarget> MakeTextTarget() { return std::make_unique<TextTarget>(); }

}  // namespace kvmanager::fuzz
