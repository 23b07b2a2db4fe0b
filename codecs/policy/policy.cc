#include "codecs/policy/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "codecs/layer_group.h"
#include "codecs/policy/policy_device_codec.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kPolicyBytesMax = 4096;
constexpr uint64_t kSinkTokensMax = 1 << 20;
constexpr uint32_t kPolicyVersion = 1;
constexpr char kSinks[] = "sinks";
constexpr absl::string_view kClauseForm = "FIRST..LAST[,FIRST..LAST]=SPEC or sinks=N";

/// Layers first..last, both included.
struct LayerRange {
  int first = 0, last = 0;
};

using Codecs = std::vector<std::unique_ptr<Codec>>;

/// A policy while it is read: each layer's codec, by number.
struct Policy {
  Codecs codecs;                         // the first one is named without layers
  std::vector<absl::string_view> texts;  // each codec's spec as it was written
  std::vector<size_t> codec_of;          // [layers]
  std::optional<uint64_t> sinks;         // tokens; whole pages. nullopt: neither said nor the cache's
};

class PolicyAttention final : public PageAttention {
 public:
  explicit PolicyAttention(const LayerGroups& groups) {
    for (const LayerGroup& group : groups.all()) every_.push_back(&group.codec->attention());
    for (int layer = 0; layer < groups.layers(); ++layer) of_layer_.push_back(every_[groups.number_of(layer)]);
  }
  size_t workspace_bytes(int rows) const override {
    size_t bytes = 0;
    for (const PageAttention* attention : every_) bytes = std::max(bytes, attention->workspace_bytes(rows));
    return bytes;
  }
  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    of_layer_[task.layer]->Attend(task, state, workspace);
  }
  size_t head_bytes(int layer, int kv_head) const override { return of_layer_[layer]->head_bytes(layer, kv_head); }
  int visit_pages_min(int layer) const override { return of_layer_[layer]->visit_pages_min(layer); }
  bool maps(int layer) const override { return of_layer_[layer]->maps(layer); }
  absl::string_view space(int layer) const override { return of_layer_[layer]->space(layer); }
  void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const override {
    of_layer_[layer]->MapQueries(layer, kv_head, rows, q, mapped);
  }
  void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    of_layer_[layer]->ExpandOutput(layer, kv_head, rows, acc, out);
  }
  bool folds_output(int layer) const override { return of_layer_[layer]->folds_output(layer); }
  void ProjectOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    of_layer_[layer]->ProjectOutput(layer, kv_head, rows, acc, out);
  }

 private:
  std::vector<const PageAttention*> every_;  // [groups]
  std::vector<const PageAttention*> of_layer_;
};

/// Layers of each of the policy's codecs, ascending.
std::vector<std::vector<int>> ServedLayers(const Policy& policy) {
  std::vector<std::vector<int>> served(policy.codecs.size());
  for (size_t layer = 0; layer < policy.codec_of.size(); ++layer) {
    served[policy.codec_of[layer]].push_back(static_cast<int>(layer));
  }
  return served;
}

/// A group for each codec. REQUIRES: each has a layer.
LayerGroups GroupsOf(const Policy& policy) {
  std::vector<std::vector<int>> served = ServedLayers(policy);
  std::vector<LayerGroup> groups;
  for (size_t i = 0; i < policy.codecs.size(); ++i) {
    groups.push_back({std::move(served[i]), policy.codecs[i]->layout(), policy.codecs[i].get()});
  }
  return LayerGroups(static_cast<int>(policy.codec_of.size()), std::move(groups));
}

std::string DigestOfAll(const LayerGroups& groups) {
  std::set<std::string> digests;
  for (const LayerGroup& group : groups.all()) {
    const std::string& digest = group.codec->info().calibration_digest;
    if (!digest.empty()) digests.insert(digest);
  }
  return DigestOfArtifacts(digests);
}

CodecInfo InfoOf(const LayerGroups& groups, std::optional<uint64_t> sinks) {
  if (groups.all().size() == 1) {
    CodecInfo info = groups.all()[0].codec->info();
    info.sink_tokens = sinks.value_or(0);
    if (sinks.has_value()) absl::StrAppend(&info.spec, ";", kSinks, "=", *sinks);
    return info;
  }
  CodecInfo info;
  info.name = "policy";
  info.version = kPolicyVersion;
  for (const LayerGroup& group : groups.all()) {
    const CodecInfo& of = group.codec->info();
    // Any codec's new version is a new version of the whole.
    info.version = info.version * 1000003u + of.version;
    if (&group != &groups.all()[0]) absl::StrAppend(&info.spec, ";", LayerRanges(group.layers), "=");
    absl::StrAppend(&info.spec, of.spec);
  }
  info.sink_tokens = sinks.value_or(0);
  if (sinks.has_value()) absl::StrAppend(&info.spec, ";", kSinks, "=", *sinks);
  info.calibration_digest = DigestOfAll(groups);

  // What a codec says of its padding is a mean over all layers, hence so here.
  const int layers = groups.layers();
  std::vector<double> padding;
  for (const LayerGroup& group : groups.all()) {
    const CodecInfo& of = group.codec->info();
    double bytes = 0;
    for (int layer = 0; layer < layers; ++layer) bytes += double(of.page_bytes(layer));
    padding.push_back(bytes / double(layers) - double(of.payload_bytes));
  }
  double payload = 0;
  for (int layer = 0; layer < layers; ++layer) {
    const CodecInfo& of = groups.of(layer).codec->info();
    const size_t bytes = of.page_bytes(layer);
    info.layer_bytes.push_back(static_cast<uint32_t>(bytes));
    info.raw_layers.push_back(of.identity);
    info.encoded_bytes = std::max(info.encoded_bytes, bytes);
    payload += double(bytes) - padding[groups.number_of(layer)];
  }
  info.payload_bytes = static_cast<size_t>(std::llround(payload / double(layers)));
  return info;
}

/// Immutable; every method may be called from any thread at once. None of its codecs has an index, nor chooses on a
/// GPU: such a codec is an identity and serves all layers, and MakePolicy then returns it as it is.
class PolicyCodec final : public Codec, public WaitingCodec {
 public:
  /// groups: of `codecs`.
  PolicyCodec(Codecs codecs, LayerGroups groups, std::optional<uint64_t> sinks, const PageLayout& layout)
      : codecs_(std::move(codecs)),
        groups_(std::move(groups)),
        layout_(layout),
        info_(InfoOf(groups_, sinks)),
        attention_(groups_) {}

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  LayerGroups groups(int layers) const override {
    KV_CHECK(layers == groups_.layers());
    return groups_;
  }

  size_t encode_workspace_bytes() const override {
    size_t bytes = 0;
    for (const auto& codec : codecs_) bytes = std::max(bytes, codec->encode_workspace_bytes());
    return bytes;
  }

  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    for (size_t begin = 0; begin < items.size();) {
      EncodeItem& first = items[begin];
      first.is_sink = KeepsRaw(first);
      if (first.is_sink) {
        first.declined = true;
        ++begin;
        continue;
      }
      // As many as go to the same codec at once.
      const LayerGroup& group = groups_.of(first.layer);
      size_t end = begin + 1;
      for (; end < items.size() && &groups_.of(items[end].layer) == &group && !KeepsRaw(items[end]); ++end) {
        items[end].is_sink = false;
      }
      group.codec->Encode(items.subspan(begin, end - begin), workspace);
      begin = end;
    }
  }

  void Decode(absl::Span<const DecodeItem> items) const override {
    for (size_t begin = 0; begin < items.size();) {
      const LayerGroup& group = groups_.of(items[begin].layer);
      size_t end = begin + 1;
      while (end < items.size() && &groups_.of(items[end].layer) == &group) ++end;
      group.codec->Decode(items.subspan(begin, end - begin));
      begin = end;
    }
  }

  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    return groups_.of(layer).codec->Validate(layer, encoded);
  }

  const PageAttention& attention() const override { return attention_; }

  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override { return MakePolicyDeviceCodec(groups_, info_); }

  bool OutputFactor(int layer, int kv_head, absl::Span<float> factor) const override {
    return groups_.of(layer).codec->OutputFactor(layer, kv_head, factor);
  }

  WorkerPool* workers() const override {
    for (const auto& codec : codecs_) {
      if (WorkerPool* const workers = WaitingWorkers(*codec); workers != nullptr) return workers;
    }
    return nullptr;
  }
  uint64_t unanswered() const override {
    uint64_t all = 0;
    for (const auto& codec : codecs_) all += UnansweredBy(*codec);
    return all;
  }

 private:
  /// Sinks, and pages whose encoded form would be a copy.
  bool KeepsRaw(const EncodeItem& item) const { return info_.keeps_raw(int(item.layer), item.first_token); }

  const Codecs codecs_;
  const LayerGroups groups_;
  const PageLayout layout_;
  const CodecInfo info_;
  const PolicyAttention attention_;
};

bool ParseLayer(absl::string_view text, int* layer) {
  return !text.empty() && absl::ascii_isdigit(text[0]) && absl::SimpleAtoi(text, layer);
}

absl::StatusOr<LayerRange> ParseRange(absl::string_view text, int layers) {
  LayerRange range;
  const size_t dots = text.find("..");
  const absl::string_view first = text.substr(0, dots);
  const absl::string_view last = dots == absl::string_view::npos ? first : text.substr(dots + 2);
  if (!ParseLayer(first, &range.first) || !ParseLayer(last, &range.last)) {
    return InvalidField("codec policy layers", absl::StrCat("\"", text, "\""), "FIRST..LAST");
  }
  if (range.first > range.last || range.last >= layers) {
    return InvalidField(
        "codec policy layers", text,
        absl::StrCat("FIRST..LAST with FIRST at most LAST, in 0..", layers - 1, ", the model's layers"));
  }
  return range;
}

/// Names the codec of the layers that the comma-separated `ranges` say. named [layers]: those of earlier clauses.
absl::Status AssignLayers(absl::string_view ranges, size_t codec, Policy* policy, std::vector<bool>* named) {
  const int layers = static_cast<int>(policy->codec_of.size());
  for (absl::string_view text : absl::StrSplit(ranges, ',')) {
    KV_ASSIGN_OR_RETURN(const LayerRange range, ParseRange(text, layers));
    for (int layer = range.first; layer <= range.last; ++layer) {
      if ((*named)[layer]) {
        return InvalidField("codec policy layers", text,
                            absl::StrCat("layers that no other clause names; ", layer, " is named twice"));
      }
      (*named)[layer] = true;
      policy->codec_of[layer] = codec;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ParseSinks(absl::string_view text, int page_tokens) {
  uint64_t tokens = 0;
  if (text.empty() || !absl::ascii_isdigit(text[0]) || !absl::SimpleAtoi(text, &tokens) || tokens > kSinkTokensMax) {
    return InvalidField("codec policy sinks", absl::StrCat("\"", text, "\""),
                        absl::StrCat("0..", kSinkTokensMax, " tokens"));
  }
  return (tokens + page_tokens - 1) / page_tokens * page_tokens;
}

/// The default codec first if it has a layer, then the others in the order of their first layer; equal ones once, those
/// without a layer not at all.
void Normalize(Policy* policy) {
  Codecs codecs;
  std::vector<absl::string_view> texts;
  std::vector<size_t> place(policy->codecs.size(), std::numeric_limits<size_t>::max());
  const auto keep = [&](size_t codec) {
    if (place[codec] != std::numeric_limits<size_t>::max()) return;
    const std::string& spec = policy->codecs[codec]->info().spec;
    const auto same =
        std::find_if(codecs.begin(), codecs.end(), [&spec](const auto& kept) { return kept->info().spec == spec; });
    place[codec] = same - codecs.begin();
    if (same != codecs.end()) return;
    texts.push_back(policy->texts[codec]);
    codecs.push_back(std::move(policy->codecs[codec]));
  };
  const bool default_used = std::find(policy->codec_of.begin(), policy->codec_of.end(), 0) != policy->codec_of.end();
  if (default_used) keep(0);
  for (size_t& codec : policy->codec_of) {
    keep(codec);
    codec = place[codec];
  }
  policy->codecs = std::move(codecs);
  policy->texts = std::move(texts);
}

/// Makes each codec anew for the layers that it serves, which are known only now that equal clauses are one.
absl::Status NameServedLayers(const CodecRegistry& registry, CodecContext context, Policy* policy) {
  std::vector<std::vector<int>> served = ServedLayers(*policy);
  for (size_t i = 0; i < policy->codecs.size(); ++i) {
    context.served_layers = std::move(served[i]);
    KV_ASSIGN_OR_RETURN(policy->codecs[i], registry.Create(policy->texts[i], context));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Codec>> MakePolicy(const CodecRegistry& registry, const CodecContext& context,
                                                  absl::string_view text, std::optional<uint64_t> default_sinks) {
  const auto check_bytes = [](absl::string_view what, size_t bytes) {
    if (bytes <= kPolicyBytesMax) return absl::OkStatus();
    return InvalidField(what, absl::StrCat(bytes, " bytes long"), absl::StrCat("at most ", kPolicyBytesMax, " bytes"));
  };
  KV_RETURN_IF_ERROR(check_bytes("codec policy", text.size()));
  const std::vector<absl::string_view> clauses = absl::StrSplit(text, ';');
  Policy policy;
  policy.codec_of.assign(context.layers, 0);
  policy.sinks = default_sinks;
  std::vector<bool> named(context.layers, false);
  bool has_sinks = false;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> default_codec, registry.Create(clauses[0], context));
  policy.codecs.push_back(std::move(default_codec));
  policy.texts.push_back(clauses[0]);
  for (const absl::string_view clause : absl::MakeConstSpan(clauses).subspan(1)) {
    const size_t equals = clause.find('=');
    if (equals == absl::string_view::npos) {
      return InvalidField("codec policy clause", absl::StrCat("\"", clause, "\""), kClauseForm);
    }
    const absl::string_view key = clause.substr(0, equals), value = clause.substr(equals + 1);
    if (key == kSinks) {
      if (has_sinks) return InvalidField("codec policy sinks", "given twice", "given once");
      has_sinks = true;
      KV_ASSIGN_OR_RETURN(policy.sinks, ParseSinks(value, context.layout.page_tokens));
      continue;
    }
    if (key.empty() || !absl::ascii_isdigit(key[0])) {
      return InvalidField("codec policy clause", absl::StrCat("\"", clause, "\""), kClauseForm);
    }
    KV_RETURN_IF_ERROR(AssignLayers(key, policy.codecs.size(), &policy, &named));
    KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, registry.Create(value, context));
    policy.codecs.push_back(std::move(codec));
    policy.texts.push_back(value);
  }
  Normalize(&policy);
  if (policy.codecs.size() > 1) KV_RETURN_IF_ERROR(NameServedLayers(registry, context, &policy));
  for (const std::unique_ptr<Codec>& codec : policy.codecs) {
    if (policy.codecs.size() > 1 && codec->NewIndex({}) != nullptr) {
      return InvalidField("codec policy clause", codec->info().spec,
                          "a codec whose queries read everything; this one serves all layers of a cache, or none");
    }
  }
  // Raw pages cannot be kept more raw.
  const bool all_raw =
      std::all_of(policy.codecs.begin(), policy.codecs.end(), [](const auto& codec) { return codec->info().identity; });
  if (all_raw) return std::move(policy.codecs[policy.codec_of[0]]);
  if (policy.codecs.size() == 1 && !policy.sinks.has_value()) return std::move(policy.codecs[0]);
  LayerGroups groups = GroupsOf(policy);
  auto codec = std::make_unique<PolicyCodec>(std::move(policy.codecs), std::move(groups), policy.sinks, context.layout);
  KV_RETURN_IF_ERROR(check_bytes("codec policy, all parameters named,", codec->info().spec.size()));
  return codec;
}

}  // namespace

void RegisterPolicy(CodecRegistry& registry) { registry.SetPolicyFactory(MakePolicy); }

}  // namespace kvmanager
