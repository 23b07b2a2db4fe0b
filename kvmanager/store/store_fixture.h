// The fixture of the store's tests: one store, made on first use with a pool of `pool_bytes_` (and a device that has
// `device_bytes_`), checked at the end.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/store/store_testing.h"

namespace kvmanager::testing {

constexpr int kPage = 16;  // tokens

inline Text MakeText(int tokens, uint32_t salt = 0) {
  Text text;
  for (int i = 0; i < tokens; ++i) text.Add(static_cast<uint32_t>(i * 7 + salt));
  return text;
}

class PageStoreTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (test_ != nullptr && test_->store != nullptr) test_->store->report().CheckInvariants();
  }
  TestStore& test() {
    if (test_ == nullptr) test_ = MakeStore();
    return *test_;
  }
  virtual std::unique_ptr<TestStore> MakeStore() {
    return std::make_unique<TestStore>(pool_bytes_, device_bytes_, moves_);
  }
  PageStore& store() { return *test().store; }
  SequenceId Create(CacheId cache) { return store().Create(cache, {})->sequence; }
  // A sequence with `tokens` tokens of `text` in every layer.
  SequenceId Filled(CacheId cache, const Text& text, int tokens) {
    const SequenceId sequence = Create(cache);
    EXPECT_TRUE(test().AppendAll(cache, sequence, text, 0, tokens).ok());
    return sequence;
  }
  std::unique_ptr<AttendLease> Attend(CacheId cache, SequenceId sequence, uint64_t position, int tokens,
                                      int layer = 0) {
    const AttendEntry entry{sequence, position, tokens};
    auto lease = store().Attend(cache, layer, {&entry, 1});
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  std::vector<BlockName> Names(CacheId cache, const Text& text, size_t blocks) {
    auto names = test().Names(cache, text);
    names.resize(blocks);
    return names;
  }
  Explained Explain(CacheId cache, std::vector<BlockName> names) {
    return ExplainAll(store(), cache, std::move(names));
  }
  BlockExplanation Explain(CacheId cache, const BlockName& name) {
    return Explain(cache, std::vector<BlockName>{name}).blocks.at(0);
  }
  double Gauge(const std::string& series) {
    const std::string text = test().metrics.Text();
    const size_t at = text.find("\n" + series + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
  }

  uint64_t pool_bytes_ = 16 << 20;
  uint64_t device_bytes_ = 0;
  bool moves_ = false;
  std::unique_ptr<TestStore> test_;
};

}  // namespace kvmanager::testing
