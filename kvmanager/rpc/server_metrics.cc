#include "kvmanager/rpc/server_metrics.h"

#include <string>

namespace kvmanager {
namespace {

constexpr char kAcceptedHelp[] = "Connections accepted";
constexpr char kErrorsHelp[] = "RPC calls answered with an error, by status code; code FRAMING: the connection ended";
constexpr char kPairsHelp[] =
    "Pairs of query token and context token attended to, by the form in which the context was read";
constexpr char kAttendHelp[] = "Attention of one step, from plan to result, on the event loop (small) or on workers";
constexpr char kReadHelp[] = "Tokens whose K and V were read back, counted once per layer, by the form of their page";
constexpr char kHandOffHelp[] = "Hand-offs by what became of them";

std::vector<double> AttendBounds() { return ExponentialBounds(4e-6, 2, 20); }

}  // namespace

const char* MethodName(Method method) {
  static constexpr const char* kNames[kMethods] = {
      "hello",   "openCache",      "createArena",   "openDevice",   "createDeviceArena",
      "admin",   "ping",           "info",          "match",        "createSequences",
      "step",    "claim",          "outputFactors", "extend",       "openProjections",
      "read",    "setProjections", "fork",          "crop",         "publish",
      "handOff", "beginHandOff",   "finishHandOff", "sequenceInfo", "copy",
      "mapSlab", "status",         "caches",        "sequences",    "peers",
      "drain",   "undrain",        "purge",         "recompute",    "metrics",
  };
  return kNames[static_cast<int>(method)];
}

const char* EndReasonName(EndReason reason) {
  static constexpr const char* kNames[kEndReasons] = {"closed", "framing", "process_died", "unread", "shutdown"};
  return kNames[static_cast<int>(reason)];
}

ServerMetrics::ServerMetrics(Metrics* m)
    : connections(m->Gauge("connections", "Open connections of clients")),
      connections_unix(m->Counter("connections_total", kAcceptedHelp, {{"socket", "unix"}})),
      connections_tcp(m->Counter("connections_total", kAcceptedHelp, {{"socket", "tcp"}})),
      connections_refused(m->Counter("connections_refused_total", "Connections closed at once: too many are open")),
      framing_errors(m->Counter("rpc_errors_total", kErrorsHelp, {{"method", "none"}, {"code", "FRAMING"}})),
      held_sequences(m->Gauge("held_sequences", "Sequences that clients hold")),
      arena_bytes(m->Gauge("arena_bytes", "Bytes of arenas shared with clients")),
      draining(m->Gauge("draining", "1 while no new sequences are accepted")),
      attend_encoded_pairs(m->Counter("attend_pairs_total", kPairsHelp, {{"form", "encoded"}})),
      attend_raw_pairs(m->Counter("attend_pairs_total", kPairsHelp, {{"form", "raw"}})),
      attend_loop_seconds(m->Histogram("attend_seconds", kAttendHelp, AttendBounds(), {{"where", "loop"}})),
      attend_worker_seconds(m->Histogram("attend_seconds", kAttendHelp, AttendBounds(), {{"where", "workers"}})),
      attend_tokens(m->Counter("attend_tokens_total", "Query tokens attended for, counted once per layer")),
      read_seconds(
          m->Histogram("read_seconds", "One read of K and V, from pages that are ready to rows", AttendBounds())),
      read_encoded_tokens(m->Counter("read_tokens_total", kReadHelp, {{"form", "encoded"}})),
      read_raw_tokens(m->Counter("read_tokens_total", kReadHelp, {{"form", "raw"}})),
      encode_seconds(
          m->Histogram("encode_seconds", "Encoding of one page on one worker", ExponentialBounds(4e-6, 2, 18))),
      encode_input_bytes(m->Counter("encode_input_bytes_total", "Raw bytes of pages given to codecs")),
      pool_pinned_bytes(m->Gauge("pool_pinned_bytes", "Bytes of the host pool that GPUs can move pages to")),
      device_encoded_pages(m->Counter("device_encoded_pages_total", "Pages that the daemon encoded on GPUs")),
      hand_offs_sent(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "sent"}, {"result", "ok"}})),
      hand_offs_send_failed(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "sent"}, {"result", "failed"}})),
      hand_offs_received(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "received"}, {"result", "ok"}})),
      hand_offs_between_gpus(
          m->Counter("hand_offs_between_gpus_total", "Hand-offs received out of a peer's GPU into one here")),
      hand_offs_refused(
          m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "received"}, {"result", "refused"}})),
      hand_offs_aborted(
          m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "received"}, {"result", "aborted"}})),
      hand_offs_claimed(
          m->Counter("tickets_total", "Received sequences by how their wait ended", {{"end", "claimed"}})),
      hand_offs_expired(
          m->Counter("tickets_total", "Received sequences by how their wait ended", {{"end", "expired"}})),
      tickets(m->Gauge("tickets", "Sequences that wait to be claimed: received, or being received")),
      hand_offs_waiting(m->Gauge("hand_offs_waiting", "Offered hand-offs that wait for room here")),
      metrics_(m) {
  for (int i = 0; i < kMethods; ++i) {
    calls_by_method[i] =
        &m->Counter("rpc_calls_total", "RPC calls by method", {{"method", MethodName(static_cast<Method>(i))}});
  }
  for (int i = 0; i < kEndReasons; ++i) {
    connections_ended[i] = &m->Counter("connections_ended_total", "Connections ended, by reason",
                                       {{"reason", EndReasonName(static_cast<EndReason>(i))}});
  }
}

void ServerMetrics::CountError(Method method, absl::StatusCode code) {
  metrics_
      ->Counter("rpc_errors_total", kErrorsHelp,
                {{"method", MethodName(method)}, {"code", absl::StatusCodeToString(code)}})
      .Increment();
}

}  // namespace kvmanager
