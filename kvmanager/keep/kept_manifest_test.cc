#include "kvmanager/keep/kept_manifest.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

constexpr KeptManifest::Pool kPool{.bytes = 64 << 20, .slab_bytes = 2 << 20};

Digest DigestOf(uint64_t number) { return Sha256({reinterpret_cast<const uint8_t*>(&number), sizeof number}); }

KeptBlock MakeBlock(uint64_t number) {
  std::mt19937_64 random(number);
  KeptBlock block;
  block.cache = DigestOf(number % 3);
  block.name = {DigestOf(2 * number), DigestOf(2 * number + 1)};
  block.index = static_cast<uint32_t>(number % 100);
  block.tokens = 64;
  block.tenant.assign(random() % 40, static_cast<char>('a' + number % 3));
  block.pages.resize(1 + random() % 40);
  for (KeptPage& page : block.pages) {
    page.place = {static_cast<uint32_t>(random()), static_cast<uint32_t>(random() % 3), 64 * (1 + random() % 1000)};
    page.raw = random() % 2 == 0;
    page.checksum = random();
  }
  return block;
}

void ExpectEqual(const KeptBlock& is, const KeptBlock& expected) {
  EXPECT_EQ(is.cache, expected.cache);
  EXPECT_EQ(is.name.key, expected.name.key);
  EXPECT_EQ(is.name.tokens, expected.name.tokens);
  EXPECT_EQ(std::tie(is.index, is.tokens, is.tenant), std::tie(expected.index, expected.tokens, expected.tenant));
  ASSERT_EQ(is.pages.size(), expected.pages.size());
  for (size_t i = 0; i < is.pages.size(); ++i) {
    EXPECT_EQ(is.pages[i].place, expected.pages[i].place);
    EXPECT_EQ(is.pages[i].raw, expected.pages[i].raw);
    EXPECT_EQ(is.pages[i].checksum, expected.pages[i].checksum);
  }
}

// The manifest of a process that goes, and of the next one.
class KeptManifestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = KeptManifest::Create(kPool);
    ASSERT_TRUE(made.ok()) << made.status();
    manifest_ = *std::move(made);
    fd_ = dup(manifest_->keeper_fd());
  }
  ~KeptManifestTest() override { close(fd_); }
  // What the next process finds.
  std::map<uint64_t, KeptBlock> Restart() {
    manifest_ = nullptr;
    auto taken = KeptManifest::TakeOver(dup(fd_), kPool);
    EXPECT_TRUE(taken.ok()) << taken.status();
    manifest_ = *std::move(taken);
    std::map<uint64_t, KeptBlock> found;
    manifest_->Recover([&](uint64_t entry, const KeptBlock& block) { found.emplace(entry, block); });
    return found;
  }
  // The bytes of the memory, as a kill or a stray write would leave them.
  void Patch(uint64_t at, const void* bytes, size_t size) {
    ASSERT_EQ(pwrite(fd_, bytes, size, static_cast<off_t>(at)), static_cast<ssize_t>(size));
  }

  std::unique_ptr<KeptManifest> manifest_;
  int fd_ = -1;
};

TEST_F(KeptManifestTest, FindsWhatWasWritten) {
  const uint64_t first = manifest_->Write(MakeBlock(1)), second = manifest_->Write(MakeBlock(2)),
                 third = manifest_->Write(MakeBlock(3));
  ASSERT_TRUE(first != 0 && second != 0 && third != 0);
  manifest_->Erase(second);
  auto found = Restart();
  ASSERT_EQ(found.size(), 2u);
  ExpectEqual(found.at(first), MakeBlock(1));
  ExpectEqual(found.at(third), MakeBlock(3));
  ExpectEqual(manifest_->Read(third), MakeBlock(3));
  // And goes on.
  EXPECT_EQ(manifest_->Write(MakeBlock(2)), second);
  manifest_->Erase(first);
  found = Restart();
  ASSERT_EQ(found.size(), 2u);
  ExpectEqual(found.at(second), MakeBlock(2));
}

TEST_F(KeptManifestTest, IsOfOnePoolAndOneFormat) {
  manifest_->Write(MakeBlock(1));
  for (const KeptManifest::Pool& other :
       {KeptManifest::Pool{kPool.bytes, 4 << 20}, {128 << 20, 2 << 20}, {kPool.bytes - (2 << 20), 2 << 20}}) {
    EXPECT_EQ(KeptManifest::TakeOver(dup(fd_), other).status().code(), absl::StatusCode::kFailedPrecondition);
  }
  for (const uint64_t at : {0, 7, 8, 16, 24, 32, 40, 56, 63}) {
    uint8_t byte;
    ASSERT_EQ(pread(fd_, &byte, 1, static_cast<off_t>(at)), 1);
    const uint8_t changed = byte ^ 1;
    Patch(at, &changed, 1);
    EXPECT_FALSE(KeptManifest::TakeOver(dup(fd_), kPool).ok()) << at;
    Patch(at, &byte, 1);
  }
  EXPECT_EQ(Restart().size(), 1u);
}

TEST_F(KeptManifestTest, AnEntryThatIsNotWholeIsRoom) {
  const uint64_t first = manifest_->Write(MakeBlock(1)), second = manifest_->Write(MakeBlock(2));
  for (uint64_t at = first; at < second; ++at) {
    uint8_t byte;
    ASSERT_EQ(pread(fd_, &byte, 1, static_cast<off_t>(at)), 1);
    const uint8_t changed = byte ^ static_cast<uint8_t>(1 << at % 8);
    Patch(at, &changed, 1);
    const auto found = Restart();
    // Behind its last byte nothing is of it.
    const bool is_there = found.contains(first);
    ASSERT_EQ(found.size(), is_there ? 2u : 1u) << at;
    if (is_there) ExpectEqual(found.at(first), MakeBlock(1));
    Patch(at, &byte, 1);
  }
  const uint64_t zero = 0;
  Patch(first, &zero, sizeof zero);
  EXPECT_EQ(Restart().size(), 1u);
  EXPECT_EQ(manifest_->Write(MakeBlock(1)), first);
}

TEST_F(KeptManifestTest, RefusesWhatIsOutOfRange) {
  KeptBlock block = MakeBlock(1);
  block.pages.clear();
  EXPECT_EQ(manifest_->Write(block), 0u);
  block.pages.resize(KeptManifest::kPagesMax + 1);
  EXPECT_EQ(manifest_->Write(block), 0u);
  block.pages.resize(KeptManifest::kPagesMax);
  EXPECT_NE(manifest_->Write(block), 0u);
  block.tenant.assign(KeptManifest::kTenantBytesMax + 1, 'x');
  EXPECT_EQ(manifest_->Write(block), 0u);
}

// A client that chooses the bytes of a name makes no entry of them.
TEST_F(KeptManifestTest, BytesWithinAnEntryAreNoEntry) {
  KeptBlock block = MakeBlock(1);
  block.pages.resize(8);
  const uint64_t entry = manifest_->Write(block);
  std::vector<uint8_t> bytes(4096);
  // The whole entry, as another process has written it with the seed of its own, behind itself.
  const auto other = KeptManifest::Create(kPool);
  const uint64_t foreign = (*other)->Write(block);
  ASSERT_EQ(pread((*other)->keeper_fd(), bytes.data(), bytes.size(), static_cast<off_t>(foreign)),
            static_cast<ssize_t>(bytes.size()));
  Patch(entry + 4096, bytes.data(), bytes.size());
  EXPECT_EQ(Restart().size(), 1u);
}

TEST_F(KeptManifestTest, AtRandomUntilItIsFullAndOver) {
  std::mt19937 random(5);
  std::map<uint64_t, uint64_t> written;  // entry to number
  uint64_t next = 0, refused = 0;
  for (int step = 0; step < 30000; ++step) {
    if (!written.empty() && random() % 3 == 0) {
      const auto gone = std::next(written.begin(), static_cast<long>(random() % written.size()));
      manifest_->Erase(gone->first);
      written.erase(gone);
    } else {
      const uint64_t entry = manifest_->Write(MakeBlock(++next));
      refused += entry == 0;
      if (entry == 0) continue;
      ASSERT_TRUE(written.emplace(entry, next).second);
    }
    if (step % 5000 != 4999) continue;
    const auto found = Restart();
    ASSERT_EQ(found.size(), written.size());
    for (const auto& [entry, number] : written) ExpectEqual(found.at(entry), MakeBlock(number));
  }
  EXPECT_GT(refused, 0u) << "it was never full";
}

}  // namespace
}  // namespace kvmanager
