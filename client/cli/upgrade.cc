#include "client/cli/upgrade.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTry{50};

double SecondsSince(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

/// A metric without labels; 0: there is none.
double MetricOf(const std::string& text, absl::string_view name) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    if (absl::ConsumePrefix(&line, absl::StrCat(name, " ")) && absl::SimpleAtod(line, &value)) return value;
  }
  return 0;
}

}  // namespace

absl::StatusOr<Upgraded> Upgrade(std::unique_ptr<Client> client, const std::string& address, Client::Options options,
                                 const UpgradeArguments& arguments) {
  std::string program = arguments.program;
  std::error_code error;
  // The daemon is in another folder.
  if (!program.empty()) program = std::filesystem::absolute(program, error).lexically_normal().string();
  KV_ASSIGN_OR_RETURN(const DaemonDescription before, client->Status());
  KV_RETURN_IF_ERROR(client->Upgrade(program, arguments.cold));
  const auto asked = steady_clock::now();
  client.reset();
  Upgraded upgraded{.from = before.version};
  options.hello_ms = arguments.wait_s * int64_t{1000};
  for (;;) {
    auto next = Client::Connect(address, options);
    absl::StatusOr<DaemonDescription> now = next.ok() ? (*next)->Status() : next.status();
    if (now.ok() && now->boot_epoch != before.boot_epoch) {
      upgraded.seconds = SecondsSince(asked);
      upgraded.to = now->version;
      KV_ASSIGN_OR_RETURN(const std::string metrics, (*next)->MetricsText());
      upgraded.found_blocks =
          static_cast<uint64_t>(std::llround(MetricOf(metrics, "kvmanager_recovered_blocks_total")));
      return upgraded;
    }
    if (SecondsSince(asked) >= arguments.wait_s) {
      return absl::UnavailableError(
          absl::StrCat("the daemon took the new program, which does not serve after ", arguments.wait_s,
                       " s: its log says why; start the earlier one, whose --state-dir has what was published. ",
                       now.ok() ? "The earlier one still answers" : now.status().message()));
    }
    std::this_thread::sleep_for(kTry);
  }
}

std::string FormatUpgraded(const Upgraded& upgraded) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.2f", upgraded.seconds);
  return absl::StrCat("kvmanagerd ", upgraded.to, " serves in place of ", upgraded.from, ", after ", seconds, " s; ",
                      upgraded.found_blocks, " published blocks are found in memory\n");
}

nlohmann::json ToJson(const Upgraded& upgraded) {
  return {{"from", upgraded.from},
          {"version", upgraded.to},
          {"seconds", upgraded.seconds},
          {"found_blocks", upgraded.found_blocks}};
}

}  // namespace kvmanager::client::cli
