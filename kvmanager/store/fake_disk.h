// A disk in memory whose writes and reads wait until a test ends them.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "kvmanager/base/status.h"
#include "kvmanager/disk/block_disk.h"

namespace kvmanager::testing {

class FakeDisk final : public BlockDisk {
 public:
  using Name = std::pair<CacheDigest, BlockKey>;
  static constexpr uint64_t kRetainedBytes = 1000;  // that Retain says of each block
  struct Stored {
    DiskRecord record;
    DiskBlock block;
    std::string payer;
    std::vector<std::vector<uint8_t>> pages;
  };

  bool loaded() const override { return true; }
  const char* state() const override { return "ready"; }
  const DiskBlock* Find(const CacheDigest& cache, const BlockKey& key) const override {
    const auto found = stored.find({cache, key});
    return found == stored.end() ? nullptr : &found->second.block;
  }
  void NoteUse(const CacheDigest&, absl::Span<const BlockName> names) override { uses += names.size(); }
  uint64_t Retain(const CacheDigest& cache, const BlockKey& key, const Retention& retention) override {
    const auto found = stored.find({cache, key});
    if (found == stored.end()) return 0;
    found->second.block.retention = retention;
    return kRetainedBytes;
  }
  void Look() override {}
  bool TakesWritesWithin(int64_t) const override { return takes; }
  bool CanWrite(uint64_t) const override { return takes && writes_.size() < writes_max; }
  void Write(DiskRecord record, absl::string_view payer, std::vector<const uint8_t*> sources,
             absl::AnyInvocable<void(bool)> done) override {
    const Name name{record.cache, record.name.key};
    KV_CHECK(!stored.contains(name) && record.pages.size() == sources.size());
    for (const Writing& writing : writes_) KV_CHECK(writing.erased || writing.name() != name);
    writes_.push_back({std::move(record), std::string(payer), std::move(sources), std::move(done)});
  }
  void Read(const CacheDigest& cache, const BlockKey& key, std::vector<Target> targets,
            absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)> done) override {
    KV_CHECK(stored.contains({cache, key}));
    reads_.push_back({{cache, key}, std::move(targets), std::move(done)});
  }
  void Erase(const CacheDigest& cache, const BlockKey& key) override { Remove({cache, key}, DiskLoss::kWrong); }
  void EraseBad(const CacheDigest& cache, const BlockKey& key, const DiskBadPage& page) override {
    bad_pages.push_back(page);
    Remove({cache, key}, DiskLoss::kChecksum);
  }
  uint64_t EraseCache(const CacheDigest& cache) override {
    return EraseIf([&](const Name& name) { return name.first == cache; });
  }
  uint64_t EraseAll() override {
    return EraseIf([](const Name&) { return true; });
  }
  void WhenErased(absl::AnyInvocable<void(absl::Status)> done) override { done(absl::OkStatus()); }
  void OnGone(std::function<void(const CacheDigest&, const BlockKey&, DiskLoss)> fn) override {
    on_gone_ = std::move(fn);
  }
  Use use() const override { return {.capacity_bytes = UINT64_MAX, .blocks = stored.size()}; }
  void CheckInvariants() const override {}

  size_t writes() const { return writes_.size(); }
  size_t reads() const { return reads_.size(); }
  /// The bytes are taken now: until here they must have stayed as they were.
  void FinishWrite(bool durable = true) {
    Writing writing = std::move(writes_.front());
    writes_.pop_front();
    durable &= !writing.erased;
    if (durable) {
      Stored made;
      const DiskRecord& record = writing.record;
      made.block = {record.name.tokens, record.index, static_cast<uint32_t>(record.pages.size())};
      made.block.raw.resize((record.pages.size() + 7) / 8);
      for (size_t i = 0; i < record.pages.size(); ++i) {
        made.pages.emplace_back(writing.sources[i], writing.sources[i] + record.pages[i].bytes);
        if (record.pages[i].raw) made.block.raw[i / 8] |= 1 << i % 8;
      }
      made.payer = writing.payer;
      made.record = std::move(writing.record);
      const Name name{made.record.cache, made.record.name.key};
      stored.emplace(name, std::move(made));
    }
    writing.done(durable);
  }
  void FinishRead(absl::Status status = absl::OkStatus()) {
    Reading reading = std::move(reads_.front());
    reads_.pop_front();
    const auto found = stored.find(reading.name);
    if (status.ok() && found == stored.end()) status = absl::NotFoundError("it was erased");
    if (!status.ok()) return reading.done(status);
    std::vector<uint64_t> checksums;
    for (size_t i = 0; i < reading.targets.size(); ++i) {
      const std::vector<uint8_t>& page = found->second.pages[i];
      KV_CHECK(page.size() == reading.targets[i].bytes);
      std::memcpy(reading.targets[i].to, page.data(), page.size());
      checksums.push_back(found->second.record.pages[i].checksum);
    }
    reading.done(std::move(checksums));
  }
  void FinishAll() {
    while (writes() > 0) FinishWrite();
    while (reads() > 0) FinishRead();
  }
  /// What is on its way never ends: the daemon has died.
  void LoseAll() {
    writes_.clear();
    reads_.clear();
  }
  /// As if room were short.
  void Evict(const Name& name) { Remove(name, DiskLoss::kEvicted); }

  std::map<Name, Stored> stored;
  bool takes = true;
  size_t writes_max = SIZE_MAX;
  uint64_t uses = 0;
  std::vector<DiskBadPage> bad_pages;  // that EraseBad was told

 private:
  struct Writing {
    DiskRecord record;
    std::string payer;
    std::vector<const uint8_t*> sources;
    absl::AnyInvocable<void(bool)> done;
    bool erased = false;
    Name name() const { return {record.cache, record.name.key}; }
  };
  struct Reading {
    Name name;
    std::vector<Target> targets;
    absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)> done;
  };

  void Remove(Name name, DiskLoss loss) {  // a copy: it may be the key that goes
    if (stored.erase(name) > 0 && on_gone_) on_gone_(name.first, name.second, loss);
  }
  template <typename Wanted>
  uint64_t EraseIf(Wanted wanted) {
    for (Writing& writing : writes_) writing.erased |= wanted(writing.name());
    std::vector<Name> gone;
    for (const auto& [name, block] : stored) {
      if (wanted(name)) gone.push_back(name);
    }
    for (const Name& name : gone) Remove(name, DiskLoss::kErased);
    return gone.size();
  }

  std::deque<Writing> writes_;
  std::deque<Reading> reads_;
  std::function<void(const CacheDigest&, const BlockKey&, DiskLoss)> on_gone_;
};

}  // namespace kvmanager::testing
