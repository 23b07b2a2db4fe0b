#include "kvmanager/rpc/rpc_metrics.h"

#include <string>

namespace kvmanager {
namespace {

constexpr char kAcceptedHelp[] = "Connections accepted";
constexpr char kPairsHelp[] =
    "Pairs of query token and context token attended to, by the form in which the context was read";
constexpr char kAttendHelp[] = "Attention of one step, from plan to result, on the event loop (small) or on workers";
constexpr char kReadHelp[] = "Tokens whose K and V were read back, counted once per layer, by the form of their page";

constexpr char kBlocksSecondsHelp[] =
    "One call that reads or writes whole blocks in stored form, from pinned or reserved pages on";
constexpr char kBlocksBytesHelp[] = "Bytes of whole blocks that engines read or wrote in stored form";

std::vector<double> AttendBounds() { return ExponentialBounds(4e-6, 2, 20); }

}  // namespace

const char* MethodName(Method method) {
  static constexpr const char* kNames[kMethods] = {
      "hello",         "openCache",  "createArena",    "openDevice",    "createDeviceArena",
      "admin",         "ping",       "info",           "match",         "createSequences",
      "step",          "claim",      "outputFactors",  "extend",        "openProjections",
      "read",          "readBlocks", "writeBlocks",    "retain",        "prefetch",
      "releaseBlocks", "mapBlocks",  "setProjections", "fork",          "crop",
      "publish",       "handOff",    "beginHandOff",   "finishHandOff", "sequenceInfo",
      "copy",          "mapSlab",    "status",         "caches",        "sequences",
      "peers",         "drain",      "undrain",        "purge",         "recompute",
      "metrics",       "limits",     "explain",        "upgrade",
  };
  return kNames[static_cast<int>(method)];
}

const char* EndReasonName(EndReason reason) {
  static constexpr const char* kNames[kEndReasons] = {"closed",     "framing",  "process_died", "unread",
                                                      "unfinished", "no_hello", "tls",          "shutdown"};
  return kNames[static_cast<int>(reason)];
}

ConnectionMetrics::ConnectionMetrics(Metrics* m)
    : open(m->Gauge("connections", "Open connections of clients, without those on the admin socket")),
      accepted_unix(m->Counter("connections_total", kAcceptedHelp, {{"socket", "unix"}})),
      accepted_tcp(m->Counter("connections_total", kAcceptedHelp, {{"socket", "tcp"}})),
      refused(
          m->Counter("connections_refused_total",
                     "Connections closed at once: too many are open, of all or of one process, user or host, or their "
                     "user may not administer")) {
  for (int i = 0; i < kEndReasons; ++i) {
    ended_by_reason[i] = &m->Counter("connections_ended_total", "Connections ended, by reason",
                                     {{"reason", EndReasonName(static_cast<EndReason>(i))}});
  }
}

AttendMetrics::AttendMetrics(Metrics* m)
    : encoded_pairs(m->Counter("attend_pairs_total", kPairsHelp, {{"form", "encoded"}})),
      raw_pairs(m->Counter("attend_pairs_total", kPairsHelp, {{"form", "raw"}})),
      loop_seconds(m->Histogram("attend_seconds", kAttendHelp, AttendBounds(), {{"where", "loop"}})),
      worker_seconds(m->Histogram("attend_seconds", kAttendHelp, AttendBounds(), {{"where", "workers"}})),
      tokens(m->Counter("attend_tokens_total", "Query tokens attended for, counted once per layer")) {}

ReadMetrics::ReadMetrics(Metrics* m)
    : seconds(m->Histogram("read_seconds", "One read of K and V, from pages that are ready to rows", AttendBounds())),
      encoded_tokens(m->Counter("read_tokens_total", kReadHelp, {{"form", "encoded"}})),
      raw_tokens(m->Counter("read_tokens_total", kReadHelp, {{"form", "raw"}})) {}

MatchMetrics::MatchMetrics(Metrics* m)
    : seconds(
          m->Histogram("match_seconds", "One call of match, from its request until all was looked for, with its turns",
                       {1e-5, 2e-5, 3e-5, 5e-5, 7e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1})) {}

BlockCallMetrics::BlockCallMetrics(Metrics* m)
    : read_seconds(m->Histogram("block_call_seconds", kBlocksSecondsHelp, AttendBounds(), {{"call", "read"}})),
      write_seconds(m->Histogram("block_call_seconds", kBlocksSecondsHelp, AttendBounds(), {{"call", "write"}})),
      read_bytes(m->Counter("block_call_bytes_total", kBlocksBytesHelp, {{"call", "read"}})),
      written_bytes(m->Counter("block_call_bytes_total", kBlocksBytesHelp, {{"call", "write"}})) {}

}  // namespace kvmanager
