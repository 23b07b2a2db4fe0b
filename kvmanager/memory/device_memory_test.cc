// Device memory on the GPU: slabs, the pool, two processes that map the same slabs, the release counter.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_pool.h"
#include "kvmanager/memory/device_region.h"
#include "kvmanager/memory/device_testing.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_copy.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/memory/release_epochs.h"

extern char** environ;

namespace kvmanager {
namespace {

constexpr uint64_t kSlabBytes = DeviceRegion::kSlabBytesMin;
constexpr char kSocketVariable[] = "KVMANAGER_TEST_IMPORTER_SOCKET";

/// How many of `bytes` at `data` differ from `value`; -1 on an error.
int64_t CountOthers(const uint8_t* data, uint64_t bytes, uint8_t value) {
  std::vector<uint8_t> copy(bytes);
  if (cudaMemcpy(copy.data(), data, bytes, cudaMemcpyDeviceToHost) != cudaSuccess) return -1;
  int64_t others = 0;
  for (const uint8_t b : copy) others += b != value;
  return others;
}

cudaError_t Fill(uint8_t* data, uint64_t bytes, uint8_t value) {
  cudaError_t error = cudaMemset(data, value, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return error;
}

// The importer's side: a second process, started by exec, does what messages say and answers each with a number.

enum class Ask : uint32_t {
  kImport,
  kImportReadOnly,
  kCount,
  kFill,
  kFetch,         // a kernel writes
  kFetchForever,  // answers first; kernels of a second or more, until the process is killed
  kMapCounter,
  kRelease,
  kEnd,
};

struct Message {
  Ask ask = Ask::kEnd;
  uint32_t slab = 0;
  uint64_t offset = 0;  // from the region's first byte
  uint64_t bytes = 0;
  uint64_t value = 0;
};

void Send(int socket, const Message& message, int fd) {
  iovec data{const_cast<Message*>(&message), sizeof(message)};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &fd, sizeof(int));
  }
  ASSERT_EQ(sendmsg(socket, &header, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(message)));
}

bool Receive(int socket, Message* message, int* fd) {
  iovec data{message, sizeof(*message)};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  if (recvmsg(socket, &header, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof(*message))) return false;
  *fd = -1;
  if (const cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr) std::memcpy(fd, CMSG_DATA(part), sizeof(int));
  return true;
}

TEST(Importer, DoesWhatItIsAsked) {
  const char* const socket_text = std::getenv(kSocketVariable);
  if (socket_text == nullptr) GTEST_SKIP() << "the second process of other tests";
  const int socket = std::atoi(socket_text);
  auto device = Device::Open(0);
  ASSERT_TRUE(device.ok()) << device.status();
  auto region = DeviceRegion::Reserve(device->get(), kSlabBytes, 2);
  ASSERT_TRUE(region.ok()) << region.status();
  std::unique_ptr<Region> counter;
  Message message;
  int fd;
  while (Receive(socket, &message, &fd) && message.ask != Ask::kEnd) {
    int64_t answer = 0;
    uint8_t* const data = (*region)->data() + message.offset;
    switch (message.ask) {
      case Ask::kImport:
      case Ask::kImportReadOnly: {
        const absl::Status imported = (*region)->Import(message.slab, fd, message.ask == Ask::kImport);
        if (!imported.ok()) ADD_FAILURE() << imported;
        answer = static_cast<int64_t>(imported.code());
        break;
      }
      case Ask::kCount:
        answer = CountOthers(data, message.bytes, static_cast<uint8_t>(message.value));
        break;
      case Ask::kFill:
        answer = Fill(data, message.bytes, static_cast<uint8_t>(message.value));
        break;
      case Ask::kFetch:
      case Ask::kFetchForever: {
        Region::Options options;
        options.bytes = message.bytes;
        auto source = Region::Create(options);
        ASSERT_TRUE(source.ok()) << source.status();
        std::memset((*source)->data(), static_cast<int>(message.value), (*source)->bytes());
        ASSERT_TRUE((*device)->PinHost((*source)->data(), (*source)->bytes()).ok());
        const PageCopy copy{data, (*source)->data(), static_cast<uint32_t>(message.bytes)};
        const std::vector<PageCopy> copies(message.ask == Ask::kFetch ? 1 : 2000, copy);
        if (message.ask == Ask::kFetchForever) {
          ASSERT_EQ(send(socket, &answer, sizeof(answer), MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(answer)));
        }
        do {
          ASSERT_TRUE(EnqueuePageCopies(PageDirection::kFetch, copies, (*device)->encode_stream(),
                                        PageCopyMethod::kKernel, /*blocks=*/1)
                          .ok());
          answer = cudaStreamSynchronize((*device)->encode_stream());
        } while (message.ask == Ask::kFetchForever && answer == 0);
        (*device)->UnpinHost((*source)->data());
        break;
      }
      case Ask::kMapCounter: {
        auto mapped = Region::Map(fd, message.bytes, /*writable=*/true);
        ASSERT_TRUE(mapped.ok()) << mapped.status();
        counter = *std::move(mapped);
        answer = static_cast<int64_t>((*device)->PinHost(counter->data(), counter->bytes()).code());
        break;
      }
      case Ask::kRelease:
        answer = static_cast<int64_t>(
            (*device)->EnqueueRelease((*device)->attention_stream(), counter->data(), message.value).code());
        if (answer == 0) answer = cudaStreamSynchronize((*device)->attention_stream());
        break;
      case Ask::kEnd:
        break;
    }
    ASSERT_EQ(send(socket, &answer, sizeof(answer), MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(answer)));
  }
}

/// The second process, as the first sees it.
class ImporterProcess {
 public:
  ImporterProcess() {
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    socket_ = pair[0];
    const int inherited = dup(pair[1]);  // survives exec
    close(pair[1]);
    const std::string variable = std::string(kSocketVariable) + "=" + std::to_string(inherited);
    std::vector<char*> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      // Not those by which a test runner would count this process as a run of its own.
      if (std::strncmp(*entry, "TEST_", 5) != 0 && std::strncmp(*entry, "XML_OUTPUT", 10) != 0 &&
          std::strncmp(*entry, "GTEST_", 6) != 0) {
        environment.push_back(*entry);
      }
    }
    environment.push_back(const_cast<char*>(variable.c_str()));
    environment.push_back(nullptr);
    char name[] = "importer", filter[] = "--gtest_filter=Importer.*";
    char* arguments[] = {name, filter, nullptr};
    EXPECT_EQ(posix_spawn(&pid_, "/proc/self/exe", nullptr, nullptr, arguments, environment.data()), 0);
    close(inherited);
  }
  ~ImporterProcess() { End(); }

  /// The exit status; ends it if it still runs.
  int End() {
    if (pid_ == 0) return status_;
    Message end;
    iovec data{&end, sizeof(end)};
    msghdr header = {};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    sendmsg(socket_, &header, MSG_NOSIGNAL);
    close(socket_);
    waitpid(pid_, &status_, 0);
    pid_ = 0;
    return status_;
  }

  /// Ends it by SIGKILL; returns once the process is gone.
  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status_, 0);
    close(socket_);
    pid_ = 0;
  }

  int64_t Tell(const Message& message, int fd = -1) {
    Send(socket_, message, fd);
    if (fd >= 0) close(fd);
    int64_t answer = INT64_MIN;
    if (recv(socket_, &answer, sizeof(answer), 0) != static_cast<ssize_t>(sizeof(answer))) {
      ADD_FAILURE() << "the importer is gone";
    }
    return answer;
  }

 private:
  int socket_ = -1;
  pid_t pid_ = 0;
  int status_ = 0;
};

class DeviceMemoryTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    auto device = Device::Open(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }
  std::unique_ptr<DevicePool> MakePool(uint32_t slabs) {
    auto region = DeviceRegion::Reserve(device_.get(), kSlabBytes, slabs);
    EXPECT_TRUE(region.ok()) << region.status();
    auto pool = DevicePool::Create(*std::move(region));
    EXPECT_TRUE(pool.ok()) << pool.status();
    return *std::move(pool);
  }

  std::unique_ptr<Device> device_;
};

TEST_F(DeviceMemoryTest, SaysWhatTheDeviceIs) {
  EXPECT_EQ(device_->info().compute_major, 9);
  EXPECT_GT(device_->info().multiprocessors, 0);
  EXPECT_NE(DeviceSummary().find(device_->info().name), std::string::npos) << DeviceSummary();
  int attention = 0, encode = 0;
  ASSERT_CUDA(cudaStreamGetPriority(device_->attention_stream(), &attention));
  ASSERT_CUDA(cudaStreamGetPriority(device_->encode_stream(), &encode));
  EXPECT_LT(attention, encode);  // lower numbers go first
  EXPECT_EQ(Device::Open(1000).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Device::Open(-1).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DeviceMemoryTest, AForkedChildIsRefused) {
  const pid_t child = fork();
  if (child == 0) {
    const absl::Status opened = Device::Open(0).status();
    const bool refused = opened.code() == absl::StatusCode::kFailedPrecondition &&
                         device_->Use().code() == absl::StatusCode::kFailedPrecondition;
    _exit(refused && std::string(opened.message()).find("forked") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(device_->Use().ok());
}

TEST_F(DeviceMemoryTest, RefusesSizesThatDoNotFit) {
  const auto code = [&](uint64_t slab_bytes, uint32_t slabs) {
    return DeviceRegion::Reserve(device_.get(), slab_bytes, slabs).status().code();
  };
  EXPECT_EQ(code(kSlabBytes - (2 << 20), 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(1 << 20, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DeviceRegion::kGranularityBytes, 1), absl::StatusCode::kOk);  // one slab may be small
  EXPECT_EQ(code(kSlabBytes + 4096, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kSlabBytes, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kSlabBytes, 1025), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kSlabBytes, 1024), absl::StatusCode::kOk);  // addresses alone
}

TEST_F(DeviceMemoryTest, MoreThanTheDeviceHasIsRefusedAndGivenBack) {
  const auto free_before = device_->FreeBytes();
  ASSERT_TRUE(free_before.ok());
  const uint64_t slab_bytes = uint64_t{4} << 30;
  auto region = DeviceRegion::Reserve(device_.get(), slab_bytes, *free_before / slab_bytes + 1);
  ASSERT_TRUE(region.ok()) << region.status();
  const auto pool = DevicePool::Create(*std::move(region));
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(pool.status().message()).find("device-pool-bytes"), std::string::npos);
  EXPECT_GT(*device_->FreeBytes(), *free_before / 4 * 3);  // others may use the GPU meanwhile
}

TEST_F(DeviceMemoryTest, ThePoolIsExhaustedWhereItSaysAndZeroesForTheNextTenant) {
  auto pool = MakePool(2);
  const size_t bytes = 100 << 20;  // 2 to a slab
  EXPECT_TRUE(pool->CanAllocate(1, {{bytes, 4}}));
  EXPECT_FALSE(pool->CanAllocate(1, {{bytes, 5}}));
  std::vector<PageId> ids;
  for (int i = 0; i < 4; ++i) {
    const auto id = pool->Allocate(1, bytes);
    ASSERT_TRUE(id.ok()) << id.status();
    EXPECT_EQ(CountOthers(pool->Data(*id), bytes, 0), 0);  // zeroed when it was made
    ASSERT_CUDA(Fill(pool->Data(*id), bytes, 0x5a));
    EXPECT_EQ(pool->data() + uint64_t{pool->SlotUnit(*id)} * DevicePool::kSlotUnitBytes, pool->Data(*id));
    ids.push_back(*id);
  }
  EXPECT_EQ(pool->Allocate(1, bytes).status().code(), absl::StatusCode::kResourceExhausted);
  for (const PageId id : ids) pool->Free(id);
  const auto next = pool->Allocate(2, kSlabBytes);
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(CountOthers(pool->Data(*next), kSlabBytes, 0), 0);
}

TEST_F(DeviceMemoryTest, AnotherProcessReadsAndWritesAnExportedSlab) {
  auto pool = MakePool(2);
  const auto first = pool->Allocate(1, kSlabBytes);  // so that the slot under test is not at the range's first byte
  const auto id = pool->Allocate(1, 1 << 20);
  ASSERT_TRUE(first.ok() && id.ok());
  ASSERT_CUDA(Fill(pool->Data(*id), 1 << 20, 0x11));
  const uint32_t slab = pool->SlabOf(*id);
  const uint64_t offset = uint64_t{pool->SlotUnit(*id)} * DevicePool::kSlotUnitBytes;
  EXPECT_GE(offset, kSlabBytes);
  auto fd = pool->Export(slab);
  ASSERT_TRUE(fd.ok()) << fd.status();
  ImporterProcess importer;
  ASSERT_EQ(importer.Tell({Ask::kImport, slab}, *fd), 0);
  EXPECT_EQ(importer.Tell({Ask::kCount, slab, offset, 1 << 20, 0x11}), 0);
  EXPECT_EQ(importer.Tell({Ask::kFill, slab, offset, 1 << 19, 0x22}), 0);
  EXPECT_EQ(CountOthers(pool->Data(*id), 1 << 19, 0x22), 0);
  EXPECT_EQ(CountOthers(pool->Data(*id) + (1 << 19), 1 << 19, 0x11), 0);

  // The tenant's last page goes: the slab stays the importer's to map, so it is nobody else's.
  pool->Free(*id);
  EXPECT_FALSE(pool->CanAllocate(2, {{1024, 1}}));
  EXPECT_EQ(pool->kept_bytes(), kSlabBytes);
  // Even if the importer is taken for gone too early, what it maps is the old memory.
  pool->ImporterGone(slab);
  const auto other = pool->Allocate(2, kSlabBytes);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(pool->SlabOf(*other), slab);
  EXPECT_EQ(CountOthers(pool->Data(*other), kSlabBytes, 0), 0);
  EXPECT_EQ(importer.Tell({Ask::kCount, slab, offset, 1 << 19, 0x22}), 0);
  EXPECT_EQ(importer.Tell({Ask::kFill, slab, kSlabBytes, kSlabBytes, 0x33}), 0);
  EXPECT_EQ(CountOthers(pool->Data(*other), kSlabBytes, 0), 0);
  EXPECT_EQ(importer.End(), 0);
}

TEST_F(DeviceMemoryTest, AReadOnlyImportReadsAndCannotWrite) {
  auto pool = MakePool(1);
  const auto id = pool->Allocate(1, 1 << 20);
  ASSERT_TRUE(id.ok());
  ASSERT_CUDA(Fill(pool->Data(*id), 1 << 20, 0x77));
  auto fd = pool->Export(0);
  ASSERT_TRUE(fd.ok()) << fd.status();
  {
    ImporterProcess importer;
    ASSERT_EQ(importer.Tell({Ask::kImportReadOnly, 0}, *fd), 0);
    EXPECT_EQ(importer.Tell({Ask::kCount, 0, 0, 1 << 20, 0x77}), 0);
    EXPECT_NE(importer.Tell({Ask::kFill, 0, 0, 1 << 20, 0x88}), 0);  // refused
    EXPECT_EQ(importer.Tell({Ask::kCount, 0, 0, 1 << 20, 0x77}), 0);
    EXPECT_NE(importer.Tell({Ask::kFetch, 0, 0, 1 << 16, 0x88}), 0);  // a fault: that process has lost its device
  }
  EXPECT_EQ(CountOthers(pool->Data(*id), 1 << 20, 0x77), 0);  // and this process's device goes on
  ASSERT_CUDA(Fill(pool->Data(*id), 1 << 20, 0x99));
}

// What quarantine rests on: once a killed process is gone, so are its kernels. One kernel here writes for over a
// second.
TEST_F(DeviceMemoryTest, AProcessKilledUnderALongKernelWritesNothingOnceItIsGone) {
  auto pool = MakePool(1);
  constexpr uint64_t kPageBytes = 16 << 20;
  const auto id = pool->Allocate(1, kPageBytes);
  ASSERT_TRUE(id.ok());
  auto fd = pool->Export(0);
  ASSERT_TRUE(fd.ok()) << fd.status();
  ImporterProcess importer;
  ASSERT_EQ(importer.Tell({Ask::kImport, 0}, *fd), 0);
  ASSERT_EQ(importer.Tell({Ask::kFetchForever, 0, 0, kPageBytes, 0x44}), 0);
  while (CountOthers(pool->Data(*id), kPageBytes, 0x44) != 0) {
  }
  ASSERT_CUDA(Fill(pool->Data(*id), kPageBytes, 0x55));
  while (CountOthers(pool->Data(*id), kPageBytes, 0x55) == 0) {
  }
  importer.Kill();
  // The slot's next user, of the same tenant, in the same memory.
  pool->Free(*id);
  const auto next = pool->Allocate(1, kPageBytes);
  ASSERT_TRUE(next.ok());
  ASSERT_EQ(pool->SlotUnit(*next), 0u);
  ASSERT_CUDA(Fill(pool->Data(*next), kPageBytes, 0x66));
  for (int i = 0; i < 50; ++i) ASSERT_EQ(CountOthers(pool->Data(*next), kPageBytes, 0x66), 0);
  pool->Free(*next);
  pool->ImporterGone(0);
  EXPECT_EQ(pool->used_bytes(), 0u);
  EXPECT_TRUE(pool->CanAllocate(2, {{kSlabBytes, 1}}));
}

TEST_F(DeviceMemoryTest, CopiesComeFromMemoryThatIsMappedForReading) {
  constexpr size_t kBytes = 4 << 20;
  Region::Options options;
  options.bytes = kBytes;
  options.sharing = Region::Sharing::kReadOnly;
  auto written = Region::Create(options);
  ASSERT_TRUE(written.ok()) << written.status();
  std::memset((*written)->data(), 0x77, kBytes);
  auto mapped = Region::Map(dup((*written)->fd()), kBytes, /*writable=*/false);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_FALSE(device_->PinHost((*mapped)->data(), kBytes).ok());
  cudaGetLastError();
  ASSERT_EQ(device_->PinHostForReading((*mapped)->data(), kBytes), absl::OkStatus());
  EXPECT_FALSE(device_->PinHostForReading((*mapped)->data(), kBytes).ok());  // it is
  DeviceBytes memory(kBytes);
  ASSERT_EQ(device_->EnqueueCopy(device_->service_stream(), memory.as<uint8_t>(), (*mapped)->data(), kBytes),
            absl::OkStatus());
  ASSERT_CUDA(cudaStreamSynchronize(device_->service_stream()));
  EXPECT_EQ(CountOthers(memory.as<uint8_t>(), kBytes, 0x77), 0);
  device_->UnpinHost((*mapped)->data());
  // Not pinned it is copied as well.
  std::memset((*written)->data(), 0x78, kBytes);
  ASSERT_EQ(device_->EnqueueCopy(device_->service_stream(), memory.as<uint8_t>(), (*mapped)->data(), kBytes),
            absl::OkStatus());
  ASSERT_CUDA(cudaStreamSynchronize(device_->service_stream()));
  EXPECT_EQ(CountOthers(memory.as<uint8_t>(), kBytes, 0x78), 0);
}

TEST_F(DeviceMemoryTest, ReleasesComeInStreamOrderFromThisAndAnotherProcess) {
  Region::Options options;
  options.bytes = sizeof(ReleaseCounter);
  auto own_page = Region::Create(options), other_page = Region::Create(options);
  ASSERT_TRUE(own_page.ok() && other_page.ok());
  ASSERT_TRUE(device_->PinHost((*own_page)->data(), (*own_page)->bytes()).ok());
  ReleaseEpochs epochs;
  const auto own = epochs.AddHolder(reinterpret_cast<const ReleaseCounter*>((*own_page)->data()));
  const auto other = epochs.AddHolder(reinterpret_cast<const ReleaseCounter*>((*other_page)->data()));
  ASSERT_TRUE(own.ok() && other.ok());
  const uint64_t own_plan = *epochs.OpenPlan(*own), other_plan = *epochs.OpenPlan(*other);
  epochs.Retire(PageId{1, 1});
  std::vector<PageId> reusable;

  auto pool = MakePool(1);
  const auto id = pool->Allocate(1, kSlabBytes);
  ASSERT_TRUE(id.ok());
  for (int i = 0; i < 20; ++i) {
    ASSERT_CUDA(cudaMemsetAsync(pool->Data(*id), i, kSlabBytes, device_->attention_stream()));
  }
  cudaEvent_t before;
  ASSERT_CUDA(cudaEventCreateWithFlags(&before, cudaEventDisableTiming));
  ASSERT_CUDA(cudaEventRecord(before, device_->attention_stream()));
  ASSERT_TRUE(device_->EnqueueRelease(device_->attention_stream(), (*own_page)->data(), own_plan).ok());
  const auto* const counter = reinterpret_cast<const ReleaseCounter*>((*own_page)->data());
  while (counter->released.load(std::memory_order_acquire) != own_plan) {
  }
  EXPECT_EQ(cudaEventQuery(before), cudaSuccess);  // never ahead of the work before it
  ASSERT_CUDA(cudaEventDestroy(before));
  epochs.Collect(&reusable);
  EXPECT_TRUE(reusable.empty());

  ImporterProcess importer;
  ASSERT_EQ(importer.Tell({Ask::kMapCounter, 0, 0, (*other_page)->bytes()}, dup((*other_page)->fd())), 0);
  EXPECT_EQ(importer.Tell({Ask::kRelease, 0, 0, 0, own_plan}), 0);  // not one of its own
  epochs.Collect(&reusable);
  EXPECT_TRUE(reusable.empty());
  EXPECT_EQ(importer.Tell({Ask::kRelease, 0, 0, 0, other_plan}), 0);
  epochs.Collect(&reusable);
  EXPECT_EQ(reusable.size(), 1u);
  EXPECT_EQ(importer.End(), 0);
  device_->UnpinHost((*own_page)->data());
}

TEST_F(DeviceMemoryTest, ThePagePoolIsPinnedInTheBackground) {
  PagePool::Options options;
  options.pool_bytes = 64 << 20;
  options.slab_bytes = 16 << 20;
  auto host = PagePool::Create(options);
  ASSERT_TRUE(host.ok()) << host.status();
  std::vector<absl::Span<uint8_t>> slabs;
  for (uint32_t i = 0; i < (*host)->slabs(); ++i) slabs.push_back((*host)->SlabData(i));
  HostPinner::Calls calls;
  calls.pin = [&](uint8_t* data, size_t bytes) { return device_->PinHost(data, bytes); };
  calls.unpin = [&](uint8_t* data) { device_->UnpinHost(data); };
  {
    HostPinner pinner(slabs, calls);
    pinner.Wait();
    ASSERT_TRUE(pinner.status().ok()) << pinner.status();
    EXPECT_EQ(pinner.ready_bytes(), options.pool_bytes);
    cudaPointerAttributes attributes;
    ASSERT_CUDA(cudaPointerGetAttributes(&attributes, slabs[3].data() + 4096));
    EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
    EXPECT_EQ(attributes.devicePointer, slabs[3].data() + 4096);  // kernels use the host's own addresses
  }
  cudaPointerAttributes attributes;
  ASSERT_CUDA(cudaPointerGetAttributes(&attributes, slabs[3].data()));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

}  // namespace
}  // namespace kvmanager
