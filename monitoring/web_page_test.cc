// The page's server against browsers and strangers.
#include "monitoring/web_page.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using nlohmann::json;

class Socket {
 public:
  explicit Socket(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~Socket() { close(fd_); }
  bool connected() const { return connected_; }
  void Send(const std::string& text) { (void)!send(fd_, text.data(), text.size(), MSG_NOSIGNAL); }
  // Until the other side closes.
  std::string ReadAll() {
    std::string answer;
    char buffer[4096];
    for (ssize_t n; (n = read(fd_, buffer, sizeof buffer)) > 0;) answer.append(buffer, n);
    return answer;
  }
  std::string Read(size_t bytes) {
    std::string answer(bytes, 0);
    const ssize_t got = recv(fd_, answer.data(), bytes, MSG_WAITALL);
    answer.resize(std::max<ssize_t>(got, 0));
    return answer;
  }
  // One answer with a Content-Length.
  std::string ReadOne() {
    std::string answer;
    size_t wanted = std::string::npos;
    char c;
    while (answer.size() < wanted && read(fd_, &c, 1) == 1) {
      answer += c;
      if (wanted == std::string::npos && answer.ends_with("\r\n\r\n")) {
        wanted = answer.size() + std::stoul(answer.substr(answer.find("Content-Length: ") + 16));
      }
    }
    return answer;
  }

 private:
  const int fd_;
  bool connected_ = false;
};

class WebPageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    metrics_.Gauge("pool_capacity_bytes", "Bytes").Set(1000);
    metrics_.Gauge("pool_used_bytes", "Bytes").Set(250);
    auto page = WebPage::Start("localhost:0", &metrics_, &errors_, &clock_, {.version = "1.2.3"});
    ASSERT_TRUE(page.ok()) << page.status();
    page_ = *std::move(page);
  }
  std::string Ask(const std::string& request) {
    Socket socket(page_->port());
    socket.Send(request);
    return socket.ReadAll();
  }
  std::string Get(const std::string& path, const std::string& host = "localhost") {
    return Ask("GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n");
  }
  static std::string Body(const std::string& answer) { return answer.substr(answer.find("\r\n\r\n") + 4); }
  static std::string Line(const std::string& answer) { return answer.substr(0, answer.find("\r\n")); }
  // The state once it is there: the first sample is taken when the server has started.
  json State() {
    json state;
    do state = json::parse(Body(Get("/state.json")));
    while (!state.contains("now"));
    return state;
  }

  const SteadyClock clock_;
  Metrics metrics_;
  RecentErrors errors_;
  std::unique_ptr<WebPage> page_;
};

TEST_F(WebPageTest, ServesItsFilesAndNothingElse) {
  for (const auto& [path, type] : std::vector<std::pair<std::string, std::string>>{
           {"/", "text/html"}, {"/?a=b", "text/html"}, {"/page.css", "text/css"}, {"/page.js", "text/javascript"}}) {
    const std::string answer = Get(path);
    EXPECT_EQ(Line(answer), "HTTP/1.1 200 OK") << path;
    EXPECT_NE(answer.find("\r\nContent-Type: " + type), std::string::npos) << path;
    EXPECT_NE(answer.find("\r\nX-Content-Type-Options: nosniff\r\n"), std::string::npos);
    EXPECT_NE(answer.find("\r\nContent-Security-Policy: default-src 'none';"), std::string::npos);
    EXPECT_GT(Body(answer).size(), 100u) << path;
  }
  for (const char* path : {"/metrics", "/../etc/passwd", "/page.js/", "//", "/%2e", "*", "http://localhost/"}) {
    EXPECT_EQ(Line(Get(path)).substr(0, 12), "HTTP/1.1 404") << path;
  }
}

TEST_F(WebPageTest, ThePageNamesNothingOutsideItself) {
  const std::string html = Body(Get("/"));
  for (const std::string& text : {html, Body(Get("/page.css")), Body(Get("/page.js"))}) {
    std::string rest = text;
    const std::string svg = "http://www.w3.org/2000/svg";  // a name, never fetched
    if (const size_t at = rest.find(svg); at != std::string::npos) rest.erase(at, svg.size());
    EXPECT_EQ(rest.find("://"), std::string::npos) << rest.substr(rest.find("://") - 20, 60);
    EXPECT_EQ(rest.find("@import"), std::string::npos);
  }
  EXPECT_EQ(html.find("style="), std::string::npos);  // the policy forbids what stands in the page itself
  EXPECT_EQ(html.find("<style"), std::string::npos);
  EXPECT_EQ(html.find("<script>"), std::string::npos);
}

TEST_F(WebPageTest, TellsTheState) {
  errors_.Record("step", InvalidField("tokens", 5, "0..4 \"<b>\xff\n"), clock_.NowNs());
  errors_.Record("step", InvalidField("tokens", 6, "0..4"), clock_.NowNs());
  json state;
  do state = State();  // of a sample behind the errors
  while (state["errors"].empty());
  EXPECT_EQ(state["daemon"]["version"], "1.2.3");
  EXPECT_EQ(state["now"]["tiers"][0], (json{{"name", "host"}, {"used", 250}, {"capacity", 1000}}));
  EXPECT_FALSE(state["history"]["used"].empty());
  for (const auto& [name, values] : state["history"].items()) {
    EXPECT_EQ(values.size(), state["history"]["unix_ms"].size()) << name;
  }
  EXPECT_EQ(state["errors"][0]["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(state["errors"][0]["field"], "tokens");
  EXPECT_EQ(state["errors"][0]["count"], 2);
  EXPECT_TRUE(state["now"]["quality"].empty());
}

TEST_F(WebPageTest, TellsOfTheDiskAndOfKeptMemoryWhereTheyAre) {
  json state = State();
  EXPECT_TRUE(state["now"]["disk"].is_null());
  EXPECT_TRUE(state["now"]["kept"].is_null());
  EXPECT_FALSE(state["history"].contains("disk_written"));
  metrics_.Gauge("recorded_blocks", "Blocks").Set(60);
  metrics_.Gauge("unclaimed_blocks", "Blocks").Set(7);
  metrics_.Counter("recovered_blocks_total", "Blocks").Increment(20);
  metrics_.Gauge("disk_used_bytes", "Bytes").Set(300);
  metrics_.Gauge("disk_blocks", "Blocks").Set(12);
  metrics_.Gauge("disk_unwritten_blocks", "Blocks").Set(2);
  metrics_.Counter("disk_errors_total", "Failures", {{"op", "read"}}).Increment();
  metrics_.Counter("prefix_hit_tier_blocks_total", "Hits", {{"tier", "disk"}}).Increment(4);
  metrics_.Gauge("disk_capacity_bytes", "Bytes").Set(4000);  // the last: a sample with it has all others
  do state = State();
  while (state["now"]["disk"].is_null());
  const json& disk = state["now"]["disk"];
  EXPECT_EQ(disk["used"], 300);
  EXPECT_EQ(disk["capacity"], 4000);
  EXPECT_EQ(disk["blocks"], 12);
  EXPECT_EQ(disk["unwritten_blocks"], 2);
  EXPECT_EQ(disk["errors"], 1);
  EXPECT_TRUE(disk["read"]["p99_s"].is_null());
  EXPECT_EQ(state["now"]["kept"]["recorded_blocks"], 60);
  EXPECT_EQ(state["now"]["kept"]["unclaimed_blocks"], 7);
  EXPECT_EQ(state["now"]["kept"]["recovered_blocks"], 20);
  int hits = 0;
  for (const json& blocks : state["history"]["hit_disk_blocks"]) hits += blocks.get<int>();
  EXPECT_EQ(hits, 4);
  EXPECT_TRUE(state["history"]["disk_written"].front().is_null());  // before there was a disk
  EXPECT_EQ(state["history"]["disk_written"].back(), 0);
  EXPECT_EQ(state["history"]["disk_read"].size(), state["history"]["unix_ms"].size());
}

// The script shows them where the daemon has them.
TEST_F(WebPageTest, PanelsOfTheDiskAndOfKeptMemoryAreHiddenAtFirst) {
  const std::string html = Body(Get("/"));
  for (const std::string name : {"disk", "kept"}) {
    EXPECT_NE(html.find("id=\"" + name + "-panel\" data-panel=\"" + name + "\" hidden>"), std::string::npos) << name;
  }
}

TEST_F(WebPageTest, HeadHasNoBody) {
  Socket socket(page_->port());
  socket.Send("HEAD / HTTP/1.1\r\nHost: 127.0.0.1:9999\r\nConnection: close\r\n\r\n");
  const std::string answer = socket.ReadAll();
  EXPECT_EQ(Line(answer), "HTTP/1.1 200 OK");
  EXPECT_EQ(Body(answer), "");
}

TEST_F(WebPageTest, AConnectionServesManyRequests) {
  Socket socket(page_->port());
  const std::string request = "GET /page.css HTTP/1.1\r\nHost: [::1]\r\n\r\n";
  socket.Send(request + request);
  EXPECT_EQ(socket.ReadOne(), socket.ReadOne());
  socket.Send("GET / HTTP/1.0\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(Line(socket.ReadAll()), "HTTP/1.1 200 OK");
}

TEST_F(WebPageTest, ForeignNamesAreRefused) {
  for (const char* host :
       {"example.com", "127.0.0.1.example.com", "localhost.example.com", "10.0.0.1", "", "[::1", "[::2]",
        "127.0.0.1@example.com", "[::1]x", "localhost:1@example.com", "127.0.0.1:x", "[::1]:8080x"}) {
    EXPECT_EQ(Line(Get("/state.json", host)).substr(0, 12), "HTTP/1.1 421") << host;
  }
  EXPECT_EQ(Line(Ask("GET / HTTP/1.1\r\nConnection: close\r\n\r\n")).substr(0, 12), "HTTP/1.1 421");
  for (const char* host : {"localhost", "LocalHost:80", "127.0.0.1", "127.1.2.3:1", "[::1]", "[::1]:8080"}) {
    EXPECT_EQ(Line(Get("/state.json", host)), "HTTP/1.1 200 OK") << host;
  }
}

TEST(WebPageElsewhere, AnswersToItsAddressAndItsNames) {
  Metrics metrics;
  RecentErrors errors;
  const SteadyClock clock;
  for (const auto& [listen, hosts, host, answer] :
       std::vector<std::tuple<const char*, std::vector<std::string>, const char*, const char*>>{
           {"0.0.0.0:0", {}, "10.0.0.1", "200"},
           {"0.0.0.0:0", {}, "localhost", "200"},
           {"0.0.0.0:0", {}, "attacker.example", "421"},
           {"0.0.0.0:0", {}, "", "421"},
           {"0.0.0.0:0", {"kv1.example"}, "kv1.example", "200"},
           {"127.0.0.1:0", {"kv1.example"}, "kv1.example:80", "200"},
           {"127.0.0.1:0", {"kv1.example"}, "attacker.example", "421"},
       }) {
    auto page = WebPage::Start(listen, &metrics, &errors, &clock, {.version = "1.2.3"}, hosts);
    ASSERT_TRUE(page.ok()) << page.status();
    Socket socket((*page)->port());
    socket.Send(std::string("GET /state.json HTTP/1.1\r\nHost: ") + host + "\r\nConnection: close\r\n\r\n");
    EXPECT_EQ(socket.ReadAll().substr(9, 3), answer) << listen << " asked as " << host;
  }
}

TEST_F(WebPageTest, RequestsOfOtherKindsAreRefused) {
  const std::string host = "\r\nHost: localhost\r\n";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"POST / HTTP/1.1" + host + "\r\n", "405"},
      {"DELETE / HTTP/1.1" + host + "\r\n", "405"},
      {"OPTIONS * HTTP/1.1" + host + "\r\n", "405"},
      {"POST / HTTP/1.1" + host + "Content-Length: 5\r\n\r\nhello", "413"},
      {"GET / HTTP/1.1" + host + "Content-Length: 18446744073709551614\r\n\r\n", "413"},
      {"GET / HTTP/1.1" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "413"},
      {"GET / HTTP/1.1" + host + "Host: 127.0.0.1\r\n\r\n", "400"},
      {"GET / HTTP/1.1" + host + "Content-Length: x\r\n\r\n", "400"},
      {"GET / HTTP/9.9" + host + "\r\n", "400"},
      {"GET  / HTTP/1.1" + host + "\r\n", "400"},
      {"\x16\x03\x01\x02\x01 not HTTP at all\r\n\r\n", "400"},
      {std::string("GET /\0 HTTP/1.1", 15) + host + "\r\n", "400"},
      {"GET /" + std::string(HttpServer::kHeaderBytesMax, 'a') + " HTTP/1.1" + host + "\r\n", "431"},
      {"GET / HTTP/1.1" + host + "X: " + std::string(HttpServer::kHeaderBytesMax, 'a') + "\r\n\r\n", "431"},
  };
  for (const auto& [request, code] : cases) {
    EXPECT_EQ(Line(Ask(request)).substr(0, 12), "HTTP/1.1 " + code) << request.substr(0, 60);
  }
  EXPECT_EQ(Line(Get("/")), "HTTP/1.1 200 OK");
}

TEST_F(WebPageTest, OneConnectionTooManyTakesTheLongestIdleOnesPlace) {
  const std::string request = "GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n";
  std::vector<std::unique_ptr<Socket>> held;
  for (size_t i = 0; i < HttpServer::kConnectionsMax; ++i) {
    held.push_back(std::make_unique<Socket>(page_->port()));
    ASSERT_TRUE(held.back()->connected());
    if (i % 2 == 1) held.back()->Send("GET /page.css HTTP/1.1\r\nHo");  // and never the rest
  }
  held.back()->Send("st: localhost\r\n\r\n");  // so that all were accepted
  EXPECT_EQ(Line(held.back()->ReadOne()), "HTTP/1.1 200 OK");
  held[0]->Send(request);  // has waited less long now than all others
  EXPECT_EQ(Line(held[0]->ReadOne()), "HTTP/1.1 200 OK");
  std::vector<std::unique_ptr<Socket>> more;
  for (size_t i = 1; i <= 3; ++i) {
    more.push_back(std::make_unique<Socket>(page_->port()));
    more.back()->Send(request);
    EXPECT_EQ(Line(more.back()->ReadOne()), "HTTP/1.1 200 OK");
    EXPECT_EQ(held[i]->ReadAll(), "") << i;
  }
  for (const size_t i : {0, 4}) {
    held[i]->Send(request);
    EXPECT_EQ(Line(held[i]->ReadOne()), "HTTP/1.1 200 OK") << i;
  }
}

TEST_F(WebPageTest, EndsWhileConnectionsAreOpen) {
  Socket idle(page_->port()), half(page_->port());
  half.Send("GET / HTT");
  page_.reset();
  EXPECT_EQ(idle.ReadAll(), "");
  EXPECT_EQ(half.ReadAll(), "");
}

TEST(HttpServer, WhoIsBeingAnsweredStays) {
  const auto large = std::make_shared<const std::string>(size_t{64} << 20, 'x');  // more than sockets take in
  HttpServer::Options options;
  options.listen = "127.0.0.1:0";
  options.handler = [&large](absl::string_view) { return HttpAnswer{200, "text/plain", large}; };
  auto server = HttpServer::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<std::unique_ptr<Socket>> readers;
  for (size_t i = 0; i < HttpServer::kConnectionsMax; ++i) {
    readers.push_back(std::make_unique<Socket>((*server)->port()));
    readers.back()->Send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_EQ(readers.back()->Read(12), "HTTP/1.1 200");
  }
  EXPECT_EQ(Socket((*server)->port()).ReadAll(), "");
  EXPECT_EQ(readers[0]->Read(size_t{64} << 20).size(), size_t{64} << 20);
}

TEST(HttpServer, BadAddressesAreErrors) {
  for (const char* listen : {"", "nothing", ":80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1",
                             "example.com:80", "[::1:80", "127.0.0.1:80s"}) {
    HttpServer::Options options;
    options.listen = listen;
    EXPECT_EQ(HttpServer::Start(std::move(options)).status().code(), absl::StatusCode::kInvalidArgument) << listen;
  }
  HttpServer::Options options;
  options.listen = "127.0.0.1:0";
  options.handler = [](absl::string_view) { return HttpAnswer{}; };
  auto first = HttpServer::Start(options);
  ASSERT_TRUE(first.ok()) << first.status();
  options.listen = "127.0.0.1:" + std::to_string((*first)->port());
  EXPECT_EQ(HttpServer::Start(options).status().code(), absl::StatusCode::kUnavailable);
}

TEST(RecentErrors, KeepTheLastOfEachKind) {
  RecentErrors errors;
  for (size_t i = 0; i < RecentErrors::kEntriesMax + 3; ++i) {
    errors.Record("step", InvalidField("field" + std::to_string(i), "x", "y"), int64_t(i));
  }
  errors.Record("step", InvalidField("field10", std::string(1000, 'z'), "y"), 99);
  const auto list = errors.List();
  ASSERT_EQ(list.size(), RecentErrors::kEntriesMax);
  EXPECT_EQ(list[0].field, "field10");
  EXPECT_EQ(list[0].count, 2u);
  EXPECT_EQ(list[0].last_ns, 99);
  EXPECT_LE(list[0].message.size(), RecentErrors::kTextBytesMax + 3);
  EXPECT_EQ(list.back().field, "field3");
}

}  // namespace
}  // namespace kvmanager
