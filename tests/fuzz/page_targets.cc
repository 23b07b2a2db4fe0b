// Encoded pages of every codec, which come from peers and are computed on.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "codecs/bench_codecs.h"
#include "codecs/codec.h"
#include "kvmanager/base/status.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/model.h"

namespace kvmanager::fuzz {
namespace {

constexpr const char* kSpecs[] = {
    "hack:k_bits=3,v_bits=2",
    "hack:k_bits=8,v_bits=8",
    "hack:k_bits=1,v_bits=1,meta=16",
    "hack:k_bits=4,v_bits=3,part=32",
    "hack:rotation=none,v_norm=0",
    "hack:k_axis=token,k_bits=2,v_bits=2,meta=16,part=32,sums=1",
    "hack:k_axis=token,k_bits=4,v_bits=4,part=32,q=asymmetric",
    "raw",
    "million:m=16,bits=8,calibration=synthetic",
    "million:k_m=32,k_bits=6,v_m=16,v_bits=12,calibration=synthetic",
    "zack:rate=0.4,calibration=synthetic",
    "zack+hack:bytes=48,calibration=synthetic",
    "zack+hack:bytes=32,allocation=model,fold=1,calibration=synthetic",
    "zack+million:m=16,bits=8,calibration=synthetic",
    "hack;0..0=raw;1..1=zack+hack:bytes=56,calibration=synthetic;sinks=64",
};

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t[], Free>;

/// Exactly `bytes` (a multiple of 64), aligned: a read past the end is a fault that AddressSanitizer sees.
Bytes Aligned(size_t bytes) { return Bytes(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))); }

class PageTarget final : public FuzzTarget {
 public:
  PageTarget() {
    PageLayout layout;
    layout.kv_heads = 2;
    layout.head_dim = 64;
    layout.page_tokens = 64;
    for (const char* const spec : kSpecs) {
      absl::StatusOr<std::unique_ptr<Codec>> codec = maker_.Make(spec, layout, 2, kLayers);
      KV_CHECK(codec.ok());
      codecs_.push_back(std::move(*codec));
    }
    shape_.kv_heads = 2;
    shape_.head_dim = 64;
    shape_.query_heads = 2;
  }
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    for (size_t i = 0; i < codecs_.size(); ++i) {
      const Codec& codec = *codecs_[i];
      for (const testing::Kind kind : {testing::Kind::kNormal, testing::Kind::kConstant, testing::Kind::kTiny}) {
        const testing::Source source{9, kind, shape_};
        Bytes raw = Aligned(codec.layout().raw_bytes());
        const std::vector<uint8_t> k = source.K(0, 0, 64), v = source.V(0, 0, 64);
        std::copy(k.begin(), k.end(), raw.get());
        std::copy(v.begin(), v.end(), raw.get() + k.size());
        std::string seed(1, char(i));
        if (codec.info().identity) {
          seed.append(reinterpret_cast<const char*>(raw.get()), codec.layout().raw_bytes());
        } else {
          Bytes encoded = Aligned(codec.info().encoded_bytes);
          Bytes workspace = Aligned(codec.encode_workspace_bytes());
          EncodeItem item{raw.get(), encoded.get(), kLayer, 640};
          codec.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), codec.encode_workspace_bytes()));
          if (item.declined) continue;
          const size_t bytes = codec.info().page_bytes(kLayer);
          KV_CHECK(codec.Validate(kLayer, absl::MakeConstSpan(encoded.get(), bytes)).ok());
          seed.append(reinterpret_cast<const char*>(encoded.get()), bytes);
        }
        seeds.push_back(std::move(seed));
      }
    }
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    const Codec& codec = *codecs_[input[0] % codecs_.size()];
    const size_t bytes = codec.info().page_bytes(kLayer);
    Bytes page = Aligned(bytes);
    std::memset(page.get(), 0, bytes);
    std::copy_n(input.begin() + 1, std::min(bytes, input.size() - 1), page.get());
    // Sizes that are not a page's are refused, whatever is in them.
    KV_CHECK(!codec.Validate(kLayer, absl::MakeConstSpan(page.get(), bytes - 1)).ok());
    const absl::Status valid = codec.Validate(kLayer, absl::MakeConstSpan(page.get(), bytes));
    if (!valid.ok()) {
      KV_CHECK(!valid.message().empty());
      return;
    }
    Bytes raw = Aligned(codec.layout().raw_bytes());
    const DecodeItem item{page.get(), raw.get(), kLayer};
    codec.Decode(absl::MakeConstSpan(&item, 1));
    const uint8_t* const pages[2] = {page.get(), page.get()};
    const int d = codec.layout().head_dim;
    for (const int rows : {1, 4, 13}) {
      Bytes q = Aligned(rows * d * 4), acc = Aligned(rows * d * 4);
      std::vector<float> max(rows, -INFINITY), sum(rows, 0);
      for (int i = 0; i < rows * d; ++i) {
        reinterpret_cast<float*>(q.get())[i] = float((i * 37 + input[i % input.size()]) % 101) / 50 - 1;
        reinterpret_cast<float*>(acc.get())[i] = 0;
      }
      const size_t workspace_bytes = codec.attention().workspace_bytes(rows);
      Bytes workspace = Aligned(std::max<size_t>(workspace_bytes, 64));
      PageAttentionTask task;
      task.q = reinterpret_cast<const float*>(q.get());
      Bytes mapped = Aligned(rows * d * 4);
      if (codec.attention().maps(kLayer)) {
        codec.attention().MapQueries(kLayer, rows % 2, rows, task.q, reinterpret_cast<float*>(mapped.get()));
        task.q = reinterpret_cast<const float*>(mapped.get());
      }
      task.layer = kLayer;
      task.rows = rows;
      task.scale = 0.125f;
      task.kv_head = rows % 2;
      task.pages = pages;
      codec.attention().Attend(task, {max.data(), sum.data(), reinterpret_cast<float*>(acc.get())},
                               absl::MakeSpan(workspace.get(), workspace_bytes));
    }
  }

 private:
  static constexpr int kLayers = 2, kLayer = 1;

  client::CacheOptions shape_;
  BenchCodecs maker_;
  std::vector<std::unique_ptr<Codec>> codecs_;
};

}  // namespace

std::unique_ptr<FuzzTarget> MakePageTarget() { return std::make_unique<PageTarget>(); }

}  // namespace kvmanager::fuzz
