#include "examples/engine/fake_client.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "codecs/builtin.h"
#include "codecs/codec.h"
#include "codecs/registry.h"
#include "examples/engine/windows.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using client::CacheDescription;
using client::CacheOptions;
using client::Pending;

template <typename T>
class Ready final : public Pending<T>::State {
 public:
  explicit Ready(T value) : value_(std::move(value)) {}
  bool ready() override { return true; }
  T Wait() override { return std::move(value_); }

 private:
  T value_;
};

template <typename T>
Pending<T> Now(T value) {
  return Pending<T>(std::make_unique<Ready<T>>(std::move(value)));
}

absl::Status Absent(const char* what) { return absl::UnimplementedError(absl::StrCat(what, ": not in the fake")); }

class FakeArena final : public client::Arena {
 public:
  explicit FakeArena(uint64_t bytes) : words_((bytes + 7) / 8), bytes_(bytes) {}
  absl::Span<uint8_t> data() const override {
    return absl::MakeSpan(reinterpret_cast<uint8_t*>(const_cast<uint64_t*>(words_.data())), bytes_);
  }

 private:
  std::vector<uint64_t> words_;
  uint64_t bytes_;
};

class FakeSequence final : public client::Sequence {
 public:
  FakeSequence(FakeHost* host, uint64_t id, const CacheDescription& cache, std::shared_ptr<const Codec> codec)
      : host_(host), id_(id), cache_(cache), codec_(std::move(codec)), page_tokens_(cache.options.page_tokens) {}
  ~FakeSequence() override { host_->sequences.erase(id_); }
  uint64_t id() const override { return id_; }
  absl::StatusOr<std::unique_ptr<Sequence>> Fork() override { return Absent("fork"); }
  absl::Status Crop(uint64_t) override { return Absent("crop"); }

  absl::StatusOr<client::PublishOutcome> Publish(absl::Span<const BlockName> names) override {
    const FakeHost::SequenceState& whole = host_->sequences.at(id_);
    client::PublishOutcome outcome;
    for (size_t b = 0; b < names.size(); ++b) {
      const uint64_t end = (b + 1) * page_tokens_;
      FakeHost::SequenceState prefix = whole;
      for (size_t layer = 0; layer < prefix.tokens.size(); ++layer) {
        if (prefix.tokens[layer] < end) return absl::FailedPreconditionError(absl::StrCat("block ", b, " is not full"));
        for (FakeHost::Layer& head : prefix.layers[layer]) {
          const size_t keep = head.k.size() / prefix.tokens[layer] * end;
          head.k.resize(keep);
          head.v.resize(keep);
        }
        prefix.tokens[layer] = end;
      }
      const bool fresh = host_->blocks.try_emplace(names[b].key, names[b].tokens, std::move(prefix)).second;
      ++(fresh ? outcome.published : outcome.shared);
    }
    return outcome;
  }

  Pending<absl::StatusOr<client::HandOffOutcome>> HandOffAsync(absl::string_view peer, absl::string_view blob,
                                                               const client::HandOffOptions&) override {
    const auto found = host_->peers.find(std::string(peer));
    if (found == host_->peers.end())
      return Now<absl::StatusOr<client::HandOffOutcome>>(absl::UnavailableError("no such peer"));
    client::HandOffOutcome outcome;
    outcome.ticket = absl::StrCat("ticket \xff ", id_);
    outcome.pages_sent = host_->sequences.at(id_).layers.size();
    found->second->tickets[outcome.ticket] = {host_->sequences.at(id_), std::string(blob)};
    return Now<absl::StatusOr<client::HandOffOutcome>>(outcome);
  }

  Pending<absl::StatusOr<std::unique_ptr<client::HandOff>>> BeginHandOffAsync(absl::string_view, uint64_t,
                                                                              const client::HandOffOptions&) override {
    return Now<absl::StatusOr<std::unique_ptr<client::HandOff>>>(absl::UnimplementedError("hand off at the end"));
  }

  absl::StatusOr<client::SequenceDescription> Info() override {
    client::SequenceDescription info;
    info.id = id_;
    ++host_->infos;
    const FakeHost::SequenceState& state = host_->sequences.at(id_);
    for (size_t layer = 0; layer < state.tokens.size(); ++layer) {
      const uint64_t tokens = state.tokens[layer], pages = (tokens + page_tokens_ - 1) / page_tokens_;
      for (uint64_t page = 0; page < pages; ++page) {
        const bool full = (page + 1) * page_tokens_ <= tokens;
        const bool sink = page * page_tokens_ < SinkTokens(cache_.options.codec);
        const bool encoded = full && !sink;
        const bool in_lag = page + cache_.options.lag_pages + 1 >= pages;
        if (encoded) info.bytes += codec_->info().page_bytes(int(layer));
        if (!encoded || (in_lag && !codec_->info().identity)) info.bytes += cache_.raw_page_bytes;
      }
    }
    return info;
  }

 private:
  FakeHost* const host_;
  const uint64_t id_;
  const CacheDescription cache_;
  const std::shared_ptr<const Codec> codec_;
  const int page_tokens_;
};

class FakeCache final : public client::Cache {
 public:
  FakeCache(FakeHost* host, const CacheOptions& options, std::shared_ptr<const Codec> codec)
      : host_(host), codec_(std::move(codec)) {
    description_.options = options;
    description_.options.codec = codec_->info().spec;
    description_.raw_page_bytes = codec_->layout().raw_bytes();
    description_.payload_page_bytes = codec_->info().payload_bytes;
    description_.encoded_page_bytes = codec_->info().mean_page_bytes();
    description_.sink_tokens = codec_->info().sink_tokens;
    const std::string facts = absl::StrCat(options.model, "/", options.revision, "/", options.rope, "/", options.codec,
                                           "/", options.lag_pages);
    description_.digest = Sha256(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(facts.data()), facts.size()));
  }

  const CacheDescription& description() const override { return description_; }
  absl::StatusOr<CacheDescription> Refresh() override {
    CacheDescription now = description_;
    return now;
  }
  client::Pending<absl::StatusOr<std::vector<client::PrefixMatch>>> MatchAsync(
      absl::Span<const absl::Span<const BlockName>>, const client::MatchOptions&) override {
    return Now<absl::StatusOr<std::vector<client::PrefixMatch>>>(Absent("match"));
  }

  absl::StatusOr<std::vector<absl::StatusOr<client::CreatedSequence>>> CreateSequences(
      absl::Span<const absl::Span<const BlockName>> prefixes, absl::Span<const uint64_t>) override {
    std::vector<absl::StatusOr<client::CreatedSequence>> created;
    for (const auto& prefix : prefixes) {
      FakeHost::SequenceState state;
      state.layers.assign(description_.options.layers, std::vector<FakeHost::Layer>(description_.options.kv_heads));
      state.tokens.assign(description_.options.layers, 0);
      client::PrefixMatch match;
      for (const BlockName& name : prefix) {
        const auto found = host_->blocks.find(name.key);
        if (found == host_->blocks.end() || found->second.first != name.tokens) {
          match.reason = client::Miss::kNotFound;
          break;
        }
        state = found->second.second;
        ++match.hit_blocks;
      }
      created.push_back(client::CreatedSequence{Adopt(std::move(state)), match});
    }
    return created;
  }

  Pending<absl::StatusOr<client::StepResult>> StepAsync(const client::StepBatch& batch) override {
    return Now<absl::StatusOr<client::StepResult>>(DoStep(batch));
  }

  Pending<absl::StatusOr<client::ReadResult>> ReadAsync(const client::ReadBatch&) override {
    return Now<absl::StatusOr<client::ReadResult>>(Absent("read"));
  }

  Pending<absl::StatusOr<client::ReadBlocksResult>> ReadBlocksAsync(const client::BlockRange&) override {
    return Now<absl::StatusOr<client::ReadBlocksResult>>(Absent("read of blocks"));
  }
  Pending<absl::StatusOr<client::WriteBlocksResult>> WriteBlocksAsync(const client::BlockRange&,
                                                                      absl::Span<const uint8_t>,
                                                                      absl::Span<const uint64_t>) override {
    return Now<absl::StatusOr<client::WriteBlocksResult>>(Absent("write of blocks"));
  }

  Pending<absl::StatusOr<client::ExtendOutcome>> ExtendAsync(const client::ExtendBatch&) override {
    return Now<absl::StatusOr<client::ExtendOutcome>>(Absent("extend"));
  }

  absl::StatusOr<std::vector<float>> OutputFactors(int) override { return std::vector<float>(); }
  Pending<absl::StatusOr<client::ClaimedSequence>> ClaimAsync(absl::string_view ticket, int64_t) override {
    using Result = absl::StatusOr<client::ClaimedSequence>;
    const auto found = host_->tickets.find(std::string(ticket));
    if (found == host_->tickets.end()) return Now<Result>(absl::NotFoundError("no such ticket"));
    client::ClaimedSequence claimed;
    claimed.tokens = found->second.sequence.tokens[0];
    claimed.blob = found->second.blob;
    claimed.sequence = Adopt(std::move(found->second.sequence));
    host_->tickets.erase(found);
    return Now<Result>(std::move(claimed));
  }

 private:
  std::unique_ptr<client::Sequence> Adopt(FakeHost::SequenceState state) {
    const uint64_t id = host_->next_sequence++;
    host_->sequences[id] = std::move(state);
    return std::make_unique<FakeSequence>(host_, id, description_, codec_);
  }

  absl::StatusOr<client::StepResult> DoStep(const client::StepBatch& batch) {
    const CacheOptions& o = description_.options;
    const int d = o.head_dim, group = o.query_heads / o.kv_heads;
    size_t rows = 0;
    for (const client::StepEntry& entry : batch.entries) rows += entry.tokens;
    const size_t kv_bytes = rows * o.kv_heads * d * 2, q_bytes = rows * o.query_heads * d * 4;
    if (batch.k.bytes != kv_bytes || batch.v.bytes != kv_bytes)
      return InvalidField("k bytes", batch.k.bytes, absl::StrCat(kv_bytes));
    if (batch.q.bytes != q_bytes || batch.out.bytes != q_bytes)
      return InvalidField("q bytes", batch.q.bytes, absl::StrCat(q_bytes));
    if ((batch.q.arena != nullptr) != host_->has_arenas)
      return absl::InvalidArgumentError("an arena where there is none, or none where there is one");
    ++host_->steps;
    host_->inline_steps += batch.q.arena == nullptr;

    client::StepResult result;
    result.encoded_pairs = host_->pair_error;
    size_t row = 0;
    for (const client::StepEntry& entry : batch.entries) {
      const auto found = host_->sequences.find(entry.sequence);
      if (found == host_->sequences.end()) return absl::NotFoundError("no such sequence");
      FakeHost::SequenceState& state = found->second;
      uint64_t& held = state.tokens[batch.layer];
      if (entry.position != held) return InvalidField("position", entry.position, absl::StrCat(held));
      held += entry.tokens;
      for (int h = 0; h < o.kv_heads; ++h) {
        FakeHost::Layer& head = state.layers[batch.layer][h];
        for (int t = 0; t < entry.tokens; ++t) {
          for (int c = 0; c < d; ++c) {
            const size_t at = ((row + t) * o.kv_heads + h) * d + c;
            head.k.push_back(LoadElement(batch.k.data, o.dtype, at));
            head.v.push_back(LoadElement(batch.v.data, o.dtype, at));
          }
        }
        for (int g = 0; g < group; ++g) AttendHead(batch, entry, row, h * group + g, head, int(held));
      }
      for (int t = 0; t < entry.tokens; ++t) {
        const uint64_t position = entry.position + t, before = position / o.page_tokens;
        const uint64_t kept = o.lag_pages + SinkTokens(o.codec) / o.page_tokens;
        const uint64_t aged = codec_->info().identity || before < kept ? 0 : before - kept;
        result.encoded_pairs += aged * o.page_tokens;
        result.raw_pairs += position + 1 - aged * o.page_tokens;
      }
      row += entry.tokens;
    }
    return result;
  }

  void AttendHead(const client::StepBatch& batch, const client::StepEntry& entry, size_t row, int query_head,
                  const FakeHost::Layer& head, int context) {
    const CacheOptions& o = description_.options;
    const int d = o.head_dim, stride = o.query_heads * d;
    const float* q = static_cast<const float*>(batch.q.data) + row * stride + size_t(query_head) * d;
    float* out = static_cast<float*>(batch.out.data) + row * stride + size_t(query_head) * d;
    scores_.resize(size_t(entry.tokens) * context);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, entry.tokens, context, d, 1 / std::sqrt(float(d)), q, stride,
                head.k.data(), d, 0, scores_.data(), context);
    for (int t = 0; t < entry.tokens; ++t) {
      float* s = &scores_[size_t(t) * context];
      const int seen = int(entry.position) + t + 1;
      const float top = *std::max_element(s, s + seen);
      float sum = 0;
      for (int i = 0; i < seen; ++i) sum += s[i] = std::exp(s[i] - top);
      for (int i = 0; i < context; ++i) s[i] = i < seen ? s[i] / sum : 0;
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, entry.tokens, d, context, 1, scores_.data(), context,
                head.v.data(), d, 0, out, stride);
  }

  FakeHost* const host_;
  const std::shared_ptr<const Codec> codec_;
  CacheDescription description_;
  std::vector<float> scores_;
};

class FakeClient final : public client::Client {
 public:
  explicit FakeClient(FakeHost* host) : host_(host) {}
  uint64_t boot_epoch() const override { return 1; }
  bool connected() override { return true; }
  std::string peer_address() const override { return ""; }
  absl::Status Reconnect() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<client::Cache>> OpenCache(const CacheOptions& options) override {
    CodecRegistry registry;
    RegisterBuiltinCodecs(registry);
    registry.SetCalibrations(host_->calibrations);
    CodecContext context;
    context.layout = {options.dtype, uint16_t(options.kv_heads), uint16_t(options.head_dim),
                      uint16_t(options.page_tokens)};
    context.layers = options.layers;
    KV_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> codec, registry.CreateForCache(options.codec, context));
    return std::make_unique<FakeCache>(host_, options, std::move(codec));
  }
  absl::StatusOr<std::unique_ptr<client::Arena>> CreateArena(uint64_t bytes) override {
    if (bytes == 0 || bytes % 4096 != 0) return InvalidField("bytes", bytes, "a multiple of 4096");
    if (!host_->has_arenas) return absl::FailedPreconditionError("an arena needs a Unix socket");
    return std::make_unique<FakeArena>(bytes);
  }
  absl::Status Ping() override { return absl::OkStatus(); }
  absl::StatusOr<client::DaemonDescription> Status() override { return Absent("status"); }
  absl::StatusOr<std::vector<CacheDescription>> Caches() override { return Absent("caches"); }
  absl::StatusOr<std::vector<client::SequenceDescription>> Sequences() override { return Absent("sequences"); }
  absl::StatusOr<std::vector<client::PeerDescription>> Peers(absl::Span<const std::string>) override {
    return Absent("peers");
  }
  absl::Status Drain(bool) override { return Absent("drain"); }
  absl::StatusOr<uint64_t> Purge(uint32_t) override { return Absent("purge"); }

 private:
  FakeHost* const host_;
};

}  // namespace

std::unique_ptr<client::Client> FakeHost::Connect() { return std::make_unique<FakeClient>(this); }

}  // namespace kvmanager::engine
