// A whole store of an engine's blocks, run by few calls: what client/block_store.h decides is done by the engine's GPU.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/block_store.h"
#include "client/c/block_hashes.h"
#include "client/c/object.h"
#include "client/c/paged_blocks.h"

namespace kvmanager::client::c {
namespace {

class StoreObject final : public kvm_object, private BlockStoreWork {
 public:
  static constexpr Kind kKind = Kind::kStore;

  StoreObject(std::shared_ptr<Session> of, const kvm_store_room& room, uint32_t first, const kvm_hashes& hashes,
              const int64_t* ids, uint32_t groups)
      : kvm_object(kKind, std::move(of)),
        room_(room),
        stagings_(room.staging, room.staging + room.stagings),
        ranges_(room.range, room.range + room.ranges),
        first_(first),
        named_(hashes),
        blocks_(hashes.count - first),
        ids_(ids, ids + size_t{groups} * blocks_),
        groups_(groups),
        encoded_(room.encoded),
        store_({.first = first,
                .count = blocks_,
                .stagings = room.stagings,
                .ranges = room.ranges,
                .blocks = room.blocks,
                .tied = room.tied != 0,
                .ahead = room.direct != 0,
                .writes = room.writes,
                .first_blocks = std::min(room.first_blocks, room.blocks)},
               this) {}

  /// Calls under way are cancelled; it waits for no GPU.
  void Drop() override {
    asked_.reset();
    store_.Cancel();
  }
  const std::atomic<uint32_t>& read() const { return store_.read(); }
  void Stop() { store_.Stop(); }

  absl::StatusOr<BlockStore::State> Run(const PageCodecObject& object, CacheObject& cache,
                                        const BlockStoreSignals& signals, kvm_stored* stored) {
    object_ = &object;
    cache_ = &cache;
    auto state = store_.Run(signals);
    const BlockStore::Counts& counts = store_.counts();
    *stored = {.state = state.ok() ? static_cast<uint32_t>(*state) : 0,
               .next = store_.next(),
               .found = counts.found,
               .written = counts.written,
               .present = counts.present,
               .full = counts.full,
               .written_bytes = counts.written_bytes,
               .nanoseconds = 0};
    if (began_.has_value()) stored->nanoseconds = std::chrono::nanoseconds(Clock::now() - *began_).count();
    Leave(store_.full());
    return state;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void Ask() override { asked_.emplace(Match(first_ + 1)); }
  absl::StatusOr<uint32_t> Present() override {
    // The daemon has a block only with those before it: mostly it lacks the first, and the others need not be named.
    KV_ASSIGN_OR_RETURN(auto matches, std::exchange(asked_, std::nullopt)->Wait());
    if (matches[0].hit_blocks > first_ && blocks_ > 1) {
      KV_ASSIGN_OR_RETURN(matches, Match(named_.count()).Wait());
    }
    return static_cast<uint32_t>(matches[0].hit_blocks);
  }
  Pending<absl::StatusOr<std::vector<PrefixMatch>>> Match(uint32_t blocks) {
    const absl::Span<const BlockName> names = Names(0, blocks);
    return cache_->handle->MatchAsync({&names, 1}, {});
  }
  absl::Span<const BlockName> Names(uint32_t at, uint32_t count) {
    return named_.Names(cache_->handle->description().digest, at, count);
  }
  uint32_t Fits(uint32_t at, uint32_t count) const override {
    uint64_t bytes = 0;
    for (uint32_t block = 0; block < count; ++block) {
      bytes += BlockBytes(at + block);
      if (block > 0 && bytes > room_.range_bytes) return block;
    }
    return count;
  }
  absl::Status Begin(BlockPart* part) override {
    const kvm_store_staging& staging = stagings_[part->staging];
    void* const range = ranges_[part->range];
    const bool direct = room_.direct != 0;
    const kvm_save save{.raw = direct && identity() ? range : staging.raw,
                        .stored = direct ? range : staging.stored,
                        .host = direct ? nullptr : range,
                        .ids = TakeIds(ids_.data(), groups_, blocks_, part->at, part->count, &given_),
                        .list = staging.list,
                        .list_device = staging.list_device,
                        .declined = staging.declined,
                        .sums = staging.sums,
                        .first_block = first_ + part->at,
                        .count = part->count,
                        .groups = groups_,
                        .part = room_.part,
                        .save = room_.save,
                        .send = room_.send};
    KV_ASSIGN_OR_RETURN(part->bytes, EnqueueSave(*object_, save));
    if (part->bytes > room_.range_bytes) {
      return absl::InternalError(absl::StrCat("a part takes ", part->bytes, " bytes of ", room_.range_bytes));
    }
    return encoded_.Add(*object_->device, StreamOf(room_.send));
  }
  absl::StatusOr<bool> Encoded(const BlockPart&) override {
    KV_ASSIGN_OR_RETURN(const bool encoded, encoded_.Pass(*object_->device, StreamOf(room_.send)));
    if (encoded && !began_.has_value()) began_ = Clock::now();
    return encoded;
  }
  bool Declined(const BlockPart& part) const override {
    if (identity()) return false;
    const std::vector<uint8_t> raw = Forms(part);
    const uint32_t* const declined = stagings_[part.staging].declined;
    const auto pages = std::count(raw.begin(), raw.end(), 0);
    return std::any_of(declined, declined + pages, [](uint32_t each) { return each != 0; });
  }
  Pending<absl::StatusOr<WriteBlocksResult>> Write(const BlockPart& part) override {
    const std::vector<uint8_t> raw = Forms(part);
    const kvm_tensor pages{ranges_[part.range], part.bytes};
    const BlockRange range{first_ + part.at, Names(first_ + part.at, part.count), ViewOf(*session, pages)};
    const uint64_t* const sums = stagings_[part.staging].sums;
    return cache_->handle->WriteBlocksAsync(range, raw, {sums, sums == nullptr ? 0 : raw.size()});
  }
  void Rest() override { RestOnStream(); }
  void Drain() override {
    asked_.reset();
    DrainStreams(*object_->device, {StreamOf(room_.save), StreamOf(room_.send)});
  }

  bool identity() const { return object_->codec->info().identity; }
  /// Of each page, whether it is never encoded.
  std::vector<uint8_t> Forms(const BlockPart& part) const {
    std::vector<uint8_t> raw;
    raw.reserve(size_t{part.count} * object_->paged.layers);
    for (uint32_t block = 0; block < part.count; ++block) {
      for (uint32_t layer = 0; layer < object_->paged.layers; ++layer) {
        raw.push_back(KeepsRaw(*object_, first_ + part.at + block, layer));
      }
    }
    return raw;
  }
  uint64_t BlockBytes(uint32_t at) const {
    uint64_t bytes = 0;
    for (uint32_t layer = 0; layer < object_->paged.layers; ++layer) {
      bytes += AlignedPage(StoredBytes(*object_, KeepsRaw(*object_, first_ + at, layer), layer));
    }
    return bytes;
  }

  const kvm_store_room room_;  // its arrays are below
  const std::vector<kvm_store_staging> stagings_;
  const std::vector<void*> ranges_;
  const uint32_t first_;
  NamedByHashes named_;  // from the sequence's first block on
  const uint32_t blocks_;
  const std::vector<int64_t> ids_;
  const uint32_t groups_;
  std::optional<Pending<absl::StatusOr<std::vector<PrefixMatch>>>> asked_;
  StreamCount encoded_;
  std::vector<int64_t> given_;  // of one part
  std::optional<Clock::time_point> began_;
  const PageCodecObject* object_ = nullptr;  // of this run
  CacheObject* cache_ = nullptr;
  BlockStore store_;
};

}  // namespace
}  // namespace kvmanager::client::c

using namespace kvmanager;             // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client;     // NOLINT
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_create_store(kvm_object* codec, const kvm_store_room* room, uint32_t first, const kvm_hashes* hashes,
                     const int64_t* ids, uint32_t groups, kvm_object** store, const uint32_t** read) {
  *store = nullptr;
  *read = nullptr;
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_RETURN_IF_ERROR(CheckPaged(object));
    for (const auto& [field, value] :
         {std::pair("room.stagings", room->stagings), std::pair("room.ranges", room->ranges),
          std::pair("room.blocks", room->blocks), std::pair("room.part", room->part),
          std::pair("room.writes", room->writes), std::pair("room.first_blocks", room->first_blocks)}) {
      if (value == 0) return InvalidField(field, 0, "at least 1");
    }
    if (room->tied != 0 && room->ranges != room->stagings) {
      return InvalidField("room.ranges", room->ranges,
                          absl::StrCat(room->stagings, ", as stagings, that are tied to them"));
    }
    if (hashes->count <= first) {
      return InvalidField("hashes.count", hashes->count,
                          absl::StrCat("more than ", first, ", the blocks before the store"));
    }
    KV_RETURN_IF_ERROR(CheckHashes(*hashes));
    auto made = std::make_unique<StoreObject>(object.session, *room, first, *hashes, ids, groups);
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
    *read = reinterpret_cast<const uint32_t*>(&made->read());
    *store = made.release();
    return absl::OkStatus();
  });
}

int kvm_run_store(kvm_object* store, kvm_object* codec, kvm_object* cache, const kvm_store_signals* signals,
                  kvm_stored* stored) {
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(StoreObject * run, Use<StoreObject>(store));
    KV_ASSIGN_OR_RETURN(CacheObject * of, Use<CacheObject>(cache));
    KV_RETURN_IF_ERROR(CheckPaged(object));
    static_assert(sizeof(BlockStoreSignals) == sizeof(kvm_store_signals));
    return run->Run(object, *of, *reinterpret_cast<const BlockStoreSignals*>(signals), stored).status();
  });
}

int kvm_stop_store(kvm_object* store) {
  return Guard([&]() -> absl::Status {
    if (store == nullptr || store->kind != Kind::kStore)
      return InvalidField("store", store == nullptr ? "NULL" : NameOf(store->kind), NameOf(Kind::kStore));
    static_cast<StoreObject*>(store)->Stop();
    return absl::OkStatus();
  });
}

}  // extern "C"
