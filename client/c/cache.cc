// Caches: prefixes, steps, and calls under way.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/block_hashes.h"
#include "client/c/describe.h"
#include "client/c/object.h"

namespace kvmanager::client::c {
namespace {

static_assert(sizeof(BlockName) == 64);

template <typename F>
int Ask(kvm_object* cache, F f) {
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(CacheObject * object, Use<CacheObject>(cache));
    return f(*object);
  });
}

std::vector<absl::Span<const BlockName>> PrefixesOf(const uint8_t* names, const uint32_t* blocks, uint32_t prefixes) {
  std::vector<absl::Span<const BlockName>> spans;
  for (uint32_t i = 0; i < prefixes; ++i) {
    spans.emplace_back(reinterpret_cast<const BlockName*>(names), blocks[i]);
    names += size_t{blocks[i]} * sizeof(BlockName);
  }
  return spans;
}

/// What a batch names must live as long as the batch.
absl::Status ReadStep(const Session& session, const kvm_step& step, std::vector<StepEntry>* entries, StepBatch* batch) {
  if (step.q_dtype < 0 || step.q_dtype > 2) return InvalidField("q_dtype", step.q_dtype, "0..2");
  KV_RETURN_IF_ERROR(ReadEntries(step.entries, step.entry_count, entries));
  batch->layer = step.layer;
  batch->entries = *entries;
  batch->k = ViewOf(session, step.k);
  batch->v = ViewOf(session, step.v);
  batch->x = ViewOf(session, step.x);
  batch->q = ViewOf(session, step.q);
  batch->out = ViewOf(session, step.out);
  batch->lse = ViewOf(session, step.lse);
  batch->q_dtype = static_cast<DType>(step.q_dtype);
  batch->scale = step.scale;
  batch->ready = step.ready;
  return absl::OkStatus();
}

/// An answer that is copied to the caller's memory: a call that nobody waits for must not write there.
struct Copied {
  std::vector<uint8_t> bytes;
  void* to = nullptr;

  void Redirect(TensorView* view) {
    if (view->data == nullptr || view->arena != nullptr) return;
    bytes.resize(view->bytes);
    to = std::exchange(view->data, bytes.data());
  }
  void Deliver() const {
    if (to != nullptr) std::memcpy(to, bytes.data(), bytes.size());
  }
};

}  // namespace
}  // namespace kvmanager::client::c

using namespace kvmanager::client;     // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_open_cache(kvm_object* client, const char* options, size_t options_bytes, kvm_object** cache) {
  *cache = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(ClientObject * object, Use<ClientObject>(client));
    KV_ASSIGN_OR_RETURN(const CacheOptions parsed, ParseCacheOptions({options, options_bytes}));
    KV_ASSIGN_OR_RETURN(auto made, object->handle->OpenCache(parsed));
    Leave(Text(Describe(made->description())));
    *cache = new CacheObject(object->session, std::move(made));
    return absl::OkStatus();
  });
}

int kvm_refresh(kvm_object* cache) {
  return Ask(cache, [](CacheObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const CacheDescription description, object.handle->Refresh());
    Leave(Text(Describe(description)));
    return absl::OkStatus();
  });
}

int kvm_name_blocks(const uint8_t* digest, const uint32_t* ids, uint64_t count, int32_t page_tokens, uint8_t* names) {
  return Guard([&]() -> absl::Status {
    if (page_tokens < 16 || page_tokens > 256) return kvmanager::InvalidField("page_tokens", page_tokens, "16..256");
    kvmanager::CacheDigest cache;
    std::memcpy(cache.bytes.data(), digest, cache.bytes.size());
    std::vector<kvmanager::BlockName> made;
    kvmanager::NameBlocks(cache, {ids, count}, page_tokens, &made);
    if (!made.empty()) std::memcpy(names, made.data(), made.size() * sizeof(kvmanager::BlockName));
    return absl::OkStatus();
  });
}

int kvm_name_hashes(const uint8_t* digest, const kvm_hashes* hashes, uint8_t* names) {
  return Guard([&]() -> absl::Status {
    KV_RETURN_IF_ERROR(CheckHashes(*hashes));
    kvmanager::CacheDigest cache;
    std::memcpy(cache.bytes.data(), digest, cache.bytes.size());
    NamedByHashes by(*hashes);
    const auto made = by.Names(cache, 0, by.count());
    if (!made.empty()) std::memcpy(names, made.data(), made.size() * sizeof(kvmanager::BlockName));
    return absl::OkStatus();
  });
}

int kvm_match(kvm_object* cache, const uint8_t* names, const uint32_t* blocks, uint32_t prefixes, int32_t prefetch,
              kvm_match_result* results) {
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const auto matches,
                        object.handle->Match(PrefixesOf(names, blocks, prefixes), {.prefetch = prefetch != 0}));
    for (size_t i = 0; i < matches.size(); ++i) results[i] = ResultOf(matches[i]);
    return absl::OkStatus();
  });
}

int kvm_prefetch(kvm_object* cache, const uint8_t* names, uint32_t blocks, kvm_match_result* result) {
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const PrefixMatch match,
                        object.handle->Prefetch({reinterpret_cast<const kvmanager::BlockName*>(names), blocks}));
    *result = ResultOf(match);
    return absl::OkStatus();
  });
}

int kvm_retain(kvm_object* cache, const uint8_t* names, uint32_t blocks, int32_t priority, int64_t ttl_ms,
               uint64_t* values) {
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const RetainOutcome outcome,
                        object.handle->Retain({reinterpret_cast<const kvmanager::BlockName*>(names), blocks},
                                              {.priority = priority, .ttl_ms = ttl_ms}));
    values[0] = outcome.blocks;
    values[1] = outcome.bytes;
    values[2] = 0;
    return absl::OkStatus();
  });
}

int kvm_create_sequences(kvm_object* cache, const uint8_t* names, const uint32_t* blocks, const uint64_t* prompt_tokens,
                         uint32_t prefixes, kvm_created* created) {
  for (uint32_t i = 0; i < prefixes; ++i) created[i] = {};
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    const auto prompts = absl::MakeConstSpan(prompt_tokens, prompt_tokens == nullptr ? 0 : prefixes);
    KV_ASSIGN_OR_RETURN(auto made, object.handle->CreateSequences(PrefixesOf(names, blocks, prefixes), prompts));
    std::string errors = "[";
    for (size_t i = 0; i < made.size(); ++i) {
      if (i > 0) errors += ",";
      if (!made[i].ok()) {
        created[i].code = int32_t(made[i].status().code());
        errors += ErrorText(made[i].status());
        continue;
      }
      errors += "null";
      created[i].id = made[i]->sequence->id();
      created[i].match = ResultOf(made[i]->match);
      created[i].sequence = new SequenceObject(object.session, std::move(made[i]->sequence));
    }
    Leave(errors + "]");
    return absl::OkStatus();
  });
}

int kvm_cache_step(kvm_object* cache, const kvm_step* step, uint64_t* values) {
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    std::vector<StepEntry> entries;
    StepBatch batch;
    KV_RETURN_IF_ERROR(ReadStep(*object.session, *step, &entries, &batch));
    KV_ASSIGN_OR_RETURN(const StepResult result, object.handle->Step(batch));
    values[0] = result.encoded_pairs;
    values[1] = result.raw_pairs;
    values[2] = result.done;
    return absl::OkStatus();
  });
}

int kvm_cache_step_async(kvm_object* cache, const kvm_step* step, kvm_object** pending) {
  *pending = nullptr;
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    std::vector<StepEntry> entries;
    StepBatch batch;
    KV_RETURN_IF_ERROR(ReadStep(*object.session, *step, &entries, &batch));
    Copied out, lse;
    out.Redirect(&batch.out);
    lse.Redirect(&batch.lse);
    auto under_way = object.handle->StepAsync(batch);
    *pending = NewPending(
        object, std::move(under_way),
        [out = std::move(out), lse = std::move(lse)](const Session&, StepResult result) -> absl::StatusOr<Done> {
          out.Deliver();
          lse.Deliver();
          return Done{{result.encoded_pairs, result.raw_pairs, result.done}, nullptr, ""};
        });
    return absl::OkStatus();
  });
}

int kvm_read(kvm_object* cache, int32_t layer, const kvm_entry* entries, uint32_t entry_count, const kvm_tensor* k,
             const kvm_tensor* v, uint64_t* values) {
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    std::vector<StepEntry> read;
    KV_RETURN_IF_ERROR(ReadEntries(entries, entry_count, &read));
    const Session& session = *object.session;
    KV_ASSIGN_OR_RETURN(const ReadResult result,
                        object.handle->Read({layer, read, ViewOf(session, *k), ViewOf(session, *v)}));
    values[0] = result.encoded_tokens;
    values[1] = result.raw_tokens;
    values[2] = 0;
    return absl::OkStatus();
  });
}

int kvm_read_async(kvm_object* cache, int32_t layer, const kvm_entry* entries, uint32_t entry_count,
                   const kvm_tensor* k, const kvm_tensor* v, kvm_object** pending) {
  *pending = nullptr;
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    std::vector<StepEntry> read;
    KV_RETURN_IF_ERROR(ReadEntries(entries, entry_count, &read));
    ReadBatch batch{layer, read, ViewOf(*object.session, *k), ViewOf(*object.session, *v)};
    Copied k_copy, v_copy;
    k_copy.Redirect(&batch.k);
    v_copy.Redirect(&batch.v);
    auto under_way = object.handle->ReadAsync(batch);
    *pending = NewPending(object, std::move(under_way),
                          [k_copy = std::move(k_copy), v_copy = std::move(v_copy)](
                              const Session&, ReadResult result) -> absl::StatusOr<Done> {
                            k_copy.Deliver();
                            v_copy.Deliver();
                            return Done{{result.encoded_tokens, result.raw_tokens}, nullptr, ""};
                          });
    return absl::OkStatus();
  });
}

int kvm_read_blocks_async(kvm_object* cache, uint32_t first, const uint8_t* names, uint32_t blocks,
                          const kvm_tensor* pages, kvm_object** pending) {
  *pending = nullptr;
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    const BlockRange range{
        first, {reinterpret_cast<const kvmanager::BlockName*>(names), blocks}, ViewOf(*object.session, *pages)};
    *pending = NewPending(object, object.handle->ReadBlocksAsync(range),
                          [](const Session&, const ReadBlocksResult& result) -> absl::StatusOr<Done> {
                            std::string raw(result.raw.size(), '0');
                            for (size_t i = 0; i < raw.size(); ++i) raw[i] += result.raw[i] != 0;
                            return Done{{result.blocks, uint64_t(result.reason), result.bytes},
                                        nullptr,
                                        absl::StrCat("{\"raw\":\"", raw, "\"}")};
                          });
    return absl::OkStatus();
  });
}

int kvm_write_blocks_async(kvm_object* cache, uint32_t first, const uint8_t* names, uint32_t blocks, const uint8_t* raw,
                           uint64_t raw_bytes, const uint64_t* checksums, const kvm_tensor* pages,
                           kvm_object** pending) {
  *pending = nullptr;
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    const BlockRange range{
        first, {reinterpret_cast<const kvmanager::BlockName*>(names), blocks}, ViewOf(*object.session, *pages)};
    const absl::Span<const uint64_t> known(checksums, checksums == nullptr ? 0 : raw_bytes);
    *pending = NewPending(object, object.handle->WriteBlocksAsync(range, {raw, raw_bytes}, known),
                          [](const Session&, const WriteBlocksResult& result) -> absl::StatusOr<Done> {
                            return Done{{result.written, result.present}, nullptr, ""};
                          });
    return absl::OkStatus();
  });
}

int kvm_ready(kvm_object* pending, int* ready) {
  *ready = 0;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(PendingObject * object, Use<PendingObject>(pending));
    *ready = object->Ready();
    return absl::OkStatus();
  });
}

int kvm_wait(kvm_object* pending, uint64_t* values, kvm_object** made) {
  *made = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(PendingObject * object, Use<PendingObject>(pending));
    auto done = object->Wait();
    object->Close();
    if (!done.ok()) return done.status();
    std::memcpy(values, done->values, sizeof done->values);
    *made = done->made;
    Leave(std::move(done->text));
    return absl::OkStatus();
  });
}

int kvm_output_factors(kvm_object* cache, int32_t layer, float* factors, uint64_t count, int* folds) {
  *folds = 0;
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const std::vector<float> found, object.handle->OutputFactors(layer));
    if (found.empty()) return absl::OkStatus();
    if (found.size() != count) return kvmanager::InvalidField("count", count, absl::StrCat(found.size()));
    std::memcpy(factors, found.data(), found.size() * sizeof(float));
    *folds = 1;
    return absl::OkStatus();
  });
}

int kvm_claim(kvm_object* cache, const uint8_t* ticket, size_t ticket_bytes, int64_t deadline_ms,
              kvm_object** pending) {
  *pending = nullptr;
  return Ask(cache, [&](CacheObject& object) -> absl::Status {
    auto claim = object.handle->ClaimAsync({reinterpret_cast<const char*>(ticket), ticket_bytes}, deadline_ms);
    *pending = NewPending(object, std::move(claim),
                          [session = object.session](const Session&, ClaimedSequence claimed) -> absl::StatusOr<Done> {
                            const uint64_t id = claimed.sequence->id();
                            return Done{{claimed.tokens, id},
                                        new SequenceObject(session, std::move(claimed.sequence)),
                                        Text({{"blob", Hex(claimed.blob)}})};
                          });
    return absl::OkStatus();
  });
}

}  // extern "C"
