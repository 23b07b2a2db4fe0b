// A whole load of an engine's blocks, by one call: what client/block_load.h decides is done by the engine's GPU.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "client/block_load.h"
#include "client/c/block_hashes.h"
#include "client/c/describe.h"
#include "client/c/object.h"
#include "client/c/paged_blocks.h"

namespace kvmanager::client::c {
namespace {

class Bringing final : public BlockLoadWork {
 public:
  Bringing(const PageCodecObject& object, CacheObject& cache, const kvm_bring_room& room, uint32_t first,
           const kvm_hashes& hashes, const int64_t* ids, uint32_t groups)
      : object_(object),
        cache_(cache),
        room_(room),
        first_(first),
        named_(hashes),
        ids_(ids),
        groups_(groups),
        copied_(room.copied) {}

  Pending<absl::StatusOr<MappedBlocks>> Map(uint32_t at, uint32_t count) override {
    const BlockRange range{first_ + at, named_.Names(cache_.handle->description().digest, at, count), TensorView{}};
    return cache_.handle->MapBlocksAsync(range, PinnerFor(*cache_.session, object_.device->info().ordinal));
  }
  absl::Status Copy(const MappedBlocks& mapped, uint32_t at, uint32_t place) override {
    if (!mapped.pinned.ok()) unpinned_ = mapped.pinned;
    const PagedLoad load{.raw = {room_.raw[0], room_.raw[1]},
                         .stored = {room_.stored[0], room_.stored[1]},
                         .blocks = room_.blocks,
                         .extents = extents_,
                         .ids = TakeIds(ids_, groups_, named_.count(), at, mapped.blocks, &given_),
                         .groups = groups_,
                         .list = room_.lists + place * room_.list_bytes,
                         .list_device = room_.lists_device + place * room_.list_bytes,
                         .sums = Sums(place),
                         .fetch = StreamOf(room_.fetch),
                         .load = StreamOf(room_.load)};
    KV_ASSIGN_OR_RETURN(const uint64_t bytes, EnqueueLoad(object_, mapped, load));
    bytes_ += bytes;
    extents_ += (mapped.blocks + room_.blocks - 1) / room_.blocks;
    return copied_.Add(*object_.device, load.load);
  }
  absl::StatusOr<bool> Copied() override { return copied_.Pass(*object_.device, StreamOf(room_.load)); }
  std::optional<uint32_t> Corrupt(const MappedBlocks& mapped, uint32_t place) const override {
    const auto made = absl::MakeConstSpan(Sums(place), mapped.checksums.size());
    const auto differ = std::mismatch(made.begin(), made.end(), mapped.checksums.begin()).first - made.begin();
    if (static_cast<size_t>(differ) == made.size()) return std::nullopt;
    return static_cast<uint32_t>(differ / object_.paged.layers);
  }
  void Rest() override { RestOnStream(); }
  void Drain() override { DrainStreams(*object_.device, {StreamOf(room_.fetch), StreamOf(room_.load)}); }

  uint64_t bytes() const { return bytes_; }
  const absl::Status& unpinned() const { return unpinned_; }

 private:
  uint64_t* Sums(uint32_t place) const { return reinterpret_cast<uint64_t*>(room_.sums + place * room_.sums_bytes); }

  const PageCodecObject& object_;
  CacheObject& cache_;
  const kvm_bring_room& room_;
  const uint32_t first_;
  NamedByHashes named_;
  const int64_t* const ids_;
  const uint32_t groups_;
  StreamCount copied_;
  std::vector<int64_t> given_;  // of one call
  uint32_t extents_ = 0;
  uint64_t bytes_ = 0;
  absl::Status unpinned_;
};

}  // namespace
}  // namespace kvmanager::client::c

using namespace kvmanager;             // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client;     // NOLINT
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_bring_blocks(kvm_object* codec, kvm_object* cache, const kvm_bring_room* room, uint32_t first,
                     const kvm_hashes* hashes, const int64_t* ids, uint32_t groups, kvm_brought* brought) {
  *brought = {};
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(CacheObject * of, Use<CacheObject>(cache));
    KV_RETURN_IF_ERROR(CheckPaged(object));
    for (const auto& [field, value] :
         {std::pair("room.blocks", room->blocks), std::pair("room.calls", room->calls),
          std::pair("room.call_blocks", room->call_blocks), std::pair("room.first_blocks", room->first_blocks)}) {
      if (value == 0) return InvalidField(field, 0, "at least 1");
    }
    KV_RETURN_IF_ERROR(CheckHashes(*hashes));
    Bringing work(object, *of, *room, first, *hashes, ids, groups);
    BlockLoad load({.count = hashes->count,
                    .calls = room->calls,
                    .first_blocks = room->first_blocks,
                    .call_blocks = room->call_blocks},
                   &work);
    KV_RETURN_IF_ERROR(load.Run());
    *brought = {load.blocks(), static_cast<uint32_t>(load.reason()), work.bytes()};
    Leave(work.unpinned().ok() ? "" : Text({{"unpinned", std::string(work.unpinned().message())}}));
    return absl::OkStatus();
  });
}

}  // extern "C"
