// MB/s of hand-offs between two transports of this process over loopback, beside a plain copy through a loopback
// socket: the limit that the kernel sets here. Usage: transport_bench [MiB, default 1024]. Pages come from and go to
// the same 256 MiB each time.
#include <xxhash.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

#include "kvmanager/base/status.h"
#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

constexpr size_t kPoolBytes = 256 << 20;

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

Page Filled(uint64_t seed) {
  Page pool(kPoolBytes);
  for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<uint8_t>((seed += 0x9e3779b97f4a7c15) >> 56);
  return pool;
}

/// Accepts everything into one buffer.
class PoolReceiver final : public HandOffReceiver {
 public:
  explicit PoolReceiver(Page* pool) : pool_(pool) {}
  class HandOff final : public IncomingHandOff {
   public:
    absl::Span<uint8_t> target(size_t page) override { return targets[page]; }
    std::vector<absl::Span<uint8_t>> targets;
  };
  void Offer(std::string, std::string, std::vector<uint64_t> bytes, std::vector<uint64_t>, OfferReply reply) override {
    auto hand_off = std::make_unique<HandOff>();
    size_t at = 0;
    for (const uint64_t size : bytes) {
      hand_off->targets.push_back(absl::MakeSpan(pool_->data() + at, size));
      at += size;
    }
    reply(std::move(hand_off));
  }
  void Complete(std::unique_ptr<IncomingHandOff>, CompleteReply reply) override { reply(std::string("ticket")); }
  void Abort(std::unique_ptr<IncomingHandOff>, absl::Status) override {}

 private:
  Page* pool_;
};

double PlainCopy(const Page& from, Page& to, size_t rounds) {
  RawSocket listener = RawSocket::Listen();
  RawSocket writer = RawSocket::Connect(listener.address());
  RawSocket reader = listener.Accept();
  constexpr size_t kChunk = 256 << 10;
  const auto start = std::chrono::steady_clock::now();
  std::thread thread([&] {
    for (size_t round = 0; round < rounds; ++round) {
      for (size_t at = 0; at < from.size(); at += kChunk) writer.WriteFrom(&from[at], kChunk);
    }
  });
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t at = 0; at < to.size(); at += kChunk) reader.ReadInto(&to[at], kChunk);
  }
  thread.join();
  return static_cast<double>(rounds * from.size()) / Seconds(start) / 1e6;
}

double HandOffs(const Page& from, Page& to, size_t rounds, size_t page_bytes) {
  Metrics registry;
  TransportMetrics metrics(&registry);
  PoolReceiver receiver(&to);
  TcpTransport::Options options;
  options.metrics = &metrics;
  auto sender = TcpTransport::Create(options);
  options.listen = "127.0.0.1:0";
  options.receiver = &receiver;
  auto receiving = TcpTransport::Create(options);
  KV_CHECK(sender.ok() && receiving.ok());
  SendRequest request;
  request.peer = (*receiving)->listen_address();
  request.manifest = "bench";
  for (size_t at = 0; at + page_bytes <= from.size(); at += page_bytes) {
    request.pages.push_back({absl::MakeConstSpan(&from[at], page_bytes), XXH3_64bits(&from[at], page_bytes)});
  }
  uint64_t bytes = 0;
  const auto start = std::chrono::steady_clock::now();
  for (size_t round = 0; round < rounds; ++round) {
    std::promise<absl::StatusOr<SendResult>> promise;
    (*sender)->Send(request, [&](absl::StatusOr<SendResult> result) { promise.set_value(std::move(result)); });
    const absl::StatusOr<SendResult> result = promise.get_future().get();
    KV_CHECK(result.ok());
    bytes += result->bytes_sent;
  }
  const double mb_per_s = static_cast<double>(bytes) / Seconds(start) / 1e6;
  KV_CHECK(std::equal(from.begin(), from.begin() + request.pages.size() * page_bytes, to.begin()));
  return mb_per_s;
}

int Main(int argc, char** argv) {
  const size_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1024;
  const size_t rounds = std::max<size_t>(1, (mib << 20) / kPoolBytes);
  const Page from = Filled(1);
  Page to = Filled(2);
  const auto start = std::chrono::steady_clock::now();
  uint64_t sum = 0;
  for (size_t at = 0; at < from.size(); at += 256 << 10) sum += XXH3_64bits(&from[at], 256 << 10);
  const double hash = static_cast<double>(from.size()) / Seconds(start) / 1e6;
  std::printf("XXH3-64 alone, one core          %8.0f MB/s  (%02x)\n", hash, static_cast<unsigned>(sum & 0xff));
  for (const size_t page_bytes : {size_t{256} << 10, size_t{11} << 10}) {
    const double plain = PlainCopy(from, to, rounds);
    const double pages = HandOffs(from, to, rounds, page_bytes);
    std::printf("plain loopback socket copy       %8.0f MB/s\n", plain);
    std::printf("hand-off, pages of %4zu KiB       %8.0f MB/s  %.2f of the copy\n", page_bytes >> 10, pages,
                pages / plain);
  }
  return 0;
}

}  // namespace
}  // namespace kvmanager::tcp

int main(int argc, char** argv) { return kvmanager::tcp::Main(argc, argv); }
