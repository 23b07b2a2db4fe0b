// Encode and decode of ZACK pages on a GPU: GB/s of raw pages (codecs/device/encode_bench.h).
//
//   bazel run --config=opt //codecs/zack:zack_encode_gpu_bench
//
// Random pages, made-up factors, ranks that differ from head to head and average half of all dimensions.
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "codecs/device/encode_bench.h"
#include "codecs/zack/zack_codec.h"
#include "codecs/zack/zack_testing.h"

namespace kvmanager::zack {
namespace {

constexpr int kLayers = 4, kKvHeads = 8;
constexpr size_t kPages = 4096;  // 1 GB

int Main() {
  NeedGpu();
  std::printf("%-40s %12s %12s\n", "codec", "encode GB/s", "decode GB/s");
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const PageLayout layout = MakeLayout(kKvHeads, 128, 64, dtype);
    const device::EncodeBench bench(layout, kPages);
    const CodecContext context = MakeContext(layout, kLayers, 4 * kKvHeads);
    constexpr int32_t kMixed[2 * kKvHeads] = {112, 112, 32, 96, 96, 80, 48, 64, 80, 64, 64, 48, 48, 32, 32, 16};
    for (const char* const name : {"mixed ranks", "rank 64", "rank 128"}) {
      std::vector<int32_t> ranks;
      for (int i = 0; i < kLayers * 2 * kKvHeads; ++i) {
        ranks.push_back(name[0] == 'm' ? kMixed[i % (2 * kKvHeads)] : name[5] == '6' ? 64 : 128);
      }
      const ZackCodec codec(MakeFormat(context, "balanced", false, ranks), nullptr);
      const auto rates = bench.Measure(codec, kLayers, kPages);
      std::printf("%-40s %12.1f %12.1f\n",
                  absl::StrCat("zack, ", name, dtype == DType::kFloat16 ? ", fp16" : ", bf16").c_str(),
                  rates.encode_gb_per_s, rates.decode_gb_per_s);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvmanager::zack

int main() { return kvmanager::zack::Main(); }
