#include "kvmanager/memory/shared_semaphores.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

namespace kvmanager {
namespace {

using Word = SharedSemaphores::Word;
constexpr Word kAll[] = {Word::kReady, Word::kDone, Word::kReleased, Word::kEncoded};

int Memfd(size_t bytes, int seals) {
  const int fd = memfd_create("words", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(ftruncate(fd, static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(SharedSemaphores, BothSidesSeeTheSameWords) {
  auto own = SharedSemaphores::Create();
  ASSERT_TRUE(own.ok()) << own.status();
  auto other = SharedSemaphores::Import(dup((*own)->fd()));
  ASSERT_TRUE(other.ok()) << other.status();
  uint64_t value = 1;
  for (const Word word : kAll) {
    EXPECT_EQ((*other)->Load(word), 0u);
    (*own)->Store(word, ++value);
    EXPECT_EQ((*other)->Load(word), value);
    (*other)->Abandon(word);
    EXPECT_EQ((*own)->Load(word), SharedSemaphores::kAbandoned);
  }
  (*other)->Store(Word::kReleased, 77);
  EXPECT_EQ((*own)->released()->released.load(), 77u);
  (*own)->non_finite()[0] = 5;
  (*own)->non_finite()[SharedSemaphores::kNonFiniteWords - 1] = 6;
  (*own)->declined()[0] = 7;
  (*own)->declined()[SharedSemaphores::kDeclinedWords - 1] = 8;
  EXPECT_EQ((*other)->non_finite()[0], 5u);
  EXPECT_EQ((*other)->non_finite()[SharedSemaphores::kNonFiniteWords - 1], 6u);
  EXPECT_EQ((*other)->declined()[0], 7u);
  EXPECT_EQ((*other)->declined()[SharedSemaphores::kDeclinedWords - 1], 8u);
  EXPECT_EQ((*own)->Load(Word::kReady), SharedSemaphores::kAbandoned);
}

TEST(SharedSemaphores, WordsLieOnLinesOfTheirOwn) {
  auto words = SharedSemaphores::Create();
  ASSERT_TRUE(words.ok()) << words.status();
  const auto address = [&](Word word) { return reinterpret_cast<uintptr_t>((*words)->Address(word)); };
  for (size_t i = 0; i < std::size(kAll); ++i) {
    EXPECT_EQ(address(kAll[i]) - address(Word::kReady), 64 * i);
    EXPECT_EQ(address(kAll[i]) % 64, 0u);
  }
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*words)->non_finite()) - address(Word::kReady),
            SharedSemaphores::kNonFiniteOffset);
}

TEST(SharedSemaphores, AbandonedIsAheadOfEveryValueAsTheGpuCompares) {
  const auto passes = [](uint64_t word, uint64_t value) { return static_cast<int64_t>(word - value) >= 0; };
  for (const uint64_t value : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 40, SharedSemaphores::kValueMax}) {
    EXPECT_TRUE(passes(SharedSemaphores::kAbandoned, value)) << value;
  }
  EXPECT_FALSE(passes(UINT64_MAX, 5));
}

TEST(SharedSemaphores, TheMemoryCannotChangeSize) {
  auto words = SharedSemaphores::Create();
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_NE(ftruncate((*words)->fd(), 0), 0);
  EXPECT_NE(ftruncate((*words)->fd(), 1 << 20), 0);
}

TEST(SharedSemaphores, ImportRefusesWhatIsNoSealedMemfdOfThisSize) {
  const auto code = [](int fd) { return SharedSemaphores::Import(fd).status().code(); };
  EXPECT_EQ(code(Memfd(SharedSemaphores::kBytes, 0)), absl::StatusCode::kFailedPrecondition);  // could shrink: SIGBUS
  EXPECT_EQ(code(Memfd(SharedSemaphores::kBytes, F_SEAL_GROW)), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(Memfd(SharedSemaphores::kBytes - 1, F_SEAL_SHRINK)), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(open("/dev/zero", O_RDWR | O_CLOEXEC)), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(SharedSemaphores::Import(-1).ok());
  EXPECT_EQ(code(Memfd(SharedSemaphores::kBytes, F_SEAL_SHRINK | F_SEAL_WRITE)), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code(Memfd(SharedSemaphores::kBytes, F_SEAL_SHRINK)), absl::StatusCode::kOk);
}

TEST(SharedSemaphores, ANewOneIsNotPinned) {
  auto words = SharedSemaphores::Create();
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_FALSE((*words)->pinned());
  (*words)->Unpin();
  EXPECT_FALSE((*words)->pinned());
}

}  // namespace
}  // namespace kvmanager
