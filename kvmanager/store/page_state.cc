#include "kvmanager/store/page_state.h"

#include <string>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using S = PageState;
using E = PageEvent;

bool RawOnly(const Page&, const PageChange& a) { return a.raw.valid() && !a.encoded.valid(); }
bool EncodedOnly(const Page&, const PageChange& a) { return !a.raw.valid() && a.encoded.valid(); }
bool Same(const Page& b, const PageChange& a) { return a.raw == b.raw && a.encoded == b.encoded; }
bool Empty(const PageChange& a) { return !a.raw.valid() && !a.encoded.valid(); }

bool CanOpen(const Page& b, const PageChange& a) { return RawOnly(b, a); }
bool CanSeal(const Page& b, const PageChange& a) { return a.raw == b.raw && a.encoded.valid(); }
bool CanSealIdentity(const Page& b, const PageChange& a) { return EncodedOnly(b, a) && a.encoded == b.raw; }
bool CanEncode(const Page& b, const PageChange& a) { return Same(b, a) && !b.busy; }
bool CanFinish(const Page& b, const PageChange& a) { return Same(b, a) && b.busy && !a.declined; }
bool CanDecline(const Page& b, const PageChange& a) { return RawOnly(b, a) && a.raw == b.raw && b.busy && a.declined; }
bool CanReleaseRaw(const Page& b, const PageChange& a) {
  return EncodedOnly(b, a) && a.encoded == b.encoded && b.raw.valid() && b.raw_holds == 0 && b.pins == b.encoded_pins &&
         !b.declined;
}
bool CanLower(const Page& b, const PageChange& a) {
  return EncodedOnly(b, a) && EncodedOnly(b, {b.raw, b.encoded}) && a.encoded != b.encoded && a.rung > b.rung &&
         b.pins == 1 && b.encoded_pins == 1;
}
bool CanReserve(const Page&, const PageChange& a) { return !Empty(a); }
bool CanReserveRaw(const Page& b, const PageChange& a) {
  return !b.raw.valid() && a.raw.valid() && a.encoded.valid() && a.encoded == b.encoded;
}
bool CanShowOpen(const Page& b, const PageChange& a) { return Same(b, a) && RawOnly(b, a); }
bool CanShowRaw(const Page& b, const PageChange& a) { return Same(b, a) && a.raw.valid() && a.encoded.valid(); }
bool CanShowEncoded(const Page& b, const PageChange& a) { return EncodedOnly(b, a) && a.encoded == b.encoded; }
bool CanShowCopy(const Page& b, const PageChange& a) {
  return Same(b, a) && (a.declined ? RawOnly(b, a) : a.encoded.valid());
}
bool CanQuarantine(const Page& b, const PageChange& a) { return Same(b, a) && (b.pins > 0 || b.busy); }
bool CanEndJob(const Page& b, const PageChange& a) { return Same(b, a) && b.busy; }
bool CanFree(const Page& b, const PageChange& a) { return Empty(a) && b.pins == 0 && !b.busy; }

constexpr char kUnused[] = "no lease pins it, no job runs on it";
constexpr char kUsed[] = "no sequence and no name is left; a lease pins it or a job runs on it";

constexpr PageTransition kTransitions[] = {
    {E::kOpen, S::kFree, S::kFilling, "append, fork, crop, export", "a raw slot is reserved", CanOpen},
    {E::kSeal, S::kFilling, S::kSealed, "append", "full; an encoded slot is reserved", CanSeal},
    {E::kSealIdentity, S::kFilling, S::kResident, "append", "full; the raw slot becomes the encoded one",
     CanSealIdentity},
    {E::kEncode, S::kSealed, S::kEncoding, "append, import", "the job is posted", CanEncode},
    {E::kEncoded, S::kEncoding, S::kResident, "encode job", "every byte is written", CanFinish},
    {E::kDeclined, S::kEncoding, S::kResident, "encode job", "the codec declined; the encoded slot goes", CanDecline},
    {E::kReleaseRaw, S::kResident, S::kResident, "store", "no sequence holds the raw form, no lease pins it",
     CanReleaseRaw},
    {E::kLower, S::kResident, S::kResident, "lowering", "encoded again; only what lowers it pins it", CanLower},
    {E::kReserve, S::kFree, S::kReceiving, "import, move", "slots are reserved", CanReserve},
    {E::kReserveRaw, S::kReceiving, S::kReceiving, "import", "a raw slot is reserved", CanReserveRaw},
    {E::kReceivedOpen, S::kReceiving, S::kFilling, "import, move", "bytes verified", CanShowOpen},
    {E::kReceivedRaw, S::kReceiving, S::kSealed, "import", "bytes verified", CanShowRaw},
    {E::kReceivedEncoded, S::kReceiving, S::kResident, "import", "bytes verified", CanShowEncoded},
    {E::kReceivedCopy, S::kReceiving, S::kResident, "import, move",
     "bytes verified; the forms of the page it was copied from", CanShowCopy},
    {E::kQuarantine, S::kReceiving, S::kQuarantined, "store", kUsed, CanQuarantine},
    {E::kQuarantine, S::kFilling, S::kQuarantined, "store", kUsed, CanQuarantine},
    {E::kQuarantine, S::kSealed, S::kQuarantined, "store", kUsed, CanQuarantine},
    {E::kQuarantine, S::kEncoding, S::kQuarantined, "store", kUsed, CanQuarantine},
    {E::kQuarantine, S::kResident, S::kQuarantined, "store", kUsed, CanQuarantine},
    {E::kJobEnded, S::kQuarantined, S::kQuarantined, "encode job", "a waiting lease may still read the result",
     CanEndJob},
    {E::kFree, S::kFilling, S::kFree, "store", kUnused, CanFree},
    {E::kFree, S::kReceiving, S::kFree, "import, move", "nobody writes it any more", CanFree},
    {E::kFree, S::kSealed, S::kFree, "store", kUnused, CanFree},
    {E::kFree, S::kResident, S::kFree, "store", kUnused, CanFree},
    {E::kFree, S::kQuarantined, S::kFree, "lease, encode job", kUnused, CanFree},
};

void Count(const Page& page, int sign, const FormBytes& bytes, const PageGauges& gauges) {
  if (page.state == S::kFree) return;
  const size_t state = static_cast<size_t>(page.state);
  gauges.pages[state]->Increment(sign);
  if (page.raw.valid()) gauges.raw_bytes[state]->Increment(sign * static_cast<double>(bytes.raw));
  if (page.encoded.valid()) gauges.encoded_bytes[state]->Increment(sign * static_cast<double>(bytes.encoded));
}

}  // namespace

const char* PageStateName(PageState state) {
  static constexpr const char* kNames[kPageStates] = {"free",     "filling",  "receiving",  "sealed",
                                                      "encoding", "resident", "quarantined"};
  return kNames[static_cast<size_t>(state)];
}

const char* PageEventName(PageEvent event) {
  static constexpr const char* kNames[kPageEvents] = {
      "open",          "seal",        "seal identity", "encode",        "encoded",      "declined",
      "release raw",   "lower",       "reserve",       "received open", "received raw", "received encoded",
      "received copy", "reserve raw", "quarantine",    "job ended",     "free"};
  return kNames[static_cast<size_t>(event)];
}

absl::Span<const PageTransition> PageTransitions() { return kTransitions; }

void ApplyTransition(Page& page, PageEvent event, const PageChange& after, const FormBytes& bytes,
                     const FormBytes& bytes_after, const PageGauges& gauges) {
  const PageTransition* legal = nullptr;
  for (const PageTransition& row : kTransitions) {
    if (row.event == event && row.from == page.state) legal = &row;
  }
  if (legal == nullptr || !legal->holds(page, after)) {
    const std::string what = absl::StrCat("a page goes from ", PageStateName(page.state), " by ", PageEventName(event),
                                          " only if ", legal == nullptr ? "the table has it" : legal->condition);
    CheckFailed(what.c_str(), __FILE__, __LINE__);
  }
  Count(page, -1, bytes, gauges);
  page.rung = RungAfter(page, event, after);
  page.state = legal->to;
  page.raw = after.raw;
  page.encoded = after.encoded;
  page.declined = after.declined;
  page.checksum = after.checksum;
  if (event == E::kEncode) page.busy = true;
  if (event == E::kEncoded || event == E::kDeclined || event == E::kJobEnded) page.busy = false;
  Count(page, +1, bytes_after, gauges);
}

}  // namespace kvmanager
