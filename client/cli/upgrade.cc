#include "client/cli/upgrade.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/daemon_command.h"
#include "client/cli/format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTry{50};
constexpr double kSupervisorS = 5;  // in which systemd, say, starts again what has ended

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
  const DaemonCommand command = CommandOf(address);  // it is not to be seen any more once the daemon has gone
  // As a unit's ExecReload: systemd starts the service again once this has ended.
  const bool is_waited_for = !command.unit.empty() && command.unit == ReadCommand("/proc/self").unit;
  const auto failed = [&](const std::string& what) {
    const bool runs = command.pid > 0 && Runs(absl::StrCat("/proc/", command.pid));
    return WithDetail(absl::UnavailableError(
                          absl::StrCat(what, "\n", HowToStartAgain(command, runs, arguments.program, arguments.cold))),
                      {.field = kUpgradeField});
  };
  if (absl::Status refused = client->Upgrade(program, arguments.cold); !refused.ok()) {
    if (!absl::IsUnavailable(refused)) return refused;
    // Of the keeper: the daemon is there.
    if (client->Status().ok()) return WithDetail(refused, {.field = kUpgradeField});
    return failed(std::string(refused.message()));
  }
  const auto asked = steady_clock::now();
  client.reset();
  std::optional<steady_clock::time_point> ended;  // the process was seen to have ended
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
    if (!now.ok() && !ended.has_value() && command.pid > 0 && !Runs(absl::StrCat("/proc/", command.pid))) {
      ended = steady_clock::now();
    }
    if (ended.has_value() && SecondsSince(*ended) >= (is_waited_for ? 0 : kSupervisorS)) {
      return failed(absl::StrCat("the daemon took the new program, which has ended: its log says why (",
                                 now.status().message(), ")"));
    }
    if (SecondsSince(asked) < arguments.wait_s) {
      std::this_thread::sleep_for(kTry);
      continue;
    }
    if (now.ok()) {
      return WithDetail(absl::UnavailableError(absl::StrCat("the daemon took the new program, and still serves itself "
                                                            "after ",
                                                            arguments.wait_s, " s: its log says why")),
                        {.field = kUpgradeField});
    }
    return failed(absl::StrCat("the daemon took the new program, which does not serve after ", arguments.wait_s,
                               " s: its log says why (", now.status().message(), ")"));
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
