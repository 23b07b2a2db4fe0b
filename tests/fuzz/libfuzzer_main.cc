// libFuzzer's entry points, for the target that the environment variable KVMANAGER_FUZZ_TARGET names, one of those of
// the macro KVMANAGER_FUZZ_TARGETS(). tools/fuzz builds and runs it (--config=fuzz: libFuzzer is clang's).
//
// With KVMANAGER_FUZZ_SEEDS=DIR it writes the target's seeds into that folder instead, a file each, and ends.
#include <openssl/crypto.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

constexpr uint64_t kRunsBetweenChecks = 1 << 16;

kvmanager::fuzz::FuzzTarget* target = nullptr;  // libFuzzer ends the process with it: it is never destroyed

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  using namespace kvmanager::fuzz;
  signal(SIGPIPE, SIG_IGN);
  // By itself OpenSSL ends with the process before a Check() that was to run first, if an input was the first to use
  // it.
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  const char* const name = std::getenv("KVMANAGER_FUZZ_TARGET");
  for (const NamedTarget& each : KVMANAGER_FUZZ_TARGETS()) {
    if (name != nullptr && std::strcmp(name, each.name) == 0) target = each.make().release();
  }
  if (target == nullptr) {
    std::fprintf(stderr, "KVMANAGER_FUZZ_TARGET is \"%s\", expected one of:", name == nullptr ? "" : name);
    for (const NamedTarget& each : KVMANAGER_FUZZ_TARGETS()) std::fprintf(stderr, " %s", each.name);
    std::fprintf(stderr, "\n");
    std::exit(2);
  }
  if (const char* const folder = std::getenv("KVMANAGER_FUZZ_SEEDS")) {
    int number = 0;
    for (const std::string& seed : target->Seeds()) {
      std::ofstream file(absl::StrCat(folder, "/seed-", number++), std::ios::binary);
      if (!(file << seed).flush()) {
        std::fprintf(stderr, "cannot write to %s\n", folder);
        std::exit(2);
      }
    }
    std::_Exit(0);
  }
  std::atexit([] { target->Check(); });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static uint64_t runs = 0;
  target->Run({data, size});
  if (++runs % kRunsBetweenChecks == 0) target->Check();
  return 0;
}
