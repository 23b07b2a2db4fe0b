#include "client/handles.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/host_slabs.h"
#include "client/mapped_blocks.h"

namespace kvmanager::client {
namespace {

constexpr int64_t kHandOffMsMax = 3600000;
constexpr int64_t kHandOffMarginMs = 1000;  // the daemon's own deadline comes first, and says more

absl::Status Check(const HandOffOptions& options) {
  if (options.timeout_ms < 1 || options.timeout_ms > kHandOffMsMax) {
    return InvalidField("timeout_ms", options.timeout_ms, absl::StrCat("1..", kHandOffMsMax));
  }
  if (options.room_ms < 0 || options.room_ms > kHandOffMsMax) {
    return InvalidField("room_ms", options.room_ms, absl::StrCat("0..", kHandOffMsMax));
  }
  return absl::OkStatus();
}

// Request: with a peer, timeoutMs, roomMs and goesOn.
template <typename Request>
void Write(absl::string_view peer, const HandOffOptions& options, Request& request) {
  request.setPeer(ToKj(std::string(peer)));
  request.setTimeoutMs(uint32_t(options.timeout_ms));
  request.setRoomMs(uint32_t(options.room_ms));
  request.setGoesOn(options.will_append);
}

auto BytesOf(absl::string_view text) {
  return ToKj(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

absl::StatusOr<HandOffOutcome> ReadOutcome(api::HandOffReply::Reader reply) {
  KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
  KV_RETURN_IF_ERROR(CheckListed("layers", reply.getLayers().size()));
  HandOffOutcome outcome{.ticket = ToString(reply.getTicket()),
                         .bytes_sent = reply.getBytesSent(),
                         .pages_sent = reply.getPagesSent(),
                         .pages_skipped = reply.getPagesSkipped(),
                         .bytes_resent = reply.getBytesResent(),
                         .resumes = reply.getResumes(),
                         .seconds = reply.getSeconds(),
                         .sending_seconds = reply.getSendingSeconds(),
                         .peer = ToString(reply.getPeer()),
                         .begun_unix_ns = reply.getBegunUnixNs()};
  for (const auto layer : reply.getLayers()) {
    outcome.layers.push_back(
        {layer.getReadyFirst(), layer.getReadyLast(), layer.getSentFirst(), layer.getArrivedLast()});
  }
  return outcome;
}

class HandOffImpl final : public HandOff {
 public:
  HandOffImpl(std::shared_ptr<Connection> connection, api::HandOff::Client cap, std::string ticket, std::string peer,
              int64_t timeout_ms)
      : handle_(std::move(connection), std::move(cap)),
        ticket_(std::move(ticket)),
        peer_(std::move(peer)),
        timeout_ms_(timeout_ms) {}

  const std::string& ticket() const override { return ticket_; }
  const std::string& peer() const override { return peer_; }
  Pending<absl::StatusOr<HandOffOutcome>> FinishAsync(absl::string_view blob) override {
    using Result = absl::StatusOr<HandOffOutcome>;
    if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
    const uint64_t bytes = kMessageOverheadBytes + blob.size();
    if (auto fits = CheckMessageBytes("blob", bytes, handle_.connection().message_bytes_max()); !fits.ok()) {
      return Ready<Result>(fits);
    }
    auto request = handle_.cap().finishRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    request.setBlob(BytesOf(blob));
    return handle_.connection().CallLater<Result>(
        std::move(request), [](auto& response) { return ReadOutcome(response.getReply()); },
        timeout_ms_ + kHandOffMarginMs);
  }

 private:
  Handle<api::HandOff::Client> handle_;
  const std::string ticket_, peer_;
  const int64_t timeout_ms_;
};

template <typename Cap>
CreatedSequence ReadSequence(const std::shared_ptr<Connection>& connection, Cap reply);

class SequenceImpl final : public Sequence {
 public:
  SequenceImpl(std::shared_ptr<Connection> connection, api::Sequence::Client cap, uint64_t id, uint64_t copied)
      : handle_(std::move(connection), std::move(cap)), id_(id), copied_(copied) {}

  uint64_t id() const override { return id_; }
  uint64_t copied() const override { return copied_; }

  absl::StatusOr<std::unique_ptr<Sequence>> Fork() override {
    using Result = absl::StatusOr<std::unique_ptr<Sequence>>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    return handle_.connection().Call<Result>(handle_.cap().forkRequest(), [this](auto& response) -> Result {
      const auto reply = response.getReply();
      KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
      return ReadSequence(handle_.shared_connection(), reply).sequence;
    });
  }

  absl::Status Crop(uint64_t tokens) override {
    KV_RETURN_IF_ERROR(handle_.Usable());
    auto request = handle_.cap().cropRequest();
    request.setTokens(tokens);
    return handle_.connection().Call<absl::Status>(std::move(request), [this](auto& response) {
      copied_ = std::max<uint64_t>(copied_, response.getDone());
      return FromWire(response.getStatus());
    });
  }

  absl::StatusOr<PublishOutcome> Publish(absl::Span<const BlockName> names) override {
    using Result = absl::StatusOr<PublishOutcome>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    const uint64_t bytes = kMessageOverheadBytes + names.size() * kBlockNameBytes;
    KV_RETURN_IF_ERROR(CheckMessageBytes("names", bytes, handle_.connection().message_bytes_max()));
    auto request = handle_.cap().publishRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    ToWire(names, request.initNames(uint(names.size())));
    return handle_.connection().Call<Result>(std::move(request), [](auto& response) -> Result {
      const auto reply = response.getReply();
      KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
      return PublishOutcome{int(reply.getPublished()), int(reply.getShared()), int(reply.getDeferred())};
    });
  }

  Pending<absl::StatusOr<HandOffOutcome>> HandOffAsync(absl::string_view peer, absl::string_view blob,
                                                       const HandOffOptions& options) override {
    using Result = absl::StatusOr<HandOffOutcome>;
    if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
    if (absl::Status good = Check(options); !good.ok()) return Ready<Result>(good);
    const uint64_t bytes = kMessageOverheadBytes + peer.size() + blob.size();
    if (auto fits = CheckMessageBytes("blob", bytes, handle_.connection().message_bytes_max()); !fits.ok()) {
      return Ready<Result>(fits);
    }
    auto request = handle_.cap().handOffRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    Write(peer, options, request);
    request.setBlob(BytesOf(blob));
    return handle_.connection().CallLater<Result>(
        std::move(request), [](auto& response) { return ReadOutcome(response.getReply()); },
        options.timeout_ms + options.room_ms + kHandOffMarginMs);
  }

  Pending<absl::StatusOr<std::unique_ptr<client::HandOff>>> BeginHandOffAsync(absl::string_view peer, uint64_t tokens,
                                                                              const HandOffOptions& options) override {
    using Result = absl::StatusOr<std::unique_ptr<client::HandOff>>;
    if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
    if (absl::Status good = Check(options); !good.ok()) return Ready<Result>(good);
    const uint64_t bytes = kMessageOverheadBytes + peer.size();
    if (auto fits = CheckMessageBytes("peer", bytes, handle_.connection().message_bytes_max()); !fits.ok()) {
      return Ready<Result>(fits);
    }
    auto request = handle_.cap().beginHandOffRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    Write(peer, options, request);
    request.setTokens(tokens);
    return handle_.connection().CallLater<Result>(
        std::move(request),
        [connection = handle_.shared_connection(), timeout_ms = options.timeout_ms](auto& response) -> Result {
          KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
          return std::make_unique<HandOffImpl>(connection, response.getHandOff(), ToString(response.getTicket()),
                                               ToString(response.getPeer()), timeout_ms);
        },
        options.timeout_ms + options.room_ms + kHandOffMarginMs);
  }

  absl::StatusOr<SequenceDescription> Info() override {
    using Result = absl::StatusOr<SequenceDescription>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    return handle_.connection().Call<Result>(handle_.cap().infoRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      return FromWire(response.getInfo());
    });
  }

 private:
  Handle<api::Sequence::Client> handle_;
  const uint64_t id_;
  uint64_t copied_;
};

/// REQUIRES: the reply's status is ok.
template <typename Reply>
CreatedSequence ReadSequence(const std::shared_ptr<Connection>& connection, Reply reply) {
  return {std::make_unique<SequenceImpl>(connection, reply.getSequence(), reply.getSequenceId(), reply.getDone()),
          FromWire(reply.getMatch())};
}

class ArenaImpl final : public ArenaHandle {
 public:
  ArenaImpl(std::shared_ptr<Connection> connection, api::Arena::Client cap, uint32_t id, absl::Span<uint8_t> data)
      : ArenaHandle(std::move(connection), std::move(cap), id), data_(data) {}
  ~ArenaImpl() override { ::munmap(data_.data(), data_.size()); }

  absl::Span<uint8_t> data() const override { return data_; }

 private:
  const absl::Span<uint8_t> data_;
};

class CacheImpl final : public Cache {
 public:
  CacheImpl(std::shared_ptr<Connection> connection, api::Cache::Client cap, CacheDescription description)
      : handle_(std::move(connection), std::move(cap)), description_(std::move(description)) {}

  const CacheDescription& description() const override { return description_; }

  absl::StatusOr<CacheDescription> Refresh() override {
    using Result = absl::StatusOr<CacheDescription>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    return handle_.connection().Call<Result>(handle_.cap().infoRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      return FromWire(response.getInfo());
    });
  }

  Pending<absl::StatusOr<std::vector<PrefixMatch>>> MatchAsync(absl::Span<const absl::Span<const BlockName>> prefixes,
                                                               const MatchOptions& options) override {
    using Result = absl::StatusOr<std::vector<PrefixMatch>>;
    if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
    const auto bytes = PrefixBytes(prefixes);
    if (!bytes.ok()) return Ready<Result>(bytes.status());
    auto request = handle_.cap().matchRequest(capnp::MessageSize{*bytes / sizeof(capnp::word), 0});
    WritePrefixes(prefixes, request.initRequests(uint(prefixes.size())));
    request.setPrefetch(options.prefetch);
    return handle_.connection().CallLater<Result>(
        std::move(request),
        [count = prefixes.size()](auto& response) -> Result {
          KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
          const auto results = response.getResults();
          KV_RETURN_IF_ERROR(CheckCount(results.size(), count));
          std::vector<PrefixMatch> matches;
          for (const auto result : results) matches.push_back(FromWire(result));
          return matches;
        },
        handle_.connection().options().deadline_ms);
  }

  absl::StatusOr<std::vector<absl::StatusOr<CreatedSequence>>> CreateSequences(
      absl::Span<const absl::Span<const BlockName>> prefixes, absl::Span<const uint64_t> prompt_tokens) override {
    using Result = absl::StatusOr<std::vector<absl::StatusOr<CreatedSequence>>>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    if (!prompt_tokens.empty() && prompt_tokens.size() != prefixes.size()) {
      return InvalidField("prompt_tokens (length)", prompt_tokens.size(),
                          absl::StrCat(prefixes.size(), ", one per prefix, or none"));
    }
    KV_ASSIGN_OR_RETURN(const uint64_t bytes, PrefixBytes(prefixes));
    auto request = handle_.cap().createSequencesRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    auto requests = request.initRequests(uint(prefixes.size()));
    WritePrefixes(prefixes, requests);
    for (size_t i = 0; i < prompt_tokens.size(); ++i) requests[uint(i)].setPromptTokens(prompt_tokens[i]);
    return handle_.connection().Call<Result>(std::move(request), [&](auto& response) -> Result {
      const auto replies = response.getReplies();
      if (replies.size() > 0 && replies.size() < prefixes.size()) {  // too many were asked for: all answers say so
        KV_RETURN_IF_ERROR(FromWire(replies[0].getStatus()));
      }
      KV_RETURN_IF_ERROR(CheckCount(replies.size(), prefixes.size()));
      std::vector<absl::StatusOr<CreatedSequence>> created;
      for (const auto reply : replies) {
        if (absl::Status status = FromWire(reply.getStatus()); !status.ok()) {
          created.emplace_back(std::move(status));
        } else {
          created.emplace_back(ReadSequence(handle_.shared_connection(), reply));
        }
      }
      return created;
    });
  }

  absl::StatusOr<RetainOutcome> Retain(absl::Span<const BlockName> names, const RetentionOptions& options) override {
    using Result = absl::StatusOr<RetainOutcome>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    KV_RETURN_IF_ERROR(CheckRetention(options));
    const uint64_t bytes = kMessageOverheadBytes + names.size() * kBlockNameBytes;
    KV_RETURN_IF_ERROR(CheckMessageBytes("names", bytes, handle_.connection().message_bytes_max()));
    auto request = handle_.cap().retainRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    WriteRetention(names, options, request);
    return handle_.connection().Call<Result>(std::move(request), [](auto& response) { return ReadRetained(response); });
  }

  absl::StatusOr<PrefixMatch> Prefetch(absl::Span<const BlockName> names) override {
    using Result = absl::StatusOr<PrefixMatch>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    const uint64_t bytes = kMessageOverheadBytes + names.size() * kBlockNameBytes;
    KV_RETURN_IF_ERROR(CheckMessageBytes("names", bytes, handle_.connection().message_bytes_max()));
    auto request = handle_.cap().prefetchRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
    ToWire(names, request.initNames(uint(names.size())));
    return handle_.connection().Call<Result>(std::move(request), [](auto& response) { return ReadMatch(response); });
  }

  Pending<absl::StatusOr<StepResult>> StepAsync(const StepBatch& batch) override;
  Pending<absl::StatusOr<ReadResult>> ReadAsync(const ReadBatch& batch) override;
  Pending<absl::StatusOr<ReadBlocksResult>> ReadBlocksAsync(const BlockRange& range) override;
  Pending<absl::StatusOr<MappedBlocks>> MapBlocksAsync(const BlockRange& range,
                                                       std::shared_ptr<SlabPinner> pinner) override;
  absl::StatusOr<uint64_t> BindSlabs(uint64_t bytes, std::shared_ptr<SlabPinner> pinner) override;
  Pending<absl::StatusOr<WriteBlocksResult>> WriteBlocksAsync(const BlockRange& range, absl::Span<const uint8_t> raw,
                                                              absl::Span<const uint64_t> checksums) override;
  Pending<absl::StatusOr<ExtendOutcome>> ExtendAsync(const ExtendBatch& batch) override;
  absl::StatusOr<std::vector<float>> OutputFactors(int layer) override {
    using Result = absl::StatusOr<std::vector<float>>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    const CacheOptions& o = description_.options;
    if (layer < 0 || layer >= o.layers) return InvalidField("layer", layer, absl::StrCat("0..", o.layers - 1));
    auto request = handle_.cap().outputFactorsRequest();
    request.setLayer(uint32_t(layer));
    const size_t elements = size_t(o.kv_heads) * o.head_dim * o.head_dim;
    return handle_.connection().Call<Result>(std::move(request), [elements](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      std::vector<float> factors;
      if (!response.getFolds()) return factors;
      const auto data = response.getFactors();
      if (data.size() != elements * sizeof(float)) {
        return absl::InternalError(absl::StrCat("the daemon sent ", data.size(), " bytes of output factors, expected ",
                                                elements * sizeof(float)));
      }
      factors.resize(elements);
      std::memcpy(factors.data(), data.begin(), data.size());
      return factors;
    });
  }

  absl::StatusOr<std::unique_ptr<Projections>> OpenProjections(const ProjectionFacts& facts) override {
    using Result = absl::StatusOr<std::unique_ptr<Projections>>;
    KV_RETURN_IF_ERROR(handle_.Usable());
    if (facts.rotary_dims < 0) return InvalidField("rotary_dims", facts.rotary_dims, "at least 0");
    auto call = handle_.cap().openProjectionsRequest();
    auto wire = call.initFacts();
    wire.setRotaryDims(uint32_t(facts.rotary_dims));
    wire.setTheta(facts.theta);
    wire.setInterleaved(facts.interleaved);
    wire.setDoubleAngles(facts.double_angles);
    return handle_.connection().Call<Result>(std::move(call), [this](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      return MakeProjections(handle_.shared_connection(), response.getProjections());
    });
  }

  Pending<absl::StatusOr<ClaimedSequence>> ClaimAsync(absl::string_view ticket, int64_t deadline_ms) override {
    using Result = absl::StatusOr<ClaimedSequence>;
    if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
    if (deadline_ms < 0 || deadline_ms > kHandOffMsMax) {
      return Ready<Result>(InvalidField("deadline_ms", deadline_ms, absl::StrCat("0..", kHandOffMsMax)));
    }
    const uint64_t bytes = kMessageOverheadBytes + ticket.size();
    if (auto fits = CheckMessageBytes("ticket", bytes, handle_.connection().message_bytes_max()); !fits.ok()) {
      return Ready<Result>(fits);
    }
    auto request = handle_.cap().claimRequest();
    request.setTicket(BytesOf(ticket));
    return handle_.connection().CallLater<Result>(
        std::move(request),
        [connection = handle_.shared_connection()](auto& response) -> Result {
          const auto reply = response.getReply();
          KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
          return ClaimedSequence{ReadSequence(connection, reply).sequence, response.getTokens(),
                                 ToString(response.getBlob())};
        },
        deadline_ms > 0 ? deadline_ms : handle_.connection().options().deadline_ms);
  }

 private:
  static absl::Status CheckCount(size_t got, size_t expected) {
    if (got == expected) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("the daemon answered ", got, " of ", expected, " requests"));
  }

  absl::StatusOr<uint64_t> PrefixBytes(absl::Span<const absl::Span<const BlockName>> prefixes) const {
    uint64_t bytes = kMessageOverheadBytes;
    for (const auto& prefix : prefixes) bytes += kPrefixBytes + prefix.size() * kBlockNameBytes;
    KV_RETURN_IF_ERROR(CheckMessageBytes("prefixes", bytes, handle_.connection().message_bytes_max()));
    return bytes;
  }

  static void WritePrefixes(absl::Span<const absl::Span<const BlockName>> prefixes,
                            capnp::List<api::SequenceRequest>::Builder wire) {
    for (size_t i = 0; i < prefixes.size(); ++i) ToWire(prefixes[i], wire[i].initPrefix(uint(prefixes[i].size())));
  }

  /// Bytes of the request, or what is wrong with the batch. Only what the client alone can know, or must for its own
  /// memory's sake: the rest is the daemon's to judge.
  absl::StatusOr<uint64_t> CheckStep(const StepBatch& batch) const;

  absl::StatusOr<uint64_t> CheckRead(const ReadBatch& batch) const;

  /// Whether the daemon's memory may be mapped here.
  absl::Status CheckMaps() const;

  /// Bytes of the request, or what is wrong.
  absl::StatusOr<uint64_t> CheckBlocks(const BlockRange& range, size_t raw_bytes, bool may_be_none = false) const;
  static void WriteBlockRange(const BlockRange& range, api::BlocksRequest::Builder request);

  Handle<api::Cache::Client> handle_;
  const CacheDescription description_;
};

void WriteEntries(absl::Span<const StepEntry> entries, capnp::List<api::StepEntry>::Builder wire) {
  for (size_t i = 0; i < entries.size(); ++i) {
    wire[uint(i)].setSequenceId(entries[i].sequence);
    wire[uint(i)].setPosition(entries[i].position);
    wire[uint(i)].setTokens(uint32_t(entries[i].tokens));
  }
}

absl::StatusOr<uint64_t> CacheImpl::CheckStep(const StepBatch& batch) const {
  if (batch.layer < 0) return InvalidField("layer", batch.layer, "at least 0");
  uint64_t tokens = 0;
  for (const StepEntry& entry : batch.entries) {
    if (entry.tokens < 0) return InvalidField("tokens", entry.tokens, "at least 0");
    tokens += uint64_t(entry.tokens);
  }
  uint64_t sent = kMessageOverheadBytes + batch.entries.size() * kStepEntryBytes, received = kMessageOverheadBytes;
  const auto check = [this](absl::string_view field, const TensorView& tensor, uint64_t* inline_bytes) {
    return CheckTensor(field, tensor, handle_.connection(), handle_.generation(), inline_bytes);
  };
  KV_RETURN_IF_ERROR(check("k", batch.k, &sent));
  KV_RETURN_IF_ERROR(check("v", batch.v, &sent));
  KV_RETURN_IF_ERROR(check("x", batch.x, &sent));
  KV_RETURN_IF_ERROR(check("q", batch.q, &sent));
  KV_RETURN_IF_ERROR(check("out", batch.out, &received));
  KV_RETURN_IF_ERROR(check("lse", batch.lse, &received));
  if ((batch.q.data != nullptr) != (batch.out.data != nullptr)) {
    return InvalidField("out", batch.out.data == nullptr ? "absent" : "given", "given exactly where q is");
  }
  // Replies are copied to these: their sizes must be known to be right before anything changes.
  const CacheOptions& o = description_.options;
  const uint64_t out_bytes = tokens * uint64_t(o.query_heads) * uint64_t(o.head_dim) * DTypeBytes(batch.q_dtype);
  if (batch.out.data != nullptr && batch.out.bytes != out_bytes) {
    return InvalidField("out (bytes)", batch.out.bytes,
                        absl::StrCat(out_bytes, ": tokens x query_heads x head_dim of q_dtype"));
  }
  const uint64_t lse_bytes = tokens * uint64_t(o.query_heads) * sizeof(float);
  if (batch.lse.data != nullptr && batch.lse.bytes != lse_bytes) {
    return InvalidField("lse (bytes)", batch.lse.bytes, absl::StrCat(lse_bytes, ": tokens x query_heads of float32"));
  }
  KV_RETURN_IF_ERROR(CheckMessageBytes("step", sent, handle_.connection().message_bytes_max()));
  KV_RETURN_IF_ERROR(CheckMessageBytes("step's reply", received, handle_.connection().message_bytes_max()));
  return sent;
}

absl::StatusOr<uint64_t> CacheImpl::CheckRead(const ReadBatch& batch) const {
  if (batch.layer < 0) return InvalidField("layer", batch.layer, "at least 0");
  uint64_t tokens = 0;
  for (const StepEntry& entry : batch.entries) {
    if (entry.tokens < 0) return InvalidField("tokens", entry.tokens, "at least 0");
    tokens += uint64_t(entry.tokens);
  }
  const CacheOptions& o = description_.options;
  const uint64_t want = tokens * uint64_t(o.kv_heads) * uint64_t(o.head_dim) * DTypeBytes(o.dtype);
  uint64_t received = kMessageOverheadBytes;
  for (const auto& [field, tensor] : {std::pair<absl::string_view, const TensorView&>("k", batch.k), {"v", batch.v}}) {
    KV_RETURN_IF_ERROR(CheckTensor(field, tensor, handle_.connection(), handle_.generation(), &received));
    if (tensor.data == nullptr) return InvalidField(field, "none", "given");
    if (tensor.bytes != want) {
      return InvalidField(absl::StrCat(field, " (bytes)"), tensor.bytes,
                          absl::StrCat(want, ": tokens x kv_heads x head_dim of the cache's dtype"));
    }
  }
  const uint64_t sent = kMessageOverheadBytes + batch.entries.size() * kStepEntryBytes;
  KV_RETURN_IF_ERROR(CheckMessageBytes("read", sent, handle_.connection().message_bytes_max()));
  KV_RETURN_IF_ERROR(CheckMessageBytes("read's reply", received, handle_.connection().message_bytes_max()));
  return sent;
}

/// Copies an inline reply to where it was wanted.
absl::Status CopyReply(absl::string_view field, capnp::Data::Reader data, const TensorView& to) {
  if (to.data == nullptr || to.arena != nullptr) return absl::OkStatus();
  if (data.size() != to.bytes) {
    return absl::InternalError(
        absl::StrCat("the daemon sent ", data.size(), " bytes of ", field, ", expected ", to.bytes));
  }
  std::memcpy(to.data, data.begin(), data.size());
  return absl::OkStatus();
}

Pending<absl::StatusOr<StepResult>> CacheImpl::StepAsync(const StepBatch& batch) {
  using Result = absl::StatusOr<StepResult>;
  if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
  const auto bytes = CheckStep(batch);
  if (!bytes.ok()) return Ready<Result>(bytes.status());
  auto call = handle_.cap().stepRequest(capnp::MessageSize{*bytes / sizeof(capnp::word), 0});
  auto request = call.initRequest();
  request.setLayer(uint32_t(batch.layer));
  WriteEntries(batch.entries, request.initEntries(uint(batch.entries.size())));
  WriteTensor(batch.k, request.initK());
  WriteTensor(batch.v, request.initV());
  if (batch.x.data != nullptr) WriteTensor(batch.x, request.initX());
  WriteTensor(batch.q, request.initQ());
  request.setQDtype(ToWire(batch.q_dtype));
  if (batch.out.arena != nullptr) WriteTensor(batch.out, request.initOut());
  if (batch.lse.arena != nullptr) {
    WriteTensor(batch.lse, request.initLse());
  } else {
    request.setWantLse(batch.lse.data != nullptr);
  }
  request.setScale(batch.scale);
  request.setReady(batch.ready);
  return handle_.connection().CallLater<Result>(
      std::move(call),
      [out = batch.out, lse = batch.lse](auto& response) -> Result {
        const auto reply = response.getReply();
        KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
        KV_RETURN_IF_ERROR(CopyReply("out", reply.getOut(), out));
        KV_RETURN_IF_ERROR(CopyReply("lse", reply.getLse(), lse));
        return StepResult{reply.getEncodedPairs(), reply.getRawPairs(), reply.getDone()};
      },
      handle_.connection().options().deadline_ms);
}

Pending<absl::StatusOr<ReadResult>> CacheImpl::ReadAsync(const ReadBatch& batch) {
  using Result = absl::StatusOr<ReadResult>;
  if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
  const auto bytes = CheckRead(batch);
  if (!bytes.ok()) return Ready<Result>(bytes.status());
  auto call = handle_.cap().readRequest(capnp::MessageSize{*bytes / sizeof(capnp::word), 0});
  auto request = call.initRequest();
  request.setLayer(uint32_t(batch.layer));
  WriteEntries(batch.entries, request.initEntries(uint(batch.entries.size())));
  if (batch.k.arena != nullptr) WriteTensor(batch.k, request.initK());
  if (batch.v.arena != nullptr) WriteTensor(batch.v, request.initV());
  return handle_.connection().CallLater<Result>(
      std::move(call),
      [k = batch.k, v = batch.v](auto& response) -> Result {
        const auto reply = response.getReply();
        KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
        KV_RETURN_IF_ERROR(CopyReply("k", reply.getK(), k));
        KV_RETURN_IF_ERROR(CopyReply("v", reply.getV(), v));
        return ReadResult{reply.getEncodedTokens(), reply.getRawTokens()};
      },
      handle_.connection().options().deadline_ms);
}

absl::StatusOr<uint64_t> CacheImpl::CheckBlocks(const BlockRange& range, size_t raw_bytes, bool may_be_none) const {
  uint64_t in_line = 0;
  KV_RETURN_IF_ERROR(CheckTensor("pages", range.pages, handle_.connection(), handle_.generation(), &in_line));
  if (range.pages.arena == nullptr && !(may_be_none && range.pages.data == nullptr)) {
    return InvalidField("pages", "not in an arena", "a range of an arena");
  }
  const uint64_t sent = kMessageOverheadBytes + range.names.size() * kBlockNameBytes + raw_bytes;
  KV_RETURN_IF_ERROR(CheckMessageBytes("blocks", sent, handle_.connection().message_bytes_max()));
  return sent;
}

void CacheImpl::WriteBlockRange(const BlockRange& range, api::BlocksRequest::Builder request) {
  request.setFirstBlock(range.first);
  ToWire(range.names, request.initNames(uint(range.names.size())));
  WriteTensor(range.pages, request.initPages());
}

Pending<absl::StatusOr<ReadBlocksResult>> CacheImpl::ReadBlocksAsync(const BlockRange& range) {
  using Result = absl::StatusOr<ReadBlocksResult>;
  if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
  const auto bytes = CheckBlocks(range, 0);
  if (!bytes.ok()) return Ready<Result>(bytes.status());
  auto call = handle_.cap().readBlocksRequest(capnp::MessageSize{*bytes / sizeof(capnp::word), 0});
  WriteBlockRange(range, call.initRequest());
  return handle_.connection().CallLater<Result>(
      std::move(call),
      [asked = range.names.size(), layers = uint64_t(description_.options.layers),
       range_bytes = range.pages.bytes](auto& response) -> Result {
        const auto reply = response.getReply();
        KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
        // Who asked goes by these.
        if (reply.getBlocks() > asked || reply.getRaw().size() != reply.getBlocks() * layers ||
            reply.getBytes() > range_bytes) {
          return absl::InternalError(absl::StrCat("the daemon read ", reply.getBlocks(), " of ", asked, " blocks, ",
                                                  reply.getRaw().size(), " forms and ", reply.getBytes(), " bytes"));
        }
        return ReadBlocksResult{reply.getBlocks(), FromWire(reply.getReason()), reply.getBytes(),
                                ToString(reply.getRaw())};
      },
      handle_.connection().options().deadline_ms);
}

absl::Status CacheImpl::CheckMaps() const {
  KV_RETURN_IF_ERROR(handle_.Usable());
  const Connection& connection = handle_.connection();
  if (!connection.address().is_unix) {
    return absl::FailedPreconditionError("the daemon's memory is mapped over Unix sockets only");
  }
  if (connection.maps_blocks()) return absl::OkStatus();
  return absl::UnimplementedError("the daemon does not let its memory be mapped: it lacks the feature map-blocks");
}

Pending<absl::StatusOr<MappedBlocks>> CacheImpl::MapBlocksAsync(const BlockRange& range,
                                                                std::shared_ptr<SlabPinner> pinner) {
  using Result = absl::StatusOr<MappedBlocks>;
  if (absl::Status maps = CheckMaps(); !maps.ok()) return Ready<Result>(maps);
  const auto bytes = CheckBlocks(range, 0, /*may_be_none=*/true);
  if (!bytes.ok()) return Ready<Result>(bytes.status());
  handle_.connection().slabs()->PinWith(std::move(pinner));
  auto call = handle_.cap().readBlocksRequest(capnp::MessageSize{*bytes / sizeof(capnp::word), 0});
  auto request = call.initRequest();
  WriteBlockRange(range, request);
  request.setMapped(true);
  const CacheOptions& o = description_.options;
  return client::MapBlocks(handle_.shared_connection(), std::move(call),
                           {.names = range.names.size(),
                            .layers = uint64_t(o.layers),
                            .raw_page_bytes = PageLayout{.dtype = o.dtype,
                                                         .kv_heads = uint16_t(o.kv_heads),
                                                         .head_dim = uint16_t(o.head_dim),
                                                         .page_tokens = uint16_t(o.page_tokens)}
                                                  .raw_bytes(),
                            .range = range.pages});
}

absl::StatusOr<uint64_t> CacheImpl::BindSlabs(uint64_t bytes, std::shared_ptr<SlabPinner> pinner) {
  KV_RETURN_IF_ERROR(CheckMaps());
  handle_.connection().slabs()->PinWith(std::move(pinner));
  return client::BindSlabs(handle_.connection(), handle_.cap(), bytes);
}

Pending<absl::StatusOr<WriteBlocksResult>> CacheImpl::WriteBlocksAsync(const BlockRange& range,
                                                                       absl::Span<const uint8_t> raw,
                                                                       absl::Span<const uint64_t> checksums) {
  using Result = absl::StatusOr<WriteBlocksResult>;
  if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
  const size_t checksum_bytes = checksums.size() * sizeof(uint64_t);
  const auto bytes = CheckBlocks(range, raw.size() + checksum_bytes);
  if (!bytes.ok()) return Ready<Result>(bytes.status());
  auto call = handle_.cap().writeBlocksRequest(capnp::MessageSize{*bytes / sizeof(capnp::word), 0});
  auto request = call.initRequest();
  WriteBlockRange(range, request);
  request.setRaw(ToKj(raw));
  if (checksum_bytes > 0) {
    request.setChecksums(ToKj({reinterpret_cast<const uint8_t*>(checksums.data()), checksum_bytes}));
  }
  return handle_.connection().CallLater<Result>(
      std::move(call),
      [](auto& response) -> Result {
        const auto reply = response.getReply();
        KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
        return WriteBlocksResult{reply.getBlocks(), reply.getPresent()};
      },
      handle_.connection().options().deadline_ms);
}

absl::Status ReadWords(absl::string_view field, capnp::Data::Reader data, std::vector<uint32_t>* words) {
  if (data.size() % sizeof(uint32_t) != 0) {
    return absl::InternalError(absl::StrCat("the daemon sent ", data.size(), " bytes of ", field, ", no whole words"));
  }
  words->resize(data.size() / sizeof(uint32_t));
  std::memcpy(words->data(), data.begin(), data.size());
  return absl::OkStatus();
}

Pending<absl::StatusOr<ExtendOutcome>> CacheImpl::ExtendAsync(const ExtendBatch& batch) {
  using Result = absl::StatusOr<ExtendOutcome>;
  if (absl::Status usable = handle_.Usable(); !usable.ok()) return Ready<Result>(usable);
  uint64_t bytes =
      kMessageOverheadBytes + batch.entries.size() * kStepEntryBytes + batch.words.size() * sizeof(uint32_t);
  for (const QueryRow& row : batch.queries) bytes += kStepEntryBytes + row.q.size();
  if (auto fits = CheckMessageBytes("entries", bytes, handle_.connection().message_bytes_max()); !fits.ok()) {
    return Ready<Result>(fits);
  }
  for (const StepEntry& entry : batch.entries) {
    if (entry.tokens < 0) return Ready<Result>(InvalidField("tokens", entry.tokens, "at least 0"));
  }
  auto call = handle_.cap().extendRequest(capnp::MessageSize{bytes / sizeof(capnp::word), 0});
  auto request = call.initRequest();
  WriteEntries(batch.entries, request.initEntries(uint(batch.entries.size())));
  request.setAppend(batch.append);
  request.setAttend(batch.attend);
  request.setEncodeHere(batch.encode_here);
  auto words = request.initWords(uint(batch.words.size()));
  for (uint i = 0; i < words.size(); ++i) words.set(i, batch.words[i]);
  if (!batch.queries.empty()) {
    auto queries = request.initQueries(uint(batch.queries.size()));
    for (uint i = 0; i < queries.size(); ++i) {
      queries[i].setLayer(uint32_t(batch.queries[i].layer));
      queries[i].setQ(capnp::Data::Reader(batch.queries[i].q.data(), batch.queries[i].q.size()));
    }
  }
  return handle_.connection().CallLater<Result>(
      std::move(call),
      [](auto& response) -> Result {
        const auto reply = response.getReply();
        KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
        ExtendOutcome outcome;
        outcome.epoch = reply.getEpoch();
        for (const uint32_t aged : reply.getAged()) outcome.aged.push_back(aged);
        for (const uint64_t from : reply.getChoosesFrom()) outcome.sparse_from.push_back(from);
        KV_RETURN_IF_ERROR(ReadWords("changes", reply.getChanges(), &outcome.changes));
        KV_RETURN_IF_ERROR(ReadWords("encodeItems", reply.getEncodeItems(), &outcome.encode_items));
        outcome.encode_batch = reply.getEncodeBatch();
        outcome.encode_at = reply.getEncodeAt();
        return outcome;
      },
      handle_.connection().options().deadline_ms);
}

}  // namespace

absl::StatusOr<CreatedSequence> Cache::CreateSequence(absl::Span<const BlockName> prefix, uint64_t prompt_tokens) {
  KV_ASSIGN_OR_RETURN(auto created,
                      CreateSequences(absl::MakeConstSpan(&prefix, 1), absl::MakeConstSpan(&prompt_tokens, 1)));
  return std::move(created.front());
}

absl::Status BlocksLease::Release(std::optional<uint32_t> corrupt_block) { return ReleaseAsync(corrupt_block).Wait(); }

Pending<absl::StatusOr<MappedBlocks>> Cache::MapBlocksAsync(const BlockRange&, std::shared_ptr<SlabPinner>) {
  return Ready<absl::StatusOr<MappedBlocks>>(absl::UnimplementedError("this client maps no blocks"));
}

absl::StatusOr<uint64_t> Cache::BindSlabs(uint64_t, std::shared_ptr<SlabPinner>) {
  return absl::UnimplementedError("this client maps no blocks");
}

absl::StatusOr<MappedBlocks> Cache::MapBlocks(const BlockRange& range, std::shared_ptr<SlabPinner> pinner) {
  return MapBlocksAsync(range, std::move(pinner)).Wait();
}

std::unique_ptr<Cache> MakeCache(std::shared_ptr<Connection> connection, api::Cache::Client cap,
                                 CacheDescription description) {
  return std::make_unique<CacheImpl>(std::move(connection), std::move(cap), std::move(description));
}

absl::StatusOr<std::unique_ptr<Arena>> MakeArena(std::shared_ptr<Connection> connection, api::Arena::Client cap,
                                                 uint32_t id, uint64_t bytes) {
  KV_ASSIGN_OR_RETURN(const int fd, DescriptorOf(*connection, cap));
  struct stat stat {};
  if (::fstat(fd, &stat) != 0 || uint64_t(stat.st_size) != bytes) {
    return absl::InternalError(absl::StrCat("the daemon's arena is of ", stat.st_size, " bytes, expected ", bytes));
  }
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("mapping an arena of ", bytes, " bytes: ", std::strerror(errno)));
  }
  return std::make_unique<ArenaImpl>(std::move(connection), std::move(cap), id,
                                     absl::MakeSpan(static_cast<uint8_t*>(data), bytes));
}

}  // namespace kvmanager::client
