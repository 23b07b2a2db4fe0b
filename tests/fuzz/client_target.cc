// A hostile daemon: the client library asks a server of this process that answers with an input's bytes.
//
// An input is pieces: two bytes for its length, of which the highest bit says that a descriptor comes with it, and its
// bytes. Whenever the client has said something the next piece goes out; behind the last one, and to a client that
// waits for more, the stream ends.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/local_server.h"
#include "tests/fuzz/target_util.h"
#include "tests/harness.h"
#include "tests/model.h"

namespace kvmanager::fuzz {
namespace {

constexpr size_t kArenaBytes = 4096;
constexpr size_t kPieceBytesMax = 0x7fff;

struct Piece {
  std::string bytes;
  bool with_file = false;
};

std::vector<Piece> PiecesOf(absl::Span<const uint8_t> input) {
  std::vector<Piece> pieces;
  while (input.size() >= 2) {
    const size_t head = input[0] | size_t{input[1]} << 8, bytes = std::min(head & kPieceBytesMax, input.size() - 2);
    pieces.push_back({std::string(TextOf(input.subspan(2, bytes))), head > kPieceBytesMax});
    input.remove_prefix(2 + bytes);
  }
  return pieces;
}

std::string Input(const std::vector<Piece>& pieces) {
  std::string input;
  for (const Piece& piece : pieces) {
    const size_t head = piece.bytes.size() | (piece.with_file ? kPieceBytesMax + 1 : 0);
    input.push_back(static_cast<char>(head));
    input.push_back(static_cast<char>(head >> 8));
    input += piece.bytes;
  }
  return input;
}

int Listen(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  KV_CHECK(path.size() < sizeof address.sun_path);
  std::memcpy(address.sun_path, path.data(), path.size());
  KV_CHECK(fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && listen(fd, 16) == 0);
  return fd;
}

bool SendPiece(int fd, const Piece& piece, int file) {
  if (piece.bytes.empty()) return true;
  iovec bytes{const_cast<char*>(piece.bytes.data()), piece.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  if (piece.with_file) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &file, sizeof(int));
  }
  return sendmsg(fd, &message, MSG_NOSIGNAL) > 0;
}

/// Serves the pieces of one input after the other. Its thread is the server's side.
class Player {
 public:
  Player()
      : path_(absl::StrCat(directory_.path(), "/daemon.sock")),
        listener_(Listen(path_)),
        file_(memfd_create("arena", MFD_CLOEXEC)) {
    KV_CHECK(file_ >= 0 && ftruncate(file_, kArenaBytes) == 0);
  }
  ~Player() {
    close(listener_);
    close(file_);
  }
  std::string address() const { return absl::StrCat("unix:", path_); }

  /// Runs `client` while the pieces are played to it.
  template <typename Client>
  void Play(std::vector<Piece> pieces, Client client) {
    const int done = eventfd(0, EFD_CLOEXEC);
    KV_CHECK(done >= 0);
    std::thread server([&] { Serve(pieces, done); });
    client();
    const uint64_t one = 1;
    KV_CHECK(write(done, &one, sizeof one) == sizeof one);
    server.join();
    close(done);
  }

 private:
  static constexpr int kSilentMs = 30;  // a client that says nothing for so long waits for more

  void Serve(const std::vector<Piece>& pieces, int done) {
    std::vector<pollfd> watched = {{done, POLLIN, 0}, {listener_, POLLIN, 0}};
    size_t next = 0;
    for (;;) {
      const int ready = poll(watched.data(), watched.size(), watched.size() > 2 ? kSilentMs : -1);
      KV_CHECK(ready >= 0 || errno == EINTR);
      if (watched[0].revents != 0) break;
      if (ready == 0) {
        for (size_t i = 2; i < watched.size(); ++i) shutdown(watched[i].fd, SHUT_RDWR);
      }
      for (size_t i = 2; i < watched.size();) {
        if (watched[i].revents != 0 && !Answer(watched[i].fd, pieces, &next)) {
          close(watched[i].fd);
          watched.erase(watched.begin() + int(i));
        } else {
          ++i;
        }
      }
      if ((watched[1].revents & POLLIN) == 0) continue;
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) watched.push_back({fd, POLLIN, 0});
    }
    for (size_t i = 2; i < watched.size(); ++i) close(watched[i].fd);
    // A connection that was not accepted is another input's no more.
    while (poll(&watched[1], 1, 0) == 1) close(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
  }

  /// False: the client is gone.
  bool Answer(int fd, const std::vector<Piece>& pieces, size_t* next) const {
    char bytes[65536];
    if (recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) <= 0) return false;
    while (recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
    }
    if (*next == pieces.size()) return shutdown(fd, SHUT_WR) == 0;
    return SendPiece(fd, pieces[(*next)++], file_);
  }

  testing::TempDir directory_;
  const std::string path_;
  const int listener_, file_;
};

/// Stands between a client and a daemon, and keeps what the daemon said, cut where the client spoke.
class Recorder {
 public:
  explicit Recorder(std::string upstream)
      : upstream_(std::move(upstream)),
        path_(absl::StrCat(directory_.path(), "/daemon.sock")),
        listener_(Listen(path_)) {
    done_ = eventfd(0, EFD_CLOEXEC);
    thread_ = std::thread([this] { Serve(); });
  }
  std::string address() const { return absl::StrCat("unix:", path_); }
  std::vector<Piece> Take() {
    const uint64_t one = 1;
    KV_CHECK(write(done_, &one, sizeof one) == sizeof one);
    thread_.join();
    close(done_);
    close(listener_);
    return std::move(pieces_);
  }

 private:
  void Serve() {
    std::vector<pollfd> watched = {{done_, POLLIN, 0}, {listener_, POLLIN, 0}};
    for (;;) {
      KV_CHECK(poll(watched.data(), watched.size(), -1) >= 0);
      if (watched[0].revents != 0) break;
      // The client's side of a pair is the even one.
      for (size_t i = 2; i < watched.size(); ++i) {
        if (watched[i].revents != 0) Pass(watched[i].fd, watched[i ^ 1].fd, i % 2 == 0);
      }
      if (watched[1].revents == 0) continue;
      const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      const int daemon = testing::ConnectSocket(upstream_);
      KV_CHECK(client >= 0 && daemon >= 0);
      watched.push_back({client, POLLIN, 0});
      watched.push_back({daemon, POLLIN, 0});
    }
    for (size_t i = 2; i < watched.size(); ++i) close(watched[i].fd);
  }
  void Pass(int from, int to, bool of_client) {
    char bytes[kPieceBytesMax];
    iovec piece{bytes, sizeof bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t n = recvmsg(from, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n <= 0) {
      shutdown(to, SHUT_RDWR);
      return;
    }
    const bool with_file = message.msg_controllen > 0;
    piece.iov_len = static_cast<size_t>(n);
    KV_CHECK(sendmsg(to, &message, MSG_NOSIGNAL) == n);
    if (with_file) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
      close(fd);
    }
    if (of_client) {
      pieces_.emplace_back();
    } else if (!pieces_.empty() && pieces_.back().bytes.size() + size_t(n) <= kPieceBytesMax) {
      pieces_.back().bytes.append(bytes, size_t(n));
      pieces_.back().with_file |= with_file;
    }
  }

  const std::string upstream_;
  testing::TempDir directory_;
  const std::string path_;
  const int listener_;
  int done_ = -1;
  std::vector<Piece> pieces_;
  std::thread thread_;
};

template <typename T>
bool Ok(const absl::StatusOr<T>& result) {
  MustExplain(result.status());
  return result.ok();
}

/// Every call that a client may make, as far as the daemon's answers let it come. True: to the end.
bool Session(const std::string& address, const std::string& admin, bool administrate) {
  using namespace client;
  Client::Options options;
  options.connect_ms = 20;
  options.hello_ms = 500;
  options.deadline_ms = 500;
  options.admin_address = admin;
  const auto connected = Client::Connect(address, options);
  if (!Ok(connected)) return false;
  Client& client = **connected;
  if (administrate) {
    const bool known = Ok(client.Status()) && Ok(client.Caches()) && Ok(client.Sequences()) && Ok(client.Peers()) &&
                       Ok(client.Limits()) && Ok(client.Recompute()) && Ok(client.MetricsText());
    MustExplain(client.Drain(false));
    return Ok(client.Purge(Client::kAllCaches)) && known;
  }
  MustExplain(client.Ping());
  const CacheOptions shape = testing::SmallCache("raw", 0, 16, 16);
  const auto opened = client.OpenCache(shape);
  if (!Ok(opened)) return false;
  Cache& cache = **opened;
  const testing::Source source{1, testing::Kind::kNormal, shape};
  std::vector<BlockName> names;
  NameBlocks(cache.description().digest, source.TokenIds(0, 16), 16, &names);
  const absl::Span<const BlockName> prefix(names);
  if (Ok(cache.Match({&prefix, 1}))) MustExplain(cache.Refresh().status());
  const auto created = cache.CreateSequence(prefix);
  if (!Ok(created)) return false;
  Sequence& sequence = *created->sequence;
  MustExplain(testing::Load(cache, sequence.id(), source, 0, 20, 20));
  const auto asked = testing::Ask(cache, sequence.id(), source, 19);
  MustExplain(asked.status());
  const StepEntry entry{sequence.id(), 0, 18};
  std::vector<uint8_t> k(18 * shape.kv_heads * shape.head_dim * 2), v(k.size());
  const bool read =
      Ok(cache.Read({0, {&entry, 1}, TensorView::Inline(k.data(), k.size()), TensorView::Inline(v.data(), v.size())}));
  MustExplain(sequence.Publish(names).status());
  MustExplain(sequence.Fork().status());
  MustExplain(sequence.Crop(17));
  MustExplain(sequence.Info().status());
  MustExplain(sequence.HandOff("127.0.0.1:1", "blob", 100).status());
  MustExplain(cache.Claim("no ticket").status());
  MustExplain(cache.OutputFactors(0).status());
  const auto arena = client.CreateArena(kArenaBytes);
  if (!Ok(arena)) return false;
  (*arena)->data()[kArenaBytes - 1] = 1;
  return read && asked.ok();
}

class ClientTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    for (const bool administrate : {false, true}) {
      LocalServer server;
      Recorder recorder(administrate ? server.admin() : server.address());
      std::thread([&] {
        Session(administrate ? server.address() : recorder.address(), recorder.address(), administrate);
      }).join();
      seeds.push_back(std::string(1, administrate ? 'a' : 'b') + Input(recorder.Take()));
    }
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    const bool administrate = input[0] % 2 != 0;
    player_.Play(PiecesOf(input.subspan(1)), [&] { Session(player_.address(), player_.address(), administrate); });
  }

 private:
  Player player_;
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeClientTarget() { return std::make_unique<ClientTarget>(); }

}  // namespace kvmanager::fuzz
