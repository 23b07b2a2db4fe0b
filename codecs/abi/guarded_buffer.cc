#include "codecs/abi/guarded_buffer.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr uint8_t kCanary = 0xa5;

// What the handler reads, wherever the fault was: without a lock.
struct Live {
  std::atomic<const char*> name;  // nullptr: free; kClaimed: not filled in yet
  const uint8_t *map, *map_end, *data, *data_end;
};
constexpr char kClaimed[] = "";
Live live[GuardedBuffer::kLiveMax];
int report_fd = -1;

void OnFault(int number, siginfo_t* info, void* context) {
  const auto* at = static_cast<const uint8_t*>(info->si_addr);
  const char* verb = "touched";
#if defined(__x86_64__)
  verb = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0 ? "wrote" : "read";
#endif
  char text[256];
  int bytes = std::snprintf(text, sizeof text, "Fit crashed with signal %d, at address %p", number, info->si_addr);
  for (const Live& buffer : live) {
    const char* const name = buffer.name.load();
    if (name == nullptr || name == kClaimed || at < buffer.map || at >= buffer.map_end) continue;
    if (at >= buffer.data_end) {
      bytes = std::snprintf(text, sizeof text, "Fit %s byte %zd past the end of the %s, which has %zu bytes", verb,
                            at - buffer.data_end + 1, name, size_t(buffer.data_end - buffer.data));
    } else if (at < buffer.data) {
      bytes =
          std::snprintf(text, sizeof text, "Fit %s %zd bytes before the start of the %s", verb, buffer.data - at, name);
    } else {
      bytes = std::snprintf(text, sizeof text, "Fit wrote to byte %zd of the %s, which is read-only", at - buffer.data,
                            name);
    }
    break;
  }
  const ssize_t written = write(report_fd, text, std::min<size_t>(bytes, sizeof text - 1));
  _exit(written > 0 ? 0 : 1);
}

}  // namespace

GuardedBuffer::GuardedBuffer(const char* name, size_t bytes, Place place, size_t alignment)
    : name_(name), bytes_(bytes) {
  const size_t room = (bytes + alignment - 1) / alignment * alignment;
  const size_t inner = std::max<size_t>((room + kPageBytes - 1) / kPageBytes, 1) * kPageBytes;
  map_bytes_ = inner + 2 * kPageBytes;
  void* const map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  KV_CHECK(map != MAP_FAILED);
  map_ = static_cast<uint8_t*>(map);
  KV_CHECK(mprotect(map_ + kPageBytes, inner, PROT_READ | PROT_WRITE) == 0);
  std::memset(map_ + kPageBytes, kCanary, inner);
  data_ = place == Place::kAgainstStart ? map_ + kPageBytes : map_ + kPageBytes + inner - room;
  std::memset(data_, 0, bytes_);
  for (slot_ = 0; slot_ < kLiveMax; ++slot_) {
    const char* free = nullptr;
    if (live[slot_].name.compare_exchange_strong(free, kClaimed)) break;
  }
  KV_CHECK(slot_ < kLiveMax);
  Live& mine = live[slot_];
  mine.map = map_, mine.map_end = map_ + map_bytes_, mine.data = data_, mine.data_end = data_ + bytes_;
  mine.name = name_;
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& from) noexcept
    : name_(from.name_),
      map_(std::exchange(from.map_, nullptr)),
      map_bytes_(from.map_bytes_),
      data_(from.data_),
      bytes_(from.bytes_),
      slot_(from.slot_) {}

GuardedBuffer::~GuardedBuffer() {
  if (map_ == nullptr) return;
  live[slot_].name = nullptr;
  munmap(map_, map_bytes_);
}

void GuardedBuffer::Fill(uint8_t value) { std::memset(data_, value, bytes_); }

void GuardedBuffer::SetReadOnly(bool read_only) {
  KV_CHECK(mprotect(map_ + kPageBytes, map_bytes_ - 2 * kPageBytes, read_only ? PROT_READ : PROT_READ | PROT_WRITE) ==
           0);
}

std::string GuardedBuffer::Damage() const {
  for (const uint8_t* p = map_ + kPageBytes; p < map_ + map_bytes_ - kPageBytes; ++p) {
    if (p == data_) p += bytes_;
    if (p >= map_ + map_bytes_ - kPageBytes) break;
    if (*p == kCanary) continue;
    return p < data_ ? absl::StrCat("it wrote ", data_ - p, " bytes before the start of the ", name_)
                     : absl::StrCat("it wrote byte ", p - data_ - bytes_ + 1, " past the end of the ", name_,
                                    ", which has ", bytes_, " bytes");
  }
  return "";
}

void InstallFaultHandler(int fd) {
  report_fd = fd;
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace kvmanager
