#include "codecs/ladder/ladder.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using Rungs = std::vector<std::unique_ptr<Codec>>;

constexpr size_t kLadderBytesMax = 4096;
constexpr uint32_t kLadderVersion = 1;
constexpr char kSinks[] = "sinks=";

std::string RungField(size_t rung) { return absl::StrCat("codec ladder rung ", rung); }

/// Immutable; every method may be called from any thread at once.
class LadderCodec final : public Codec, public WaitingCodec {
 public:
  LadderCodec(Rungs rungs, CodecInfo info) : rungs_(std::move(rungs)), info_(std::move(info)) {}

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return rungs_[0]->layout(); }
  LayerGroups groups(int layers) const override { return rungs_[0]->groups(layers); }
  size_t encode_workspace_bytes() const override { return rungs_[0]->encode_workspace_bytes(); }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    rungs_[0]->Encode(items, workspace);
  }
  void Decode(absl::Span<const DecodeItem> items) const override { rungs_[0]->Decode(items); }
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    return rungs_[0]->Validate(layer, encoded);
  }
  const PageAttention& attention() const override { return rungs_[0]->attention(); }

  int rungs() const override { return static_cast<int>(rungs_.size()); }
  const Codec& rung(int rung) const override { return *rungs_[rung]; }

  WorkerPool* workers() const override {
    for (const auto& codec : rungs_) {
      if (WorkerPool* const workers = WaitingWorkers(*codec); workers != nullptr) return workers;
    }
    return nullptr;
  }
  uint64_t unanswered() const override {
    uint64_t all = 0;
    for (const auto& codec : rungs_) all += UnansweredBy(*codec);
    return all;
  }

 private:
  const Rungs rungs_;
  const CodecInfo info_;
};

/// What is written of the rungs: each without its sinks.
struct LadderText {
  std::vector<std::string> rungs;
  std::optional<std::string> sinks;
};

absl::StatusOr<LadderText> Parse(absl::string_view text) {
  absl::ConsumePrefix(&text, CodecRegistry::kLadderPrefix);
  const std::vector<absl::string_view> specs = absl::StrSplit(text, '>');
  if (specs.size() < 2 || specs.size() > size_t{Codec::kRungsMax}) {
    return InvalidField("codec ladder rungs", specs.size(), absl::StrCat("2..", Codec::kRungsMax, ", SPEC>SPEC"));
  }
  LadderText ladder;
  for (size_t rung = 0; rung < specs.size(); ++rung) {
    std::vector<absl::string_view> clauses = absl::StrSplit(specs[rung], ';');
    for (size_t i = 1; i < clauses.size();) {
      if (!absl::StartsWith(clauses[i], kSinks)) {
        ++i;
        continue;
      }
      if (rung != 0 && rung + 1 != specs.size()) {
        return InvalidField("codec ladder sinks", absl::StrCat("in rung ", rung),
                            "in rung 0 or behind the last one: they are the same on all");
      }
      if (ladder.sinks.has_value()) return InvalidField("codec ladder sinks", "given twice", "given once");
      ladder.sinks = std::string(clauses[i]);
      clauses.erase(clauses.begin() + i);
    }
    if (absl::StartsWith(specs[rung], CodecRegistry::kLadderPrefix)) {
      return InvalidField(RungField(rung), absl::StrCat("\"", specs[rung], "\""), "a codec or a policy, not a ladder");
    }
    ladder.rungs.push_back(absl::StrJoin(clauses, ";"));
  }
  return ladder;
}

absl::Status CheckRung(const Codec& codec, size_t rung, int layers) {
  const CodecInfo& info = codec.info();
  if (info.identity) {
    return InvalidField(RungField(rung), info.spec, "a codec that encodes pages; raw and pq keep them as they are");
  }
  for (int layer = 0; layer < layers; ++layer) {
    if (codec.attention().folds_output(layer)) {
      return InvalidField(RungField(rung), info.spec, "a codec whose outputs are in the model's space (fold=0)");
    }
  }
  if (absl::StrContains(info.spec, '>')) {
    return InvalidField(RungField(rung), info.spec, "a codec whose text has no '>'");
  }
  return absl::OkStatus();
}

/// `lower` is the rung behind `upper`.
absl::Status CheckStep(const CodecInfo& upper, const CodecInfo& lower, size_t rung, int layers) {
  KV_CHECK(upper.sink_tokens == lower.sink_tokens);
  uint64_t upper_bytes = 0, lower_bytes = 0;
  for (int layer = 0; layer < layers; ++layer) {
    const bool raw = upper.keeps_raw(layer, upper.sink_tokens);
    if (lower.keeps_raw(layer, lower.sink_tokens) != raw) {
      return InvalidField(absl::StrCat(RungField(rung), " layer ", layer), raw ? "encoded" : "raw",
                          absl::StrCat(raw ? "raw" : "encoded", ", as on rung ", rung - 1));
    }
    if (raw) continue;
    if (lower.page_bytes(layer) > upper.page_bytes(layer)) {
      return InvalidField(absl::StrCat(RungField(rung), " page bytes of layer ", layer), lower.page_bytes(layer),
                          absl::StrCat("at most ", upper.page_bytes(layer), ", those of rung ", rung - 1));
    }
    upper_bytes += upper.page_bytes(layer);
    lower_bytes += lower.page_bytes(layer);
  }
  if (lower_bytes >= upper_bytes) {
    return InvalidField(absl::StrCat(RungField(rung), " page bytes of all layers"), lower_bytes,
                        absl::StrCat("below ", upper_bytes, ", those of rung ", rung - 1));
  }
  return absl::OkStatus();
}

CodecInfo InfoOf(const Rungs& rungs, bool says_sinks) {
  CodecInfo info = rungs[0]->info();
  info.name = "ladder";
  info.version = kLadderVersion;
  const std::string sinks = absl::StrCat(";", kSinks, info.sink_tokens);
  std::vector<absl::string_view> specs;
  std::set<std::string> digests;
  for (const auto& codec : rungs) {
    const CodecInfo& of = codec->info();
    absl::string_view spec = of.spec;
    if (says_sinks) KV_CHECK(absl::ConsumeSuffix(&spec, sinks));
    specs.push_back(spec);
    // Any rung's new version is a new version of the whole.
    info.version = info.version * 1000003u + of.version;
    if (!of.calibration_digest.empty()) digests.insert(of.calibration_digest);
  }
  info.spec = absl::StrCat(CodecRegistry::kLadderPrefix, absl::StrJoin(specs, ">"), says_sinks ? sinks : "");
  info.calibration_digest = DigestOfArtifacts(digests);
  return info;
}

absl::StatusOr<std::unique_ptr<Codec>> MakeLadder(const CodecRegistry& registry, const CodecContext& context,
                                                  absl::string_view text, std::optional<uint64_t> default_sinks) {
  const auto check_bytes = [](absl::string_view what, size_t bytes) {
    if (bytes <= kLadderBytesMax) return absl::OkStatus();
    return InvalidField(what, absl::StrCat(bytes, " bytes long"), absl::StrCat("at most ", kLadderBytesMax, " bytes"));
  };
  KV_RETURN_IF_ERROR(check_bytes("codec ladder", text.size()));
  KV_ASSIGN_OR_RETURN(LadderText ladder, Parse(text));
  if (!ladder.sinks.has_value() && default_sinks.has_value()) ladder.sinks = absl::StrCat(kSinks, *default_sinks);
  Rungs rungs;
  for (size_t rung = 0; rung < ladder.rungs.size(); ++rung) {
    std::string spec = ladder.rungs[rung];
    if (ladder.sinks.has_value()) absl::StrAppend(&spec, ";", *ladder.sinks);
    KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, registry.Create(spec, context));
    KV_RETURN_IF_ERROR(CheckRung(*codec, rung, context.layers));
    if (rung > 0) KV_RETURN_IF_ERROR(CheckStep(rungs.back()->info(), codec->info(), rung, context.layers));
    rungs.push_back(std::move(codec));
  }
  CodecInfo info = InfoOf(rungs, ladder.sinks.has_value());
  KV_RETURN_IF_ERROR(check_bytes("codec ladder, all parameters named,", info.spec.size()));
  return std::make_unique<LadderCodec>(std::move(rungs), std::move(info));
}

}  // namespace

void RegisterLadder(CodecRegistry& registry) { registry.SetLadderFactory(MakeLadder); }

}  // namespace kvmanager
