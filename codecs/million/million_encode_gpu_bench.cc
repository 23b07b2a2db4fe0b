// Encode and decode of MILLION pages on a GPU: GB/s of raw pages (codecs/device/encode_bench.h).
//
//   bazel run --config=opt //codecs/million:million_encode_gpu_bench
//
// Random pages and centroids.
#include <cstdio>

#include "codecs/device/encode_bench.h"
#include "codecs/million/million.h"
#include "codecs/million/million_testing.h"

namespace kvmanager::million {
namespace {

constexpr int kLayers = 4;
constexpr size_t kPages = 2048;  // 512 MB

int Main() {
  NeedGpu();
  const PageLayout layout = MakeLayout(8, 128, 64);
  const device::EncodeBench bench(layout, kPages);
  std::printf("%-36s %12s %12s\n", "codec", "encode GB/s", "decode GB/s");
  for (const SideParameters side : {SideParameters{64, 8}, SideParameters{32, 8}, SideParameters{32, 12}}) {
    const MillionFormat format = MakeFormat(layout, side, side);
    const Books books(format, kLayers, 2);
    const auto codec = MakeMillionCodec(format, books.books, "million");
    const auto rates = bench.Measure(*codec, kLayers, side.bits == 8 && side.m == 64 ? kPages : kPages / 32);
    std::printf("%-36s %12.1f %12.1f\n", MillionSpec(format.parameters).c_str(), rates.encode_gb_per_s,
                rates.decode_gb_per_s);
  }
  return 0;
}

}  // namespace
}  // namespace kvmanager::million

int main() { return kvmanager::million::Main(); }
