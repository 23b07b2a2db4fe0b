#include "client/host_slabs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmanager::client {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kHugePageBytes = 2 << 20;  // to which memory of huge pages must be aligned

absl::Status CheckMemory(int fd, uint64_t bytes) {
  struct stat stat {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (bytes == 0 || bytes > HostSlabs::kSlabBytesMax || bytes % kPageBytes != 0 || ::fstat(fd, &stat) != 0 ||
      static_cast<uint64_t>(stat.st_size) < bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::InternalError(absl::StrCat("the daemon's slab of ", bytes, " bytes is no sealed memory of that size"));
  }
  return absl::OkStatus();
}

}  // namespace

HostSlabs::~HostSlabs() {
  if (forks_ != ForkCount()) {
    new std::shared_ptr<SlabPinner>(std::move(pinner_));  // the parent's
    return;
  }
  for (const auto& [number, slab] : slabs_) Unmap(slab);
}

void HostSlabs::Unmap(const Slab& slab) {
  if (slab.pinned) pinner_->Unpin(slab.data);
  ::munmap(slab.reserved, slab.reserved_bytes);
}

HostSlabs::Hold::Hold(std::shared_ptr<HostSlabs> of, std::vector<uint32_t> slabs)
    : of_(std::move(of)), slabs_(std::move(slabs)) {
  for (const uint32_t slab : slabs_) ++of_->holds_[slab];
}

HostSlabs::Hold::~Hold() {
  for (const uint32_t slab : slabs_) {
    const auto held = of_->holds_.find(slab);
    if (--held->second == 0) of_->holds_.erase(held);
  }
}

void HostSlabs::Unmap(uint32_t slab) {
  const auto found = slabs_.find(slab);
  if (found == slabs_.end() || holds_.contains(slab)) return;
  Unmap(found->second);
  slabs_.erase(found);
}

absl::Span<const uint8_t> HostSlabs::Find(uint32_t slab) const {
  const auto found = slabs_.find(slab);
  if (found == slabs_.end()) return {};
  return {found->second.data, found->second.bytes};
}

absl::Status HostSlabs::Map(uint32_t slab, int fd, uint64_t bytes) {
  if (slabs_.contains(slab)) return absl::OkStatus();
  if (slabs_.size() >= kSlabsMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("this client maps ", kSlabsMax, " slabs, the most that it does; read blocks without mapping"));
  }
  if (absl::Status good = CheckMemory(fd, bytes); !good.ok()) return good;
  Slab made{.bytes = bytes, .reserved_bytes = 2 * bytes + kHugePageBytes};
  made.reserved = ::mmap(nullptr, made.reserved_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made.reserved == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("mapping a slab of ", bytes, " bytes: ", std::strerror(errno)));
  }
  const uint64_t past = reinterpret_cast<uintptr_t>(made.reserved) % kHugePageBytes;
  uint8_t* const data = static_cast<uint8_t*>(made.reserved) + (past == 0 ? 0 : kHugePageBytes - past);
  if (::mmap(data, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    ::munmap(made.reserved, made.reserved_bytes);
    return absl::ResourceExhaustedError(absl::StrCat("mapping a slab of ", bytes, " bytes: ", std::strerror(error)));
  }
  ::madvise(made.reserved, made.reserved_bytes, MADV_DONTFORK);
  made.data = data;
  Pin(slabs_.emplace(slab, made).first->second);
  return absl::OkStatus();
}

void HostSlabs::PinWith(std::shared_ptr<SlabPinner> pinner) {
  if (pinner == nullptr || pinner_ != nullptr) return;
  pinner_ = std::move(pinner);
  may_pin_ = true;
  for (auto& [number, slab] : slabs_) Pin(slab);
}

void HostSlabs::Pin(Slab& slab) {
  if (!may_pin_) return;
  pin_error_ = pinner_->Pin(slab.data, slab.bytes);
  slab.pinned = may_pin_ = pin_error_.ok();
}

absl::Status HostSlabs::TakePinError() { return std::exchange(pin_error_, absl::OkStatus()); }

}  // namespace kvmanager::client
