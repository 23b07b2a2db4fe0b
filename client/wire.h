// Between the API's messages and the client's plain structs. No I/O, no state; any thread.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {

// Bounds of messages, checked before one is built (api/kvmanager.capnp: larger ones would end the connection).
inline constexpr uint64_t kMessageBytesMax = 32 << 20;
inline constexpr uint64_t kMessageOverheadBytes = 1024;  // RPC envelope and fixed fields of any request, rounded up
inline constexpr uint64_t kStepEntryBytes = 24;
inline constexpr uint64_t kBlockNameBytes = 80;  // two pointers and 2 x 32 bytes
inline constexpr uint64_t kPrefixBytes = 16;     // its struct and list tag

/// Entries of a list in a daemon's answer. Empty structs take no bytes, so a message of a hundred could claim millions;
/// a daemon lists at most 65,536 of anything.
inline constexpr uint32_t kListedMax = 1 << 17;

/// INVALID_ARGUMENT if a message of about `bytes` would be over the bound. `what` names its largest part.
absl::Status CheckMessageBytes(absl::string_view what, uint64_t bytes, uint64_t bytes_max);

/// The status as the daemon made it: code, message, and the payloads field, value and bound.
absl::Status FromWire(api::Status::Reader wire);

/// Negative numbers, which the wire cannot carry, are INVALID_ARGUMENT; everything else is the daemon's to judge.
absl::Status CheckOptions(const CacheOptions& options);
/// REQUIRES: CheckOptions(options).ok().
void ToWire(const CacheOptions& options, api::CacheConfig::Builder wire);
void ToWire(absl::Span<const BlockName> names, capnp::List<api::BlockName>::Builder wire);
api::DType ToWire(DType dtype);

/// INTERNAL if a list, called `what`, has more entries than kListedMax.
absl::Status CheckListed(absl::string_view what, uint32_t entries);

/// INTERNAL if a digest is not of 32 bytes.
absl::StatusOr<CacheDescription> FromWire(api::CacheInfo::Reader wire);
SequenceDescription FromWire(api::SequenceInfo::Reader wire);
/// INTERNAL: CheckListed.
absl::StatusOr<DaemonDescription> FromWire(api::DaemonStatus::Reader wire);
PeerDescription FromWire(api::PeerStatus::Reader wire);
LimitDescription FromWire(api::LimitInfo::Reader wire);
/// Of what the wire cannot carry.
absl::Status CheckRetention(const RetentionOptions& options);
/// Request: retain's, of Cache or Admin. REQUIRES: CheckRetention(options).ok().
template <typename Request>
void WriteRetention(absl::Span<const BlockName> names, const RetentionOptions& options, Request& request) {
  ToWire(names, request.initNames(static_cast<uint32_t>(names.size())));
  request.setPriority(static_cast<uint8_t>(options.priority));
  request.setTtlMs(static_cast<uint64_t>(options.ttl_ms));
}
template <typename Response>
absl::StatusOr<RetainOutcome> ReadRetained(const Response& response) {
  KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
  return RetainOutcome{response.getBlocks(), response.getBytes()};
}
PrefixMatch FromWire(api::MatchResult::Reader wire);
/// Of prefetch, of Cache or Admin.
template <typename Response>
absl::StatusOr<PrefixMatch> ReadMatch(const Response& response) {
  KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
  return FromWire(response.getMatch());
}
/// INTERNAL: CheckListed.
absl::StatusOr<Explanation> FromWire(api::Admin::ExplainResults::Reader wire);
/// INTERNAL if a digest is not of 32 bytes; CheckListed.
absl::StatusOr<RecomputeDescription> FromWire(api::RecomputeStatus::Reader wire);
Miss FromWire(api::MissReason wire);

std::string ToString(capnp::Text::Reader text);
std::string ToString(capnp::Data::Reader data);
inline kj::StringPtr ToKj(const std::string& text) { return kj::StringPtr(text.c_str(), text.size()); }
inline capnp::Data::Reader ToKj(absl::Span<const uint8_t> data) { return {data.data(), data.size()}; }

}  // namespace kvmanager::client
