// What a client of an earlier release must still be able to do: the program that compat_test.cc runs as it is built
// here and as it was built from an earlier commit (tests/old_build). It uses client.h and model.h alone.
//
//   compat_client [--calibration-dir=DIR] serve ADDRESS CODEC
//   compat_client [--calibration-dir=DIR] hand_off FROM TO PEER CODEC whole|streamed
//
// ADDRESS, FROM and TO are what daemons listen on for clients, PEER what TO listens on for other daemons. Prints "ok"
// and ends with 0, or prints what failed and ends with 1.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/client.h"
#include "codecs/builtin.h"
#include "kvmanager/base/status.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::ClaimedSequence;
using client::Client;
using client::CreatedSequence;

constexpr int kPages = 5, kTokens = kPages * 64 + 13, kChunk = 70, kLag = 1;
// Attention rounds differently from the model's doubles, and may from release to release.
constexpr double kErrorMax = 0.04;

absl::Status Wrong(absl::string_view what) { return absl::InternalError(absl::StrCat("wrong: ", std::string(what))); }

absl::Status At(const absl::Status& status, absl::string_view step) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(std::string(step), ": ", std::string(status.message())));
}

struct ReadRows {
  std::vector<uint8_t> k, v;
  client::ReadResult counts;
};

absl::StatusOr<ReadRows> Read(Cache& cache, uint64_t sequence, int layer, int tokens) {
  const CacheOptions& shape = cache.description().options;
  const client::StepEntry entry{sequence, 0, tokens};
  ReadRows rows;
  rows.k.assign(size_t(tokens) * shape.kv_heads * shape.head_dim * DTypeBytes(shape.dtype), 0xee);
  rows.v = rows.k;
  client::ReadBatch batch;
  batch.layer = layer;
  batch.entries = {&entry, 1};
  batch.k = client::TensorView::Inline(rows.k.data(), rows.k.size());
  batch.v = client::TensorView::Inline(rows.v.data(), rows.v.size());
  KV_ASSIGN_OR_RETURN(rows.counts, cache.Read(batch));
  return rows;
}

/// Reads back and attends to all of it, and compares with the model.
absl::Status Compare(Cache& cache, uint64_t sequence, const Source& source, const ModelSequence& model, int tokens,
                     absl::string_view what) {
  for (int layer = 0; layer < source.shape.layers; ++layer) {
    absl::StatusOr<ReadRows> rows = Read(cache, sequence, layer, tokens);
    KV_RETURN_IF_ERROR(At(rows.status(), absl::StrCat(std::string(what), ", read of layer ", layer)));
    const ModelSequence::Rows expected = model.Read(layer, 0, tokens);
    if (rows->k != expected.k || rows->v != expected.v || rows->counts.encoded_tokens != expected.encoded_tokens) {
      return Wrong(absl::StrCat(std::string(what), ", read of layer ", layer, ": ", rows->counts.encoded_tokens,
                                " encoded tokens, expected ", expected.encoded_tokens, " and equal bytes"));
    }
  }
  absl::StatusOr<std::vector<float>> out = Ask(cache, sequence, source, tokens - 1);
  KV_RETURN_IF_ERROR(At(out.status(), absl::StrCat(std::string(what), ", attend")));
  const double error = RelativeError(*out, AskModel(model, source, tokens - 1));
  if (!(error <= kErrorMax)) return Wrong(absl::StrCat(std::string(what), ", attend: relative error ", error));
  return absl::OkStatus();
}

/// Create, append through the socket and through an arena, attend, read back, crop, fork, publish, prefix hit.
absl::Status Serve(const CodecRegistry& codecs, const std::string& address, const std::string& codec) {
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(address, {.name = "compat_client"}));
  const CacheOptions options = SmallCache(codec, kLag);
  KV_ASSIGN_OR_RETURN(auto cache, client->OpenCache(options));
  const Source source{31, Kind::kOutliers, options};
  ModelSequence model(options, codecs);
  KV_ASSIGN_OR_RETURN(CreatedSequence made, cache->CreateSequence());
  const uint64_t id = made.sequence->id();
  KV_RETURN_IF_ERROR(At(Load(*cache, id, source, 0, kTokens - 1, kChunk), "append"));
  LoadModel(model, source, 0, kTokens - 1, kChunk);

  KV_ASSIGN_OR_RETURN(auto arena, client->CreateArena(1 << 20));
  for (int layer = 0; layer < options.layers; ++layer) {
    const std::vector<uint8_t> k = source.K(layer, kTokens - 1, 1), v = source.V(layer, kTokens - 1, 1);
    std::copy(k.begin(), k.end(), arena->data().begin());
    std::copy(v.begin(), v.end(), arena->data().begin() + 4096);
    const client::StepEntry entry{id, kTokens - 1, 1};
    client::StepBatch batch;
    batch.layer = layer;
    batch.entries = {&entry, 1};
    batch.k = arena->View(0, k.size());
    batch.v = arena->View(4096, v.size());
    KV_RETURN_IF_ERROR(At(cache->Step(batch).status(), "append from an arena"));
  }
  LoadModel(model, source, kTokens - 1, 1, 1);
  KV_RETURN_IF_ERROR(Compare(*cache, id, source, model, kTokens, "appended"));

  KV_ASSIGN_OR_RETURN(auto fork, made.sequence->Fork());
  KV_RETURN_IF_ERROR(At(fork->Crop(kTokens - 3), "crop"));
  ModelSequence cropped = std::move(model);
  cropped.Crop(kTokens - 3);
  KV_RETURN_IF_ERROR(Compare(*cache, fork->id(), source, cropped, kTokens - 3, "forked and cropped"));

  absl::StatusOr<client::PublishOutcome> published = made.sequence->Publish(Names(*cache, source, kPages));
  KV_RETURN_IF_ERROR(At(published.status(), "publish"));
  KV_ASSIGN_OR_RETURN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, kPages)));
  if (hit.match.hit_blocks != kPages) return Wrong(absl::StrCat("prefix hit of ", hit.match.hit_blocks, " blocks"));
  ModelSequence shared(options, codecs);
  LoadModel(shared, source, 0, kPages * 64, kChunk);
  shared.MarkShared(kPages * 64);
  KV_RETURN_IF_ERROR(Compare(*cache, hit.sequence->id(), source, shared, kPages * 64, "prefix hit"));

  KV_ASSIGN_OR_RETURN(const client::DaemonDescription status, client->Status());
  if (status.published_blocks != kPages) return Wrong(absl::StrCat(status.published_blocks, " published blocks"));
  KV_RETURN_IF_ERROR(At(client->Caches().status(), "caches"));
  KV_RETURN_IF_ERROR(At(client->Sequences().status(), "sequences"));
  KV_RETURN_IF_ERROR(At(client->MetricsText().status(), "metrics"));
  hit.sequence.reset();
  fork.reset();
  made.sequence.reset();
  return At(client->Purge(Client::kAllCaches).status(), "purge");
}

/// A sequence goes from one daemon to the other, as a whole or while it grows; there it reads as it did here.
absl::Status HandOver(const CodecRegistry& codecs, const std::string& from, const std::string& to,
                      const std::string& peer, const std::string& codec, bool streamed) {
  KV_ASSIGN_OR_RETURN(auto here, Client::Connect(from, {.name = "compat_client"}));
  KV_ASSIGN_OR_RETURN(auto there, Client::Connect(to, {.name = "compat_client"}));
  const CacheOptions options = SmallCache(codec, kLag);
  KV_ASSIGN_OR_RETURN(auto cache, here->OpenCache(options));
  KV_ASSIGN_OR_RETURN(auto other, there->OpenCache(options));
  if (cache->description().digest != other->description().digest) return Wrong("the caches' digests differ");
  const Source source{streamed ? 41u : 42u, Kind::kOutliers, options};
  KV_ASSIGN_OR_RETURN(CreatedSequence made, cache->CreateSequence());
  const uint64_t id = made.sequence->id();
  const std::string blob("first token\0\xff", 13);
  std::string ticket;
  if (streamed) {
    auto begun = made.sequence->BeginHandOff(peer, kTokens);
    KV_RETURN_IF_ERROR(At(begun.status(), "begin of a streamed hand-off"));
    for (int layer = 0; layer < options.layers; ++layer) {
      KV_RETURN_IF_ERROR(At(LoadLayer(*cache, id, source, layer, 0, kTokens), "append"));
    }
    const auto sent = (*begun)->Finish(blob);
    KV_RETURN_IF_ERROR(At(sent.status(), "finish of a streamed hand-off"));
    ticket = sent->ticket;
  } else {
    KV_RETURN_IF_ERROR(At(Load(*cache, id, source, 0, kTokens, kTokens), "append"));
    const auto sent = made.sequence->HandOff(peer, blob);
    KV_RETURN_IF_ERROR(At(sent.status(), "hand-off"));
    ticket = sent->ticket;
  }
  KV_ASSIGN_OR_RETURN(const ClaimedSequence claimed, other->Claim(ticket));
  if (claimed.tokens != kTokens || claimed.blob != blob) return Wrong("tokens or blob of the claimed sequence");

  // One token more ages what the receiver may read encoded.
  ModelSequence model(options, codecs);
  LoadModel(model, source, 0, kTokens, kTokens);
  LoadModel(model, source, kTokens, 1, 1);
  for (const auto& [at, sequence] :
       {std::make_pair(cache.get(), id), std::make_pair(other.get(), claimed.sequence->id())}) {
    const std::string what = at == cache.get() ? "at the sender" : "at the receiver";
    KV_RETURN_IF_ERROR(At(Load(*at, sequence, source, kTokens, 1, 1), absl::StrCat("append ", what)));
    KV_RETURN_IF_ERROR(Compare(*at, sequence, source, model, kTokens + 1, what));
  }
  return absl::OkStatus();
}

int Main(std::vector<std::string> args) {
  std::string directory;
  if (!args.empty()) {
    absl::string_view first = args[0];
    if (absl::ConsumePrefix(&first, "--calibration-dir=")) {
      directory = std::string(first);
      args.erase(args.begin());
    }
  }
  const auto artifacts = MakeCalibrationDirectory(directory);
  CodecRegistry codecs;
  RegisterBuiltinCodecs(codecs);
  codecs.SetCalibrations(artifacts.get());
  absl::Status status = absl::InvalidArgumentError("see the head of compat_client.cc");
  if (args.size() == 3 && args[0] == "serve") status = Serve(codecs, args[1], args[2]);
  if (args.size() == 6 && args[0] == "hand_off") {
    status = HandOver(codecs, args[1], args[2], args[3], args[4], args[5] == "streamed");
  }
  std::printf("%s\n", status.ok() ? "ok" : status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) { return kvmanager::testing::Main(std::vector<std::string>(argv + 1, argv + argc)); }
