// The whole of the client in one page: what an engine does, without the model. client/README.md walks through it.
//
//   kvmanagerd --listen unix:/tmp/kv.sock --host-pool-bytes 256MiB --hand-off-peers any &
//   example unix:/tmp/kv.sock [HOST:PORT of another daemon's --peer-listen, and that daemon's own address]
#include <cstdint>
#include <iostream>
#include <numeric>
#include <vector>

#include "client/client.h"
#include "kvmanager/base/status.h"

namespace {

using namespace kvmanager;          // NOLINT: an example
using namespace kvmanager::client;  // NOLINT

constexpr int kLayers = 2, kKvHeads = 2, kQueryHeads = 8, kHeadDim = 64, kPageTokens = 64;
constexpr size_t kKvRow = kKvHeads * kHeadDim, kQueryRow = kQueryHeads * kHeadDim;
constexpr int kPromptTokens = 150;

/// Where an engine's tensors lie: the daemon reads and writes them in place.
struct Tensors {
  explicit Tensors(Arena& arena) {
    size_t at = 0;
    const auto take = [&](size_t bytes) {
      const TensorView view = arena.View(at, bytes);
      at += (bytes + 63) / 64 * 64;  // ranges begin at multiples of 64
      return view;
    };
    k = take(kPromptTokens * kKvRow * sizeof(uint16_t));
    v = take(kPromptTokens * kKvRow * sizeof(uint16_t));
    q = take(kPromptTokens * kQueryRow * sizeof(float));
    out = take(kPromptTokens * kQueryRow * sizeof(float));
  }
  static TensorView Rows(TensorView view, int rows, size_t row_bytes) {
    return {view.data, rows * row_bytes, view.arena};
  }

  /// Appends and attends `tokens` tokens of one sequence in one layer. Here is where an engine computes k, v and q.
  absl::Status Layer(Cache& cache, int layer, uint64_t sequence, uint64_t position, int tokens) const {
    const StepEntry entries[] = {{sequence, position, tokens}};
    const auto done = cache.Step({.layer = layer,
                                  .entries = entries,
                                  .k = Rows(k, tokens, kKvRow * sizeof(uint16_t)),
                                  .v = Rows(v, tokens, kKvRow * sizeof(uint16_t)),
                                  .q = Rows(q, tokens, kQueryRow * sizeof(float)),
                                  .out = Rows(out, tokens, kQueryRow * sizeof(float))});
    return done.status();
  }

  TensorView k, v, q, out;
};

absl::Status Run(const char* address, const char* peer, const char* peer_client_address) {
  // 1. Connect. Every call has the deadline; a lost daemon is UNAVAILABLE at once.
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(address, {.name = "example", .deadline_ms = 10000}));

  // 2. Open the cache of this model. Everything in the options is part of every block's name.
  CacheOptions options;
  options.model = "example-model";
  options.revision = "1";
  options.layers = kLayers;
  options.kv_heads = kKvHeads;
  options.query_heads = kQueryHeads;
  options.head_dim = kHeadDim;
  options.page_tokens = kPageTokens;
  options.codec = "raw";
  KV_ASSIGN_OR_RETURN(auto cache, client->OpenCache(options));

  // 3. Memory that both sides see. Over TCP there is none: use TensorView::Inline.
  KV_ASSIGN_OR_RETURN(auto arena, client->CreateArena(4 << 20));
  const Tensors tensors(*arena);

  // 4. A sequence that begins with whatever blocks of the prompt are known already.
  std::vector<uint32_t> tokens(kPromptTokens);
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<BlockName> names;
  NameBlocks(cache->description().digest, tokens, kPageTokens, &names);
  // At least one token is left to compute: its output is what the next token is sampled from.
  KV_ASSIGN_OR_RETURN(CreatedSequence created, cache->CreateSequence(names));
  const uint64_t found = uint64_t(created.match.hit_blocks) * kPageTokens;
  std::cout << "prompt: " << found << " of " << kPromptTokens << " tokens were there\n";

  // 5. Prefill the rest: one call per layer, causal within the chunk.
  const int rest = int(kPromptTokens - found);
  for (int layer = 0; layer < kLayers; ++layer) {
    KV_RETURN_IF_ERROR(tensors.Layer(*cache, layer, created.sequence->id(), found, rest));
  }

  // 6. Publish the full blocks, so that the next prompt with this beginning finds them.
  KV_ASSIGN_OR_RETURN(const PublishOutcome published, created.sequence->Publish(names));
  std::cout << "published " << published.published << ", shared " << published.shared << ", deferred "
            << published.deferred << "\n";

  // 7. Fork: two continuations of one prompt. Full blocks are shared, the open page is copied.
  KV_ASSIGN_OR_RETURN(auto fork, created.sequence->Fork());
  for (int layer = 0; layer < kLayers; ++layer) {  // one call steps a whole batch: here both sequences, one token each
    const StepEntry entries[] = {{created.sequence->id(), kPromptTokens, 1}, {fork->id(), kPromptTokens, 1}};
    const auto done = cache->Step({.layer = layer,
                                   .entries = entries,
                                   .k = Tensors::Rows(tensors.k, 2, kKvRow * sizeof(uint16_t)),
                                   .v = Tensors::Rows(tensors.v, 2, kKvRow * sizeof(uint16_t)),
                                   .q = Tensors::Rows(tensors.q, 2, kQueryRow * sizeof(float)),
                                   .out = Tensors::Rows(tensors.out, 2, kQueryRow * sizeof(float))});
    KV_RETURN_IF_ERROR(done.status());
  }

  // 8. Take back what speculation got wrong.
  KV_RETURN_IF_ERROR(fork->Crop(kPromptTokens));

  // 9. Hand a sequence to the daemon of another host while it is prefilled: pages go as soon as a layer has them. The
  // ticket travels by the engine's own means, and may be claimed at once: the answer comes when the prompt is complete.
  if (peer != nullptr) {
    KV_ASSIGN_OR_RETURN(CreatedSequence going, cache->CreateSequence());
    KV_ASSIGN_OR_RETURN(auto hand_off, going.sequence->BeginHandOff(peer, kPromptTokens));
    KV_ASSIGN_OR_RETURN(auto there, Client::Connect(peer_client_address, {.name = "example"}));
    KV_ASSIGN_OR_RETURN(auto same_cache, there->OpenCache(options));
    auto claim = same_cache->ClaimAsync(hand_off->ticket(), /*deadline_ms=*/30000);
    for (int layer = 0; layer < kLayers; ++layer) {
      KV_RETURN_IF_ERROR(tensors.Layer(*cache, layer, going.sequence->id(), 0, kPromptTokens));
    }
    KV_RETURN_IF_ERROR(going.sequence->Publish(names).status());
    KV_ASSIGN_OR_RETURN(const HandOffOutcome sent, hand_off->Finish("sampling state"));
    std::cout << "handed off " << sent.pages_sent << " pages, " << sent.bytes_sent << " bytes\n";
    KV_ASSIGN_OR_RETURN(const ClaimedSequence claimed, claim.Wait());
    std::cout << "claimed " << claimed.tokens << " tokens, blob \"" << claimed.blob << "\"\n";
  }
  return absl::OkStatus();  // 10. Handles give back what they name; published blocks stay.
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::cerr << "usage: example ADDRESS [PEER_HOST:PORT PEER_CLIENT_ADDRESS]\n";
    return 2;
  }
  const absl::Status status = Run(argv[1], argc == 4 ? argv[2] : nullptr, argc == 4 ? argv[3] : nullptr);
  if (!status.ok()) {
    const ErrorDetail detail = DetailOf(status);
    std::cerr << status << "\n";
    if (!detail.field.empty()) std::cerr << "field " << detail.field << ", allowed: " << detail.bound << "\n";
    return 1;
  }
}
