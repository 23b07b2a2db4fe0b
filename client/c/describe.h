// The client's descriptions as JSON objects, whose members are named as the structs' in client/client.h; and options
// from JSON. Digests, tickets and blobs are hexadecimal. No state; any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "nlohmann/json.hpp"

namespace kvmanager::client::c {

std::string Text(const nlohmann::json& json);
nlohmann::json Describe(const CacheDescription& description);
nlohmann::json Describe(const DaemonDescription& description);
nlohmann::json Describe(const SequenceDescription& description);
nlohmann::json Describe(const PeerDescription& description);
nlohmann::json Describe(const LimitDescription& description);
nlohmann::json Describe(const Explanation& explanation);
nlohmann::json Describe(const RecomputeDescription& description);
nlohmann::json Describe(const HandOffOutcome& outcome);

template <typename T>
nlohmann::json DescribeAll(const std::vector<T>& descriptions) {
  nlohmann::json all = nlohmann::json::array();
  for (const T& description : descriptions) all.push_back(Describe(description));
  return all;
}

std::string Hex(absl::string_view bytes);

/// Errors: INVALID_ARGUMENT for what is no JSON object, an unknown member, a member of another type or beyond an int's
/// range; what values mean is the client's and the daemon's to judge.
absl::StatusOr<Client::Options> ParseClientOptions(absl::string_view json);
absl::StatusOr<CacheOptions> ParseCacheOptions(absl::string_view json);
absl::StatusOr<std::vector<std::string>> ParseStrings(absl::string_view field, absl::string_view json);

}  // namespace kvmanager::client::c
