#include "kvmanager/store/sequence_exports.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/host_export.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/raw_page.h"

namespace kvmanager {
namespace {

class ExportLeaseImpl final : public ExportLease, public PageFollower {
 public:
  ExportLeaseImpl(const SequenceExports::Parts& parts, std::shared_ptr<Cache> cache, SequenceId sequence,
                  const ExportOptions& options)
      : parts_(parts), cache_(std::move(cache)), sequence_(sequence), options_(options) {
    ++cache_->leases;
    parts_.metrics->export_leases.Increment();
    parts_.encodes->followers().push_back(this);
  }
  ~ExportLeaseImpl() override {
    if (parts_.alive.expired()) return;
    LeaveSequence();
    std::erase(parts_.encodes->followers(), this);
    for (const PageRef& ref : encoded_) {
      if (ref.block != nullptr) parts_.blocks->UnpinEncoded(ref);
    }
    for (const PageRef& ref : raw_) parts_.blocks->Unpin(ref);
    for (const PageRef& ref : open_) parts_.blocks->Unpin(ref);
    for (const PageRef& ref : activations_) parts_.blocks->Unpin(ref);
    if (copy_ != nullptr) {
      parts_.blocks->ForgetHolder(copy_);
      parts_.blocks->Release(copy_);
    }
    --cache_->leases;
    parts_.metrics->export_leases.Decrement();
  }

  void Begin(Sequence& sequence, uint64_t tokens, bool written);

  const HandOffHeader& first() const override { return first_; }
  std::vector<ExportedPage> TakeReady() override { return std::exchange(ready_, {}); }
  void OnReady(absl::AnyInvocable<void()> fn) override {
    fn_ = std::move(fn);
    told_last_ = false;
    Tell();
  }
  absl::Status Finish() override;
  bool finished() const override { return finished_; }
  const HandOffTrailer* last() const override { return settled_ ? &last_ : nullptr; }
  absl::Span<const ExportedPage> last_pages() const override { return last_pages_; }
  absl::Span<const ExportedOpenPage> open_pages() const override { return open_pages_; }

 private:
  static constexpr uint32_t kNotEncoded = UINT32_MAX;

  uint64_t tokens() const override { return first_.tokens; }
  void OnFull(uint32_t block, uint32_t layer) override;
  void OnEncoded() override;
  bool AwaitsWrites(SequenceId sequence) const override { return sequence == sequence_ && !all_written(); }
  void OnWritten(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) override;
  void Tell() override {
    if (fn_ == nullptr || (ready_.empty() && (!settled_ || told_last_))) return;
    told_last_ = settled_;
    fn_();
  }

  uint32_t full_blocks() const { return static_cast<uint32_t>(first_.blocks.size()); }
  bool all_written() const {
    return std::all_of(written_.begin(), written_.end(), [this](uint64_t tokens) { return tokens >= first_.tokens; });
  }
  bool is_written(uint32_t number) const {
    const HandOffPage& page = first_.pages[number];
    return written_[page.layer] >= (uint64_t{page.block} + 1) * cache_->page_tokens();
  }
  // Declined for what is in it: the header did not know.
  bool is_withdrawn(uint32_t number) const {
    const HandOffPage& page = first_.pages[number];
    return encoded_[number].page().declined && !cache_->keeps_raw(page.block, page.layer);
  }
  // Activations that are there, of pages of the header that are full.
  void OfferActivations(const Sequence& sequence);
  uint32_t& NumberOf(uint32_t block, uint32_t layer) { return numbers_[size_t{layer} * full_blocks() + block]; }
  // A page of the header that the codec has done with.
  void Offer(uint32_t number);
  // The trailer, once nothing of the first is awaited.
  void SettleIfDone();
  void LeaveSequence();
  uint64_t ChecksumOf(absl::Span<const uint8_t> bytes) const {
    return cache_->tier->memory().Checksum(bytes.data(), bytes.size());
  }

  const SequenceExports::Parts parts_;
  const std::shared_ptr<Cache> cache_;  // shared: see Block
  const SequenceId sequence_;
  const ExportOptions options_;
  HandOffHeader first_;
  HandOffTrailer last_;
  std::vector<ExportedPage> last_pages_;
  std::vector<uint32_t> numbers_;  // [layers][full blocks] in first_.pages
  std::vector<PageRef> encoded_;   // [first_.pages]; no block: not full yet. Pinned for their encoded form
  std::vector<PageRef> raw_;       // pinned
  std::vector<PageRef> open_;      // pinned, on a GPU: the sequence's own, which are copied later
  std::vector<ExportedOpenPage> open_pages_;
  std::vector<PageRef> activations_;  // [first_.activations] pinned
  std::vector<uint32_t> awaited_;     // in encoded_: full, and not encoded yet
  std::vector<uint64_t> written_;     // [layers] tokens
  std::vector<uint32_t> unwritten_;   // in encoded_: full, travel as they are appended, and are not written yet
  std::vector<ExportedPage> ready_;
  Block* copy_ = nullptr;  // of zero-padded copies of open pages
  bool finished_ = false;
  bool settled_ = false;
  bool told_last_ = false;
  absl::AnyInvocable<void()> fn_;
};

void ExportLeaseImpl::Begin(Sequence& sequence, uint64_t tokens, bool written) {
  first_.config = cache_->config;
  first_.codec_version = cache_->codec->info().version;
  first_.tokens = tokens;
  written_.assign(cache_->layers(), written ? tokens : 0);
  const uint64_t page_tokens = cache_->page_tokens();
  first_.blocks.resize(tokens / page_tokens);
  numbers_.assign(size_t{full_blocks()} * cache_->layers(), kNotEncoded);
  for (uint32_t i = 0; i < full_blocks() && i < sequence.blocks.size(); ++i) {
    const Block& block = *sequence.blocks[i];
    if (block.published) first_.blocks[i] = {block.name, true};
  }
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    // As if the newest token had been appended alone; not more, unless it is said that the receiver goes on behind it:
    // else it may crop and ask as the sender may.
    const uint64_t newest = tokens > 0 && !options_.will_append ? tokens - 1 : tokens;
    const uint32_t aged = std::max(sequence.aged[layer], cache_->reading().AgedPages(newest));
    first_.aged.push_back(aged);
    for (uint32_t i = 0; i < aged; ++i) {
      const bool full = sequence.tokens[layer] >= (uint64_t{i} + 1) * page_tokens;
      const bool declined = full && sequence.blocks[i]->pages[layer].declined;
      const bool in_trailer = cache_->keeps_raw(i, layer) ? options_.kept_raw == KeptRaw::kWithTrailer : declined;
      if (in_trailer) continue;  // it travels raw
      NumberOf(i, layer) = static_cast<uint32_t>(first_.pages.size());
      first_.pages.push_back({i, layer, cache_->aged_bytes(i, layer)});
    }
  }
  OfferActivations(sequence);
  encoded_.resize(first_.pages.size());
  sequence.followers.push_back(this);
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    const uint64_t full = std::min<uint64_t>(sequence.tokens[layer] / page_tokens, full_blocks());
    for (uint32_t i = 0; i < full; ++i) OnFull(i, layer);
  }
}

void ExportLeaseImpl::OfferActivations(const Sequence& sequence) {
  for (const HandOffPage& page : first_.pages) {
    if (page.block >= sequence.blocks.size() || sequence.blocks[page.block]->activations.empty()) continue;
    const PageRef ref{sequence.blocks[page.block], page.layer, PageKind::kActivations};
    if (ref.page().state != PageState::kResident) continue;
    parts_.blocks->Pin(ref);
    activations_.push_back(ref);
    const absl::Span<const uint8_t> bytes(PageData(*cache_, ref.page().encoded), cache_->activation_page_bytes());
    first_.activations.push_back({page.block, page.layer, bytes.size()});
    const uint32_t number = static_cast<uint32_t>(first_.size() - 1);
    ready_.push_back({number, bytes, ref.page().checksum});
  }
}

void ExportLeaseImpl::OnFull(uint32_t block, uint32_t layer) {
  const uint32_t number = NumberOf(block, layer);
  if (number == kNotEncoded) return;
  const auto sequence = parts_.sequences->Find(sequence_);
  KV_CHECK(sequence.ok());
  const PageRef ref{(*sequence)->blocks[block], layer};
  parts_.blocks->PinEncoded(ref);
  encoded_[number] = ref;
  if (ref.page().awaits_encoding()) {
    awaited_.push_back(number);
  } else if (cache_->identity() && !is_written(number)) {
    unwritten_.push_back(number);
  } else {
    Offer(number);
  }
}

void ExportLeaseImpl::OnWritten(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) {
  if (!AwaitsWrites(sequence)) return;
  KV_CHECK(first_layer >= 0 && first_layer + tokens.size() <= written_.size());
  for (size_t i = 0; i < tokens.size(); ++i) written_[first_layer + i] = std::max(written_[first_layer + i], tokens[i]);
  std::erase_if(unwritten_, [this](uint32_t number) {
    if (!is_written(number)) return false;
    Offer(number);
    return true;
  });
  SettleIfDone();
}

void ExportLeaseImpl::OnEncoded() {
  const size_t before = awaited_.size();
  std::erase_if(awaited_, [this](uint32_t number) {
    if (encoded_[number].page().awaits_encoding()) return false;
    Offer(number);
    return true;
  });
  if (awaited_.size() != before) SettleIfDone();
}

void ExportLeaseImpl::Offer(uint32_t number) {
  const PageRef& ref = encoded_[number];
  const Page& page = ref.page();
  if (is_withdrawn(number)) return;
  const PageId slot = page.declined ? page.raw : page.encoded;
  const absl::Span<const uint8_t> bytes(PageData(*cache_, slot), first_.pages[number].bytes);
  // Of a resident page the checksum is the one kept since it was made, so that the receiver notices what changed since.
  const bool kept = page.state == PageState::kResident;
  ready_.push_back({number, bytes, kept ? page.checksum : ChecksumOf(bytes)});
}

absl::Status ExportLeaseImpl::Finish() {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (finished_) return absl::FailedPreconditionError("this hand-off was finished before");
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts_.sequences->Find(sequence_));
  const auto shortest = std::min_element(sequence->tokens.begin(), sequence->tokens.end());
  if (*shortest != first_.tokens) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "tokens",
        absl::StrCat(*shortest, " in layer ", shortest - sequence->tokens.begin()),
        absl::StrCat(first_.tokens, " in every layer, as the hand-off of sequence ", sequence_, " began"));
  }
  const int open_tokens = static_cast<int>(first_.tokens % cache_->page_tokens());
  if (open_tokens > 0 && options_.way == ExportWay::kByHost) {
    for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
      open_.push_back({sequence->blocks[full_blocks()], layer});
      parts_.blocks->Pin(open_.back());
    }
  } else if (open_tokens > 0) {
    // The sequence may grow while it is sent, so its open pages are copied.
    Reservation slots(cache_->tier->pool());
    KV_RETURN_IF_ERROR(cache_->tier->Reserve(*cache_, {.raw = cache_->layers()}, &slots));
    copy_ = parts_.blocks->New(cache_, full_blocks());
    parts_.blocks->NoteHolder(copy_);
    for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
      const PageId slot = slots.TakeRaw();
      const PageRef open{sequence->blocks[full_blocks()], layer};
      std::vector<OpenCopy> later;
      cache_->tier->memory().CopyOpen(*cache_, layer, open.page(), slot, open_tokens, &later);
      if (later.empty()) ZeroRawTail(cache_->layout(), PageData(*cache_, slot), open_tokens);
      for (const OpenCopy& copy : later) {
        open_pages_.push_back({PageData(*cache_, copy.from), PageData(*cache_, copy.to)});
        open_.push_back(open);
        parts_.blocks->Pin(open);
      }
      parts_.blocks->Apply({copy_, layer}, PageEvent::kOpen, {slot, PageId()});
    }
  }
  finished_ = true;
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    for (uint32_t i = 0; i < full_blocks(); ++i) {
      if (NumberOf(i, layer) != kNotEncoded) continue;
      raw_.push_back({sequence->blocks[i], layer});
      parts_.blocks->Pin(raw_.back());
    }
  }
  last_.blocks.resize(full_blocks());
  for (uint32_t i = 0; i < full_blocks(); ++i) {
    const Block& block = *sequence->blocks[i];
    if (block.published && !first_.blocks[i].named) last_.blocks[i] = {block.name, true};
  }
  if (sequence->index != nullptr) last_.index = sequence->index->facts();
  LeaveSequence();
  parts_.metrics->exports.Increment();
  SettleIfDone();
  Tell();
  return absl::OkStatus();
}

void ExportLeaseImpl::SettleIfDone() {
  if (!finished_ || !awaited_.empty() || !all_written()) return;
  settled_ = true;
  auto next_raw = raw_.begin();
  const auto add = [this](const PageRef& ref, uint32_t block) {
    const Page& page = ref.page();
    const absl::Span<const uint8_t> bytes(RawPageData(*cache_, page), cache_->layout().raw_bytes());
    KV_CHECK(bytes.data() != nullptr);
    const bool kept = page.state == PageState::kResident && page.declined && block < full_blocks();
    const uint32_t number = static_cast<uint32_t>(first_.size() + last_.pages.size());
    last_.pages.push_back({block, ref.layer, bytes.size()});
    last_pages_.push_back({number, bytes, kept ? page.checksum : ChecksumOf(bytes)});
  };
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    for (uint32_t i = 0; i < full_blocks(); ++i) {
      const uint32_t number = NumberOf(i, layer);
      if (number == kNotEncoded) {
        add(*next_raw++, i);
      } else if (is_withdrawn(number)) {
        last_.withdrawn.push_back(number);
        add(encoded_[number], i);
      }
    }
    if (copy_ != nullptr) {
      add({copy_, layer}, full_blocks());
    } else if (!open_.empty()) {
      add(open_[layer], full_blocks());  // of which the first tokens are copied to the host
    }
  }
}

void ExportLeaseImpl::LeaveSequence() {
  const auto sequence = parts_.sequences->Find(sequence_);
  if (sequence.ok()) std::erase((*sequence)->followers, this);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExportLease>> SequenceExports::Whole(SequenceId id, const ExportOptions& options) {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts_.sequences->FindWhole(id));
  if (!sequence->index_places.empty()) return sequence->cache->IndexStaysHere();
  const uint64_t longest = *std::max_element(sequence->tokens.begin(), sequence->tokens.end());
  ExportOptions direct = options;
  direct.way = ExportWay::kDirect;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ExportLease> lease, Begin(id, longest, direct, /*written=*/true));
  KV_RETURN_IF_ERROR(lease->Finish());
  return lease;
}

absl::StatusOr<std::unique_ptr<ExportLease>> SequenceExports::Growing(SequenceId id, uint64_t tokens,
                                                                      const ExportOptions& options) {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts_.sequences->FindWhole(id));
  const std::shared_ptr<Cache> cache = sequence->cache;
  const bool direct = options.way == ExportWay::kDirect;
  if (direct && !sequence->index_places.empty()) return cache->IndexStaysHere();
  const bool written = cache->tier->memory().writes_at_once();
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ExportLease> lease, Begin(id, tokens, options, written));
  if (direct) return lease;
  return MakeHostExport(parts_, std::move(lease), cache);
}

bool SequenceExports::AwaitsWrites(SequenceId sequence) const {
  return std::any_of(parts_.encodes->followers().begin(), parts_.encodes->followers().end(),
                     [sequence](const PageFollower* follower) { return follower->AwaitsWrites(sequence); });
}

void SequenceExports::Written(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) {
  for (PageFollower* follower : parts_.encodes->followers()) follower->OnWritten(sequence, first_layer, tokens);
  parts_.encodes->TellFollowers();
}

absl::StatusOr<std::unique_ptr<ExportLease>> SequenceExports::Begin(SequenceId id, uint64_t tokens,
                                                                    const ExportOptions& options, bool written) {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, parts_.sequences->FindWhole(id));
  const std::shared_ptr<Cache> cache = sequence->cache;
  const uint64_t longest = *std::max_element(sequence->tokens.begin(), sequence->tokens.end());
  const uint64_t tokens_max = kSequenceBlocksMax * cache->page_tokens();
  if (tokens < longest || tokens > tokens_max) {
    return InvalidField(
        "tokens", tokens,
        absl::StrCat(longest, "..", tokens_max, ": what sequence ", id, " has, and a sequence's limit"));
  }
  // Before they are listed.
  const uint64_t pages = (tokens + cache->page_tokens() - 1) / cache->page_tokens() * cache->layers();
  if (pages > kHandOffPagesMax) {
    return InvalidField("tokens", tokens,
                        absl::StrCat("what has at most ", kHandOffPagesMax, " pages, of a block one in each of ",
                                     cache->layers(), " layers"));
  }
  auto lease = std::make_unique<ExportLeaseImpl>(parts_, cache, id, options);
  lease->Begin(*sequence, tokens, written);
  return lease;
}

}  // namespace kvmanager
