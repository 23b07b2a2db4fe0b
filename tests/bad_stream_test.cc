// Streams that are no messages: only their own connection ends, with its leases.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "transport/tcp/wire.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

std::string Words(const std::vector<uint32_t>& words) {
  return std::string(reinterpret_cast<const char*>(words.data()), words.size() * 4);
}

std::string Noise(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string noise(bytes, 0);
  for (char& c : noise) c = static_cast<char>(random());
  return noise;
}

struct Stream {
  const char* what;
  std::string bytes;
  bool ends_by_itself;  // false: the stream waits for more, and our close ends it
};

/// A Cap'n Proto frame: the number of segments less one, their sizes in words, padding to 8 bytes, the segments.
std::vector<Stream> BadStreams() {
  std::vector<Stream> streams;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::string noise = Noise(1 << 16, seed);
    noise[3] = '\x7f';  // a segment count that no message has
    streams.push_back({"noise", std::move(noise), true});
  }
  streams.push_back({"too many segments", Words({0xffffffff, 1, 1, 1}), true});
  streams.push_back({"600 segments", Words({599}) + std::string(600 * 4, '\1'), true});
  streams.push_back({"a segment of 32 GiB", Words({0, 0xffffffff}), true});
  streams.push_back({"sizes that overflow", Words({2, 0xffffffff, 0xffffffff, 0xffffffff}), true});
  streams.push_back({"a message of 33 MiB", Words({0, (33u << 20) / 8}) + std::string(1 << 16, '\0'), true});
  streams.push_back({"half a segment table", Words({3, 1}), false});
  streams.push_back({"half a message", Words({0, 1000}) + std::string(100, '\0'), false});
  streams.push_back({"one byte", std::string(1, '\0'), false});
  streams.push_back({"nothing", "", false});
  // A message whose root pointer lies: far out of its segment, to a segment that is not there, deep into itself.
  streams.push_back({"a root out of bounds", Words({0, 1, 0x00001000, 0x00100010}), false});
  streams.push_back({"a root in no segment", Words({0, 1, 0x0000000a, 7}), false});
  streams.push_back({"a root of its own", Words({0, 2, 0xfffffffc, 0x00010001, 0xfffffffc, 0x00010001}), false});
  streams.push_back({"an empty message", Words({0, 0}), false});
  return streams;
}

class BadStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start({}));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, client_->OpenCache(options_));
    ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
    ASSERT_OK(Load(*cache_, made_.sequence->id(), source_, 0, 100, 100));
  }
  void TearDown() override {
    made_.sequence.reset();
    cache_.reset();
    client_.reset();
  }
  client::DaemonDescription Status() {
    absl::StatusOr<client::DaemonDescription> status = client_->Status();
    EXPECT_OK(status);
    return status.ok() ? *status : client::DaemonDescription{};
  }
  /// The other client works, and is alone.
  void ExpectUnharmed(const char* what) {
    SCOPED_TRACE(what);
    EXPECT_TRUE(Eventually([&] {
      const client::DaemonDescription status = Status();
      return status.connections == 1 && status.leases == 1;
    })) << Status().connections
        << " connections, " << Status().leases << " leases";
    EXPECT_OK(Ask(*cache_, made_.sequence->id(), source_, 99));
  }

  const CacheOptions options_ = SmallCache("hack:k_bits=3,v_bits=2", 1);
  const Source source_{19, Kind::kNormal, options_};
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<client::Cache> cache_;
  CreatedSequence made_;
};

TEST_F(BadStreamTest, MalformedStreamsEndTheirOwnConnectionOnly) {
  for (const Stream& stream : BadStreams()) {
    SCOPED_TRACE(stream.what);
    const int fd = ConnectSocket(daemon_->listen());
    ASSERT_GE(fd, 0);
    WriteAll(fd, stream.bytes);
    if (!stream.ends_by_itself) shutdown(fd, SHUT_WR);
    EXPECT_TRUE(ClosedByPeer(fd)) << "the daemon ends it";
    close(fd);
    ExpectUnharmed(stream.what);
  }
}

TEST_F(BadStreamTest, ABrokenConnectionsLeasesGoWithIt) {
  for (const Stream& stream : BadStreams()) {
    if (!stream.ends_by_itself) continue;
    SCOPED_TRACE(stream.what);
    Proxy proxy(daemon_->listen());
    ASSERT_OK_AND_ASSIGN(auto other, Client::Connect("tcp:" + proxy.address(), {}));
    ASSERT_OK_AND_ASSIGN(auto cache, other->OpenCache(options_));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), source_, 0, 50, 50));
    EXPECT_EQ(Status().leases, 2u);
    proxy.Inject(stream.bytes);
    ExpectUnharmed(stream.what);
    EXPECT_CODE(other->Ping(), kUnavailable);
  }
}

TEST_F(BadStreamTest, AMessageOfAnAdmissibleSizeIsTaken) {
  // 16 MiB of K and V each is beyond the limit of a message; 8 MiB each is within it.
  CacheOptions large = options_;
  large.codec = "raw";
  large.kv_heads = 4;
  large.query_heads = 4;
  large.head_dim = 256;
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(large));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  const Source source{4, Kind::kConstant, large};
  EXPECT_OK(Load(*cache, made.sequence->id(), source, 0, 4096, 4096));
  const absl::Status over = Load(*cache, made.sequence->id(), source, 4096, 9000, 9000);
  EXPECT_FALSE(over.ok()) << "a message of 36 MiB";
  EXPECT_OK(client_->Ping()) << "the client refuses to send it, and its connection lives";
}

TEST_F(BadStreamTest, APeerThatSendsGarbageIsCutOff) {
  std::vector<std::string> streams;
  for (uint64_t seed = 0; seed < 8; ++seed) streams.push_back(Noise(4096, seed));
  const std::string hello = tcp::EncodeHello({});
  for (uint64_t seed = 0; seed < 8; ++seed) streams.push_back(hello + Noise(4096, 100 + seed));
  // Headers whose lengths lie.
  for (const uint64_t body : {uint64_t{0}, uint64_t{1} << 30, uint64_t{1} << 62, UINT64_MAX}) {
    std::string header = tcp::EncodeEmpty(tcp::FrameType::kPing);
    header[0] = static_cast<char>(tcp::FrameType::kOffer);
    for (int i = 0; i < 8; ++i) header[8 + i] = static_cast<char>(body >> (8 * i));
    streams.push_back(hello + header + std::string(64, '\xff'));
  }
  // A well-formed offer of pages behind a manifest that is none, and an honest size with more pages than bytes.
  HandOffPart part;
  part.page_bytes = {1024};
  for (const std::string& manifest : {std::string("no manifest at all"), Noise(1 << 16, 7), std::string(64, '\0')}) {
    part.manifest = manifest;
    tcp::Token token = {};
    token[0] = static_cast<uint8_t>(streams.size());
    streams.push_back(hello + tcp::EncodeOffer(token, 0, part));
    part.page_bytes = {};
  }
  // Frames out of turn.
  streams.push_back(hello + tcp::EncodeTrailer(part));
  streams.push_back(hello + tcp::EncodeEmpty(tcp::FrameType::kDone));
  streams.push_back(hello + hello);
  tcp::HelloFrame future;
  future.version = 99;
  future.version_min = 98;
  streams.push_back(tcp::EncodeHello(future));
  for (size_t i = 0; i < streams.size(); ++i) {
    SCOPED_TRACE(i);
    const int fd = ConnectSocket(daemon_->peer());
    ASSERT_GE(fd, 0);
    WriteAll(fd, streams[i]);
    EXPECT_TRUE(ClosedByPeer(fd));
    close(fd);
  }
  ExpectUnharmed("after all");
  // A real hand-off still arrives.
  ASSERT_OK_AND_ASSIGN(auto second, DaemonProcess::Start({}));
  ASSERT_OK_AND_ASSIGN(auto sender, Client::Connect(second->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto cache, sender->OpenCache(options_));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source_, 0, 70, 70));
  EXPECT_OK(made.sequence->HandOff(daemon_->peer(), ""));
  ASSERT_OK_AND_ASSIGN(const MetricsPage metrics, Scrape(*daemon_));
  EXPECT_GT(metrics.Sum("kvmanager_transport_protocol_errors_total"), 0);
}

TEST_F(BadStreamTest, TheMetricsPageSurvivesGarbage) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const int fd = ConnectSocket(daemon_->metrics());
    ASSERT_GE(fd, 0);
    WriteAll(fd, Noise(4096, seed) + "\r\n\r\n");
    shutdown(fd, SHUT_WR);
    ClosedByPeer(fd);
    close(fd);
  }
  ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*daemon_));
  EXPECT_FALSE(page.families.empty());
}

}  // namespace
}  // namespace kvmanager::testing
