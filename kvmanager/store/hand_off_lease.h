// A sequence on its way from one store (page_store.h) to another, perhaps while it grows: what is said of it, the lease
// of who sends it, and the lease of who receives it. On the store's thread, unless a method says otherwise. Leases may
// end after the store: they then do nothing.
//
// What is said of it, without the bytes of its pages, comes in two parts: the header says what is known before the
// pages are made, and what of them will travel encoded; the trailer says the rest. Pages are numbered from 0 in the
// header; those of the trailer go on from there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/long_call.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// How a growing sequence of a GPU's cache leaves it: out of the GPU's memory, or by way of the host's, where its pages
/// are copied one by one as they are ready.
enum class ExportWay : uint8_t { kDirect = 0, kByHost };

/// With which part pages go that the codec keeps raw whatever is in them. Earlier builds take them with the trailer
/// alone: they refuse a header that names them with the bytes of a raw page.
enum class KeptRaw : uint8_t { kWithHeader = 0, kWithTrailer };

/// Pages of a sequence that is handed off, of all layers.
constexpr uint64_t kHandOffPagesMax = 1 << 20;
/// Of all that are sent, until what they held is given back; and of one payer, so that another finds room.
constexpr uint64_t kSentPagesMax = 16 << 20, kTenantSentPagesMax = kSentPagesMax / 2;

/// How a sequence is sent.
struct ExportOptions {
  /// The receiver appends before it reads, so pages travel as the token to come will read them, not as the last one
  /// did; one that the last token filled may then travel encoded, and the receiver cannot crop into it.
  bool will_append = false;
  ExportWay way = ExportWay::kDirect;  // out of a GPU's memory, of one that grows
  KeptRaw kept_raw = KeptRaw::kWithHeader;
};

struct HandOffPage {
  uint32_t block = 0;
  uint32_t layer = 0;
  uint64_t bytes =
      0;  // of the form that travels; an open page's are those of a whole raw page, its unused tokens zeros
};
struct HandOffBlock {
  BlockName name;  // all zeros: not published
  bool named = false;
};
struct HandOffHeader {
  CacheConfig config;
  uint32_t codec_version = 0;
  uint64_t tokens = 0;               // of every layer, once the sender has appended them
  std::vector<HandOffBlock> blocks;  // full ones, in order; the names that they have already
  std::vector<uint32_t> aged;        // [layers] pages before this one are read encoded, unless the codec declined them
  /// Aged pages, by layer, then by block: those that will travel encoded, and those that the codec keeps raw whatever
  /// is in them (CodecInfo::keeps_raw), which travel so.
  std::vector<HandOffPage> pages;
  /// Activations of some of `pages`, in their order. Numbered behind them. The receiver takes a page in one of the two
  /// forms: K and V as they are, or activations, from which it recomputes K and V.
  std::vector<HandOffPage> activations;

  size_t size() const { return pages.size() + activations.size(); }
  const HandOffPage& page(size_t number) const {
    return number < pages.size() ? pages[number] : activations[number - pages.size()];
  }
};
struct HandOffTrailer {
  std::vector<uint32_t> withdrawn;   // pages of the header that the codec declined, ascending
  std::vector<HandOffPage> pages;    // every page that the header does not send, raw: by layer, then by block
  std::vector<HandOffBlock> blocks;  // [HandOffHeader::blocks] names since the header
  IndexFacts index;                  // of a codec with indexes: the receiver makes an equal one
};

/// Bytes of a page that is ready to be sent: unchanged while the lease lives.
struct ExportedPage {
  uint32_t page = 0;
  absl::Span<const uint8_t> bytes;  // of a cache on a GPU there
  uint64_t checksum = 0;  // XXH3-64. Of a page that stays in this form the one kept since it was made; 0: on a
                          // GPU, where nobody has made it yet
};

/// The first tokens of an open page on a GPU, to be copied before the copy is sent, with zeros behind them.
struct ExportedOpenPage {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
};

/// A sequence that is being sent, perhaps while it grows. Its pages are pinned once they are full: it may be dropped or
/// published meanwhile, but until Finish it cannot be cropped, nor grow beyond header().tokens.
class ExportLease {
 public:
  virtual ~ExportLease() = default;
  virtual const HandOffHeader& header() const = 0;
  /// Bytes of all pages in the forms in which the receiver keeps them, as far as the header knows.
  virtual uint64_t needed_bytes() const = 0;
  /// Not OK: pages could not be copied to the host (ExportWay::kByHost), and it will not get further. UNAVAILABLE (the
  /// GPU has failed), DATA_LOSS (bytes that no page may have), RESOURCE_EXHAUSTED.
  virtual absl::Status status() const { return absl::OkStatus(); }
  /// Pages of the header that the codec has done with since the last call, pages_max at most, in the order in which it
  /// was; at first their activations, so that who takes those can compute while the others are on their way. On a GPU
  /// each is there: what is sent as it was appended has been written (Exports::Written).
  virtual std::vector<ExportedPage> TakeReady(size_t pages_max) = 0;
  std::vector<ExportedPage> TakeReady() { return TakeReady(SIZE_MAX); }
  /// Calls `fn` on the store's thread, from within other calls of the store: now and whenever there is something to
  /// take, trailer() appears, or status() changes. It may call this lease, but destroy none, and not call the store.
  virtual void OnReady(absl::AnyInvocable<void()> fn) = 0;
  /// The sequence is complete; copies its open pages. What takes long of it is done by LongCalls::ReleaseSome; the
  /// sequence can be appended to at once, and cropped once its open pages are copied and the names of its blocks read.
  /// Errors leave everything as it was: FAILED_PRECONDITION naming the shortest layer; NOT_FOUND, if it was dropped;
  /// RESOURCE_EXHAUSTED.
  virtual absl::Status Finish() = 0;
  virtual bool finished() const = 0;
  /// nullptr before Finish, and until the codec has encoded or declined every page of the header; on a GPU also
  /// until everything is written, and copied where it goes by way of the host.
  virtual const HandOffTrailer* trailer() const = 0;
  /// Of trailer()->pages.
  virtual absl::Span<const ExportedPage> trailer_pages() const = 0;
  /// Of a cache on a GPU, after Finish: what is to be copied before last_pages' bytes are there, of
  /// header().tokens % page_tokens tokens each.
  virtual absl::Span<const ExportedOpenPage> open_pages() const = 0;
};

struct ArrivedPage {
  uint32_t page = 0;
  uint64_t checksum = 0;
};

/// How many pages of a layer to recompute from their activations, of `pages` that are to come, the first
/// `with_activations` of which may be recomputed: at most that many.
using RecomputeChoice = absl::FunctionRef<uint32_t(uint32_t layer, uint32_t pages, uint32_t with_activations)>;
using OwnedRecomputeChoice = absl::AnyInvocable<uint32_t(uint32_t layer, uint32_t pages, uint32_t with_activations)>;

/// A page whose activations have arrived. Only who recomputes it touches `raw`, until Recomputed.
struct RecomputePage {
  uint32_t page = 0;  // number of the activations
  uint32_t layer = 0;
  uint64_t first_token = 0;
  const uint8_t* activations = nullptr;  // [page_tokens][hidden]
  uint8_t* raw = nullptr;                // where K and V go
};

/// A hand-off whose pages are being listed and pinned. Its sequence may be appended to, published and dropped
/// meanwhile, not cropped. Destroying it, on the store's thread, gives all back.
class ExportBeginning : public LongCall {
 public:
  /// Once, after kDone. Errors: NOT_FOUND, if the sequence was dropped meanwhile; UNAVAILABLE (the store has closed);
  /// RESOURCE_EXHAUSTED (of the host, by way of which it goes).
  virtual absl::StatusOr<std::unique_ptr<ExportLease>> Commit() = 0;
};

/// Sequences that are sent.
class Exports {
 public:
  virtual ~Exports() = default;
  /// A sequence that is complete, as it is now: the lease will be finished. On a GPU everything that was appended must
  /// have been written. Errors: FAILED_PRECONDITION naming the shortest layer, or `device` where its index lies in
  /// slots; INVALID_ARGUMENT (one of more than kHandOffPagesMax pages); RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<ExportBeginning>> BeginWhole(SequenceId sequence,
                                                                      const ExportOptions& options) = 0;
  /// One that will have `tokens` tokens. On a GPU nothing counts as written before Written says so, what it has already
  /// included. Errors: INVALID_ARGUMENT (tokens); FAILED_PRECONDITION (directly, where its index lies in slots; by way
  /// of the host, of memory that moves no pages); UNAVAILABLE (pages cannot move yet). RESOURCE_EXHAUSTED of the host,
  /// which is to have room for all of it, comes with a later piece.
  virtual absl::StatusOr<std::unique_ptr<ExportBeginning>> BeginGrowing(SequenceId sequence, uint64_t tokens,
                                                                        const ExportOptions& options) = 0;
  /// The same, all at once.
  absl::StatusOr<std::unique_ptr<ExportLease>> Whole(SequenceId sequence, const ExportOptions& options = {}) {
    return Commit(BeginWhole(sequence, options));
  }
  absl::StatusOr<std::unique_ptr<ExportLease>> Growing(SequenceId sequence, uint64_t tokens,
                                                       const ExportOptions& options = {}) {
    return Commit(BeginGrowing(sequence, tokens, options));
  }
  /// Whether a hand-off of this sequence waits to hear of what is written (Growing).
  virtual bool AwaitsWrites(SequenceId sequence) const = 0;
  /// Kernels have written the first tokens[i] tokens of layer first_layer + i, all of them appended. Tells such
  /// hand-offs, also of a sequence that was dropped since; in any order.
  virtual void Written(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) = 0;

 private:
  static absl::StatusOr<std::unique_ptr<ExportLease>> Commit(
      absl::StatusOr<std::unique_ptr<ExportBeginning>> beginning) {
    if (!beginning.ok()) return beginning.status();
    (*beginning)->DoAll();
    return (*beginning)->Commit();
  }
};

/// Slots reserved for a sequence that is being received. Destroying it without Commit gives back what nobody else uses.
class ImportLease {
 public:
  virtual ~ImportLease() = default;
  virtual CacheId cache() const = 0;
  /// Where the bytes of a page go, on a GPU if its cache is there; empty if the block is already here and need not be
  /// sent. Of the trailer after Extend. A worker may call it once the call that the page is of has returned.
  virtual absl::Span<uint8_t> target(size_t page) const = 0;
  /// Pages of the header, and after ExtendNext of the trailer, that have no target, ascending.
  virtual absl::Span<const uint32_t> unwanted() const = 0;
  /// The trailer, once: may need slots for pages that were declined. ExtendNext takes it in pieces of some 0.1 ms,
  /// until it is false: then extended() is OK, or why not. Pages of the header may arrive meanwhile. Errors:
  /// INVALID_ARGUMENT (what contradicts itself or the header), RESOURCE_EXHAUSTED; either leaves everything as it was.
  /// Both also where a withdrawn page has come, or the room has gone, between two pieces: then it can only be given up.
  virtual void BeginExtend(HandOffTrailer trailer) = 0;
  virtual bool ExtendNext() = 0;
  virtual absl::Status extended() const = 0;
  /// All of it at once.
  absl::Status Extend(HandOffTrailer trailer) {
    BeginExtend(std::move(trailer));
    while (ExtendNext()) {
    }
    return extended();
  }
  /// Looks at the bytes of a page that has arrived, which come from a stranger: an encoded page must be one that the
  /// codec can compute on, a raw one finite. On any thread; reads as long as it runs. Returns the checksum. Of a GPU's
  /// page nothing is looked at, and 0 returned: kernels are safe on any bytes, since engines write there, too, and what
  /// leaves the GPU is looked at then.
  virtual absl::StatusOr<uint64_t> Validate(uint32_t page) const = 0;
  /// Pages that passed Validate. Who waits for them goes on. Errors: INVALID_ARGUMENT for one that is not awaited;
  /// those before it have arrived.
  virtual absl::Status Arrived(absl::Span<const ArrivedPage> pages) = 0;
  /// Pages whose activations have arrived since the last call.
  virtual std::vector<RecomputePage> TakeRecomputable() = 0;
  /// K and V of these are in their places, finite; they are encoded if the codec does. checksum: of K and V. Errors:
  /// INVALID_ARGUMENT for one that was not taken; those before it have been recomputed.
  virtual absl::Status Recomputed(absl::Span<const ArrivedPage> pages) = 0;
  /// Show may be called: the trailer and all its pages are here. With a codec that has indexes, which are made from
  /// all pages, all of the header too.
  virtual bool can_show() const = 0;
  /// Makes the sequence visible, while encoded pages may still arrive: queries that need one wait for it. Until Commit
  /// the sequence can be attended to, appended to and dropped, not forked, cropped, published, exported or copied
  /// (FAILED_PRECONDITION). Once. Errors: RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<SequenceId> Show() = 0;
  /// Every page is here.
  virtual bool complete() const = 0;
  /// After Show, once complete: publishes named blocks, in pieces of some 0.1 ms, until it is false. Then committed()
  /// is OK, or why not.
  virtual bool CommitNext() = 0;
  virtual absl::Status committed() const = 0;
  /// All of it at once. At most once.
  absl::Status Commit() {
    while (CommitNext()) {
    }
    return committed();
  }
  /// No more comes. A sequence that was shown is broken: who waits for its pages, and all later calls but
  /// Describe and Drop, get UNAVAILABLE with the reason. Slots go with the lease, which workers may still read.
  virtual void Break(const absl::Status& why) = 0;
};

/// A sequence that is to be received: its slots are reserved in pieces. Nothing of it is visible, and without Commit
/// everything goes back. Blocks that are here already are compared with their checksums (CompareOne).
class Importing : public LongCall {
 public:
  /// After kDone. Errors: Imports::Begin's, but for what it says at once.
  virtual const absl::Status& status() const = 0;
  /// Once, if status() is OK.
  virtual std::unique_ptr<ImportLease> Commit() = 0;
};

/// Sequences that are received.
class Imports {
 public:
  virtual ~Imports() = default;
  /// first->config.device: where it is to be. On a GPU raw pages are given to the executor in Arrived. codec: as
  /// CacheDirectory::Open's. recompute: asked once per layer; nothing is recomputed on a GPU. Errors: INVALID_ARGUMENT
  /// (what contradicts itself or its cache), FAILED_PRECONDITION (codec version; `device` where indexes lie in slots),
  /// RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<Importing>> Begin(std::shared_ptr<const HandOffHeader> header,
                                                           std::shared_ptr<const Codec> codec,
                                                           OwnedRecomputeChoice recompute) = 0;
  /// All of it at once.
  absl::StatusOr<std::unique_ptr<ImportLease>> Import(const HandOffHeader& header, std::shared_ptr<const Codec> codec,
                                                      RecomputeChoice recompute) {
    auto begun = Begin(std::make_shared<const HandOffHeader>(header), std::move(codec), recompute);
    if (!begun.ok()) return begun.status();
    (*begun)->DoAll();
    if (!(*begun)->status().ok()) return (*begun)->status();
    return (*begun)->Commit();
  }
  absl::StatusOr<std::unique_ptr<ImportLease>> Import(const HandOffHeader& header) {
    return Import(header, nullptr, [](uint32_t, uint32_t, uint32_t) { return 0u; });
  }
  /// Calls `fn` once, when host memory is next given back or can be evicted: what was refused may fit then. It is
  /// called from within other calls, and must only pass a message on. A later call replaces it.
  virtual void OnRoom(absl::AnyInvocable<void()> fn) = 0;
};

}  // namespace kvmanager
