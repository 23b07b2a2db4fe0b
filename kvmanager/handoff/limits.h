// Every bound that hand-offs put on what clients and peers send.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmanager::limits {

constexpr size_t kBlobBytesMax = 1 << 20;                           // of an engine's blob in a hand-off
constexpr uint64_t kBlobBytesWaitingMax = 64 << 20;                 // of all received sequences that wait to be claimed
constexpr uint64_t kTenantBlobBytesMax = kBlobBytesWaitingMax / 2;  // of one payer's, so that another finds room
constexpr size_t kPeerTextBytesMax = 300;                           // of one address
constexpr size_t kPeersChoiceMax = 16;                              // that a hand-off may choose from
constexpr int64_t kPeerAnswerMs = 500;  // how long a peer may take to say how much it has to do
constexpr uint32_t kHandOffTimeoutMsMax = 3600000;
constexpr size_t kTicketsMax = 4096;                   // received sequences that wait to be claimed
constexpr size_t kTenantTicketsMax = kTicketsMax / 2;  // likewise, one payer's
constexpr size_t kTenantOutgoingMax = 128;             // hand-offs of one payer that are sent at once: half of all
constexpr size_t kTenantToPeerMax = 48;    // of these, to one peer: three quarters of what it takes of one host
constexpr size_t kOffersWaitingMax = 128;  // that wait for room here
constexpr size_t kTenantOffersWaitingMax = kOffersWaitingMax / 2;  // likewise
constexpr size_t kHandOffBlocksMax = 65536;                        // of one received sequence

}  // namespace kvmanager::limits
