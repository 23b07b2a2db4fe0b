#include "codecs/zack/zack_device_codec.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "codecs/device/device_image.h"
#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack/zack_attention_cuda.h"
#include "codecs/zack/zack_device.h"
#include "codecs/zack/zack_encode_cuda.h"
#include "codecs/zack/zack_prefill_cuda.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager::zack {
namespace {

using device::AttendKernels;
using device::DeviceImage;
using device::HeadCosts;
using device::MappedSpace;

// What attention costs, in bytes of raw pages that would take as long. While all wait for memory a unit takes about as
// long whatever it holds, so that blocks whose units hold less get less of the bandwidth.
constexpr uint32_t kUnitCost = 3072, kBytesOfCost = 8;
// By many query tokens: products with K' and with V' each have 64 columns, or head_dim.
constexpr uint32_t kWideProduct = device::kPrefillRawPageCost / 2, kNarrowProduct = kWideProduct * 5 / 8;

/// Offsets on the device.
struct Offsets {
  size_t sides = 0, page_bytes = 0;
  std::vector<size_t> data;   // [layers] a MappedSpace, then a ZackDeviceHead for each KV head
  std::vector<size_t> heads;  // [layers] HeadCosts::heads
  size_t prefill = 0;         // [layers] ZackPrefillLayer
};

class ZackDeviceCodec final : public DeviceCodec {
 public:
  ZackDeviceCodec(DeviceArray<uint8_t> memory, const ZackDeviceShape& shape, bool folds, std::vector<uint32_t> costs,
                  std::vector<uint32_t> prefill_costs, Offsets offsets)
      : memory_(std::move(memory)),
        shape_(shape),
        costs_(std::move(costs)),
        prefill_costs_(std::move(prefill_costs)),
        offsets_(std::move(offsets)),
        kernels_(ZackAttentionKernels(shape.layout.head_dim)),
        prefill_kernels_(ZackPrefillKernels(shape.layout.head_dim, folds)) {}

  const AttendKernels* attention(int) const override { return kernels_; }
  const void* attention_data(int layer) const override { return memory_.get() + offsets_.data[layer]; }
  HeadCosts head_costs(int layer) const override {
    return {costs_.data(), reinterpret_cast<const uint16_t*>(memory_.get() + offsets_.heads[layer])};
  }
  device::Prefill prefill(int layer) const override {
    return {prefill_kernels_, reinterpret_cast<const ZackPrefillLayer*>(memory_.get() + offsets_.prefill) + layer,
            prefill_costs_.data()};
  }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return CudaStatus(LaunchZackEncode(shape_, items, count, declined, stream), "encoding ZACK pages");
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return CudaStatus(LaunchZackDecode(shape_, items, count, stream), "decoding ZACK pages");
  }

 private:
  const DeviceArray<uint8_t> memory_;
  const ZackDeviceShape shape_;
  const std::vector<uint32_t> costs_;          // HeadCosts::costs
  const std::vector<uint32_t> prefill_costs_;  // device::Prefill::costs
  const Offsets offsets_;
  const AttendKernels* const kernels_;
  const device::PrefillKernels* const prefill_kernels_;
};

uint32_t CostOf(const ZackFormat& format, int layer, int head) {
  const ZackHead& of = format.head(layer, head);
  const uint32_t units = 4u >> MakeZackDeviceHead(of.offset[0], of.rank[0], of.rank[1]).unit_log2;
  return units * kUnitCost + format.head_bytes(layer, head) / kBytesOfCost;
}
uint32_t PrefillCostOf(const ZackFormat& format, int layer, int head) {
  uint32_t cost = 0;
  for (const int rank : format.head(layer, head).rank) {
    cost += rank <= 64 && format.layout.head_dim > 64 ? kNarrowProduct : kWideProduct;
  }
  return cost;
}
/// Means of what the layers' heads cost, by place.
std::vector<uint32_t> Means(const std::vector<uint64_t>& sums, int layers) {
  std::vector<uint32_t> means;
  means.reserve(sums.size());
  for (const uint64_t sum : sums) means.push_back(uint32_t(sum / layers));
  return means;
}

/// `to` [d][d] = `from` [rows][columns], zeros elsewhere.
void Pad(const std::vector<float>& from, int rows, int columns, int d, float* to) {
  for (int r = 0; r < rows; ++r) std::copy_n(from.data() + size_t(r) * columns, columns, to + size_t(r) * d);
}

}  // namespace

std::unique_ptr<DeviceCodec> MakeZackDeviceCodec(const ZackFormat& format) {
  const PageLayout& layout = format.layout;
  const int d = layout.head_dim, heads = layout.kv_heads, layers = int(format.page_bytes.size());
  if (layout.page_tokens != kDevicePageTokens || (d != 64 && d != 128)) return nullptr;

  DeviceImage image;
  Offsets offsets;
  ZackDeviceShape shape;
  shape.layout = layout;
  const size_t matrix = size_t(d) * d, matrices = matrix * heads * sizeof(float);
  const size_t packed_query_bytes = PackedFactorBytes(d, d, layout.dtype);
  std::vector<ZackDeviceSide> sides;
  std::vector<uint64_t> costs(heads), prefill_costs(heads);
  struct Factors {
    size_t query, output, packed_query;
  };
  std::vector<Factors> factors;
  for (int l = 0; l < layers; ++l) {
    offsets.data.push_back(image.Place(sizeof(MappedSpace) + heads * sizeof(ZackDeviceHead)));
    offsets.heads.push_back(image.Place(heads * sizeof(uint16_t)));
    factors.push_back({image.Place(matrices), image.Place(matrices), image.Place(heads * packed_query_bytes)});
    for (int h = 0; h < heads; ++h) {
      const ZackHead& head = format.head(l, h);
      image.At<ZackDeviceHead>(offsets.data[l] + sizeof(MappedSpace))[h] =
          MakeZackDeviceHead(head.offset[0], head.rank[0], head.rank[1]);
      Pad(head.query, d, head.rank[0], d, image.At<float>(factors[l].query) + h * matrix);
      PackFactor(head.query.data(), d, head.rank[0], layout.dtype,
                 image.At<uint8_t>(factors[l].packed_query) + h * packed_query_bytes);
      float* const output = image.At<float>(factors[l].output) + h * matrix;
      if (format.parameters.fold) {
        Pad(head.encode[1], d, head.rank[1], d, output);
      } else {
        Pad(head.decode[1], head.rank[1], d, d, output);
      }
      for (int side = 0; side < 2; ++side) {
        const int n = head.rank[side];
        const size_t encode_bytes = PackedFactorBytes(d, n, layout.dtype),
                     decode_bytes = PackedFactorBytes(n, d, DType::kFloat16);
        const ZackDeviceSide of = {head.offset[side], uint32_t(n), image.Place(encode_bytes),
                                   image.Place(decode_bytes)};
        PackFactor(head.encode[side].data(), d, n, layout.dtype, image.At<uint8_t>(of.encode));
        PackFactor(head.decode[side].data(), n, d, DType::kFloat16, image.At<uint8_t>(of.decode));
        shape.encode_bytes_max = std::max(shape.encode_bytes_max, int(encode_bytes));
        shape.decode_bytes_max = std::max(shape.decode_bytes_max, int(decode_bytes));
        sides.push_back(of);
      }
    }
    uint16_t* const order = image.At<uint16_t>(offsets.heads[l]);
    std::iota(order, order + heads, uint16_t{0});
    std::stable_sort(order, order + heads, [&](int a, int b) { return CostOf(format, l, a) > CostOf(format, l, b); });
    for (int i = 0; i < heads; ++i) {
      costs[i] += CostOf(format, l, order[i]), prefill_costs[i] += PrefillCostOf(format, l, order[i]);
    }
  }
  offsets.sides = image.Place(sides.size() * sizeof sides[0]);
  std::copy(sides.begin(), sides.end(), image.At<ZackDeviceSide>(offsets.sides));
  offsets.page_bytes = image.Place(layers * sizeof(uint32_t));
  std::copy(format.page_bytes.begin(), format.page_bytes.end(), image.At<uint32_t>(offsets.page_bytes));
  offsets.prefill = image.Place(layers * sizeof(ZackPrefillLayer));

  auto memory = AllocateOnDevice<uint8_t>(image.bytes().size(), nullptr);
  if (!memory.ok()) return nullptr;
  uint8_t* const base = memory->get();
  for (int l = 0; l < layers; ++l) {
    MappedSpace& space = *image.At<MappedSpace>(offsets.data[l]);
    space.query = reinterpret_cast<const float*>(base + factors[l].query);
    space.output = reinterpret_cast<const float*>(base + factors[l].output);
    space.folds = format.parameters.fold ? 1 : 0;
    ZackPrefillLayer& prefill = image.At<ZackPrefillLayer>(offsets.prefill)[l];
    prefill.heads = reinterpret_cast<const ZackDeviceHead*>(base + offsets.data[l] + sizeof(MappedSpace));
    prefill.sides = reinterpret_cast<const ZackDeviceSide*>(base + offsets.sides) + size_t(l) * heads * 2;
    prefill.base = base;
    prefill.query = base + factors[l].packed_query;
    prefill.query_bytes = packed_query_bytes;
  }
  shape.factors = base;
  shape.sides = reinterpret_cast<const ZackDeviceSide*>(base + offsets.sides);
  shape.page_bytes = reinterpret_cast<const uint32_t*>(base + offsets.page_bytes);
  if (!CopyToDevice(image.bytes(), base).ok()) return nullptr;
  return std::make_unique<ZackDeviceCodec>(*std::move(memory), shape, format.parameters.fold, Means(costs, layers),
                                           Means(prefill_costs, layers), std::move(offsets));
}

}  // namespace kvmanager::zack
