#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "monitoring/exporter.h"
#include "monitoring/metrics.h"

namespace kvmanager {
namespace {

// A socket that is connected to the port, or -1.
int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

std::string Get(int port, const std::string& path = "/metrics", const std::string& fields = "") {
  const int fd = Connect(port);
  EXPECT_GE(fd, 0);
  const std::string request = "GET " + path + " HTTP/1.0\r\n" + fields + "\r\n";
  EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) answer.append(buffer, n);
  close(fd);
  return answer;
}

TEST(Metrics, CatalogueKnowsEverySeries) {
  Metrics metrics;
  metrics.Counter("pages_total", "Pages", {{"state", "a"}}).Increment();
  metrics.Counter("pages_total", "Pages", {{"state", "b"}}).Increment(2);
  metrics.Gauge("pool_bytes", "Bytes").Set(7);
  metrics.Histogram("encode_seconds", "Time", ExponentialBounds(1e-6, 4, 3)).Observe(5e-6);
  const auto catalogue = metrics.Catalogue();
  ASSERT_EQ(catalogue.size(), 3u);
  EXPECT_EQ(catalogue[0], (MetricInfo{"kvmanager_encode_seconds", "histogram", {}, "Time"}));
  EXPECT_EQ(catalogue[1], (MetricInfo{"kvmanager_pages_total", "counter", {"state"}, "Pages"}));
  EXPECT_NE(metrics.CatalogueMarkdown().find("| `kvmanager_pool_bytes` | gauge |  | Bytes |"), std::string::npos);
  EXPECT_NE(metrics.Text().find("kvmanager_pages_total{state=\"b\"} 2"), std::string::npos);
}

TEST(Metrics, TheSameSeriesIsMadeOnce) {
  Metrics metrics;
  EXPECT_EQ(&metrics.Counter("a_total", "A", {{"x", "1"}}), &metrics.Counter("a_total", "A", {{"x", "1"}}));
  EXPECT_NE(&metrics.Counter("a_total", "A", {{"x", "1"}}), &metrics.Counter("a_total", "A", {{"x", "2"}}));
}

TEST(MetricsDeathTest, ContradictionsAbort) {
  Metrics metrics;
  metrics.Counter("a_total", "A", {{"x", "1"}});
  EXPECT_DEATH(metrics.Counter("a_total", "A", {{"y", "1"}}), "broken invariant");
  EXPECT_DEATH(metrics.Counter("a_total", "B", {{"x", "1"}}), "broken invariant");
  EXPECT_DEATH(metrics.Counter("b", "no unit"), "broken invariant");
  EXPECT_DEATH(metrics.Gauge("b_total", "a gauge is no total"), "broken invariant");
}

TEST(Exporter, ServesOnAFreePort) {
  Metrics metrics;
  metrics.Gauge("answer_bytes", "An answer").Set(42);
  auto exporter = Exporter::Start("127.0.0.1:0", &metrics);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  ASSERT_GT((*exporter)->port(), 0);
  EXPECT_NE(Get((*exporter)->port()).find("kvmanager_answer_bytes 42"), std::string::npos);
}

// A page whose name was made to resolve to this address (DNS rebinding) reads nothing.
TEST(Exporter, ForeignNamesAreRefused) {
  Metrics metrics;
  metrics.Gauge("answer_bytes", "An answer").Set(42);
  auto exporter = Exporter::Start("127.0.0.1:0", &metrics, {"kv1.example"});
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  const auto ask = [&](const std::string& fields) { return Get((*exporter)->port(), "/metrics", fields); };
  char own[256] = {};
  ASSERT_EQ(gethostname(own, sizeof own - 1), 0);
  for (const std::string host : {"localhost", "127.0.0.1:9464", "[::1]:1", "10.0.0.1", "[fe80::1]:9464", "KV1.example",
                                 "kv1.example:9464", static_cast<const char*>(own)}) {
    EXPECT_NE(ask("Host: " + host + "\r\n").find("kvmanager_answer_bytes 42"), std::string::npos) << host;
  }
  EXPECT_NE(ask("").find("kvmanager_answer_bytes 42"), std::string::npos) << "no browser";
  for (const std::string host : {"attacker.example", "attacker.example:9464", "kv1.example.attacker.example",
                                 "127.0.0.1.attacker.example", "xkv1.example", "kv1.example:x", "[::1", "any"}) {
    const std::string answer = ask("Host: " + host + "\r\n");
    EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 421") << host;
    EXPECT_NE(answer.find("--http-hosts"), std::string::npos) << answer;
    EXPECT_EQ(answer.find("answer_bytes"), std::string::npos) << host;
  }
  auto open = Exporter::Start("127.0.0.1:0", &metrics, {"any"});
  ASSERT_TRUE(open.ok()) << open.status();
  EXPECT_NE(Get((*open)->port(), "/metrics", "Host: attacker.example\r\n").find("answer_bytes 42"), std::string::npos);
}

TEST(Exporter, AnswersWhileManyConnectionsWait) {
  Metrics metrics;
  metrics.Gauge("answer_bytes", "An answer").Set(42);
  auto exporter = Exporter::Start("127.0.0.1:0", &metrics);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  std::vector<int> waiting;
  for (size_t i = 0; i < HttpServer::kConnectionsMax + 10; ++i) {
    waiting.push_back(Connect((*exporter)->port()));
    if (i % 2 == 0) (void)!send(waiting.back(), "GET /met", 8, MSG_NOSIGNAL);
  }
  EXPECT_NE(Get((*exporter)->port()).find("kvmanager_answer_bytes 42"), std::string::npos);
  for (const int fd : waiting) close(fd);
}

TEST(Exporter, ServesNothingElse) {
  Metrics metrics;
  auto exporter = Exporter::Start("127.0.0.1:0", &metrics);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  EXPECT_EQ(Get((*exporter)->port(), "/").substr(0, 12), "HTTP/1.1 404");
  EXPECT_NE(Get((*exporter)->port()).find("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            std::string::npos);
}

TEST(Exporter, BadAddressesAreErrors) {
  Metrics metrics;
  for (const char* listen : {"", "nothing", ":80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1",
                             "a,b:80", "127.0.0.1:80s", "127.0.0.1:0,127.0.0.1:1"}) {
    EXPECT_EQ(Exporter::Start(listen, &metrics).status().code(), absl::StatusCode::kInvalidArgument) << listen;
  }
  auto first = Exporter::Start("localhost:0", &metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Exporter::Start("127.0.0.1:" + std::to_string((*first)->port()), &metrics);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvmanager
