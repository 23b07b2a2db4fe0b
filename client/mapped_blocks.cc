#include "client/mapped_blocks.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/host_slabs.h"

namespace kvmanager::client {
namespace {

// api/kvmanager.capnp, BlocksReply.places.
struct Place {
  uint64_t slab;
  uint64_t offset;
};
static_assert(sizeof(Place) == 16);
constexpr uint64_t kInRange = UINT64_MAX;
constexpr uint64_t kOffsetMultiple = 64;
constexpr size_t kSlabsAtOnce = 16;                      // descriptors that are open here and there
constexpr uint64_t kBindStepBytes = uint64_t{32} << 30;  // mapped and pinned within what a slab is bound for unmapped

class BlocksLeaseImpl final : public BlocksLease {
 public:
  BlocksLeaseImpl(std::shared_ptr<Connection> connection, api::BlocksLease::Client cap,
                  std::unique_ptr<HostSlabs::Hold> slabs)
      : handle_(std::move(connection), std::move(cap)), slabs_(std::move(slabs)) {}

  Pending<absl::Status> ReleaseAsync(std::optional<uint32_t> corrupt_block) override {
    if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<absl::Status>(usable);
    auto request = handle_.cap().releaseRequest();
    if (corrupt_block.has_value()) request.setCorruptBlock(*corrupt_block);
    return handle_.connection().CallLater<absl::Status>(
        std::move(request), [](auto& response) { return FromWire(response.getStatus()); },
        handle_.connection().options().deadline_ms);
  }

 private:
  Handle<api::BlocksLease::Client> handle_;
  // Shared with the connection, which has others once it reconnects; let go of before the handle's connection is.
  const std::unique_ptr<HostSlabs::Hold> slabs_;
};

/// A reply whose slabs may still have to be mapped.
struct Reply {
  MappedBlocks blocks;
  std::vector<Place> places;  // [blocks][layers]
  std::optional<api::BlocksLease::Client> lease;
  std::unique_ptr<HostSlabs::Hold> hold;  // of the places' slabs
};

absl::StatusOr<Reply> Read(api::BlocksReply::Reader reply, const AskedBlocks& asked) {
  KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
  const uint64_t pages = reply.getBlocks() * asked.layers;
  const auto places = reply.getPlaces(), checksums = reply.getChecksums();
  if (reply.getBlocks() > asked.names || reply.getRaw().size() != pages || places.size() != pages * sizeof(Place) ||
      checksums.size() != pages * sizeof(uint64_t) || reply.getBytes() > asked.range.bytes) {
    return absl::InternalError(absl::StrCat("the daemon read ", reply.getBlocks(), " of ", asked.names, " blocks, ",
                                            reply.getRaw().size(), " forms, ", places.size(), " bytes of places, ",
                                            checksums.size(), " of checksums and ", reply.getBytes(), " of pages"));
  }
  Reply read;
  read.blocks.blocks = reply.getBlocks();
  read.blocks.reason = FromWire(reply.getReason());
  read.blocks.bytes = reply.getBytes();
  read.blocks.raw = ToString(reply.getRaw());
  read.blocks.checksums.resize(pages);
  read.places.resize(pages);
  if (pages > 0) {
    std::memcpy(read.blocks.checksums.data(), checksums.begin(), checksums.size());
    std::memcpy(read.places.data(), places.begin(), places.size());
  }
  if (reply.hasLease()) read.lease = reply.getLease();
  for (const Place& place : read.places) {
    if (place.slab == kInRange) continue;
    if (place.slab > UINT32_MAX) {
      return absl::InternalError(absl::StrCat("the daemon sent slab ", place.slab, ", expected 32 bits"));
    }
    if (!read.lease.has_value()) return absl::InternalError("the daemon sent a page in a slab without a lease");
  }
  return read;
}

/// Slabs of the reply, each once.
std::vector<uint32_t> SlabsOf(const Reply& reply) {
  std::vector<uint32_t> slabs;
  uint64_t last = kInRange;
  for (const Place& place : reply.places) {
    if (std::exchange(last, place.slab) == place.slab || place.slab == kInRange) continue;
    slabs.push_back(static_cast<uint32_t>(place.slab));
  }
  std::sort(slabs.begin(), slabs.end());
  slabs.erase(std::unique(slabs.begin(), slabs.end()), slabs.end());
  return slabs;
}

/// Of BlocksLease.mapSlab or Cache.mapSlab.
template <typename Response>
kj::Promise<absl::Status> MapAnswered(Response& response, std::shared_ptr<HostSlabs> slabs, uint32_t slab) {
  if (absl::Status status = FromWire(response.getStatus()); !status.ok()) return status;
  api::Slab::Client cap = response.getSlab();
  const uint64_t bytes = response.getBytes();
  auto descriptor = cap.getFd();
  // The capability keeps the descriptor open until it is mapped.
  return descriptor.then(
      [slabs = std::move(slabs), slab, bytes, cap = std::move(cap)](kj::Maybe<int> fd) -> absl::Status {
        KJ_IF_MAYBE (value, fd) {
          return slabs->Map(slab, *value, bytes);
        }
        return absl::InternalError(absl::StrCat("the daemon sent no descriptor of slab ", slab));
      });
}

kj::Promise<absl::Status> MapSlab(api::BlocksLease::Client& lease, std::shared_ptr<HostSlabs> slabs, uint32_t slab) {
  auto request = lease.mapSlabRequest();
  request.setSlab(slab);
  return request.send().then(
      [slabs = std::move(slabs), slab](auto&& response) { return MapAnswered(response, slabs, slab); });
}

/// Of so many at once: each takes a turn of the daemon, whose other clients wait meanwhile.
kj::Promise<absl::Status> MapSlabs(api::BlocksLease::Client lease, std::shared_ptr<HostSlabs> slabs,
                                   std::vector<uint32_t> missing) {
  if (missing.empty()) return absl::OkStatus();
  const size_t now = std::min(kSlabsAtOnce, missing.size());
  auto mapping = kj::heapArrayBuilder<kj::Promise<absl::Status>>(now);
  for (size_t i = missing.size() - now; i < missing.size(); ++i) mapping.add(MapSlab(lease, slabs, missing[i]));
  missing.resize(missing.size() - now);
  return kj::joinPromises(mapping.finish())
      .then([lease = kj::mv(lease), slabs = std::move(slabs),
             missing = std::move(missing)](kj::Array<absl::Status> mapped) mutable -> kj::Promise<absl::Status> {
        for (const absl::Status& status : mapped) {
          if (!status.ok()) return status;
        }
        return MapSlabs(kj::mv(lease), std::move(slabs), std::move(missing));
      });
}

/// Of slabs that are bound, those that are not mapped are, some at once. Returns how many bytes are.
absl::StatusOr<uint64_t> MapBound(Connection& connection, api::Cache::Client& cache, absl::Span<const uint32_t> bound) {
  const std::shared_ptr<HostSlabs>& slabs = connection.slabs();
  for (size_t begin = 0; begin < bound.size(); begin += kSlabsAtOnce) {
    std::vector<Pending<absl::Status>> mapping;
    for (const uint32_t slab : bound.subspan(begin, kSlabsAtOnce)) {
      if (!slabs->Find(slab).empty()) continue;
      auto request = cache.mapSlabRequest();
      request.setSlab(slab);
      mapping.push_back(connection.CallOn<absl::Status>(
          std::move(request), [slabs, slab](auto& response) { return MapAnswered(response, slabs, slab); },
          connection.options().deadline_ms));
    }
    for (auto& each : mapping) {
      const absl::Status mapped = each.Wait();
      // It may have been taken back meanwhile.
      if (!mapped.ok() && !absl::IsFailedPrecondition(mapped)) return mapped;
      KV_RETURN_IF_ERROR(connection.Usable());
    }
    KV_RETURN_IF_ERROR(slabs->TakePinError());
  }
  uint64_t bytes = 0;
  for (const uint32_t slab : bound) bytes += slabs->Find(slab).size();
  return bytes;
}

/// REQUIRES: the reply's slabs are mapped.
absl::StatusOr<MappedBlocks> Finish(std::shared_ptr<Connection> connection, const std::shared_ptr<HostSlabs>& slabs,
                                    const AskedBlocks& asked, Reply reply) {
  MappedBlocks& blocks = reply.blocks;
  const absl::Span<const uint8_t> range(static_cast<const uint8_t*>(asked.range.data), blocks.bytes);
  blocks.pages.resize(reply.places.size());
  absl::Span<const uint8_t> memory;
  uint64_t last = 0;
  for (size_t i = 0; i < reply.places.size(); ++i) {
    const Place& place = reply.places[i];
    if (i == 0 || std::exchange(last, place.slab) != place.slab) {
      memory = place.slab == kInRange ? range : slabs->Find(static_cast<uint32_t>(place.slab));
      last = place.slab;
    }
    // How much an encoded page takes is not known here. It may reach into what is behind a slab (host_slabs.h), which
    // is as large as the slab, and that is no smaller than a page.
    const uint64_t least = blocks.raw[i] != 0 ? asked.raw_page_bytes : 1;
    const bool small = place.slab != kInRange && memory.size() < asked.raw_page_bytes;
    if (place.offset % kOffsetMultiple != 0 || least > memory.size() || place.offset > memory.size() - least || small) {
      return absl::InternalError(absl::StrCat("the daemon sent page ", i, " at ", place.offset, " of ", memory.size(),
                                              " bytes, expected a multiple of ", kOffsetMultiple, " inside of them"));
    }
    blocks.pages[i] = reinterpret_cast<uintptr_t>(memory.data()) + place.offset;
  }
  if (reply.lease.has_value()) {
    blocks.lease =
        std::make_unique<BlocksLeaseImpl>(std::move(connection), *std::move(reply.lease), std::move(reply.hold));
  }
  blocks.pinned = slabs->TakePinError();
  return std::move(blocks);
}

}  // namespace

Pending<absl::StatusOr<MappedBlocks>> MapBlocks(
    const std::shared_ptr<Connection>& connection,
    capnp::Request<api::Cache::ReadBlocksParams, api::Cache::ReadBlocksResults> request, const AskedBlocks& asked) {
  using Result = absl::StatusOr<MappedBlocks>;
  // The call's state holds the connection for as long as the promise lives: here it is not kept a second time.
  return connection->CallOn<Result>(
      std::move(request),
      [connection = connection.get(), slabs = connection->slabs(),
       asked](auto& response) mutable -> kj::Promise<Result> {
        absl::StatusOr<Reply> read = Read(response.getReply(), asked);
        if (!read.ok()) return Result(read.status());
        std::vector<uint32_t> missing = SlabsOf(*read);
        read->hold = std::make_unique<HostSlabs::Hold>(slabs, missing);
        // Nothing lies there: who holds it reads what it has no lease on any more. The daemon asks again.
        for (const uint32_t slab : response.getReply().getUnmap()) slabs->Unmap(slab);
        std::erase_if(missing, [&](uint32_t slab) { return !slabs->Find(slab).empty(); });
        if (missing.empty()) return Finish(connection->shared_from_this(), slabs, asked, *std::move(read));
        auto mapping = MapSlabs(*read->lease, slabs, std::move(missing));
        return mapping.then(
            [connection, slabs, asked, reply = *std::move(read)](absl::Status mapped) mutable -> Result {
              KV_RETURN_IF_ERROR(mapped);
              return Finish(connection->shared_from_this(), slabs, asked, std::move(reply));
            });
      },
      connection->options().deadline_ms);
}

absl::StatusOr<uint64_t> BindSlabs(Connection& connection, api::Cache::Client& cache, uint64_t bytes) {
  using Bound = absl::StatusOr<std::vector<uint32_t>>;
  uint64_t mapped = 0;
  size_t count = 0;
  for (uint64_t asked = 0; asked < bytes;) {
    asked = std::max(asked, mapped);
    asked = bytes - std::min(asked, bytes) > kBindStepBytes ? asked + kBindStepBytes : bytes;
    KV_RETURN_IF_ERROR(connection.Usable());
    auto request = cache.bindSlabsRequest();
    request.setBytes(asked);
    auto pending = connection.CallLater<Bound>(
        std::move(request),
        [](auto& response) -> Bound {
          KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
          std::vector<uint32_t> slabs;
          for (const uint32_t slab : response.getSlabs()) slabs.push_back(slab);
          return slabs;
        },
        connection.options().deadline_ms);
    KV_ASSIGN_OR_RETURN(const std::vector<uint32_t> bound, pending.Wait());
    KV_ASSIGN_OR_RETURN(mapped, MapBound(connection, cache, bound));
    if (bound.size() <= count) break;  // it gives no more
    count = bound.size();
  }
  return mapped;
}

}  // namespace kvmanager::client
