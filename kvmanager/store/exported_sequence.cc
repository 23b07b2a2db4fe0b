#include "kvmanager/store/exported_sequence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/raw_page.h"

namespace kvmanager {
namespace {

constexpr uint32_t kNotEncoded = ExportHolds::kNotEncoded;

}  // namespace

ExportedSequence::ExportedSequence(SequenceExports* exports, SequenceId sequence, uint64_t tokens,
                                   const ExportOptions& options, bool written, uint64_t counted)
    : exports_(exports), alive_(exports->parts().alive), sequence_(sequence), options_(options) {
  Sequence& from = **parts().sequences->Find(sequence);
  cache_ = holds_.cache = from.cache;
  holds_.counted = counted;
  header_.config = cache_->config;
  header_.codec_version = cache_->codec->info().version;
  header_.tokens = tokens;
  full_blocks_ = static_cast<uint32_t>(tokens / cache_->page_tokens());
  // As if the newest token had been appended alone; not more, unless it is said that the receiver goes on behind it:
  // else it may crop and ask as the sender may.
  const uint64_t newest = tokens > 0 && !options_.will_append ? tokens - 1 : tokens;
  size_t pages = 0;
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    header_.aged.push_back(std::max(from.aged[layer], cache_->reading().AgedPages(newest)));
    first_at_.push_back(pages);
    pages += header_.aged.back();
  }
  // Memory that is touched piece by piece.
  header_.blocks.reserve(full_blocks_);
  header_.pages.reserve(pages);
  holds_.pages.reserve(pages);
  holds_.numbers.reserve(pages);
  encoded_.resize(cache_->layers());
  kept_.resize(cache_->layers());
  written_.assign(cache_->layers(), written ? tokens : 0);
  if (cache_->identity() && !written) unwritten_.resize(cache_->layers());
  ++cache_->leases;
  parts().metrics->export_leases.Increment();
  parts().encodes->followers().push_back(this);
  from.followers.push_back(this);
}

ExportedSequence::~ExportedSequence() {
  if (store_has_gone()) return;
  LeaveSequence();
  std::erase(parts().encodes->followers(), this);
  exports_->Forget(this);
  parts().metrics->export_leases.Decrement();
  exports_->GiveBack(std::move(holds_));
}

uint64_t ExportedSequence::needed_bytes() const {
  const uint64_t page_tokens = cache_->page_tokens();
  const uint64_t pages = (header_.tokens + page_tokens - 1) / page_tokens * cache_->layers();
  return (pages - header_.pages.size()) * cache_->layout().raw_bytes() + header_bytes_;
}

uint64_t ExportedSequence::ChecksumOf(absl::Span<const uint8_t> bytes) const {
  return cache_->tier->memory().Checksum(bytes.data(), bytes.size());
}

void ExportedSequence::LeaveSequence() {
  if (!std::exchange(following_, false)) return;
  const auto sequence = parts().sequences->Find(sequence_);
  if (sequence.ok()) std::erase((*sequence)->followers, this);
}

// ---- the header ----

absl::StatusOr<bool> ExportedSequence::ListNext() {
  if (listed()) return DoPiece();
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts().sequences->Find(sequence_));
  ListSome(*sequence);
  return !listed() || finished_;
}

void ExportedSequence::ListSome(const Sequence& sequence) {
  size_t left = SequenceExports::kPagesAtOnce;
  for (; header_.blocks.size() < full_blocks_; --left) {
    if (left == 0) return;
    const size_t i = header_.blocks.size();
    HandOffBlock& block = header_.blocks.emplace_back();
    if (i < sequence.blocks.size() && sequence.blocks[i]->published) block = {sequence.blocks[i]->name, true};
  }
  for (; !listed(); ++layer_, block_ = 0) {
    for (; block_ < header_.aged[layer_]; ++block_, --left) {
      if (left == 0) return;
      ListPage(sequence, block_, layer_);
    }
  }
}

void ExportedSequence::ListPage(const Sequence& sequence, uint32_t block, uint32_t layer) {
  const size_t at = holds_.pages.size();
  const bool full = sequence.tokens[layer] >= (uint64_t{block} + 1) * cache_->page_tokens();
  const bool declined = full && sequence.blocks[block]->pages()[layer].declined;
  const bool keeps_raw = cache_->keeps_raw(block, layer);
  holds_.pages.push_back({nullptr, layer});
  if (keeps_raw ? options_.kept_raw == KeptRaw::kWithTrailer : declined) {  // it travels raw
    holds_.numbers.push_back(kNotEncoded);
    ++kept_[layer];
  } else {
    const uint64_t bytes = keeps_raw ? cache_->layout(layer).raw_bytes() : cache_->page_bytes(layer);
    holds_.numbers.push_back(static_cast<uint32_t>(header_.pages.size()));
    header_.pages.push_back({block, layer, bytes});
    header_bytes_ += bytes;
    encoded_[layer] += !keeps_raw;
    if (block < sequence.blocks.size()) ListActivations(sequence.blocks[block], layer);
  }
  if (full) Take(at, {sequence.blocks[block], layer});
}

// Those that are there, of pages of the header.
void ExportedSequence::ListActivations(Block* block, uint32_t layer) {
  if (block->activations().empty()) return;
  const PageRef ref{block, layer, PageKind::kActivations};
  if (ref.page().state != PageState::kResident) return;
  parts().blocks->Pin(ref);
  holds_.activations.push_back(ref);
  const absl::Span<const uint8_t> bytes(PageData(*cache_, ref.page().encoded), cache_->activation_page_bytes());
  const uint32_t number = static_cast<uint32_t>(header_.activations.size());
  header_.activations.push_back({block->index, layer, bytes.size()});
  ready_activations_.push_back({number, bytes, ref.page().checksum});
}

// ---- pages ----

void ExportedSequence::Take(size_t at, PageRef ref) {
  const uint32_t number = holds_.numbers[at];
  KV_CHECK(holds_.pages[at].block == nullptr);
  holds_.pages[at] = ref;
  if (number == kNotEncoded) return parts().blocks->Pin(ref);
  parts().blocks->PinEncoded(ref);
  if (ref.page().awaits_encoding()) {
    ++awaited_;
  } else if (cache_->identity() && !is_written(header_.pages[number])) {
    unwritten_[ref.layer].push_back(number);
  } else {
    Offer(number, ref);
  }
}

void ExportedSequence::Offer(uint32_t number, const PageRef& ref) {
  if (is_withdrawn(ref)) {
    ++kept_[ref.layer];
    return;
  }
  const Page page = ref.page();
  const PageId slot = page.declined ? page.raw : page.encoded;
  const absl::Span<const uint8_t> bytes(PageData(*cache_, slot), header_.pages[number].bytes);
  // Of a resident page the checksum is the one kept since it was made, so that the receiver notices what changed since.
  const bool kept = page.state == PageState::kResident;
  ready_.push_back({number, bytes, kept ? page.checksum : ChecksumOf(bytes)});
}

void ExportedSequence::OnFull(uint32_t block, uint32_t layer) {
  if (block >= header_.aged[layer]) return;
  const size_t at = first_at_[layer] + block;
  if (at >= holds_.pages.size()) return;  // it is found full when it is listed
  const auto sequence = parts().sequences->Find(sequence_);
  KV_CHECK(sequence.ok());
  Take(at, {(*sequence)->blocks[block], layer});
}

// All of one cache. A page is encoded once.
void ExportedSequence::OnEncoded(absl::Span<const PageRef> pages) {
  for (const PageRef& ref : pages) {
    if (ref.block->cache != cache_.get()) return;
    if (ref.block->index >= header_.aged[ref.layer]) continue;
    const size_t at = first_at_[ref.layer] + ref.block->index;
    if (at >= holds_.pages.size() || holds_.pages[at].block != ref.block) continue;
    const uint32_t number = holds_.numbers[at];
    if (number == kNotEncoded) continue;
    KV_CHECK(awaited_ > 0);
    --awaited_;
    Offer(number, ref);
  }
  if (awaited_ == 0) GoOn();
}

bool ExportedSequence::all_written() const {
  return std::all_of(written_.begin(), written_.end(), [this](uint64_t tokens) { return tokens >= header_.tokens; });
}

bool ExportedSequence::has_written() const {
  return std::any_of(unwritten_.begin(), unwritten_.end(), [this](const std::deque<uint32_t>& numbers) {
    return !numbers.empty() && is_written(header_.pages[numbers.front()]);
  });
}

void ExportedSequence::OnWritten(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) {
  if (!AwaitsWrites(sequence)) return;
  KV_CHECK(first_layer >= 0 && first_layer + tokens.size() <= written_.size());
  for (size_t i = 0; i < tokens.size(); ++i) written_[first_layer + i] = std::max(written_[first_layer + i], tokens[i]);
  if (all_written()) GoOn();
}

std::vector<ExportedPage> ExportedSequence::TakeReady(size_t pages_max) {
  // In each layer pages become full in order.
  for (std::deque<uint32_t>& numbers : unwritten_) {
    for (; ready_.size() < pages_max && !numbers.empty(); numbers.pop_front()) {
      const HandOffPage& page = header_.pages[numbers.front()];
      if (!is_written(page)) break;
      Offer(numbers.front(), holds_.pages[first_at_[page.layer] + page.block]);
    }
  }
  std::vector<ExportedPage> pages;
  pages.reserve(std::min(pages_max, ready_activations_.size() + ready_.size()));
  for (; pages.size() < pages_max && !ready_activations_.empty(); ready_activations_.pop_front()) {
    pages.push_back(ready_activations_.front());
    pages.back().page += static_cast<uint32_t>(header_.pages.size());
  }
  for (; pages.size() < pages_max && !ready_.empty(); ready_.pop_front()) pages.push_back(ready_.front());
  return pages;
}

void ExportedSequence::OnReady(absl::AnyInvocable<void()> fn) {
  fn_ = std::move(fn);
  told_trailer_ = false;
  Tell();
}

void ExportedSequence::Tell() {
  if (fn_ == nullptr) return;
  const bool ready = !ready_.empty() || !ready_activations_.empty() || has_written();
  if (!ready && (!settled_ || told_trailer_)) return;
  told_trailer_ = settled_;
  fn_();
}

// ---- the trailer ----

absl::Status ExportedSequence::Finish() {
  if (store_has_gone()) return absl::UnavailableError("the store has closed");
  KV_RETURN_IF_ERROR(Complete());
  GoOn();
  Tell();
  return absl::OkStatus();
}

absl::Status ExportedSequence::Complete() {
  if (finished_) return absl::FailedPreconditionError("this hand-off was finished before");
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts().sequences->Find(sequence_));
  const auto shortest = std::min_element(sequence->tokens.begin(), sequence->tokens.end());
  if (*shortest != header_.tokens) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "tokens",
        absl::StrCat(*shortest, " in layer ", shortest - sequence->tokens.begin()),
        absl::StrCat(header_.tokens, " in every layer, as the hand-off of sequence ", sequence_, " began"));
  }
  // The sequence may grow while it is sent, so its open pages are copied, here or on the way to the host.
  if (open_tokens() > 0 && options_.way != ExportWay::kByHost) {
    Reservation slots(cache_->tier->pool());
    KV_RETURN_IF_ERROR(cache_->tier->Reserve(*cache_, {.raw = cache_->layers()}, &slots));
    copy_ = parts().blocks->New(cache_, full_blocks_);
    parts().blocks->NoteHolder(copy_);
    holds_.blocks.push_back(copy_);
    for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
      parts().blocks->Apply({copy_, layer}, PageEvent::kOpen, {slots.TakeRaw(), PageId()});
    }
  }
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    for (uint32_t i = header_.aged[layer]; i < full_blocks_; ++i) holds_.tail.push_back({sequence->blocks[i], layer});
    if (open_tokens() > 0) holds_.open.push_back({sequence->blocks[full_blocks_], layer});
  }
  for (const PageRef& ref : holds_.tail) parts().blocks->Pin(ref);
  for (const PageRef& ref : holds_.open) parts().blocks->Pin(ref);
  if (sequence->index != nullptr) trailer_.index = sequence->index->facts();
  trailer_.blocks.reserve(full_blocks_);
  finished_ = true;
  return absl::OkStatus();
}

bool ExportedSequence::DoPiece() {
  if (!finished_ || !listed() || settled_) return false;
  if (CopyOpenPages() || ReadNames()) return true;
  if (awaited_ > 0 || !all_written()) return false;
  if (MakeTrailer()) return true;
  settled_ = true;
  return false;
}

void ExportedSequence::GoOn() {
  if (later_ || !DoPiece()) return;
  later_ = true;
  exports_->Later(this);
}

bool ExportedSequence::CopyOpenPages() {
  if (copy_ == nullptr) return false;
  for (size_t bytes = 0; copied_ < cache_->layers(); bytes += cache_->layout(copied_++).raw_bytes()) {
    if (bytes >= SequenceExports::kBytesAtOnce) return true;
    const PageRef& open = holds_.open[copied_];
    const PageId slot = copy_->pages()[copied_].raw;
    std::vector<OpenCopy> later;
    cache_->tier->memory().CopyOpen(*cache_, copied_, open.page(), slot, open_tokens(), &later);
    if (later.empty()) ZeroRawTail(cache_->layout(copied_), PageData(*cache_, slot), open_tokens());
    for (const OpenCopy& copy : later)
      open_pages_.push_back({PageData(*cache_, copy.from), PageData(*cache_, copy.to)});
  }
  if (!open_pages_.empty()) return false;
  for (const PageRef& ref : holds_.open) parts().blocks->Unpin(ref);
  holds_.open.clear();
  return false;
}

bool ExportedSequence::ReadNames() {
  if (!following_) return false;
  const auto sequence = parts().sequences->Find(sequence_);
  for (size_t left = SequenceExports::kPagesAtOnce; trailer_.blocks.size() < full_blocks_; --left) {
    if (left == 0) return true;
    const size_t i = trailer_.blocks.size();
    HandOffBlock& name = trailer_.blocks.emplace_back();
    if (!sequence.ok()) continue;
    const Block& block = *(*sequence)->blocks[i];
    if (block.published && !header_.blocks[i].named) name = {block.name, true};
  }
  LeaveSequence();
  parts().metrics->exports.Increment();
  return false;
}

bool ExportedSequence::MakeTrailer() {
  const uint32_t layers = cache_->layers(), blocks = full_blocks_ + (open_tokens() > 0);
  if (trailer_pages_.capacity() == 0) {
    size_t pages = holds_.tail.size() + layers;
    for (const uint32_t kept : kept_) pages += kept;
    trailer_.pages.reserve(pages);
    trailer_pages_.reserve(pages);
  }
  size_t left = SequenceExports::kPagesAtOnce, bytes = 0;
  for (; trailer_layer_ < layers; ++trailer_layer_, trailer_block_ = 0) {
    const uint32_t layer = trailer_layer_, aged = header_.aged[layer];
    if (kept_[layer] == 0) trailer_block_ = std::max(trailer_block_, aged);
    for (; trailer_block_ < blocks; ++trailer_block_, --left) {
      if (left == 0 || bytes >= SequenceExports::kBytesAtOnce) return true;
      if (trailer_block_ < aged) {
        const size_t at = first_at_[layer] + trailer_block_;
        const uint32_t number = holds_.numbers[at];
        if (number != kNotEncoded) {
          if (!is_withdrawn(holds_.pages[at])) continue;
          trailer_.withdrawn.push_back(number);
        }
        bytes += AddLast(holds_.pages[at], trailer_block_);
      } else if (trailer_block_ < full_blocks_) {
        bytes += AddLast(holds_.tail[trailer_tail_++], trailer_block_);
      } else {
        // An open page, of which the first tokens are copied: already, or to the host.
        bytes += AddLast(copy_ != nullptr ? PageRef{copy_, layer} : holds_.open[layer], trailer_block_);
      }
    }
  }
  return false;
}

size_t ExportedSequence::AddLast(const PageRef& ref, uint32_t block) {
  const Page page = ref.page();
  const absl::Span<const uint8_t> bytes(RawPageData(*cache_, page), cache_->layout(ref.layer).raw_bytes());
  KV_CHECK(bytes.data() != nullptr);
  const bool kept = page.state == PageState::kResident && page.declined && block < full_blocks_;
  const uint32_t number = static_cast<uint32_t>(header_.size() + trailer_.pages.size());
  trailer_.pages.push_back({block, ref.layer, bytes.size()});
  trailer_pages_.push_back({number, bytes, kept ? page.checksum : ChecksumOf(bytes)});
  return kept ? 0 : bytes.size();
}

}  // namespace kvmanager
