// Encode and decode of ZACK+HACK pages on a GPU: GB/s of raw pages (codecs/device/encode_bench.h).
//
//   bazel run --config=opt //codecs/zack_hack:zack_hack_encode_gpu_bench
//
// Random pages and a made-up artifact.
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "codecs/device/encode_bench.h"
#include "codecs/zack_hack/stack_testing.h"
#include "codecs/zack_hack/zack_hack.h"

namespace kvmanager::zack_hack {
namespace {

constexpr int kFewLayers = 4, kManyLayers = 32;
constexpr size_t kPages = 4096;  // 1 GB

int Main() {
  NeedGpu();
  std::printf("%-40s %12s %12s\n", "codec", "encode GB/s", "decode GB/s");
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    PageLayout layout;
    layout.dtype = dtype;
    layout.kv_heads = 8;
    layout.head_dim = 128;
    layout.page_tokens = 64;
    const device::EncodeBench bench(layout, kPages);
    struct Case {
      const char* bytes;
      int layers;
      bool by_blocks;
    };
    for (const auto& [bytes, layers, by_blocks] :
         {Case{"88", kFewLayers, false}, Case{"56", kFewLayers, false}, Case{"48", kFewLayers, false},
          Case{"76", kManyLayers, false}, Case{"76", kManyLayers, true}}) {
      const auto codec = MakeCodec(zack::SyntheticContext(layout, layers, 32), {{"bytes", bytes}});
      if (!codec.ok()) {
        std::fprintf(stderr, "zack_hack_encode_gpu_bench: %s\n", codec.status().ToString().c_str());
        return 1;
      }
      const auto rates = bench.Measure(**codec, layers, kPages, by_blocks);
      std::printf("%-40s %12.1f %12.1f\n",
                  absl::StrCat("zack+hack:bytes=", bytes, dtype == DType::kFloat16 ? " fp16" : " bf16", ", ", layers,
                               by_blocks ? " layers, by blocks" : " layers")
                      .c_str(),
                  rates.encode_gb_per_s, rates.decode_gb_per_s);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvmanager::zack_hack

int main() { return kvmanager::zack_hack::Main(); }
