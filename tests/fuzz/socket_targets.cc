// Byte streams into objects that need no daemon: messages on a socket, HTTP requests, certificates of TLS.
#include <dirent.h>
#include <fcntl.h>
#include <kj/async-unix.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/api/socket_stream.h"
#include "kvmanager/base/tls.h"
#include "kvmanager/base/tls_testing.h"
#include "monitoring/http_server.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"

namespace kvmanager::fuzz {
namespace {

using std::string_literals::operator""s;

size_t OpenDescriptors() {
  DIR* const folder = opendir("/proc/self/fd");
  KV_CHECK(folder != nullptr);
  size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

/// Eight bytes say how the rest is cut into pieces, and a ninth which pieces bring a descriptor.
class SocketStreamTarget final : public FuzzTarget {
 public:
  SocketStreamTarget() : scope_(loop_), file_(memfd_create("fuzz", MFD_CLOEXEC)) { KV_CHECK(file_ >= 0); }
  ~SocketStreamTarget() noexcept override { close(file_); }

  std::vector<std::string> Seeds() override {
    const std::string sizes = {3, 20, 1, 0, 7, 50, 120, 2};
    const auto words = [](std::vector<uint32_t> values) {
      return std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4);
    };
    const std::string one = words({0, 2, 1, 2, 3, 4}), two = words({1, 1, 2, 0, 1, 2, 3, 4, 5, 6});
    return {sizes + '\0' + one,
            sizes + '\x55' + one + two + one + words({0, 0}) + two,
            sizes + '\xff' + two + words({0, 300}) + std::string(2400, 'x') + one,
            sizes + '\1' + words({511}) + std::string(4 * 513, '\0'),
            sizes + '\0' + words({512}) + std::string(4 * 514, '\0'),
            sizes + '\0' + words({2, 0xffffffff, 0xffffffff, 0xffffffff}),
            sizes + '\0' + "\x16\x03\x01\x00\x05hello world"s};
  }

  void Run(absl::Span<const uint8_t> input) override {
    if (input.size() < kHeaderBytes) return;
    const size_t descriptors = ++runs_ % kRunsBetweenCounts == 0 ? OpenDescriptors() : 0;
    Read(input);
    if (descriptors != 0) KV_CHECK(OpenDescriptors() == descriptors);
  }

 private:
  static constexpr size_t kHeaderBytes = 9, kRunsBetweenCounts = 16;

  void Read(absl::Span<const uint8_t> input) {
    const absl::Span<const uint8_t> stream = input.subspan(kHeaderBytes);
    int pair[2];
    KV_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    kj::AutoCloseFd ours(pair[0]), theirs(pair[1]), write_side(fcntl(pair[1], F_DUPFD_CLOEXEC, 0));
    SocketStream reader(port_, theirs, write_side);
    size_t sent = 0, pieces = 0, at = 0;
    bool ended = false;
    const auto error = kj::runCatchingExceptions([&] {
      for (;;) {
        kj::AutoCloseFd space[1];
        auto reading = reader.tryReadMessage(kj::arrayPtr(space, 1), Limits(), nullptr);
        while (!reading.poll(scope_)) {
          if (sent < stream.size()) {
            const size_t bytes = std::min<size_t>(1 + 8 * input[pieces % 8], stream.size() - sent);
            const bool with_file = (input[8] >> (pieces % 8) & 1) != 0;
            sent += Send(ours, stream.subspan(sent, bytes), with_file);
            ++pieces;
          } else if (!ended) {
            ended = true;
            KV_CHECK(shutdown(ours, SHUT_WR) == 0);
          }
        }
        auto message = reading.wait(scope_);
        KJ_IF_MAYBE (got, message) {
          KV_CHECK(got->fds.size() <= 1);
          at += CheckMessage(*got->reader, stream.subspan(at));
        } else {
          KV_CHECK(at == stream.size());  // it ends between messages
          break;
        }
      }
    });
    KJ_IF_MAYBE (thrown, error) {
      KV_CHECK(thrown->getDescription().size() > 0);
      KV_CHECK(!WholeMessage(stream.subspan(at)));
    }
  }

  static capnp::ReaderOptions Limits() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 4096;
    return options;
  }
  static uint64_t Get32(absl::Span<const uint8_t> from, size_t at) {
    uint32_t value;
    std::memcpy(&value, from.data() + at, sizeof value);
    return value;
  }
  /// Of the message that `from` begins with: bytes of its table, then of its segments; nothing where it is cut or
  /// wrong.
  static std::optional<std::pair<size_t, size_t>> WholeMessage(absl::Span<const uint8_t> from) {
    if (from.size() < 4) return std::nullopt;
    const uint64_t segments = Get32(from, 0) + 1, table = (segments / 2 + 1) * 8;
    if (segments > SocketStream::kSegmentsMax || from.size() < table) return std::nullopt;
    uint64_t words = 0;
    for (uint64_t i = 0; i < segments; ++i) words += Get32(from, 4 + 4 * i);
    if (words > Limits().traversalLimitInWords || from.size() - table < 8 * words) return std::nullopt;
    return std::make_pair(table, 8 * words);
  }
  /// Returns the message's bytes in the stream.
  static size_t CheckMessage(capnp::MessageReader& reader, absl::Span<const uint8_t> from) {
    const auto whole = WholeMessage(from);
    KV_CHECK(whole.has_value());
    absl::Span<const uint8_t> rest = from.subspan(whole->first, whole->second);
    for (uint64_t i = 0; i <= Get32(from, 0); ++i) {
      const size_t bytes = 8 * Get32(from, 4 + 4 * i);
      const auto segment = reader.getSegment(static_cast<uint>(i)).asBytes();
      KV_CHECK(segment.size() == bytes && std::equal(segment.begin(), segment.end(), rest.begin()));
      rest.remove_prefix(bytes);
    }
    return whole->first + whole->second;
  }
  size_t Send(int fd, absl::Span<const uint8_t> bytes, bool with_file) const {
    iovec piece{const_cast<uint8_t*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (with_file) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(head), &file_, sizeof(int));
    }
    const ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
    KV_CHECK(n > 0 || errno == EAGAIN);
    return n > 0 ? static_cast<size_t>(n) : 0;
  }

  kj::UnixEventPort port_;
  kj::EventLoop loop_{port_};
  kj::WaitScope scope_;
  const int file_;
  uint64_t runs_ = 0;
};

class HttpTarget final : public FuzzTarget {
 public:
  HttpTarget() {
    HttpServer::Options options;
    options.listen = "127.0.0.1:0";
    options.answers_host = [](absl::string_view host) { return IsOwnHost(host, {}); };
    options.handler = [](absl::string_view path) {
      KV_CHECK(path.find('?') == path.npos);
      if (path != "/metrics") return HttpAnswer{};
      return HttpAnswer{200, "text/plain", std::make_shared<const std::string>("a 1\n")};
    };
    auto server = HttpServer::Start(std::move(options));
    KV_CHECK(server.ok());
    server_ = std::move(*server);
    address_ = absl::StrCat("tcp:127.0.0.1:", server_->port());
  }
  std::vector<std::string> Seeds() override {
    return {"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "GET /metrics?x=1 HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n",
            "HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /metrics HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
            "GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\nUpgrade: websocket\r\nExpect: 100-continue\r\n\r\n"};
  }
  void Run(absl::Span<const uint8_t> input) override { RunStream(address_, input); }

 private:
  std::unique_ptr<HttpServer> server_;
  std::string address_;
};

/// A certificate that an authority signed without looking: its first byte says who shows it and how long its common
/// name is, which follows; the rest is what subjectAltName holds.
class CertificateTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    const auto seed = [](bool dials, const std::string& name, const std::string& der) {
      return std::string(1, char(name.size() * 2 + dials)) + name + der;
    };
    std::vector<std::string> seeds;
    for (const bool dials : {false, true}) {
      seeds.push_back(seed(dials, "name", ""));
      seeds.push_back(seed(dials, "", "\x30\x06\x87\x04\x7f\0\0\1"s));                         // an IPv4 address
      seeds.push_back(seed(dials, "a", "\x30\x12\x87\x10\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1"s));  // IPv6
      seeds.push_back(seed(dials, "a",
                           "\x30\x0c\x82\x01"
                           "a\x86\x07"
                           "uri:a/b"s));                                               // DNS and URI
      seeds.push_back(seed(dials, "a", "\x30\x08\xa4\x06\x30\x04\x31\x02\x30\x00"s));  // a directory
    }
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    const bool dials = input[0] % 2 != 0;
    const size_t name_bytes = std::min<size_t>(input[0] / 2 % 64, input.size() - 1);
    std::string name(TextOf(input.subspan(1, name_bytes)));
    // OpenSSL writes no such text.
    for (char& c : name) c = static_cast<char>(c & 0x7f);
    const absl::string_view names = TextOf(input.subspan(1 + name_bytes));
    const testing::PemPair shown =
        authority_.Sign({name, {}, "serverAuth,clientAuth", -3600, 3600, std::string(names)});
    const std::string& own = authority_.certificate();
    const auto accepts = testing::AcceptContext(dials ? daemon_ : shown, own, dials);
    const auto connects = testing::DialContext(dials ? shown : testing::PemPair(), own);
    int fds[2];
    KV_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    {
      TlsLink server(accepts, fds[0]), client(connects, fds[1], "localhost");
      TlsLink::Step of_server = TlsLink::Step::kWantRead, of_client = TlsLink::Step::kWantRead;
      for (int i = 0; i < 20 && of_server != TlsLink::Step::kFailed && of_client != TlsLink::Step::kFailed; ++i) {
        if (of_client != TlsLink::Step::kDone) of_client = client.Handshake();
        if (of_server != TlsLink::Step::kDone) of_server = server.Handshake();
      }
      if (of_client == TlsLink::Step::kFailed) KV_CHECK(!client.failure().message().empty());
      if (of_server == TlsLink::Step::kFailed) KV_CHECK(!server.failure().message().empty());
      if (of_server == TlsLink::Step::kDone && dials) {
        const std::string& known = server.peer_name();
        KV_CHECK(!known.empty() && known.size() <= TlsContext::kNameBytesMax);
        for (const unsigned char c : known) KV_CHECK(c >= ' ' && c != 127);
      }
    }
    for (const int fd : fds) close(fd);
  }

 private:
  testing::TestAuthority authority_;
  const testing::PemPair daemon_ = authority_.Daemon();
};

/// Files of TLS: the first byte chooses certificate, key or authorities; the others are as they should be.
class TlsFilesTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    return {"a" + daemon_.certificate, "b" + daemon_.key, "c" + authority_.certificate(),
            "a" + daemon_.certificate + authority_.certificate(),
            "c# a comment\n" + authority_.certificate() + daemon_.certificate};
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    TlsContext::Options options;
    options.accepts = input[0] / 3 % 2 == 0;
    options.certificate = {"certificate", daemon_.certificate};
    options.key = {"key", daemon_.key};
    options.authorities = {"authorities", authority_.certificate()};
    TlsContext::Pem* const files[] = {&options.key, &options.authorities, &options.certificate};  // of 'b', 'c', 'a'
    files[(input[0] + 1) % 3]->text = std::string(TextOf(input.subspan(1)));
    const auto made = TlsContext::Make(std::move(options));
    MustExplain(made.status());
    if (!made.ok()) return;
    KV_CHECK((*made)->options().key.text.empty());
    for (const int64_t now : {int64_t{0}, int64_t{1} << 31, int64_t{1} << 40}) (void)(*made)->DateWarning(now);
  }

 private:
  testing::TestAuthority authority_;
  const testing::PemPair daemon_ = authority_.Daemon();
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeSocketStreamTarget() { return std::make_unique<SocketStreamTarget>(); }
std::unique_ptr<FuzzTarget> MakeHttpTarget() { return std::make_unique<HttpTarget>(); }
std::unique_ptr<FuzzTarget> MakeCertificateTarget() { return std::make_unique<CertificateTarget>(); }
std::unique_ptr<FuzzTarget> MakeTlsFilesTarget() { return std::make_unique<TlsFilesTarget>(); }

}  // namespace kvmanager::fuzz
