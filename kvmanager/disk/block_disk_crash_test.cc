// kill -9 of a process that writes to a disk: what it had reported durable is there, with equal bytes.
//
// The child is this program, started anew. It tells its parent through a descriptor what became durable, and what it is
// going to erase.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "kvmanager/base/child_process.h"
#include "kvmanager/disk/disk_testing.h"

namespace kvmanager::testing {
namespace {

constexpr int kOutFd = 3;
constexpr int kNumbers = 100000;  // of one child
#ifdef KVMANAGER_SANITIZED
constexpr int kRounds = 6;
#else
constexpr int kRounds = 25;
#endif

struct Said {
  char what;  // 'd': durable; 'e': is going to be erased; 'g': was erased durably
  int number;
};
void Say(char what, int number) {
  const Said said{what, number};
  KV_CHECK(write(kOutFd, &said, sizeof said) == sizeof said);
}
TestBlock BlockOf(int number) { return MakeTestBlock(1, static_cast<uint64_t>(number), 0, 8000); }

// Until it is killed.
int Child(const std::string& directory, int first, bool threads) {
  TestLoop loop;
  BlockDisk::Options options;
  options.directory = directory;
  options.bytes = uint64_t{4} << 30;  // nothing is evicted
  BlockDiskParts parts;
  parts.make_io = threads ? MakeThreadIo : MakeUringIo;
  TestDisk disk(&loop, options, parts);
  KV_CHECK(disk.Load());
  Say('s', 0);
  std::mt19937_64 random(first);
  std::vector<int> durable;
  int on_way = 0;
  for (int number = first; number < first + kNumbers; ++number) {
    auto block = std::make_shared<TestBlock>(BlockOf(number));
    ++on_way;
    disk->Write(block->record, "p", block->sources(), [&, block, number](bool ok) {
      KV_CHECK(ok);
      --on_way;
      durable.push_back(number);
      Say('d', number);
    });
    if (!durable.empty() && random() % 5 == 0) {
      const size_t at = random() % durable.size();
      const TestBlock gone = BlockOf(durable[at]);
      Say('e', durable[at]);
      disk->Erase(gone.record.cache, gone.record.name.key);
      disk->WhenErased([erased = durable[at]](const absl::Status& status) {
        KV_CHECK(status.ok());
        Say('g', erased);
      });
      durable.erase(durable.begin() + static_cast<std::ptrdiff_t>(at));
    }
    KV_CHECK(loop.RunUntil([&] { return on_way < 30; }));
  }
  return 1;
}

TEST(BlockDiskCrashTest, WhatWasReportedIsThere) {
  const uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  TestFolder folder;
  TestLoop loop;
  BlockDisk::Options options;
  options.directory = folder.path() + "/d";
  options.bytes = uint64_t{4} << 30;
  std::set<int> there, erased, gone;
  for (int round = 0; round < kRounds; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
    const std::string first = std::to_string(round * kNumbers), threads = round % 2 == 0 ? "t" : "u";
    absl::StatusOr<ChildProcess> child =
        ChildProcess::Start({"/proc/self/exe", "--crash-child", options.directory, first, threads}, {pipe_fds[1]});
    ASSERT_TRUE(child.ok()) << child.status();
    close(pipe_fds[1]);
    // So many reports, then the end, wherever it is.
    int reports = 1 + static_cast<int>(random() % 400);
    Said said;
    while (read(pipe_fds[0], &said, sizeof said) == sizeof said) {
      if (said.what == 'd') there.insert(said.number);
      if (said.what == 'e') {
        there.erase(said.number);
        erased.insert(said.number);
      }
      if (said.what == 'g') gone.insert(said.number);
      if (--reports == 0) kill(child->pid(), SIGKILL);
    }
    close(pipe_fds[0]);
    const int status = child->End();
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;

    TestDisk disk(&loop, options);
    ASSERT_TRUE(disk.Load()) << disk.status();
    disk->CheckInvariants();
    for (const int number : there) {
      const absl::Status read = disk.Read(BlockOf(number));
      ASSERT_TRUE(read.ok()) << "round " << round << ", " << number << ": " << read;
    }
    for (const int number : erased) {
      const absl::Status read = disk.Read(BlockOf(number));
      ASSERT_TRUE((read.ok() && !gone.contains(number)) || absl::IsNotFound(read))
          << "round " << round << ", " << number << ": " << read;
    }
  }
  std::printf("%zu blocks, %zu of %zu erased durably in %d rounds\n", there.size(), gone.size(), erased.size(),
              kRounds);
  EXPECT_FALSE(gone.empty());
}

}  // namespace

int RunChild(const std::string& directory, int first, bool threads) { return Child(directory, first, threads); }

}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--crash-child") {
    return kvmanager::testing::RunChild(argv[2], std::atoi(argv[3]), argv[4][0] == 't');
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
