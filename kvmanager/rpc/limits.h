// Every bound that the RPC service puts on what clients send and hold. Those of hand-offs are in handoff/limits.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvmanager/handoff/limits.h"

namespace kvmanager::limits {

constexpr size_t kConnectionsMax = 4096;           // of engines
constexpr size_t kConnectionsOfProcessMax = 1024;  // of one process on a Unix socket
constexpr size_t kTcpConnectionsMax = 2048;
// Of one user, over Unix sockets, and of one host, over TCP: others find room.
constexpr size_t kConnectionsOfUserMax = kConnectionsMax / 2;
constexpr size_t kConnectionsOfHostMax = kTcpConnectionsMax / 2;
constexpr size_t kAdminConnectionsMax = 64;             // on the admin socket: others cannot take these
constexpr uint64_t kMessageBytesMax = 32 << 20;         // of a message from a client; a larger one ends its connection
constexpr uint64_t kCallsInFlightBytesMax = 128 << 20;  // of a connection's unanswered calls; then it is not read from
constexpr uint64_t kReplyBytesMax = (32 << 20) - (64 << 10);  // of inline output: the message around it stays readable
constexpr uint64_t kReplyMemoryBytesMax = 128 << 20;          // of a connection's calls with inline output; others wait
constexpr size_t kRepliesWaitingMax = 4096;                   // calls of a connection that wait for that memory
constexpr uint64_t kUnsentBytesMax = 64 << 20;          // of other replies that a client does not take; it is cut off
constexpr size_t kUnfinishedCallsMax = 32768;           // of a connection, answered ones too: each keeps its answer
constexpr size_t kCachesHeldMax = 2048;                 // capabilities of caches, of a connection: up to 12 KB each
constexpr uint64_t kHelloBytesMax = 64 << 10;           // of a message before hello was answered
constexpr int64_t kHelloMs = 10000;                     // a connection that has not said hello by then is ended
constexpr size_t kTlsHandshakesMax = 512;               // under way; the oldest makes room for the next
constexpr int64_t kTlsHandshakeMs = 2000;               // then it is given up
constexpr size_t kArenasMax = 64;                       // of a connection
constexpr size_t kBlockLeasesMax = 256;                 // of a connection
constexpr uint64_t kMappedPagesHeldMax = 1 << 20;       // of a connection, under these
constexpr int64_t kBlockLeaseMs = 30000;                // then one ends by itself: its blocks may go
constexpr size_t kSlabsHeldMax = 1024;                  // of a connection, that are being sent to it
constexpr uint64_t kArenaBytesMax = uint64_t{1} << 30;  // of one arena
constexpr uint64_t kArenaBytesTotalMax = uint64_t{4} << 30;  // of a connection
constexpr uint64_t kArenaBytesStep = 4096;
constexpr size_t kSequencesMax = 8192;         // of a connection; with more, its end is a long turn of the event loop
constexpr size_t kSequenceRequestsMax = 4096;  // of one match or createSequences
constexpr size_t kBlockNamesMax = 65536;       // of one prefix, publish, explain, retain or prefetch
constexpr size_t kPrefetchNamesMax = kBlockNamesMax;  // of a connection, that are prefetched behind its matches
constexpr size_t kStepEntriesMax = 4096;
constexpr uint64_t kStepTokensMax = 1 << 18;  // of all entries together
constexpr uint64_t kPositionMax = uint64_t{1} << 40;
constexpr size_t kQueryRowsMax = 8;         // of one extend
constexpr uint64_t kTensorAlign = 64;       // of an offset in an arena
constexpr size_t kPeersAskedMax = 256;      // of one listing
constexpr size_t kClientNameBytesMax = 64;  // longer names are cut
constexpr int kTcpDeadS = 15;               // a silent TCP client is given up after this long

}  // namespace kvmanager::limits
