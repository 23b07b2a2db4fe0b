// What kvctl prints: tables for people, JSON for programs. Pure functions of what the daemon said; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/client.h"

namespace kvmanager::client::cli {

/// "0 B", "512 B", "1.5 KiB", "12.0 GiB": three significant places at most.
std::string FormatBytes(uint64_t bytes);
/// "12.3 s", "4 m 05 s", "3 h 07 m", "2 d 04 h".
std::string FormatSeconds(double seconds);

/// JSON must be UTF-8, and names come from clients: other bytes are shown as '?'.
std::string Utf8(const std::string& text);
/// A cell is one line of printable characters whatever a client called itself.
std::string Printable(const std::string& text);

/// Columns padded to their widest cell, two blanks between; numbers (cells of digits, and sizes) to the right.
std::string FormatTable(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows);

std::string FormatStatus(const DaemonDescription& status);
std::string FormatCaches(const std::vector<CacheDescription>& caches);
std::string FormatSequences(const std::vector<SequenceDescription>& sequences);
std::string FormatPeers(const std::vector<PeerDescription>& peers);
std::string FormatLimits(const std::vector<LimitDescription>& limits);

// One object per call; sizes in bytes, times in seconds, names as in client.h. Boot epochs and digests are strings of
// hexadecimal digits, since JSON readers round large integers.
nlohmann::json ToJson(const DaemonDescription& status);
nlohmann::json ToJson(const std::vector<CacheDescription>& caches);
nlohmann::json ToJson(const std::vector<SequenceDescription>& sequences);
nlohmann::json ToJson(const std::vector<PeerDescription>& peers);
nlohmann::json ToJson(const std::vector<LimitDescription>& limits);

/// {"error": {"code", "message", "field", "value", "bound", "advice"}}; empty parts are left out.
nlohmann::json ErrorToJson(const absl::Status& error, absl::string_view address, bool reached = false);

/// The field of an error of an upgrade whose message says what to do next.
inline constexpr char kUpgradeField[] = "upgrade";

/// What to do next about `error` of a daemon at `address`; empty if nothing helps but reading it. reached: a connection
/// to it was made before.
std::string Advice(const absl::Status& error, absl::string_view address, bool reached = false);

}  // namespace kvmanager::client::cli
