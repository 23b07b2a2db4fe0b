#include "kvmanager/rpc/block_calls.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/load_blocks.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/slab_service.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {
namespace {

constexpr size_t kNone = SIZE_MAX;

uint64_t Aligned(uint64_t bytes) {
  return (bytes + limits::kTensorAlign - 1) / limits::kTensorAlign * limits::kTensorAlign;
}

// The range that a request names, which must be in an arena; with any size.
absl::StatusOr<StepTensor> CheckRange(api::Tensor::Reader in, absl::FunctionRef<absl::Span<uint8_t>(uint32_t)> arena) {
  if (in.which() == api::Tensor::ARENA) return CheckTensor("pages", in, in.getArena().getBytes(), arena);
  return InvalidField("pages", in.which() == api::Tensor::NONE ? "none" : "inline", "a range of an arena");
}
// Of one that is read into, in host memory.
absl::StatusOr<StepTensor> CheckReadRange(const Session& session, api::Tensor::Reader in, bool mapped) {
  if (mapped && in.which() == api::Tensor::NONE) return StepTensor();
  return CheckRange(in, [&](uint32_t arena) { return session.ArenaBytes(arena); });
}

absl::StatusOr<std::vector<uint64_t>> ReadChecksums(api::BlocksRequest::Reader request, bool on_device) {
  const auto in = request.getChecksums();
  std::vector<uint64_t> checksums(in.size() / sizeof(uint64_t));
  const size_t want = on_device ? request.getRaw().size() * sizeof(uint64_t) : 0;
  if (in.size() != 0 && in.size() != want) {
    return InvalidField("checksums", absl::StrCat(in.size(), " bytes long"),
                        on_device ? absl::StrCat(want, " bytes long, 8 for each block and layer, or empty")
                                  : "empty: the daemon makes them of what comes from a host arena");
  }
  if (!checksums.empty()) std::memcpy(checksums.data(), in.begin(), in.size());
  return checksums;
}

void Shrink(std::atomic<size_t>* least, size_t to) {
  size_t now = least->load(std::memory_order_relaxed);
  while (to < now && !least->compare_exchange_weak(now, to, std::memory_order_relaxed)) {
  }
}

}  // namespace

// Pages that workers copy, each taken by one of them. Made and destroyed on the loop's thread.
class BlockCalls::Copying {
 public:
  explicit Copying(std::shared_ptr<const void> arena) : arena_(std::move(arena)) {}
  virtual ~Copying() = default;

  size_t pages() const { return offsets_.size(); }  // to be copied
  uint64_t bytes() const { return bytes_; }
  /// Of the range, as offsets of Place from `range` on.
  void SetRange(uint8_t* range) { range_ = range; }
  /// Before the first page is copied: who copies the last one says so, if none is wrong.
  void WhenCopied(MessageQueue* queue, kj::Own<kj::PromiseFulfiller<void>> fulfiller) {
    queue_ = queue;
    copied_ = kj::mv(fulfiller);
    left_.store(pages(), std::memory_order_relaxed);
  }
  /// Copies the next page. False: none is left, or one was found wrong.
  bool CopyNext() {
    const size_t next = next_.fetch_add(1, std::memory_order_relaxed);
    if (next >= pages()) return false;
    const auto [page, offset] = offsets_[next];
    if (page > wrong_.load(std::memory_order_relaxed)) return false;
    if (!Copy(page, range_ + offset)) {
      Shrink(&wrong_, page);
    } else if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      queue_->Post([fulfiller = kj::mv(copied_)]() mutable { fulfiller->fulfill(); });
    }
    return true;
  }

 protected:
  /// Any thread. False: the page is wrong.
  virtual bool Copy(size_t page, uint8_t* in_arena) = 0;
  /// Pages in their order; those without data take room in the range and are not copied, those with a place neither.
  void Place(absl::Span<const StoredPage> pages) {
    offsets_.reserve(pages.size());
    for (size_t page = 0; page < pages.size(); ++page) {
      if (pages[page].place.has_value()) continue;
      offsets_.push_back({page, bytes_});
      bytes_ += Aligned(pages[page].bytes);
    }
  }
  /// The first page that was found wrong; kNone.
  size_t wrong() const { return wrong_.load(std::memory_order_relaxed); }

  struct Offset {
    size_t page = 0;
    uint64_t in_range = 0;
  };
  const std::vector<Offset>& offsets() const { return offsets_; }
  uint8_t* range() const { return range_; }

 private:
  const std::shared_ptr<const void> arena_;
  uint8_t* range_ = nullptr;
  std::vector<Offset> offsets_;  // [pages()]
  uint64_t bytes_ = 0;
  std::atomic<size_t> next_{0}, wrong_{kNone}, left_{0};
  MessageQueue* queue_ = nullptr;
  kj::Own<kj::PromiseFulfiller<void>> copied_;
};

class BlockCalls::Reading final : public Copying {
 public:
  Reading(std::shared_ptr<Region> arena, std::unique_ptr<BlockReads> reads)
      : Copying(std::move(arena)), reads_(std::move(reads)) {
    Place(reads_->pages());
  }

  /// The pages are held from now on by what this returns, if some lie where a process may map them.
  std::unique_ptr<BlockReads> WriteReply(api::BlocksReply::Builder reply, bool mapped) {
    const size_t layers = reads_->blocks() == 0 ? 1 : reads_->pages().size() / reads_->blocks();
    const bool corrupt = wrong() != kNone;
    const size_t blocks = corrupt ? wrong() / layers : reads_->blocks();
    reads_->NoteVerified(blocks, corrupt);
    uint64_t bytes = 0;
    auto raw = reply.initRaw(static_cast<uint32_t>(blocks * layers));
    bool lies = false;
    const auto pages = reads_->pages().subspan(0, blocks * layers);
    auto places = mapped ? reply.initPlaces(static_cast<uint32_t>(pages.size() * 16)) : nullptr;
    auto checksums = mapped ? reply.initChecksums(static_cast<uint32_t>(pages.size() * 8)) : nullptr;
    for (size_t i = 0; i < pages.size(); ++i) {
      raw[i] = pages[i].raw;
      const bool has_place = pages[i].place.has_value();
      lies |= has_place;
      if (mapped) {
        const uint64_t place[] = {has_place ? pages[i].place->slab : UINT64_MAX,
                                  has_place ? pages[i].place->offset : bytes};
        const uint64_t checksum = reads_->checksum(i);
        std::memcpy(places.begin() + i * sizeof(place), place, sizeof(place));
        std::memcpy(checksums.begin() + i * sizeof(checksum), &checksum, sizeof(checksum));
      }
      if (!has_place) bytes += Aligned(pages[i].bytes);
    }
    reply.setBlocks(static_cast<uint32_t>(blocks));
    reply.setBytes(bytes);
    reply.setReason(corrupt ? api::MissReason::CHECKSUM : static_cast<api::MissReason>(reads_->reason()));
    if (mapped) {
      const std::vector<uint32_t> recalled = reads_->Recalled();
      auto unmap = reply.initUnmap(static_cast<uint32_t>(recalled.size()));
      for (uint32_t i = 0; i < recalled.size(); ++i) unmap.set(i, recalled[i]);
    }
    // A worker that has not begun has this object for a while; what it leased is given back now.
    std::unique_ptr<BlockReads> reads = std::move(reads_);
    return lies ? std::move(reads) : nullptr;
  }

 private:
  bool Copy(size_t page, uint8_t* in_arena) override {
    const StoredPage& stored = reads_->pages()[page];
    std::memcpy(in_arena, stored.data, stored.bytes);
    return reads_->Verify(page);
  }

  std::unique_ptr<BlockReads> reads_;
};

class BlockCalls::Writing final : public Copying {
 public:
  /// on_device: a device puts the pages in place, by TakeCopies. known: their checksums, or empty.
  Writing(std::shared_ptr<const void> arena, std::unique_ptr<BlockWrites> writes, bool on_device,
          std::vector<uint64_t> known)
      : Copying(std::move(arena)), writes_(std::move(writes)), on_device_(on_device), known_(std::move(known)) {
    Place(writes_->pages());
    checksums_.resize(writes_->pages().size());
    errors_.resize(writes_->pages().size());
  }

  absl::Status WriteReply(api::BlocksReply::Builder reply) {
    const std::unique_ptr<BlockWrites> writes = std::move(writes_);  // ends here, as Reading's
    if (wrong() != kNone) return errors_[wrong()];
    KV_ASSIGN_OR_RETURN(const size_t named, writes->Commit(checksums_));
    reply.setBlocks(static_cast<uint32_t>(named));
    reply.setPresent(static_cast<uint32_t>(writes->present()));
    return absl::OkStatus();
  }
  /// The next ones, at most kCopiesAtOnce; empty: there are no more.
  std::vector<PageCopy> TakeCopies() {
    std::vector<PageCopy> copies;
    for (; taken_ < offsets().size() && copies.size() < kCopiesAtOnce; ++taken_) {
      const auto [page, offset] = offsets()[taken_];
      const StoredPage& stored = writes_->pages()[page];
      if (stored.data == nullptr) continue;
      copies.push_back({range() + offset, stored.data, static_cast<uint32_t>(Aligned(stored.bytes))});
    }
    return copies;
  }
  uint64_t written_bytes() const {
    uint64_t bytes = 0;
    for (const StoredPage& page : writes_->pages()) bytes += page.data == nullptr ? 0 : page.bytes;
    return bytes;
  }

 private:
  bool Copy(size_t page, uint8_t* in_arena) override {
    const StoredPage& stored = writes_->pages()[page];
    if (stored.data == nullptr) return true;
    auto checksum =
        on_device_ ? writes_->CheckPut(page, known_.empty() ? 0 : known_[page]) : writes_->Put(page, in_arena);
    if (checksum.ok()) {
      checksums_[page] = *checksum;
      return true;
    }
    errors_[page] = std::move(checksum).status();
    return false;
  }

  static constexpr size_t kCopiesAtOnce = 2048;  // the loop spends 3 us on a copy that is not joined to others

  std::unique_ptr<BlockWrites> writes_;
  const bool on_device_;
  const std::vector<uint64_t> known_;
  size_t taken_ = 0;                  // of offsets()
  std::vector<uint64_t> checksums_;   // [pages], each written by who copied it
  std::vector<absl::Status> errors_;  // [pages], the same
};

kj::Promise<void> BlockCalls::Run(std::shared_ptr<Copying> copying, WorkerPool::Owner owner) const {
  const size_t tasks = std::min<size_t>(parts_.workers->threads(), copying->pages());
  auto ended = kj::heapArrayBuilder<kj::Promise<void>>(tasks);
  auto copied = kj::newPromiseAndFulfiller<void>();
  copying->WhenCopied(parts_.queue, kj::mv(copied.fulfiller));
  for (size_t i = 0; i < tasks; ++i) {
    ended.add(OnWorkerInTurns(parts_.workers, parts_.queue, WorkerPool::Priority::kAttend, owner,
                              [copying] { return copying->CopyNext(); }));
  }
  // A worker that has not begun when the others are through, since its core is taken, is not waited for.
  return kj::joinPromises(ended.finish()).exclusiveJoin(kj::mv(copied.promise));
}

kj::Promise<bool> BlockCalls::MoveRest(PageMover* mover, std::shared_ptr<Writing> writing) {
  std::vector<PageCopy> copies = writing->TakeCopies();
  if (copies.empty()) return true;
  auto waiting = kj::newPromiseAndFulfiller<bool>();
  // The mover keeps slots and arena, whatever becomes of the call.
  mover->Move(
      PageDirection::kDemote, std::move(copies),
      [writing, fulfiller = kj::mv(waiting.fulfiller)](bool moved) mutable { fulfiller->fulfill(kj::mv(moved)); });
  return waiting.promise.then([mover, writing](bool moved) mutable -> kj::Promise<bool> {
    if (!moved) return false;
    return MoveRest(mover, std::move(writing));
  });
}

BlockCalls::FindDeviceArena BlockCalls::ArenasOn(Gpus gpus) {
  if (gpus.empty()) return nullptr;
  return [gpus = std::move(gpus)](const Session& session, uint32_t id) -> DeviceBytes {
    const std::shared_ptr<const DeviceArena> arena = session.gpus().ArenaOf(id);
    if (arena == nullptr) return {};
    return {arena->data(), arena, FindGpu(gpus, arena->ordinal())->arena_mover()};
  };
}

absl::StatusOr<BlockCalls::Source> BlockCalls::FindSource(const Session& session, api::Tensor::Reader in) const {
  Source source;
  KV_ASSIGN_OR_RETURN(source.range, CheckRange(in, [&](uint32_t arena) {
                        if (parts_.device_arena) {
                          DeviceBytes on_device = parts_.device_arena(session, arena);
                          source.arena = std::move(on_device.arena);
                          source.mover = on_device.mover;
                          if (source.arena != nullptr) return on_device.bytes;
                        }
                        source.arena = session.FindArena(arena);
                        return session.ArenaBytes(arena);
                      }));
  if (source.mover != nullptr) KV_RETURN_IF_ERROR(source.mover->status());
  return source;
}

absl::Status BlockCalls::CheckAccepting() const {
  return parts_.drain->on() ? absl::UnavailableError("this daemon is draining: it reads and writes no blocks")
                            : absl::OkStatus();
}

absl::Status BlockCalls::CheckMaps(const Session& session) const {
  if (MayMap(session)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "mapped: this daemon lets clients on Unix sockets alone map its memory, of those users that --map-blocks says; "
      "read without it");
}

bool BlockCalls::MayMap(const Session& session) const {
  const Proof& proof = session.proof();
  if (!proof.unix_socket || parts_.maps == Maps::kNobody) return false;
  return parts_.maps == Maps::kEverybody || (proof.uid.has_value() && (*proof.uid == 0 || *proof.uid == getuid()));
}

absl::StatusOr<kj::Promise<void>> BlockCalls::BindSlabs(const std::shared_ptr<Session>& session,
                                                        const BoundCache& bound, BindSlabsContext& context) const {
  KV_RETURN_IF_ERROR(CheckAccepting());
  KV_RETURN_IF_ERROR(CheckMaps(*session));
  KV_ASSIGN_OR_RETURN(auto made, parts_.store->caches().BeginBind(bound.cache.id, context.getParams().getBytes()));
  const std::shared_ptr<SlabBinding> binding = std::move(made);
  return InTurns(session, Method::kMapBlocks, parts_.turns, bound.cache.owner, [binding] { return binding->DoPiece(); })
      .then([session, binding, context]() mutable {
        const absl::StatusOr<std::vector<uint32_t>> slabs = binding->result();
        if (!slabs.ok()) return ServeError(*session, Method::kMapBlocks, slabs.status(), context);
        auto list = context.getResults().initSlabs(static_cast<uint32_t>(slabs->size()));
        for (uint32_t i = 0; i < slabs->size(); ++i) list.set(i, (*slabs)[i]);
      });
}

absl::StatusOr<kj::Promise<void>> BlockCalls::MapSlab(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                                      MapBlocksSlabContext& context) const {
  KV_RETURN_IF_ERROR(CheckMaps(*session));
  KV_ASSIGN_OR_RETURN(auto place, ReserveSlab(session));
  KV_ASSIGN_OR_RETURN(const ShownSlab shown,
                      parts_.store->caches().ShowSlab(bound.cache.id, context.getParams().getSlab()));
  auto results = context.getResults();
  results.setSlab(kj::heap<SlabService>(shown.fd, std::move(place)));
  results.setBytes(shown.bytes);
  return Done();
}

absl::StatusOr<kj::Promise<void>> BlockCalls::Read(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                                   ReadBlocksContext& context) const {
  KV_RETURN_IF_ERROR(CheckAccepting());
  const auto request = context.getParams().getRequest();
  KV_RETURN_IF_ERROR(CheckReadRange(*session, request.getPages(), request.getMapped()).status());
  std::shared_ptr<const void> lease_place;
  if (request.getMapped()) {
    KV_RETURN_IF_ERROR(CheckMaps(*session));
    KV_ASSIGN_OR_RETURN(lease_place, ReserveBlockLease(session));
  }
  if (request.hasRaw()) return InvalidField("raw", absl::StrCat(request.getRaw().size(), " bytes long"), "empty");
  KV_ASSIGN_OR_RETURN(std::vector<BlockName> names, ReadBlockNames("names", request.getNames(), kTransferPagesMax));
  std::shared_ptr<DiskLoad> load =
      parts_.store->long_calls().BeginLoad(bound.cache.id, &names, request.getFirstBlock());
  if (load == nullptr) {
    return ReadLoaded(session, std::move(lease_place), bound.cache.id, bound.cache.owner, names, context);
  }
  return LoadBlocks(session, Method::kReadBlocks, parts_.turns, bound.cache.owner, load)
      .then([this, session, lease_place = std::move(lease_place), cache = bound.cache.id, owner = bound.cache.owner,
             load, context]() mutable -> kj::Promise<void> {
        auto reading = ReadLoaded(session, std::move(lease_place), cache, owner, load->TakeNames(), context);
        if (reading.ok()) return kj::mv(*reading);
        ServeError(*session, Method::kReadBlocks, reading.status(), context);
        return kj::READY_NOW;
      });
}

absl::StatusOr<kj::Promise<void>> BlockCalls::ReadLoaded(const std::shared_ptr<Session>& session,
                                                         std::shared_ptr<const void> lease_place, CacheId cache,
                                                         WorkerPool::Owner owner, const std::vector<BlockName>& names,
                                                         ReadBlocksContext& context) const {
  const auto request = context.getParams().getRequest();
  const bool mapped = request.getMapped();
  KV_ASSIGN_OR_RETURN(const StepTensor range, CheckReadRange(*session, request.getPages(), mapped));
  KV_ASSIGN_OR_RETURN(auto reads,
                      parts_.store->caches().ReadBlocks(cache, request.getFirstBlock(), names,
                                                        {range.bytes.size(), limits::kTensorAlign, mapped}));
  std::shared_ptr<const void> pages_place;
  if (mapped) {
    KV_ASSIGN_OR_RETURN(pages_place, ReserveMappedPages(session, reads->pages().size()));
  }
  auto reading = std::make_shared<Reading>(session->FindArena(range.arena), std::move(reads));
  reading->SetRange(range.bytes.data());
  context.releaseParams();
  const int64_t start_ns = parts_.clock->NowNs();
  auto answer = [this, reading, session, lease_place, pages_place, context, owner, mapped, start_ns]() mutable {
    auto reply = context.getResults().initReply();
    if (auto held = reading->WriteReply(reply, mapped)) {
      reply.setLease(MakeLease(session, std::move(lease_place), owner, {std::move(held), std::move(pages_place)}));
    }
    parts_.metrics->read_seconds.Observe(double(parts_.clock->NowNs() - start_ns) * 1e-9);
    parts_.metrics->read_bytes.Increment(double(reply.getBytes()));
  };
  if (reading->pages() == 0) {
    answer();
    return Done();
  }
  return Run(reading, owner).then(std::move(answer));
}

api::BlocksLease::Client BlockCalls::MakeLease(const std::shared_ptr<Session>& session,
                                               std::shared_ptr<const void> place, WorkerPool::Owner owner,
                                               BlockLeaseService::Held held) const {
  const BlockLeaseService::Parts parts{parts_.workers, parts_.queue, parts_.disposals, parts_.timer, parts_.lease_ms};
  if (parts_.disposals == nullptr) {
    return kj::heap<BlockLeaseService>(session, std::move(place), parts, owner, std::move(held));
  }
  return parts_.disposals->Make<BlockLeaseService>(session, std::move(place), parts, owner, std::move(held));
}

absl::StatusOr<kj::Promise<void>> BlockCalls::Write(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                                    WriteBlocksContext& context) const {
  KV_RETURN_IF_ERROR(CheckAccepting());
  const auto request = context.getParams().getRequest();
  KV_ASSIGN_OR_RETURN(const Source source, FindSource(*session, request.getPages()));
  if (source.mover != nullptr && request.getNames().size() == 0) return Done();
  KV_ASSIGN_OR_RETURN(const std::vector<BlockName> names,
                      ReadBlockNames("names", request.getNames(), kTransferPagesMax));
  const auto raw = request.getRaw();
  KV_ASSIGN_OR_RETURN(auto writes, parts_.store->caches().WriteBlocks(bound.cache.id, request.getFirstBlock(), names,
                                                                      {raw.begin(), raw.size()}));
  KV_ASSIGN_OR_RETURN(std::vector<uint64_t> known, ReadChecksums(request, source.mover != nullptr));
  auto writing = std::make_shared<Writing>(source.arena, std::move(writes), source.mover != nullptr, std::move(known));
  if (writing->bytes() != source.range.bytes.size()) {
    return InvalidField("pages.arena.bytes", source.range.bytes.size(),
                        absl::StrCat(writing->bytes(), ", of ", names.size(), " blocks in these forms"));
  }
  writing->SetRange(source.range.bytes.data());
  context.releaseParams();
  const int64_t start_ns = parts_.clock->NowNs();
  auto answer = [this, writing, session, context, start_ns]() mutable {
    auto reply = context.getResults().initReply();
    const uint64_t bytes = writing->written_bytes();
    if (const absl::Status status = writing->WriteReply(reply); !status.ok()) {
      return ServeError(*session, Method::kWriteBlocks, status, context);
    }
    reply.setBytes(bytes);
    parts_.metrics->write_seconds.Observe(double(parts_.clock->NowNs() - start_ns) * 1e-9);
    parts_.metrics->written_bytes.Increment(double(bytes));
  };
  if (source.mover == nullptr) return Run(writing, bound.cache.owner).then(std::move(answer));
  return MoveRest(source.mover, writing)
      .then([this, writing, session, context, owner = bound.cache.owner,
             answer = std::move(answer)](bool moved) mutable -> kj::Promise<void> {
        if (moved) return Run(writing, owner).then(std::move(answer));
        ServeError(*session, Method::kWriteBlocks,
                   absl::UnavailableError("the GPU of this arena has failed: it copies no pages"), context);
        return kj::READY_NOW;
      });
}

}  // namespace kvmanager
