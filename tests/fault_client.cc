// A client that fault_test kills: it takes leases, says so, and waits for its end (or works until then).
//
//   fault_client ADDRESS hold|fork|raw-fork|work
//
// hold: two sequences, an arena and one blocked call's worth of pages. fork: the same, with a child by fork() that
// lives on. raw-fork: a child made without the C library's handlers, so that it still holds the socket. work: appends
// and attends without end. Prints "ready", or "ready CHILD" with the child's process id.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "client/client.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

constexpr int kChildLifeS = 120;  // it outlives the test that forgot it by no more

int Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "fault_client: %s: %s\n", what, status.ToString().c_str());
  return 1;
}

[[noreturn]] void WaitForTheEnd() {
  for (;;) pause();
}

int Run(const std::string& address, const std::string& mode) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(address, {});
  if (!client.ok()) return Fail("connect", client.status());
  const client::CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 1);
  absl::StatusOr<std::unique_ptr<client::Cache>> cache = (*client)->OpenCache(options);
  if (!cache.ok()) return Fail("open cache", cache.status());
  absl::StatusOr<std::unique_ptr<client::Arena>> arena = (*client)->CreateArena(1 << 20);
  if (!arena.ok()) return Fail("arena", arena.status());
  const Source source{static_cast<uint64_t>(getpid()), Kind::kNormal, options};
  absl::StatusOr<client::CreatedSequence> a = (*cache)->CreateSequence(), b = (*cache)->CreateSequence();
  if (!a.ok() || !b.ok()) return Fail("create", a.status());
  if (absl::Status s = Load(**cache, a->sequence->id(), source, 0, 300, 100); !s.ok()) return Fail("append", s);
  if (mode == "work") {
    std::printf("ready\n");
    std::fflush(stdout);
    for (uint64_t round = 0;; ++round) {
      absl::StatusOr<client::CreatedSequence> c = (*cache)->CreateSequence();
      if (!c.ok()) return Fail("create", c.status());
      absl::StatusOr<std::vector<float>> out = Feed(**cache, c->sequence->id(), source, 0, 500, 77);
      if (!out.ok()) return Fail("step", out.status());
    }
  }
  pid_t child = 0;
  if (mode == "fork") child = fork();
  if (mode == "raw-fork") child = static_cast<pid_t>(syscall(SYS_fork));
  if (child == 0 && mode != "hold") {
    alarm(kChildLifeS);
    WaitForTheEnd();
  }
  std::printf("ready %d\n", static_cast<int>(child));
  std::fflush(stdout);
  WaitForTheEnd();
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: fault_client ADDRESS hold|fork|raw-fork|work\n");
    return 2;
  }
  return kvmanager::testing::Run(argv[1], argv[2]);
}
