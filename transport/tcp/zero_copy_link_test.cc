// What the kernel does with pages that it sends straight from where they lie, on links of the test's own network
// namespaces: a loopback device that `tc tbf` holds to a rate, with a played receiver that looks at what arrives, and a
// veth pair that copies nothing at the sender. Skipped without the rights.
#include <fcntl.h>
#include <linux/bpf.h>
#include <net/if.h>
#include <sched.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <thread>

#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

constexpr uint8_t kOld = 0x11, kNew = 0xee;

bool Shell(const std::string& command) { return std::system(("PATH=$PATH:/usr/sbin:/sbin " + command).c_str()) == 0; }

class ZeroCopyLinkTest : public testing::Test {
 protected:
  // Threads and processes that this one makes from then on are there too.
  void SetUp() override {
    was_ = ::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    ASSERT_GE(was_, 0);
    if (::unshare(CLONE_NEWNET) != 0) {
      GTEST_SKIP() << "no network namespace: " << std::strerror(errno)
                   << "; run it as root, or as `unshare --user --map-root-user --net`";
    }
    if (!Shell("ip link set lo up")) GTEST_SKIP() << "needs iproute2 (tools/setup)";
  }
  void TearDown() override {
    sender_ = nullptr;
    if (::setns(was_, CLONE_NEWNET) != 0) std::abort();
    ::close(was_);
  }
  void MakeSender(ZeroCopyUse zero_copy) {
    TcpTransport::Options options;
    options.metrics = &metrics_;
    options.connections = 1;
    options.zero_copy = zero_copy;
    sender_ = *TcpTransport::Create(options);
  }
  const TransportMetrics::ZeroCopy& bytes() const { return metrics_.zero_copy; }

  int was_ = -1;
  Metrics registry_;
  TransportMetrics metrics_{&registry_};
  std::unique_ptr<TcpTransport> sender_;
};

class SlowLinkTest : public ZeroCopyLinkTest {
 protected:
  /// Cancels a hand-off over a link of `rate` while pages are on their way. When it has ended, they may be written
  /// over.
  void CancelUnderWay(const std::string& rate, int64_t stall_ms) {
    MakeSender(ZeroCopyUse::kAlways);
    RawSocket listener = RawSocket::Listen();
    SendRequest request = RequestOf(pages_, listener.address());
    request.stall_ms = stall_ms;
    Outcome out = Begin(*sender_, std::move(request));
    receiver_.Accept(listener);
    if (!Shell("tc qdisc add dev lo root tbf rate " + rate + " burst 80kb latency 30s")) {
      GTEST_SKIP() << "needs iproute2 and the kernel's sch_tbf";
    }
    sender_->Post(out.id, PagesOf(pages_));
    EXPECT_EQ(receiver_.connection.Read(20000).size(), 20000u);
    sender_->Cancel(out.id);
    EXPECT_EQ(out.done.get().status().code(), absl::StatusCode::kCancelled);
  }
  /// Bytes that come on the connection until it ends. Fails if any of them are of pages that were written over.
  size_t ReadRest() {
    size_t bytes = 0, in_a_row = 0;
    std::vector<uint8_t> chunk(1 << 20);
    for (ssize_t n; (n = receiver_.connection.ReadSome(chunk.data(), chunk.size())) > 0; bytes += n) {
      for (ssize_t i = 0; i < n; ++i) {
        in_a_row = chunk[i] == kNew ? in_a_row + 1 : 0;
        if (in_a_row == 64) ADD_FAILURE() << "a page that was written over, " << bytes + i << " bytes later";
      }
    }
    EXPECT_EQ(errno, ECONNRESET);
    return bytes;
  }

  std::vector<Page> pages_{64, Page(256 << 10, kOld)};
  PlayedReceiver receiver_{64};
};

TEST_F(SlowLinkTest, PagesThatAQueueHoldsAreWaitedFor) {
  CancelUnderWay("40mbit", /*stall_ms=*/20000);
  if (IsSkipped()) return;
  for (Page& page : pages_) std::fill(page.begin(), page.end(), kNew);
  EXPECT_GT(ReadRest(), 0u);
  EXPECT_EQ(bytes().unconfirmed.Value(), 0);
  EXPECT_GT(bytes().sent.Value() + bytes().copied.Value(), 0);
}

TEST_F(SlowLinkTest, NotLongerThanAPeerIs) {
  CancelUnderWay("8kbit", /*stall_ms=*/100);
  if (IsSkipped()) return;
  EXPECT_GT(bytes().unconfirmed.Value(), 0);
}

TEST(ZeroCopyLoopbackTest, TheKernelCopiesThereSoAConnectionStopsAskingItNotTo) {
  TestReceiver receiver;
  Metrics registry;
  TransportMetrics metrics(&registry);
  TcpTransport::Options options;
  options.metrics = &metrics;
  options.connections = 1;
  const std::unique_ptr<TcpTransport> sender = *TcpTransport::Create(options);
  options.zero_copy = ZeroCopyUse::kNever;
  const std::unique_ptr<TcpTransport> other = *TcpTransport::Create(options);
  options.listen = "127.0.0.1:0";
  options.receiver = &receiver;
  const std::unique_ptr<TcpTransport> receiving = *TcpTransport::Create(options);
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(250, 256 << 10), 10);
  const auto send = [&](TcpTransport& transport) {
    EXPECT_TRUE(SendAll(transport, RequestOf(pages, receiving->listen_address()), PagesOf(pages)).done.get().ok());
    EXPECT_TRUE(receiver.newest() == pages);
  };
  send(*sender);
  const TransportMetrics::ZeroCopy& bytes = metrics.zero_copy;
  const double asked = bytes.copied.Value() + bytes.refused.Value();
  EXPECT_GT(asked, 0);
  EXPECT_LE(bytes.copied.Value(), ZeroCopy::kCopiedMax * (256 << 10));
  EXPECT_EQ(bytes.sent.Value(), 0);
  EXPECT_EQ(bytes.unconfirmed.Value(), 0);
  send(*other);
  EXPECT_EQ(bytes.copied.Value() + bytes.refused.Value(), asked);
}

/// Attaches an XDP program that passes everything to a device of this thread's namespace: a descriptor that holds it
/// there, or -1. A veth then copies packets at the receiving end, into pages for the program, so that nobody copies
/// them at the sender.
int AttachXdp(const char* device) {
  const bpf_insn program[] = {{BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, XDP_PASS},
                              {BPF_JMP | BPF_EXIT, 0, 0, 0, 0}};
  bpf_attr load = {}, link = {};
  load.prog_type = BPF_PROG_TYPE_XDP;
  load.insn_cnt = 2;
  load.insns = reinterpret_cast<uintptr_t>(program);
  load.license = reinterpret_cast<uintptr_t>("GPL");
  load.expected_attach_type = BPF_XDP;
  const auto loaded = static_cast<int>(::syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof(load)));
  if (loaded < 0) return -1;
  link.link_create.prog_fd = loaded;
  link.link_create.target_ifindex = ::if_nametoindex(device);
  link.link_create.attach_type = BPF_XDP;
  link.link_create.flags = 4;  // by the device, not in general
  const auto attached = static_cast<int>(::syscall(SYS_bpf, BPF_LINK_CREATE, &link, sizeof(link)));
  ::close(loaded);
  return attached;
}

TEST_F(ZeroCopyLinkTest, WhereNothingIsCopiedAllButTheFirstWriteGoesSo) {
  TestReceiver receiver;
  Metrics registry;
  TransportMetrics metrics(&registry);
  std::unique_ptr<TcpTransport> receiving;
  int xdp = -1;
  bool linked = false;
  const std::string near = absl::StrCat(::gettid());
  std::thread([&] {  // whose namespace lives on with the transport's threads
    linked = ::unshare(CLONE_NEWNET) == 0 && Shell("ip link add kvfar type veth peer name kvnear netns " + near) &&
             Shell("ip address add 10.78.0.2/30 dev kvfar") && Shell("ip link set kvfar up");
    if (!linked) return;
    xdp = AttachXdp("kvfar");
    TcpTransport::Options options;
    options.metrics = &metrics;
    options.listen = "10.78.0.2:0";
    options.receiver = &receiver;
    receiving = *TcpTransport::Create(options);
  })
      .join();
  if (!linked || !Shell("ip address add 10.78.0.1/30 dev kvnear") || !Shell("ip link set kvnear up")) {
    GTEST_SKIP() << "needs iproute2 and the kernel's veth";
  }
  if (xdp < 0) GTEST_SKIP() << "needs the right to load an XDP program, and a veth that takes it";
  MakeSender(ZeroCopyUse::kWhereItPays);
  const std::vector<Page> pages = RandomPages(std::vector<size_t>(600, 100 << 10), 3);
  const auto result = SendAll(*sender_, RequestOf(pages, receiving->listen_address()), PagesOf(pages)).done.get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(receiver.newest() == pages);
  EXPECT_EQ(bytes().copied.Value(), 0);
  EXPECT_EQ(bytes().unconfirmed.Value(), 0);
  EXPECT_GT(bytes().sent.Value() + bytes().refused.Value(), static_cast<double>(result->bytes_sent) / 2);
  ::close(xdp);
}

}  // namespace
}  // namespace kvmanager::tcp
