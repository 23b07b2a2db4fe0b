// kvctl upgrade: another program goes on in the daemon's process.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvmanager::client::cli {

struct UpgradeArguments {
  std::string program;  // empty: the path that the daemon was started by
  bool cold = false;
  int wait_s = 60;  // until it serves
};

struct Upgraded {
  std::string from, to;       // versions
  double seconds = 0;         // from the daemon's answer until its successor's first
  uint64_t found_blocks = 0;  // published, in host memory
};

/// client: of a daemon at `address`, to which `options` lead again. Errors: the client's; UNAVAILABLE about
/// kUpgradeField: the new program does not serve, with the command that starts the earlier one, as far as this host
/// says it.
absl::StatusOr<Upgraded> Upgrade(std::unique_ptr<Client> client, const std::string& address, Client::Options options,
                                 const UpgradeArguments& arguments);

std::string FormatUpgraded(const Upgraded& upgraded);
nlohmann::json ToJson(const Upgraded& upgraded);

}  // namespace kvmanager::client::cli
