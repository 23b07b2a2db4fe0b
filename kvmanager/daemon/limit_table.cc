#include "kvmanager/daemon/limit_table.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "codecs/abi/plugin_process.h"
#include "kvmanager/base/byte_budget.h"
#include "kvmanager/daemon/log.h"
#include "kvmanager/gpu/device_stream.h"
#include "kvmanager/handoff/incoming_hand_offs.h"
#include "kvmanager/handoff/limits.h"
#include "kvmanager/rpc/arena_bytes.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/message_room.h"
#include "kvmanager/rpc/principals.h"
#include "kvmanager/store/block_transfers.h"
#include "kvmanager/store/cache_directory.h"
#include "kvmanager/store/quality.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_report.h"
#include "monitoring/http_server.h"
#include "transport/tcp/peer_key.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport.h"

namespace kvmanager {
namespace {

constexpr char kDaemon[] = "daemon", kTenant[] = "tenant", kUser[] = "user", kHost[] = "host", kProcess[] = "process",
               kConnection[] = "connection", kCall[] = "call", kPeer[] = "peer";
constexpr char kBytes[] = "bytes", kMs[] = "ms", kS[] = "s";

struct Row {
  const char* name;
  const char* scope;
  const char* unit;
  uint64_t limit;
  const char* flag;          // nullptr: fixed
  uint64_t LimitUse::*used;  // nullptr: not counted
  const char* bounds;
};

using Use = LimitUse;

static_assert(limits::kTenantOutgoingMax == TcpTransport::kOutgoingMaxDefault / 2);

}  // namespace

std::vector<Limit> ListLimits(const Options& o, const LimitUse* use) {
  const Row rows[] = {
      // The daemon's memory.
      {"host_pool_bytes", kDaemon, kBytes, o.host_pool_bytes, "--host-pool-bytes", &Use::host_pool_bytes,
       "pages in host memory"},
      {"device_pool_bytes", kDaemon, kBytes, o.device_pool_bytes, "--device-pool-bytes", &Use::device_pool_bytes,
       "pages of each GPU"},
      {"disk_bytes", kDaemon, kBytes, o.disk_bytes, "--disk-bytes", &Use::disk_bytes, "published blocks on the disk"},
      {"request_bytes", kDaemon, kBytes, o.memory_beyond_pool_bytes / 2, "--memory-beyond-pool-bytes",
       &Use::request_bytes, "requests that are received or served; further ones wait"},
      {"reply_bytes", kDaemon, kBytes, o.memory_beyond_pool_bytes / 2, "--memory-beyond-pool-bytes", &Use::reply_bytes,
       "replies that are made or sent; further ones wait"},
      {"arena_bytes", kDaemon, kBytes, o.arena_bytes, "--arena-bytes", &Use::arena_bytes,
       "memory shared with engines, on GPUs too"},
      {"recompute_bytes", kDaemon, kBytes, o.recompute_bytes, "--recompute-bytes", &Use::recompute_bytes,
       "projections in host memory"},
      {"recompute_device_bytes", kDaemon, kBytes, o.recompute_device_bytes, "--recompute-device-bytes",
       &Use::recompute_device_bytes, "projections on each GPU"},
      {"waiting_blob_bytes", kDaemon, kBytes, limits::kBlobBytesWaitingMax, nullptr, &Use::waiting_blob_bytes,
       "engines' blobs of received sequences that nobody has claimed"},
      {"peer_offer_bytes", kDaemon, kBytes, TcpTransport::kOfferBufferBytesMaxDefault, nullptr, nullptr,
       "descriptions of sequences that peers offer"},
      {"peer_window_bytes", kPeer, kBytes, o.peer_window_bytes, "--peer-window-bytes", nullptr,
       "pages on their way here that are not confirmed"},
      {"quality_query_bytes", kDaemon, kBytes, QualityMonitor::kQueryBytesMax, nullptr, nullptr,
       "queries kept for --quality-sample"},
      // The daemon's places.
      {"connections", kDaemon, "connections", limits::kConnectionsMax, nullptr, &Use::connections,
       "engines, over Unix sockets and TCP"},
      {"tcp_connections", kDaemon, "connections", limits::kTcpConnectionsMax, nullptr, &Use::tcp_connections,
       "of these, over TCP"},
      {"admin_connections", kDaemon, "connections", limits::kAdminConnectionsMax, nullptr, &Use::admin_connections,
       "on the admin socket: a reserve that engines cannot take"},
      {"http_connections", kDaemon, "connections", HttpServer::kConnectionsMax, nullptr, nullptr,
       "each of --metrics-listen and --http-listen"},
      {"tls_handshakes", kDaemon, "connections", limits::kTlsHandshakesMax, nullptr, &Use::tls_handshakes,
       "clients in the handshake of TLS; the oldest makes room"},
      {"sequences", kDaemon, "sequences", StoreUse::kSequencesMax, nullptr, &Use::sequences, "open sequences"},
      {"lease_pages", kDaemon, "pages", kLeasePagesMax, nullptr, &Use::lease_pages,
       "pages that calls under way read, each time that one names it, 40 bytes each"},
      {"mapped_pages", kDaemon, "pages", kMappedPagesMax, nullptr, &Use::mapped_pages,
       "pages that clients read where they lie, each time that a lease has it, 60 bytes each"},
      {"caches", kDaemon, "caches", CacheDirectory::kCachesMax, nullptr, &Use::caches, "open caches"},
      {"waiting_hand_offs", kDaemon, "sequences", limits::kTicketsMax, nullptr, &Use::waiting_hand_offs,
       "received sequences that nobody has claimed"},
      {"waiting_offers", kDaemon, "offers", limits::kOffersWaitingMax, nullptr, nullptr,
       "hand-offs that wait for room here"},
      {"incoming_hand_offs", kDaemon, "hand-offs", TcpTransport::kIncomingMaxDefault, nullptr, nullptr,
       "hand-offs received at once"},
      {"outgoing_hand_offs", kDaemon, "hand-offs", TcpTransport::kOutgoingMaxDefault, nullptr, &Use::outgoing_hand_offs,
       "hand-offs sent at once"},
      {"sent_pages", kDaemon, "pages", kSentPagesMax, nullptr, &Use::sent_pages,
       "of hand-offs that are sent, until what these held is given back, some 100 bytes each"},
      {"peer_connections_pending", kDaemon, "connections", TcpTransport::kPendingConnectionsMaxDefault, nullptr,
       nullptr, "of peers that have not said what they are"},
      {"peer_authentications", kDaemon, "connections", tcp::kAuthenticatingMax, nullptr, nullptr,
       "of peers that prove --peer-key; of one host half of them"},
      {"listed_tenants", kDaemon, "tenants", Principals::kTenantsMax, nullptr, &Use::listed_tenants,
       "in the file of --tenants"},
      {"log_lines", kDaemon, "lines", Log::kLinesMax, nullptr, nullptr,
       "lines that wait to be written; the oldest are lost"},
      {"drain_s", kDaemon, kS, static_cast<uint64_t>(o.drain_s), "--drain-s", nullptr,
       "how long SIGTERM waits for leases and unclaimed sequences"},
      {"state_keep_s", kDaemon, kS, static_cast<uint64_t>(o.state_keep_s), "--state-keep-s", nullptr,
       "how long the memory of --state-dir is kept without a daemon; 0: for ever"},
      {"hand_off_lease_ms", kDaemon, kMs, static_cast<uint64_t>(o.hand_off_lease_ms), "--hand-off-lease-ms", nullptr,
       "how long a received sequence waits to be claimed"},
      // A tenant's.
      {"tenant_pool_bytes", kTenant, kBytes, o.host_pool_bytes / 100 * static_cast<uint64_t>(o.tenant_most_percent),
       "--tenant-most-percent", &Use::tenant_pool_bytes,
       "pages in host memory of a payer that --tenants gives no bound of its own"},
      {"tenant_recompute_bytes", kTenant, kBytes, ByteBudget::OfPayerMax(o.recompute_bytes), "--recompute-bytes",
       &Use::tenant_recompute_bytes, "a payer's part of recompute_bytes: three quarters"},
      {"tenant_recompute_device_bytes", kTenant, kBytes, ByteBudget::OfPayerMax(o.recompute_device_bytes),
       "--recompute-device-bytes", &Use::tenant_recompute_device_bytes,
       "a payer's part of recompute_device_bytes: three quarters"},
      {"tenant_sequences", kTenant, "sequences", StoreUse::kTenantSequencesMax, nullptr, &Use::tenant_sequences,
       "open sequences of a payer"},
      {"tenant_shared_blocks", kTenant, "blocks", StoreUse::kTenantSharedBlocksMax, nullptr, &Use::tenant_shared_blocks,
       "blocks with which a payer's sequences began, or that they left and still hold, 8 bytes each"},
      {"tenant_lease_pages", kTenant, "pages", kTenantLeasePagesMax, nullptr, &Use::tenant_lease_pages,
       "pages that a payer's calls under way read"},
      {"tenant_mapped_pages", kTenant, "pages", kTenantMappedPagesMax, nullptr, &Use::tenant_mapped_pages,
       "a payer's part of mapped_pages"},
      {"tenant_caches", kTenant, "caches", CacheDirectory::kTenantCachesMax, nullptr, &Use::tenant_caches,
       "open caches of a payer"},
      {"tenant_waiting_blob_bytes", kTenant, kBytes, limits::kTenantBlobBytesMax, nullptr,
       &Use::tenant_waiting_blob_bytes, "a payer's part of waiting_blob_bytes"},
      {"tenant_waiting_hand_offs", kTenant, "sequences", limits::kTenantTicketsMax, nullptr,
       &Use::tenant_waiting_hand_offs, "a payer's part of waiting_hand_offs"},
      {"tenant_waiting_offers", kTenant, "offers", limits::kTenantOffersWaitingMax, nullptr, nullptr,
       "a payer's part of waiting_offers"},
      {"tenant_outgoing_hand_offs", kTenant, "hand-offs", limits::kTenantOutgoingMax, nullptr,
       &Use::tenant_outgoing_hand_offs, "a payer's part of outgoing_hand_offs"},
      {"tenant_to_peer_hand_offs", kTenant, "hand-offs", limits::kTenantToPeerMax, nullptr,
       &Use::tenant_to_peer_hand_offs, "of these, to one peer"},
      {"tenant_sent_pages", kTenant, "pages", kTenantSentPagesMax, nullptr, &Use::tenant_sent_pages,
       "a payer's part of sent_pages"},
      {"user_connections", kUser, "connections", limits::kConnectionsOfUserMax, nullptr, &Use::user_connections,
       "connections of a user's processes, over Unix sockets"},
      {"user_arena_bytes", kUser, kBytes, ArenaBytes::OfUserMax(o.arena_bytes), "--arena-bytes", &Use::user_arena_bytes,
       "memory shared with a user's engines: three quarters of arena_bytes"},
      {"user_gpu_streams", kUser, "streams", DeviceStreams::kUserStreamsMax, nullptr, nullptr,
       "streams of a user's engines on each GPU"},
      {"host_connections", kHost, "connections", limits::kConnectionsOfHostMax, nullptr, &Use::host_connections,
       "connections of a host, over TCP"},
      {"process_connections", kProcess, "connections", limits::kConnectionsOfProcessMax, nullptr,
       &Use::process_connections, "connections of a process, over Unix sockets"},
      // A connection's.
      {"hello_ms", kConnection, kMs, limits::kHelloMs, nullptr, nullptr, "until it has said hello"},
      {"hello_bytes", kConnection, kBytes, limits::kHelloBytesMax, nullptr, nullptr, "a message before that"},
      {"tls_handshake_ms", kConnection, kMs, limits::kTlsHandshakeMs, nullptr, nullptr, "the handshake of TLS"},
      {"tcp_silent_s", kConnection, kS, limits::kTcpDeadS, nullptr, nullptr,
       "until a TCP client that owes acknowledgements is given up"},
      {"request_silent_ms", kConnection, kMs, MessageRoom::kStalledMs, nullptr, nullptr,
       "silence within a request while others wait for memory"},
      {"request_ms", kConnection, kMs, MessageRoom::kSlowMs, nullptr, nullptr,
       "from a request's begin to its end while others wait for memory; or without taking a reply"},
      {"connection_own_bytes", kConnection, kBytes, MessageRoom::kOwnBytes, nullptr, nullptr,
       "a reserve for requests, and one for replies, beside request_bytes and reply_bytes"},
      {"connection_request_bytes", kConnection, kBytes, limits::kCallsInFlightBytesMax, nullptr,
       &Use::connection_request_bytes, "unanswered requests; then nothing more is read"},
      {"connection_reply_bytes", kConnection, kBytes, limits::kReplyMemoryBytesMax, nullptr,
       &Use::connection_reply_bytes, "replies with tensors; further calls wait"},
      {"connection_replies_waiting", kConnection, "calls", limits::kRepliesWaitingMax, nullptr, nullptr,
       "calls that wait for memory for their replies"},
      {"connection_unsent_bytes", kConnection, kBytes, limits::kUnsentBytesMax, nullptr, nullptr,
       "other replies that it does not take; then it is cut off"},
      {"connection_calls", kConnection, "calls", limits::kUnfinishedCallsMax, nullptr, nullptr,
       "calls that it has not finished, answered ones too; then it is cut off"},
      {"connection_caches", kConnection, "caches", limits::kCachesHeldMax, nullptr, &Use::connection_caches,
       "capabilities of caches that it holds, and calls to open one"},
      {"connection_sequences", kConnection, "sequences", limits::kSequencesMax, nullptr, &Use::connection_sequences,
       "sequences that it holds"},
      {"connection_block_leases", kConnection, "leases", limits::kBlockLeasesMax, nullptr,
       &Use::connection_block_leases, "leases on blocks that it reads where they lie"},
      {"connection_mapped_pages", kConnection, "pages", limits::kMappedPagesHeldMax, nullptr,
       &Use::connection_mapped_pages, "pages under these"},
      {"block_lease_ms", kConnection, kMs, limits::kBlockLeaseMs, nullptr, nullptr,
       "until such a lease ends by itself"},
      {"connection_prefetch_names", kConnection, "names", limits::kPrefetchNamesMax, nullptr,
       &Use::connection_prefetch_names, "blocks that are prefetched behind its matches"},
      {"connection_slabs", kConnection, "slabs", limits::kSlabsHeldMax, nullptr, nullptr,
       "descriptors of slabs that are being sent to it"},
      {"connection_arenas", kConnection, "arenas", limits::kArenasMax, nullptr, &Use::connection_arenas,
       "arenas that it holds, on GPUs too"},
      {"connection_arena_bytes", kConnection, kBytes, limits::kArenaBytesTotalMax, nullptr,
       &Use::connection_arena_bytes, "these together"},
      {"plugin_calls", kDaemon, "calls", PluginProcess::kLanesMax, nullptr, nullptr,
       "calls at once of a codec plug-in in a process of its own; at most --threads"},
      {"plugin_shared_bytes", kDaemon, kBytes, PluginProcess::kLaneBytes, nullptr, nullptr,
       "memory that each of these shares with the daemon: a page in both forms"},
      {"plugin_address_bytes", kDaemon, kBytes, PluginProcess::kAddressBytesMax, nullptr, nullptr,
       "address space of such a process beside it"},
      {"plugin_call_ms", kDaemon, kMs, PluginProcess::kCallMsMax, nullptr, nullptr,
       "until such a process has answered a call; then it is ended"},
      {"plugin_make_ms", kDaemon, kMs, PluginProcess::kMakeMsMax, nullptr, nullptr,
       "until it has loaded its object, or made a codec"},
      {"plugin_restart_ms", kDaemon, kMs, PluginProcess::kRestartMsMax, nullptr, nullptr,
       "longest pause before it is started again"},
      {"gpu_streams", kDaemon, "streams", DeviceStreams::kStreamsMax, nullptr, nullptr,
       "streams of engines on each GPU"},
      // A call's.
      {"message_bytes", kCall, kBytes, limits::kMessageBytesMax, nullptr, nullptr,
       "a request; a larger one ends its connection"},
      {"inline_bytes", kCall, kBytes, limits::kReplyBytesMax, nullptr, nullptr, "tensors in a reply"},
      {"one_arena_bytes", kCall, kBytes, limits::kArenaBytesMax, nullptr, nullptr, "an arena"},
      {"prefixes", kCall, "prefixes", limits::kSequenceRequestsMax, nullptr, nullptr,
       "prefixes of one match or createSequences"},
      {"block_names", kCall, "names", limits::kBlockNamesMax, nullptr, nullptr,
       "names of one prefix, publish, explain, retain or prefetch"},
      {"sequence_blocks", kCall, "blocks", kSequenceBlocksMax, nullptr, nullptr, "length of a sequence"},
      {"transfer_pages", kCall, "pages", kTransferPagesMax, nullptr, nullptr,
       "pages of one readBlocks or writeBlocks: blocks times layers"},
      {"retention_ms", kCall, kMs, CacheDirectory::kRetentionMsMax, nullptr, nullptr,
       "how long a call of retain may say; without an end it may, too"},
      {"step_entries", kCall, "sequences", limits::kStepEntriesMax, nullptr, nullptr, "sequences of a step"},
      {"step_tokens", kCall, "tokens", limits::kStepTokensMax, nullptr, nullptr, "tokens of a step, of all entries"},
      {"query_rows", kCall, "rows", limits::kQueryRowsMax, nullptr, nullptr, "rows of queries of an extend"},
      {"position", kCall, "tokens", limits::kPositionMax, nullptr, nullptr, "a position in a sequence"},
      {"client_name_bytes", kCall, kBytes, limits::kClientNameBytesMax, nullptr, nullptr,
       "a client's name; longer ones are cut"},
      {"peers_asked", kCall, "peers", limits::kPeersAskedMax, nullptr, nullptr, "peers of one listing"},
      {"peers_choice", kCall, "peers", limits::kPeersChoiceMax, nullptr, nullptr,
       "peers among which a hand-off may choose"},
      {"peer_address_bytes", kCall, kBytes, limits::kPeerTextBytesMax, nullptr, nullptr, "an address of a peer"},
      {"blob_bytes", kCall, kBytes, limits::kBlobBytesMax, nullptr, nullptr, "an engine's blob in a hand-off"},
      {"hand_off_blocks", kCall, "blocks", limits::kHandOffBlocksMax, nullptr, nullptr, "blocks of a hand-off"},
      {"hand_off_ms", kCall, kMs, limits::kHandOffTimeoutMsMax, nullptr, nullptr,
       "how long a hand-off may be let take"},
      // Of peers.
      {"peer_proof_ms", kPeer, kMs, static_cast<uint64_t>(tcp::kAuthMs), nullptr, nullptr,
       "until a peer has proved --peer-key, or its certificate"},
      {"peer_answer_ms", kPeer, kMs, limits::kPeerAnswerMs, nullptr, nullptr,
       "until a peer has said how much it has to do"},
      {"peer_silent_ms", kPeer, kMs, SendRequest::kStallMsDefault, nullptr, nullptr,
       "until a peer in a hand-off that is not heard of is given up"},
      {"peer_idle_ms", kPeer, kMs, TcpTransport::kIdleMsDefault, nullptr, nullptr,
       "until a hand-off without pages gives way to one that waits"},
      {"peer_hand_off_bytes", kPeer, kBytes, TcpTransport::kTransferBytesMaxDefault, nullptr, nullptr,
       "pages of a hand-off"},
  };
  std::vector<Limit> list;
  for (const Row& row : rows) {
    Limit& limit = list.emplace_back();
    limit.name = row.name;
    limit.scope = row.scope;
    limit.unit = row.unit;
    limit.limit = row.limit;
    if (use != nullptr && row.used != nullptr) limit.used = use->*row.used;
    if (row.flag != nullptr) limit.flag = row.flag;
    limit.bounds = row.bounds;
  }
  return list;
}

std::string LimitText(const Limit& limit) {
  if (limit.limit == 0 && !limit.flag.empty()) return "as set";
  if (limit.unit == kMs || limit.unit == kS) return absl::StrCat(limit.limit, " ", limit.unit);
  if (limit.unit != kBytes || limit.limit == 0) return absl::StrCat(limit.limit);
  static constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
  uint64_t number = limit.limit;
  size_t unit = 0;
  while (number % 1024 == 0 && unit + 1 < std::size(kUnits)) {
    number /= 1024;
    ++unit;
  }
  return absl::StrCat(number, kUnits[unit]);
}

std::string LimitsHelp(absl::Span<const Limit> limits) {
  std::string text = "Limits, with what they are by default; `kvctl limits` shows a daemon's, and their use:\n";
  for (const Limit& limit : limits) {
    absl::StrAppendFormat(&text, "  %-29s %-9s of a %-11s %s%s\n", limit.name, LimitText(limit), limit.scope,
                          limit.bounds, limit.flag.empty() ? "" : absl::StrCat(" (", limit.flag, ")"));
  }
  return text;
}

}  // namespace kvmanager
