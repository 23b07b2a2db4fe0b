// Blocks that stay in the daemon's memory, mapped here.
#include <optional>
#include <utility>

#include "client/c/describe.h"
#include "client/c/object.h"
#include "kvmanager/memory/device.h"

namespace kvmanager::client::c {
namespace {

/// For copies by any GPU of this process.
class DevicePinner final : public SlabPinner {
 public:
  explicit DevicePinner(int ordinal) : device_(Device::Open(ordinal)) {}
  absl::Status Pin(const uint8_t* data, size_t bytes) override {
    if (!device_.ok()) return device_.status();
    return (*device_)->PinHostForReading(data, bytes);
  }
  void Unpin(const uint8_t* data) override { (*device_)->UnpinHost(data); }

 private:
  const absl::StatusOr<std::unique_ptr<Device>> device_;
};

/// A release under way, which gives nothing but its status.
struct PendingRelease final : PendingObject {
  PendingRelease(std::shared_ptr<Session> session, Pending<absl::Status> pending)
      : PendingObject(std::move(session)), pending_(std::in_place, std::move(pending)) {}
  void Drop() override { pending_.reset(); }
  bool Ready() override { return pending_->ready(); }
  absl::StatusOr<Done> Wait() override {
    KV_RETURN_IF_ERROR(pending_->Wait());
    return Done{};
  }

 private:
  std::optional<Pending<absl::Status>> pending_;
};

}  // namespace

std::shared_ptr<SlabPinner> PinnerFor(Session& session, int32_t device) {
  if (device < 0) return nullptr;
  if (session.pinner == nullptr) session.pinner = std::make_shared<DevicePinner>(device);
  return session.pinner;
}

}  // namespace kvmanager::client::c

using namespace kvmanager::client;     // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_bind_slabs(kvm_object* cache, uint64_t bytes, int32_t device, uint64_t* mapped_bytes) {
  *mapped_bytes = 0;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(CacheObject * object, Use<CacheObject>(cache));
    KV_ASSIGN_OR_RETURN(*mapped_bytes, object->handle->BindSlabs(bytes, PinnerFor(*object->session, device)));
    return absl::OkStatus();
  });
}

int kvm_map_blocks_async(kvm_object* cache, uint32_t first, const uint8_t* names, uint32_t blocks,
                         const kvm_tensor* pages, int32_t device, kvm_object** pending) {
  *pending = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(CacheObject * object, Use<CacheObject>(cache));
    const std::shared_ptr<Session>& session = object->session;
    const BlockRange range{first,
                           {reinterpret_cast<const kvmanager::BlockName*>(names), blocks},
                           pages == nullptr || pages->data == nullptr ? TensorView{} : ViewOf(*session, *pages)};
    auto under_way = object->handle->MapBlocksAsync(range, PinnerFor(*session, device));
    *pending = NewPending(*object, std::move(under_way),
                          [session, view = range.pages, seen = pages == nullptr ? nullptr : pages->data](
                              const Session&, MappedBlocks mapped) -> absl::StatusOr<Done> {
                            // The caller has a mapping of the arena that is its own.
                            const auto from = reinterpret_cast<uintptr_t>(view.data),
                                       to = reinterpret_cast<uintptr_t>(seen);
                            if (view.data != nullptr) {
                              for (uint64_t& page : mapped.pages)
                                page = page - from < view.bytes ? page - from + to : page;
                            }
                            Done done{{mapped.blocks, uint64_t(mapped.reason), mapped.bytes}, nullptr, ""};
                            if (!mapped.pinned.ok())
                              done.text = Text({{"unpinned", std::string(mapped.pinned.message())}});
                            done.made = new MappedBlocksObject(session, std::move(mapped));
                            return done;
                          });
    return absl::OkStatus();
  });
}

int kvm_mapped_pages(kvm_object* mapped, const uint64_t** addresses, const uint64_t** checksums, const uint8_t** raw,
                     uint64_t* count) {
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(MappedBlocksObject * object, Use<MappedBlocksObject>(mapped));
    const MappedBlocks& blocks = object->blocks;
    *addresses = blocks.pages.data();
    *checksums = blocks.checksums.data();
    *raw = reinterpret_cast<const uint8_t*>(blocks.raw.data());
    *count = blocks.pages.size();
    return absl::OkStatus();
  });
}

int kvm_release_blocks_async(kvm_object* mapped, uint32_t corrupt_block, kvm_object** pending) {
  *pending = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(MappedBlocksObject * object, Use<MappedBlocksObject>(mapped));
    BlocksLease* const lease = object->blocks.lease.get();
    const auto corrupt = corrupt_block == UINT32_MAX ? std::nullopt : std::optional<uint32_t>(corrupt_block);
    *pending = new PendingRelease(
        object->session, lease == nullptr ? Ready<absl::Status>(absl::OkStatus()) : lease->ReleaseAsync(corrupt));
    return absl::OkStatus();
  });
}

}  // extern "C"
