// The states of a page, the only legal transitions between them, and the one function that makes them.
//
// A page belongs to a block of the store, and everything here runs on the store's thread. Workers and transports touch
// the bytes of a page's slots while `busy` or `pins` says so, never its state.
//
//   Free ──open──> Filling ──seal──> Sealed ──encode──> Encoding ──encoded | declined──> Resident ──release raw,──┐
//    │              └──seal identity──────────────────────────────────────────────────────┘    └──────────lower────┘
//    └──reserve──> Receiving ──received open──> Filling, ──received raw──> Sealed, ──received encoded──> Resident,
//                            ──received copy──> Resident, ──reserve raw──> Receiving
//   any state but Free ──quarantine──> Quarantined ──free──> Free, once no lease and no job uses the slots
//
// The table itself, with the owner and the condition of each transition, is kTransitions in page_state.cc. A page that
// is copied to another memory is Receiving there, and pinned where it comes from. Pages of activations (block.h) have
// one form: they go by the rows of an identity codec's pages.
//
// Invariants (checked by every transition):
//  1. Free holds no slot; Filling a raw one; Sealed and Encoding a raw one and the encoded one reserved for them;
//     Resident an encoded one, or, if declined, a raw one; Receiving what will arrive.
//  2. A slot changes or goes only while no lease pins the page; releasing the raw form needs that no sequence holds it
//     and that those leases which pin the page read its encoded form alone. What lowers a page pins it, and nobody else
//     does then.
//  3. `busy` exactly from `encode` to the end of the job; Encoding implies busy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "monitoring/metrics.h"

namespace kvmanager {

enum class PageState : uint8_t { kFree = 0, kFilling, kReceiving, kSealed, kEncoding, kResident, kQuarantined };
inline constexpr size_t kPageStates = 7;
const char* PageStateName(PageState state);

enum class PageEvent : uint8_t {
  kOpen = 0,         // the first token arrives, or a copy of an open page is made
  kSeal,             // the page is full
  kSealIdentity,     // the page is full and its raw form is its encoded form
  kEncode,           // the job is posted
  kEncoded,          // the job ended well
  kDeclined,         // the codec cannot encode this page: it stays raw
  kReleaseRaw,       // nobody reads the raw form any more
  kLower,            // it was encoded again by the codec of a later rung (Codec::rung), into another slot
  kReserve,          // slots for a page that will be received
  kReceivedOpen,     // a hand-off's open page became visible
  kReceivedRaw,      // a hand-off's full raw page became visible; to be encoded
  kReceivedEncoded,  // a hand-off's encoded page became visible
  kReceivedCopy,     // a copy of a Resident page of another memory or daemon became visible, in the same forms
  kReserveRaw,       // a page that was to be received encoded will be received raw: the sender's codec declined it
  kQuarantine,       // every owner has gone, a lease or a job has not
  kJobEnded,         // the job of a quarantined page ended
  kFree,             // every user has gone
};
inline constexpr size_t kPageEvents = 17;
const char* PageEventName(PageEvent event);

/// One page of a block. Only ApplyTransition writes `state`, `busy`, `declined`, `rung`, the slots and the checksum.
struct Page {
  PageState state = PageState::kFree;
  bool busy = false;          // an encode job reads and writes the slots
  bool declined = false;      // by the codec: the raw form is the only one
  uint8_t rung = 0;           // of the encoded form (Codec::rung)
  uint32_t raw_holds = 0;     // sequences that have not aged this page
  uint32_t pins = 0;          // leases
  uint32_t encoded_pins = 0;  // those of them that read the encoded form alone, if there is one
  PageId raw;
  PageId encoded;
  uint64_t checksum = 0;  // XXH3-64 of the form that stays, once Resident

  /// Its encoding is still to come.
  bool awaits_encoding() const { return state == PageState::kSealed || busy; }
  bool is_full() const {
    return state == PageState::kSealed || state == PageState::kEncoding || state == PageState::kResident;
  }
};

/// What a transition leaves in the page.
struct PageChange {
  PageId raw;
  PageId encoded;
  bool declined = false;
  uint64_t checksum = 0;
  uint8_t rung = 0;  // of kReserve and kLower; other transitions leave it as it is, and kFree ends it
};

/// Metrics of one codec's pages by state; nullptr for Free.
struct PageGauges {
  std::array<prometheus::Gauge*, kPageStates> pages{};
  std::array<prometheus::Gauge*, kPageStates> raw_bytes{};
  std::array<prometheus::Gauge*, kPageStates> encoded_bytes{};
};

/// Bytes of a slot of either form.
struct FormBytes {
  uint64_t raw = 0;
  uint64_t encoded = 0;
  uint64_t Of(const PageId& raw_slot, const PageId& encoded_slot) const {
    return (raw_slot.valid() ? raw : 0) + (encoded_slot.valid() ? encoded : 0);
  }
};

/// A legal transition.
struct PageTransition {
  PageEvent event;
  PageState from;
  PageState to;
  const char* owner;      // who asks for it
  const char* condition;  // what must hold, in words
  bool (*holds)(const Page& before, const PageChange& after);
};

/// Every legal transition.
absl::Span<const PageTransition> PageTransitions();

/// Makes the transition `event` of `page`, which leaves `after` in it, and moves its gauges. Aborts unless kTransitions
/// has it and its condition holds. Allocates and frees no slot: the caller owns those that `page` loses. bytes: of its
/// slots before; bytes_after: of its slots then, which differ where its rung does.
void ApplyTransition(Page& page, PageEvent event, const PageChange& after, const FormBytes& bytes,
                     const FormBytes& bytes_after, const PageGauges& gauges);

/// The rung of a page after `event`, which leaves `after` in it.
inline uint8_t RungAfter(const Page& page, PageEvent event, const PageChange& after) {
  const bool sets = event == PageEvent::kReserve || event == PageEvent::kLower || event == PageEvent::kFree;
  return sets ? after.rung : page.rung;
}

}  // namespace kvmanager
