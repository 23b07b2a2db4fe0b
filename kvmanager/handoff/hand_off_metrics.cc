#include "kvmanager/handoff/hand_off_metrics.h"

namespace kvmanager {
namespace {

constexpr char kHandOffHelp[] = "Hand-offs by what became of them";
constexpr char kTicketsHelp[] = "Received sequences by how their wait ended";

}  // namespace

HandOffMetrics::HandOffMetrics(Metrics* m)
    : sent(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "sent"}, {"result", "ok"}})),
      send_failed(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "sent"}, {"result", "failed"}})),
      received(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "received"}, {"result", "ok"}})),
      between_gpus(m->Counter("hand_offs_between_gpus_total", "Hand-offs received out of a peer's GPU into one here")),
      refused(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "received"}, {"result", "refused"}})),
      aborted(m->Counter("hand_offs_total", kHandOffHelp, {{"direction", "received"}, {"result", "aborted"}})),
      waiting(m->Gauge("hand_offs_waiting", "Offered hand-offs that wait for room here")),
      claimed(m->Counter("tickets_total", kTicketsHelp, {{"end", "claimed"}})),
      expired(m->Counter("tickets_total", kTicketsHelp, {{"end", "expired"}})),
      tickets(m->Gauge("tickets", "Sequences that wait to be claimed: received, or being received")) {}

}  // namespace kvmanager
