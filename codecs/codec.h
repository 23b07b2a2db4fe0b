// A codec turns sealed raw pages into their encoded form and back, and says what attention can do on that form.
//
// One Codec object serves one cache: it is made for a CodecContext and parameters, is immutable afterwards, is owned by
// the cache, and every method may be called from any thread at once. Encoding is deterministic: equal pages at equal
// places give equal bytes on every machine and every instruction set. Encoded bytes are at once what is stored, sent
// and computed on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "codecs/calibration.h"
#include "codecs/device/device_codec.h"
#include "codecs/layer_group.h"
#include "codecs/page_attention.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

/// What a codec is made for: the geometry and identity of a cache, and the artifact that the spec names.
struct CodecContext {
  PageLayout layout;
  int layers = 1;       // of the model
  int query_heads = 0;  // of this shard; 0: unknown
  std::string model;    // an artifact for another model or revision is refused; empty: not compared
  std::string revision;
  std::shared_ptr<const Calibration> calibration;  // nullptr: none named. Its geometry was compared with the above
  std::vector<int> served_layers;  // ascending: what a budget for the whole is shared among, a policy's other layers
                                   // having other codecs; empty: all
};

/// What a codec says of itself for one context and one set of parameters.
struct CodecInfo {
  std::string name;  // "hack"; "policy" where layers have different codecs
  /// Canonical, all parameters in a fixed order: "hack:k_axis=channel,k_bits=3,..."; part of a cache's digest. An
  /// artifact is in it as calibration=DIGEST, so that two daemons agree whatever their files are called.
  std::string spec;
  std::string calibration_digest;  // 64 hexadecimal digits, or empty
  uint32_t version = 0;      // of the byte format; an incompatible change is a new version, and old pages become misses
  size_t encoded_bytes = 0;  // of one page of the largest layer: what a slot holds and a transfer sends, padding
                             // included; a multiple of 64
  std::vector<uint32_t> layer_bytes;  // [layers] of one page, where layers differ; empty: encoded_bytes everywhere
  size_t payload_bytes = 0;  // of these, codes, metadata and sums (no padding), the mean over layers: what "bytes per
                             // token and head" counts
  bool identity = false;     // the encoded form is the raw form; the store then never encodes
  uint64_t sink_tokens = 0;  // at the beginning of every context, whose pages stay raw; whole pages
  std::vector<bool> raw_layers;  // [layers] whose pages stay raw though others are encoded; empty: none

  /// Whether the codec declines every page of `layer` that begins at `first_token`, whatever is in it.
  bool keeps_raw(int layer, uint64_t first_token) const {
    return first_token < sink_tokens || (!raw_layers.empty() && raw_layers[layer]);
  }
  /// Bytes of an encoded page of `layer`.
  size_t page_bytes(int layer) const { return layer_bytes.empty() ? encoded_bytes : layer_bytes[layer]; }
  /// The mean over layers, rounded up.
  size_t mean_page_bytes() const {
    if (layer_bytes.empty()) return encoded_bytes;
    size_t sum = 0;
    for (const uint32_t bytes : layer_bytes) sum += bytes;
    return (sum + layer_bytes.size() - 1) / layer_bytes.size();
  }
};

struct EncodeItem {
  const uint8_t* raw = nullptr;  // a full raw page (PageLayout), finite values only; 64-byte aligned
  uint8_t* encoded = nullptr;    // page_bytes(layer), 64-byte aligned; every byte is written
  uint32_t layer = 0;            // of the model
  uint64_t first_token = 0;      // position in the context of the page's first token
  bool declined = false;         // out: the page cannot be encoded (a minimum or step does not fit fp16); it stays raw
  bool is_sink = false;          // out, with `declined`: it was not tried, since the cache's policy keeps it raw
};

struct DecodeItem {
  const uint8_t* encoded = nullptr;
  uint8_t* raw = nullptr;
  uint32_t layer = 0;
};

class Codec {
 public:
  virtual ~Codec() = default;

  virtual const CodecInfo& info() const = 0;
  virtual const PageLayout& layout() const = 0;
  /// Which codec serves which layers (layer_group.h); the groups name codecs of this one, which outlives them.
  /// layers: of the model, as the CodecContext said. Allocates: asked once, when a cache is opened.
  virtual LayerGroups groups(int layers) const { return LayerGroups(layers, *this); }

  /// Bytes of scratch that Encode needs per call.
  virtual size_t encode_workspace_bytes() const = 0;
  /// Encodes each item. workspace: at least encode_workspace_bytes(), 64-byte aligned. Allocates nothing.
  virtual void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const = 0;
  /// Writes the values that attention on the encoded form stands for, rounded to the layout's dtype.
  virtual void Decode(absl::Span<const DecodeItem> items) const = 0;
  /// Checks that hostile bytes are safe to attend to (every count and offset within bounds, every scale finite).
  /// Encoded pages from a peer or a file pass here before anything reads them. Errors: DATA_LOSS with field, value,
  /// bound.
  virtual absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const = 0;
  /// Attention directly on the encoded form; owned by the codec.
  virtual const PageAttention& attention() const = 0;

  /// Where attention().folds_output(layer): the factor A [head_dim][head_dim], row-major, by which an output o' of
  /// `kv_head` stands for o = A o' (columns beyond the head's rank are zero), for the client to fold into W_O. false:
  /// outputs are as usual.
  virtual bool OutputFactor(int layer, int kv_head, absl::Span<float> factor) const { return false; }

  /// For a sequence of this cache, an index by which its queries choose what they read (sequence_index.h); nullptr:
  /// every query reads everything. Only of identity codecs.
  virtual std::unique_ptr<SequenceIndex> NewIndex(const IndexFacts& facts) const { return nullptr; }
  /// The same for a cache on a GPU, and what it takes there.
  virtual std::unique_ptr<SequenceIndex> NewDeviceIndex(const IndexFacts& facts) const { return nullptr; }
  virtual DeviceIndexLayout device_index() const { return {}; }

  /// A ladder (codecs/ladder) has several codecs, of rungs 0 .. rungs() - 1. Pages are encoded by the one of rung 0,
  /// whose are all the methods above; the store may encode them again by that of a later rung, whose pages are smaller.
  static constexpr int kRungsMax = 4;
  virtual int rungs() const { return 1; }
  virtual const Codec& rung(int) const { return *this; }

  /// What this codec does on the calling thread's GPU; nullptr: nothing, here or in this build.
  virtual std::unique_ptr<DeviceCodec> NewDeviceCodec() const { return nullptr; }
};

}  // namespace kvmanager
