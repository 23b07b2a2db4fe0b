// Runs every target on its seeds, on every file of its corpus (tests/fuzz/corpus/NAME), and then for a bounded time on
// mutations of both; the mutations are the same in every run.
//
//   fuzz_smoke_test [--seconds=N] [--target=NAME [--input=FILE]]
//
// Prints executions per target. A crash leaves the input in a file (crash-NAME in $TEST_UNDECLARED_OUTPUTS_DIR or
// /tmp); --input runs that file alone.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/harness.h"

namespace kvmanager::fuzz {
namespace {

#ifdef KVMANAGER_SANITIZED
constexpr int kSecondsDefault = 24;
#else
constexpr int kSecondsDefault = 64;
#endif
constexpr unsigned kHangS = 120;  // of one input
constexpr size_t kInputBytesMax = 256 << 10;

// What a signal handler may touch.
const char* current_name = "";
const char* current_bytes = nullptr;
size_t current_size = 0;
char crash_path[512];

void WriteInput(int number) {
  const int fd = open(crash_path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (fd >= 0 && write(fd, current_bytes, current_size) >= 0) close(fd);
  const char* const said[] = {"fuzz_smoke_test: ",
                              number == SIGALRM ? "hang" : "crash",
                              " in ",
                              current_name,
                              ", the input is in ",
                              crash_path,
                              "\n"};
  for (const char* const text : said) (void)!write(STDERR_FILENO, text, strlen(text));
  signal(number, SIG_DFL);
  signal(SIGABRT, SIG_DFL);
  if (number == SIGALRM) abort();
  raise(number);
}

class Mutator {
 public:
  explicit Mutator(std::vector<std::string> seeds) : seeds_(std::move(seeds)), random_(20240607) {
    if (seeds_.empty()) seeds_.push_back("");
  }

  std::string Next() {
    std::string input = seeds_[Below(seeds_.size())];
    for (size_t rounds = 1 + Below(5); rounds > 0; --rounds) Mutate(&input);
    if (input.size() > kInputBytesMax) input.resize(kInputBytesMax);
    return input;
  }

 private:
  uint64_t Below(uint64_t n) { return n == 0 ? 0 : random_() % n; }

  void Mutate(std::string* s) {
    static constexpr uint64_t kEdges[] = {
        0,       1,          2,          0x7f,       0x80,        0xff,  0x7fff,     0xffff,
        0x10000, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, ~0ull, 1ull << 62, 0x7ff0000000000000};
    const size_t at = Below(s->size());
    switch (Below(11)) {
      case 0:
        if (!s->empty()) (*s)[at] ^= char(1 << Below(8));
        break;
      case 1:
        if (!s->empty()) (*s)[at] = char(random_());
        break;
      case 2:
      case 3: {  // an aligned word of 1, 2, 4 or 8 bytes becomes an edge value
        const size_t width = size_t{1} << Below(4);
        if (s->size() < width) break;
        const size_t to = Below(s->size() / width) * width;
        const uint64_t value = kEdges[Below(std::size(kEdges))] + Below(3) - 1;
        memcpy(s->data() + to, &value, width);
        break;
      }
      case 4: {  // a small change to an aligned 32-bit word
        if (s->size() < 4) break;
        const size_t to = Below(s->size() / 4) * 4;
        uint32_t value;
        memcpy(&value, s->data() + to, 4);
        value += uint32_t(Below(17)) - 8;
        memcpy(s->data() + to, &value, 4);
        break;
      }
      case 5:  // removed
        s->erase(at, 1 + Below(std::min<size_t>(64, s->size())));
        break;
      case 6:  // repeated
        s->insert(at, s->substr(at, 1 + Below(64)));
        break;
      case 7:
        s->resize(at);
        break;
      case 8: {  // a piece of another seed, over or between
        const std::string& other = seeds_[Below(seeds_.size())];
        const size_t from = Below(other.size());
        const std::string piece = other.substr(from, 1 + Below(256));
        if (Below(2) == 0) {
          s->insert(at, piece);
        } else if (!s->empty()) {
          s->replace(at, std::min(piece.size(), s->size() - at), piece);
        }
        break;
      }
      case 9: {  // two aligned words change places
        if (s->size() < 16) break;
        const size_t a = Below(s->size() / 8) * 8, b = Below(s->size() / 8) * 8;
        char word[8];
        memcpy(word, s->data() + a, 8);
        memmove(s->data() + a, s->data() + b, 8);
        memcpy(s->data() + b, word, 8);
        break;
      }
      case 10: {  // noise
        std::string noise(1 + Below(32), 0);
        for (char& c : noise) c = char(random_());
        s->insert(at, noise);
        break;
      }
    }
  }

  std::vector<std::string> seeds_;
  std::mt19937_64 random_;
};

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

/// In the order of their names, so that mutations are the same in every run.
std::vector<std::string> Corpus(const std::string& name) {
  std::vector<std::string> paths, inputs;
  std::error_code none;
  const std::string folder = testing::DataPath(absl::StrCat("tests/fuzz/corpus/", name));
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) inputs.push_back(ReadFile(path));
  return inputs;
}

void RunTarget(const NamedTarget& named, double seconds, const std::string& file) {
  const char* const outputs = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR");
  std::snprintf(crash_path, sizeof crash_path, "%s/crash-%s", outputs != nullptr ? outputs : "/tmp", named.name);
  current_name = named.name;
  std::unique_ptr<FuzzTarget> target = named.make();
  std::vector<std::string> inputs = target->Seeds();
  const size_t seeds = inputs.size();
  for (std::string& input : Corpus(named.name)) inputs.push_back(std::move(input));
  Mutator mutator(inputs);
  const auto start = std::chrono::steady_clock::now();
  uint64_t executions = 0;
  double elapsed = 0;
  auto run = [&](const std::string& input) {
    current_bytes = input.data();
    current_size = input.size();
    alarm(kHangS);
    // A copy of exact size, so that a read past the end is a fault that AddressSanitizer sees.
    const std::vector<uint8_t> exact(input.begin(), input.end());
    target->Run(exact);
    ++executions;
  };
  if (!file.empty()) {
    run(ReadFile(file));
    std::printf("%s: %zu bytes of %s, no harm done\n", named.name, current_size, file.c_str());
    return;
  }
  for (const std::string& input : inputs) run(input);
  while (elapsed < seconds) {
    run(mutator.Next());
    elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  current_size = 0;
  alarm(kHangS);
  target->Check();
  alarm(0);
  std::printf("%-15s %zu seeds, %zu of the corpus, %llu executions in %.1f s\n", named.name, seeds,
              inputs.size() - seeds, static_cast<unsigned long long>(executions), elapsed);
  std::fflush(stdout);
}

}  // namespace
}  // namespace kvmanager::fuzz

int main(int argc, char** argv) {
  using namespace kvmanager::fuzz;
  int seconds = kSecondsDefault;
  std::string only, file;
  for (int i = 1; i < argc; ++i) {
    absl::string_view flag = argv[i];
    if (absl::ConsumePrefix(&flag, "--seconds=") && absl::SimpleAtoi(flag, &seconds)) continue;
    if (absl::ConsumePrefix(&flag, "--target=")) {
      only = std::string(flag);
      continue;
    }
    if (absl::ConsumePrefix(&flag, "--input=")) {
      file = std::string(flag);
      continue;
    }
    std::fprintf(stderr, "usage: fuzz_smoke_test [--seconds=N] [--target=NAME [--input=FILE]]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) signal(number, WriteInput);
  std::vector<NamedTarget> targets;
  for (const absl::Span<const NamedTarget> group : {ParserTargets(), CodecTargets(), DaemonTargets()}) {
    for (const NamedTarget& named : group) {
      if (only.empty() || only == named.name) targets.push_back(named);
    }
  }
  if (targets.empty()) {
    std::fprintf(stderr, "no target \"%s\"\n", only.c_str());
    return 2;
  }
  for (const NamedTarget& named : targets) RunTarget(named, double(seconds) / double(targets.size()), file);
  return 0;
}
