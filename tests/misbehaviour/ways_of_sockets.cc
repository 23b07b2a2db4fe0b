// Sockets that say too little, too much, or nothing that a daemon understands.
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <thread>

#include "kvmanager/base/status.h"
#include "tests/misbehaviour/ways.h"
#include "transport/tcp/wire.h"

namespace kvmanager::testing {
namespace {

class Socket {
 public:
  Socket(Offence& offence, const std::string& address) : offence_(offence), fd_(ConnectSocket(address)) {
    ++offence.tally.calls;
    ++(fd_ < 0 ? offence.tally.refused : offence.tally.served);
    if (fd_ >= 0) fcntl(fd_, F_SETFL, O_NONBLOCK);
  }
  Socket(Socket&& other) noexcept : offence_(other.offence_), fd_(std::exchange(other.fd_, -1)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  bool open() const { return fd_ >= 0; }
  /// What fits now.
  size_t Write(absl::string_view bytes) {
    const ssize_t n = fd_ < 0 ? -1 : send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN) End();
    return n < 0 ? 0 : size_t(n);
  }
  /// What has come, at most so much.
  size_t Read(size_t most = 65536) {
    static thread_local char bytes[65536];
    const ssize_t n = fd_ < 0 ? -1 : recv(fd_, bytes, std::min(most, sizeof bytes), MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN)) End();
    return n < 0 ? 0 : size_t(n);
  }

 private:
  void End() {
    if (fd_ < 0) return;
    ++offence_.tally.ended;
    close(std::exchange(fd_, -1));
  }
  Offence& offence_;
  int fd_;
};

std::string Hello() {
  std::string bytes;
  const auto append = [&](capnp::MallocMessageBuilder& message) {
    const auto words = capnp::messageToFlatArray(message);
    bytes.append(words.asChars().begin(), words.asChars().size());
  };
  capnp::MallocMessageBuilder bootstrap, call;
  bootstrap.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  append(bootstrap);
  auto hello = call.initRoot<capnp::rpc::Message>().initCall();
  hello.setQuestionId(1);
  hello.initTarget().initPromisedAnswer().setQuestionId(0);
  hello.setInterfaceId(capnp::typeId<api::Daemon>());
  hello.setMethodId(0);
  hello.initParams().getContent().initAs<api::Daemon::HelloParams>().initRequest().setApiMajor(api::API_MAJOR);
  append(call);
  return bytes;
}

std::string HeaderOf(uint32_t bytes) {
  const uint32_t header[2] = {0, bytes / 8};
  return std::string(reinterpret_cast<const char*>(header), sizeof header);
}

void Strangers(Offence& offence) {
  const std::string hello = tcp::EncodeHello({});
  const std::string probe = tcp::EncodeEmpty(tcp::FrameType::kProbe), ping = tcp::EncodeEmpty(tcp::FrameType::kPing);
  std::string probes = hello;
  for (int i = 0; i < 1000; ++i) probes += i % 2 == 0 ? probe : ping;
  std::vector<Socket> silent;
  for (int i = 0; i < 500; ++i) {
    silent.emplace_back(offence, offence.peer);
    if (i % 2 == 0) silent.back().Write(hello);
    Socket prober(offence, offence.peer), babbler(offence, offence.peer);
    prober.Write(probes);
    babbler.Write(hello + std::string(4096, '\xff'));
    prober.Read();
    babbler.Read();
  }
  usleep(200 * 1000);
}

void PingsOfPeers(Offence& offence) {
  const std::string ping = tcp::EncodeEmpty(tcp::FrameType::kPing);
  std::string pings;
  for (int i = 0; i < 4096; ++i) pings += ping;
  std::vector<Socket> sockets;
  for (int i = 0; i < 32; ++i) {
    sockets.emplace_back(offence, offence.peer);
    sockets.back().Write(tcp::EncodeHello({}));
  }
  for (bool any = true; any;) {
    any = false;
    for (Socket& socket : sockets) {
      socket.Write(pings);
      socket.Read();
      any |= socket.open();
    }
    usleep(1000);
  }
}

void UnfinishedMessages(Offence& offence) {
  constexpr size_t kBytes = 30 << 20;
  const std::string some(1 << 20, '\0');
  std::vector<Socket> sockets;
  std::vector<size_t> sent;
  for (int i = 0; i < 100; ++i) {
    sockets.emplace_back(offence, offence.listen);
    sockets.back().Write(Hello() + HeaderOf(kBytes));
    sent.push_back(0);
  }
  for (bool any = true; any;) {
    any = false;
    for (size_t i = 0; i < sockets.size(); ++i) {
      sockets[i].Read();
      if (sent[i] + some.size() < kBytes) sent[i] += sockets[i].Write(some);
      any |= sockets[i].open();
    }
    usleep(2000);
  }
}

void Connections(Offence& offence) {
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<Socket> sockets;
  for (int i = 0; i < 5000; ++i) {
    sockets.emplace_back(offence, offence.listen);
    if (i % 3 == 0) sockets.back().Write(Hello());
    if (!sockets.back().open()) break;
  }
  usleep(500 * 1000);
}

void Malformed(Offence& offence) {
  const std::string garbage(64, '\xff');
  for (int i = 0; i < 1000; ++i) {
    Socket socket(offence, offence.listen);
    socket.Write(garbage);
    socket.Read();
  }
}

void Silent(Offence& offence) {
  std::vector<Socket> sockets;
  for (int i = 0; i < 900; ++i) {
    sockets.emplace_back(offence, offence.listen);
    if (i % 2 == 0) sockets.back().Write(absl::string_view("\0\0\0\0\4", 5));  // of a header of 8
  }
  for (int i = 0; i < 200; ++i) {
    for (Socket& socket : sockets) socket.Read();
    usleep(10000);
  }
}

// Takes a byte a second of what the daemon answers.
void SlowReader(Offence& offence) {
  const TempDir directory;
  const std::string path = absl::StrCat(directory.path(), "/relay");
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  path.copy(at.sun_path, sizeof at.sun_path - 1);
  KV_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0 && listen(listener, 1) == 0);
  std::atomic<bool> slow{false}, stop{false};
  std::thread relay([&] {
    const int down = accept(listener, nullptr, nullptr), up = ConnectSocket(offence.listen);
    std::vector<char> bytes(65536);
    for (int turn = 0; !stop; ++turn) {
      // Requests pass as they come, answers slowly.
      pollfd waits[2] = {{down, POLLIN, 0}, {up, short(slow ? 0 : POLLIN), 0}};
      poll(waits, 2, 10);
      if (waits[0].revents != 0) {
        const ssize_t n = read(down, bytes.data(), bytes.size());
        if (n <= 0 || !WriteAll(up, {bytes.data(), size_t(n)})) break;
      }
      if (slow ? turn % 100 == 0 : waits[1].revents != 0) {
        const ssize_t n = recv(up, bytes.data(), slow ? 1 : bytes.size(), MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) break;
        if (n > 0 && !WriteAll(down, {bytes.data(), size_t(n)})) break;
      }
    }
    close(down);
    close(up);
  });
  try {
    Offender a(offence, "unix:" + path);
    auto cache = a.OpenCache(OneLayer());
    const Offender::Made made = a.Create(cache);
    a.Append(cache, made.id, 0, 4096);
    slow = true;
    for (int i = 0; i < 500; ++i) {
      auto request = cache.readRequest();
      auto entry = request.initRequest().initEntries(1)[0];
      entry.setSequenceId(made.id);
      entry.setTokens(4096);
      a.Begin(kj::mv(request));
    }
    a.Room(1);
  } catch (const kj::Exception&) {
    ++offence.tally.ended;
  }
  stop = true;
  relay.join();
  close(listener);
}

void Scrapes(Offence& offence) {
  constexpr int kThreads = 8;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&offence] {
      for (int scrape = 0; scrape < 500; ++scrape) {
        ++offence.tally.calls;
        ++(HttpGet(offence.metrics, "/metrics").ok() ? offence.tally.served : offence.tally.refused);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

constexpr Way kWays[] = {
    {"strangers", "1,500 sockets on the peer port: silence, probes, noise", Strangers},
    {"pings_of_peers", "streams of PINGs on the peer port", PingsOfPeers},
    {"unfinished_messages", "100 messages of 30 MiB that do not end", UnfinishedMessages},
    {"connections", "5,000 connections of one process, a third of which say hello", Connections},
    {"malformed", "bytes that are no messages, a line of the log each", Malformed},
    {"silent", "900 connections that say nothing, or half a header", Silent},
    {"slow_reader", "500 reads of 2 MiB, taken by a byte a second", SlowReader},
    {"scrapes", "the metrics page scraped by 8 threads without a pause", Scrapes},
};

}  // namespace

absl::Span<const Way> WaysOfSockets() { return kWays; }

}  // namespace kvmanager::testing
