// Hand-off: a sequence pinned for sending, and slots for one that is being received.
#include <algorithm>
#include <cstring>

#include "kvmanager/store/page_store_impl.h"
#include "xxhash.h"

namespace kvmanager {
namespace {

class ExportLeaseImpl final : public ExportLease, private EncodeWaiter {
 public:
  ExportLeaseImpl(PageStoreImpl* store, std::shared_ptr<Cache> cache) : EncodeWaiter(store), cache_(std::move(cache)) {
    ++cache_->leases;
    store->metrics()->export_leases.Increment();
  }
  ~ExportLeaseImpl() override {
    PageStoreImpl* store = this->store();
    if (store == nullptr) return;
    for (const Source& source : sources_) store->Unpin(source.ref);
    if (copy_ != nullptr) {
      store->export_copies.erase(copy_);
      store->Release(copy_);
    }
    --cache_->leases;
    store->metrics()->export_leases.Decrement();
  }

  /// copy: a block of zero-padded copies of the open pages, held by this lease, or nullptr.
  void Start(const Sequence& sequence, Block* copy) {
    copy_ = copy;
    if (copy != nullptr) store()->export_copies.insert(copy);
    content_.config = cache_->config;
    content_.codec_version = cache_->codec->info().version;
    content_.tokens = sequence.tokens[0];
    if (sequence.index != nullptr) content_.index = sequence.index->facts();
    const uint32_t full_blocks = static_cast<uint32_t>(content_.tokens / cache_->page_tokens());
    for (uint32_t i = 0; i < full_blocks; ++i) {
      const Block& block = *sequence.blocks[i];
      HandOffBlock out;
      out.named = block.published;
      if (out.named) out.name = block.name;
      content_.blocks.push_back(out);
    }
    std::vector<PageRef> pending;
    for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
      // As if the newest token had been appended alone. Not more: the receiver may crop and ask as the sender may.
      const uint64_t newest = content_.tokens > 0 ? content_.tokens - 1 : 0;
      const uint32_t aged =
          std::max(sequence.aged[layer], AgedPages(newest, cache_->page_tokens(), cache_->config.lag_pages));
      for (uint32_t i = 0; i < full_blocks; ++i) Add({sequence.blocks[i], layer}, i < aged, &pending);
      if (copy != nullptr) Add({copy, layer}, false, &pending);
    }
    WaitFor(std::move(pending));
  }

  bool ready() const override { return is_ready(); }
  void OnReady(absl::AnyInvocable<void()> fn) override { CallWhenReady(std::move(fn)); }
  const HandOffContent& content() const override {
    KV_CHECK(is_ready());
    return content_;
  }
  absl::Span<const uint8_t> bytes(size_t page) const override {
    KV_CHECK(is_ready() && page < bytes_.size());
    return bytes_[page];
  }

 private:
  struct Source {
    PageRef ref;
    bool aged;
  };

  void Add(PageRef ref, bool aged, std::vector<PageRef>* pending) {
    store()->Pin(ref);
    sources_.push_back({ref, aged});
    if (aged && ref.page().awaits_encoding()) pending->push_back(ref);
    HandOffPage page;
    page.block = ref.block->index;
    page.layer = ref.layer;
    content_.pages.push_back(page);
  }

  void Resolve() override {
    for (size_t i = 0; i < sources_.size(); ++i) {
      const Page& page = sources_[i].ref.page();
      HandOffPage& out = content_.pages[i];
      const bool encoded = sources_[i].aged && !page.declined;
      out.form = encoded ? PageForm::kEncoded : PageForm::kRaw;
      out.bytes = encoded ? cache_->page_bytes(out.layer) : cache_->layout().raw_bytes();
      const uint8_t* data = encoded ? store()->Data(*cache_, page.encoded) : store()->RawData(*cache_, page);
      bytes_.push_back({data, out.bytes});
      // Of a resident page the checksum is the one kept since it was made, so that the receiver notices what changed
      // since.
      const bool kept = page.state == PageState::kResident && (encoded || page.declined);
      out.checksum = kept ? page.checksum : XXH3_64bits(data, out.bytes);
    }
  }

  std::shared_ptr<Cache> cache_;  // shared: see Block
  Block* copy_ = nullptr;
  std::vector<Source> sources_;  // [content_.pages.size()], each pinned
  HandOffContent content_;
  std::vector<absl::Span<const uint8_t>> bytes_;
};

// Whether `content` is of one piece: blocks and pages as its token count says, in the order of sending, with the sizes
// of the cache's forms.
absl::Status CheckContent(const Cache& cache, const HandOffContent& content) {
  const uint64_t page_tokens = cache.page_tokens();
  const uint64_t tokens_max = PageStore::kSequenceBlocksMax * page_tokens;
  if (content.tokens > tokens_max) return InvalidField("tokens", content.tokens, absl::StrCat("at most ", tokens_max));
  if (content.index.prompt_tokens > tokens_max) {
    return InvalidField("prompt_tokens", content.index.prompt_tokens, absl::StrCat("at most ", tokens_max));
  }
  if (content.index.iterations > IndexFacts::kIterationsMax) {
    return InvalidField("index_iterations", content.index.iterations,
                        absl::StrCat("at most ", IndexFacts::kIterationsMax));
  }
  const uint64_t full_blocks = content.tokens / page_tokens;
  const uint64_t per_layer = full_blocks + (content.tokens % page_tokens != 0);
  if (content.blocks.size() != full_blocks) {
    return InvalidField("blocks", content.blocks.size(), absl::StrCat(full_blocks, " for ", content.tokens, " tokens"));
  }
  if (content.pages.size() != per_layer * cache.layers()) {
    return InvalidField("pages", content.pages.size(),
                        absl::StrCat(per_layer * cache.layers(), ", ", per_layer, " per layer"));
  }
  absl::flat_hash_set<BlockKey> keys;
  for (size_t i = 0; i < content.blocks.size(); ++i) {
    if (content.blocks[i].named && !keys.insert(content.blocks[i].name.key).second) {
      return InvalidField(absl::StrCat("blocks[", i, "].name"), content.blocks[i].name.key.ToHex(8), "named once");
    }
  }
  for (size_t i = 0; i < content.pages.size(); ++i) {
    const HandOffPage& page = content.pages[i];
    const auto field = [i](absl::string_view name) { return absl::StrCat("pages[", i, "].", name); };
    if (page.layer != i / per_layer) return InvalidField(field("layer"), page.layer, absl::StrCat(i / per_layer));
    if (page.block != i % per_layer) return InvalidField(field("block"), page.block, absl::StrCat(i % per_layer));
    const bool raw = page.form == PageForm::kRaw;
    if (!raw && (page.form != PageForm::kEncoded || page.block == full_blocks)) {
      return InvalidField(field("form"), static_cast<int>(page.form), "raw, or encoded for a full block");
    }
    const uint64_t bytes = raw ? cache.layout().raw_bytes() : cache.page_bytes(page.layer);
    if (page.bytes != bytes) return InvalidField(field("bytes"), page.bytes, absl::StrCat(bytes));
  }
  return absl::OkStatus();
}

class ImportLeaseImpl final : public ImportLease {
 public:
  ImportLeaseImpl(PageStoreImpl* store, std::shared_ptr<Cache> cache, const HandOffContent& content)
      : store_(store), alive_(store->alive()), cache_(std::move(cache)), content_(content) {
    ++cache_->leases;
    store_->metrics()->import_leases.Increment();
  }
  ~ImportLeaseImpl() override {
    if (alive_.expired()) return;
    if (sequence_ != nullptr) {
      store_->hidden_sequences.erase(sequence_.get());
      store_->ReleaseBlocks(*sequence_);
    }
    --cache_->leases;
    if (!cache_->wanted) store_->CloseIfUnused(cache_);
    store_->metrics()->import_leases.Decrement();
  }

  absl::Status Start();
  absl::Span<uint8_t> target(size_t page) const override {
    KV_CHECK(page < targets_.size());
    return targets_[page];
  }
  absl::StatusOr<SequenceId> Commit() override;

 private:
  uint32_t full_blocks() const { return static_cast<uint32_t>(content_.blocks.size()); }
  size_t pages_per_layer() const { return content_.pages.size() / cache_->layers(); }
  const HandOffPage& page_of(uint32_t block, uint32_t layer) const {
    return content_.pages[layer * pages_per_layer() + block];
  }
  bool CanShare(const Block& block) const;
  absl::Status CheckReceived(size_t page) const;

  PageStoreImpl* const store_;
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<Cache> cache_;  // shared: see Block
  const HandOffContent content_;
  std::unique_ptr<Sequence> sequence_;  // not visible; nullptr after Commit
  std::vector<absl::Span<uint8_t>> targets_;
};

// Whether the block that is here serves every read of the received sequence.
bool ImportLeaseImpl::CanShare(const Block& block) const {
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    if (!sequence_->HoldsRaw(block.index, layer)) continue;
    if (store_->RawData(*cache_, block.pages[layer]) == nullptr) return false;
  }
  return true;
}

absl::Status ImportLeaseImpl::Start() {
  KV_RETURN_IF_ERROR(CheckContent(*cache_, content_));
  const bool identity = cache_->identity();
  sequence_ = store_->NewSequence(cache_);
  store_->hidden_sequences.insert(sequence_.get());
  std::fill(sequence_->tokens.begin(), sequence_->tokens.end(), content_.tokens);
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    // Encoded pages have aged, and so have those before them (raw there means that the codec declined).
    for (uint32_t i = 0; i < full_blocks(); ++i) {
      if (page_of(i, layer).form == PageForm::kEncoded) sequence_->aged[layer] = i + 1;
    }
  }
  // Find and hold first: reserving may evict.
  std::vector<Block*> shared(full_blocks(), nullptr), unfit;
  SlotCounts wanted;
  for (uint32_t i = 0; i < full_blocks(); ++i) {
    MissReason reason;
    Block* block =
        content_.blocks[i].named ? store_->FindVerified(*cache_, content_.blocks[i].name, i, &reason) : nullptr;
    if (block != nullptr && !CanShare(*block)) {
      unfit.push_back(block);
      block = nullptr;
    }
    shared[i] = block;
    for (uint32_t layer = 0; block == nullptr && layer < cache_->layers(); ++layer) {
      wanted.raw += !identity && page_of(i, layer).form == PageForm::kRaw;
      cache_->CountEncodedSlots(layer, 1, &wanted);  // a raw page's is for its encoding
    }
  }
  for (; !unfit.empty(); unfit.pop_back()) store_->Release(unfit.back());
  const bool has_open = pages_per_layer() > full_blocks();
  if (has_open) wanted.raw += cache_->layers();
  Reservation slots(cache_->tier->pool);
  if (absl::Status status = store_->Reserve(*cache_, wanted, &slots); !status.ok()) {
    for (auto block = shared.rbegin(); block != shared.rend(); ++block) {
      if (*block != nullptr) store_->Release(*block);
    }
    return status;
  }
  targets_.resize(content_.pages.size());
  for (uint32_t i = 0; i < pages_per_layer(); ++i) {
    const bool open = i == full_blocks();
    if (!open && shared[i] != nullptr) {
      store_->Attach(*sequence_, shared[i]);
      continue;
    }
    Block* block = store_->NewBlock(cache_, i);
    for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
      const bool is_raw = open || (!identity && page_of(i, layer).form == PageForm::kRaw);
      PageChange reserved;
      if (is_raw) reserved.raw = slots.TakeRaw();
      if (!open) reserved.encoded = slots.TakeEncoded(*cache_, layer);
      store_->Apply({block, layer}, PageEvent::kReserve, reserved);
      targets_[layer * pages_per_layer() + i] = {store_->Data(*cache_, is_raw ? reserved.raw : reserved.encoded),
                                                 page_of(i, layer).bytes};
    }
    store_->Attach(*sequence_, block);
  }
  return absl::OkStatus();
}

absl::Status ImportLeaseImpl::CheckReceived(size_t i) const {
  const HandOffPage& page = content_.pages[i];
  const absl::Span<const uint8_t> bytes = targets_[i];
  if (bytes.empty()) return absl::OkStatus();
  const std::string field = absl::StrCat("pages[", i, "]");
  if (const uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size()); checksum != page.checksum) {
    return FieldError(absl::StatusCode::kDataLoss, absl::StrCat(field, ".checksum"), absl::StrCat(absl::Hex(checksum)),
                      absl::StrCat(absl::Hex(page.checksum)));
  }
  if (page.form == PageForm::kEncoded && !cache_->identity())
    return cache_->codec->Validate(static_cast<int>(page.layer), bytes);
  NonFinite where;
  if (!FindNonFinite(cache_->layout(), bytes.data(), 0, cache_->page_tokens(), &where)) return absl::OkStatus();
  return InvalidField(absl::StrCat(field, where.side == 0 ? ".k" : ".v", "[head ", where.head, "][token ", where.token,
                                   "][channel ", where.channel, "]"),
                      "NaN or Inf", "finite");
}

absl::StatusOr<SequenceId> ImportLeaseImpl::Commit() {
  if (alive_.expired()) return absl::UnavailableError("the store has closed");
  if (sequence_ == nullptr) return absl::FailedPreconditionError("this hand-off was committed before");
  KV_RETURN_IF_ERROR(store_->CheckSequenceLimit());
  for (size_t i = 0; i < targets_.size(); ++i) KV_RETURN_IF_ERROR(CheckReceived(i));
  std::vector<PageRef> to_encode;
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (targets_[i].empty()) continue;
    const HandOffPage& received = content_.pages[i];
    const PageRef ref{sequence_->blocks[received.block], received.layer};
    const Page& page = ref.page();
    PageChange after{page.raw, page.encoded, false, received.checksum};
    if (received.block == full_blocks()) {
      store_->Apply(ref, PageEvent::kReceivedOpen, after);
    } else if (page.raw.valid()) {
      after.checksum = 0;
      store_->Apply(ref, PageEvent::kReceivedRaw, after);
      to_encode.push_back(ref);
    } else {
      store_->Apply(ref, PageEvent::kReceivedEncoded, after);
    }
  }
  for (uint32_t i = 0; i < full_blocks(); ++i) {
    Block* block = sequence_->blocks[i];
    // A key that somebody else published meanwhile stays theirs; the next publish shares it.
    if (!content_.blocks[i].named || block->published || cache_->table.FindKey(content_.blocks[i].name.key) != nullptr)
      continue;
    block->name = content_.blocks[i].name;
    cache_->table.Insert(block);
    store_->metrics()->published.Increment();
    store_->metrics()->published_blocks.Increment();
  }
  sequence_->hit_blocks = static_cast<int>(full_blocks());
  store_->hidden_sequences.erase(sequence_.get());
  store_->MakeIndex(*sequence_, content_.index, content_.tokens);
  store_->AdvanceIndexes(*sequence_);
  const SequenceId id = store_->Show(std::move(sequence_));
  store_->metrics()->imports.Increment();
  store_->PostEncodes(cache_, std::move(to_encode));
  return id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExportLease>> PageStoreImpl::Export(SequenceId id) {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, FindSequence(id));
  if (!sequence->LayersAreEqual()) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id, ": a hand-off needs equal token counts in all layers; the shortest has ",
                     sequence->TokensInEveryLayer()));
  }
  const std::shared_ptr<Cache> cache = sequence->cache;
  if (cache->on_device()) return WrongMemory(*cache);
  const uint32_t index = static_cast<uint32_t>(sequence->tokens[0] / cache->page_tokens());
  const int open_tokens = static_cast<int>(sequence->tokens[0] % cache->page_tokens());
  Block* copy = nullptr;
  if (open_tokens > 0) {
    // The sequence may grow while it is sent, so its open pages are copied.
    Reservation slots(cache->tier->pool);
    KV_RETURN_IF_ERROR(Reserve(*cache, {.raw = cache->layers()}, &slots));
    copy = NewBlock(cache, index);
    for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
      const PageId slot = slots.TakeRaw();
      CopyOpen(*cache, layer, sequence->blocks[index]->pages[layer], slot, open_tokens, nullptr);
      ZeroRawTail(cache->layout(), Data(*cache, slot), open_tokens);
      Apply({copy, layer}, PageEvent::kOpen, {slot, PageId()});
    }
  }
  auto lease = std::make_unique<ExportLeaseImpl>(this, cache);
  lease->Start(*sequence, copy);
  metrics_->exports.Increment();
  return lease;
}

absl::StatusOr<std::unique_ptr<ImportLease>> PageStoreImpl::Import(const HandOffContent& content,
                                                                   std::shared_ptr<const Codec> codec) {
  KV_RETURN_IF_ERROR(CheckSequenceLimit());
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache,
                      FindOrOpen(content.config, std::move(codec), &content.codec_version));
  if (cache->on_device()) {
    if (!cache->wanted) CloseIfUnused(cache);
    return WrongMemory(*cache);
  }
  auto lease = std::make_unique<ImportLeaseImpl>(this, std::move(cache), content);
  KV_RETURN_IF_ERROR(lease->Start());
  return lease;
}

}  // namespace kvmanager
