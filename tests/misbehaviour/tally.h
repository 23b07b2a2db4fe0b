// What a misbehaving process counts, in memory that it shares with the test, so that nothing is lost when it is killed.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "kvmanager/base/status.h"

namespace kvmanager::testing {

struct Tally {
  std::atomic<uint64_t> calls;      // requests, connections or bytes that were sent, as the way counts
  std::atomic<uint64_t> served;     // answered as asked
  std::atomic<uint64_t> refused;    // answered with an error that says what is wrong
  std::atomic<uint64_t> ended;      // met the end of their connection
  std::atomic<uint64_t> dishonest;  // answered with UNKNOWN or INTERNAL, or without a message
  char refusal[200];                // the latest of each
  char lie[200];

  static void Say(char (&where)[200], const std::string& text) {
    std::strncpy(where, text.c_str(), sizeof where - 1);
    where[sizeof where - 1] = '\0';
  }

  /// Maps the file at `path`, made with zeros if it is not there. Stays mapped.
  static Tally& At(const std::string& path) {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    KV_CHECK(fd >= 0);
    KV_CHECK(ftruncate(fd, sizeof(Tally)) == 0);
    void* const at = mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    KV_CHECK(at != MAP_FAILED);
    close(fd);
    return *static_cast<Tally*>(at);
  }
};

}  // namespace kvmanager::testing
