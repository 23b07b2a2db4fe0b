// One call of explain, in pieces that each take less than a turn of the event loop. The loop's thread.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/wire.h"
#include "kvmanager/store/store_report.h"

namespace kvmanager {

class ExplainCall {
 public:
  using Names = capnp::List<api::BlockName>::Reader;
  using Results = api::Admin::ExplainResults::Builder;

  /// report: outlives it. names: of a message that stays.
  ExplainCall(StoreReport* report, CacheId cache, Names names)
      : report_(report), cache_(cache), reader_("names", names, limits::kBlockNamesMax) {}

  /// Reads a part of the names, or looks for some. False: that was the last piece.
  bool DoPiece() {
    if (explanation_ == nullptr) {
      if (reader_.ReadNext()) return true;
      if (status_ = reader_.status(); !status_.ok()) return false;
      auto explanation = report_->BeginExplain(cache_, reader_.Take());
      if (status_ = explanation.status(); !status_.ok()) return false;
      explanation_ = *std::move(explanation);
    }
    if (explanation_->DoPiece()) return true;
    auto explained = explanation_->Take();
    if (status_ = explained.status(); status_.ok()) explained_ = *std::move(explained);
    return false;
  }
  const absl::Status& status() const { return status_; }

  /// After the last piece, where status() is OK: makes the answer's lists; then WriteSome until that is false.
  void BeginWriting(Results results) {
    blocks_ = results.initBlocks(static_cast<uint32_t>(explained_.blocks.size()));
    others_ = results.initOthers(static_cast<uint32_t>(explained_.others.size()));
    results.setRemembered(static_cast<uint32_t>(explained_.remembered));
    results.setRememberedMax(static_cast<uint32_t>(explained_.remembered_max));
    results.setRememberedSeconds(explained_.remembered_seconds);
  }
  bool WriteSome() {
    for (size_t i = 0; i < kWrittenAtOnce; ++i, ++written_) {
      if (written_ < blocks_.size()) {
        Write(explained_.blocks[written_], blocks_[written_]);
      } else if (const uint32_t other = written_ - blocks_.size(); other < others_.size()) {
        Write(explained_.others[other], others_[other]);
      } else {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kWrittenAtOnce = 128;

  static std::string TierText(int tier) {
    if (tier >= 0) return absl::StrCat("device:", tier);
    return tier == kDiskTier ? "disk" : "host";
  }
  static api::BlockLoss LossOf(GoneReason reason) {
    switch (reason) {
      case GoneReason::kEvicted:
        return api::BlockLoss::EVICTED;
      case GoneReason::kPurged:
        return api::BlockLoss::PURGED;
      case GoneReason::kChecksum:
        return api::BlockLoss::CHECKSUM;
      case GoneReason::kDiskRecord:
        return api::BlockLoss::DISK_RECORD;
    }
    return api::BlockLoss::UNKNOWN;
  }
  static void Write(const BlockExplanation& block, api::BlockExplanation::Builder out) {
    out.setPlace(static_cast<api::BlockPlace>(block.place));
    out.setOtherTokens(block.other_tokens);
    out.setSameTokensCacheId(block.same_tokens);
    if (block.place != BlockPlace::kNowhere) {
      out.setTier(TextOf(TierText(block.tier)));
      out.setCacheId(block.cache);
      out.setPriority(block.priority);
      out.setRetainedMs(block.ends_ms);
    } else if (block.gone.has_value()) {
      out.setLoss(LossOf(block.gone->reason));
      out.setTier(TextOf(TierText(block.gone->tier)));
      out.setCacheId(block.gone->cache);
      out.setSecondsAgo(block.gone->seconds_ago);
      if (!block.gone->owner.empty()) out.setOwner(TextOf(block.gone->owner));
      if (!block.gone->taker.empty()) out.setTaker(TextOf(block.gone->taker));
    }
  }
  static void Write(const OtherCache& other, api::OtherCache::Builder out) {
    out.setCacheId(other.cache);
    out.setTenant(TextOf(other.tenant_label));
    out.setTier(TextOf(TierText(other.device)));
    auto differs = out.initDiffers(static_cast<uint32_t>(other.differs.size()));
    for (uint32_t i = 0; i < differs.size(); ++i) differs.set(i, other.differs[i]);
  }

  StoreReport* const report_;
  const CacheId cache_;
  BlockNamesReader reader_;
  std::unique_ptr<Explanation> explanation_;  // nullptr: names are still read
  Explained explained_;
  capnp::List<api::BlockExplanation>::Builder blocks_ = nullptr;
  capnp::List<api::OtherCache>::Builder others_ = nullptr;
  uint32_t written_ = 0;  // of both, one behind the other
  absl::Status status_;
};

}  // namespace kvmanager
