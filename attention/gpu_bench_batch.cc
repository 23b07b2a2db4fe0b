#include "attention/gpu_bench_batch.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "attention/device_plan.h"
#include "attention/gpu_bench_codec.h"
#include "attention/gpu_bench_fill.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/hack/hack_attention_cuda.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_device_format.h"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/million/million.h"
#include "codecs/million/million_attention_cuda.h"
#include "codecs/raw/raw_attention_cuda.h"
#include "codecs/registry.h"
#include "codecs/zack/zack_codec.h"
#include "codecs/zack/zack_testing.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/zack_hack.h"

namespace kvmanager {
namespace {

constexpr size_t kRotateBytes = size_t{320} << 20;  // several times the second-level cache
constexpr size_t kStageBytes = size_t{1} << 30;     // of raw pages that are encoded together
constexpr size_t kItemsMax = size_t{1} << 17;

size_t PagesOf(int context) { return size_t(context + BenchBatch::kPageTokens - 1) / BenchBatch::kPageTokens; }

}  // namespace

std::vector<int> BenchShape::contexts() const {
  if (batch != 0) return std::vector<int>(batch, context);
  std::vector<int> ragged(32, 4096);
  ragged[0] = 131072;
  return ragged;
}

uint64_t BenchBatch::first_position(int sequence) const {
  return uint64_t(contexts_[sequence] - kPageTokens + shape_.open_tokens() - shape_.tokens);
}

std::unique_ptr<BenchBatch> BenchBatch::Make(const BenchCodec& codec, const BenchShape& shape, Contents contents,
                                             absl::Span<uint8_t> pool, int multiprocessors) {
  std::unique_ptr<BenchBatch> made(new BenchBatch);
  BenchBatch& b = *made;
  b.shape_ = shape;
  b.pool_ = pool;
  b.contexts_ = shape.contexts();
  b.layout_.dtype = shape.bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  b.layout_.kv_heads = uint16_t(shape.kv_heads);
  b.layout_.head_dim = uint16_t(shape.head_dim);
  b.layout_.page_tokens = kPageTokens;
  b.kernels_ = RawAttentionKernels(shape.head_dim);
  if (codec.k_bits != 0) {
    hack::HackParameters parameters;
    parameters.k_bits = codec.k_bits, parameters.v_bits = codec.v_bits;
    if (codec.v_bits == 1) parameters.v_range = hack::Range::kLeastSquares;
    if (contents == Contents::kEncoded) parameters.rotation = hack::Rotation::kNone;  // the oracle knows none
    b.format_ = std::make_unique<hack::HackFormat>(hack::MakeHackFormat(b.layout_, parameters));
    b.kernels_ = HackAttentionKernels(*b.format_);
    b.encoded_bytes_ = b.format_->page_bytes;
  }
  if (codec.million) {
    const million::MillionFormat format = million::MakeMillionFormat(b.layout_, million::MillionParameters());
    // What the oracle reads, and the batch makes, are tables of pairs.
    if (!million::MillionPairs(format)) return nullptr;
    b.kernels_ = MillionAttentionKernels(format);
    b.encoded_bytes_ = format.page_bytes;
    b.MakeBooks();
  }
  if (codec.mapped_bytes != 0) {
    if (contents == Contents::kEncoded) return nullptr;  // the oracle knows no rotation
    b.MakeMapped(codec);
  }
  if (codec.zack) b.MakeZack();
  if (codec.made) {
    if (contents == Contents::kEncoded) return nullptr;  // the oracle does not know it
    b.MakeNamed(codec);
  }
  const bool encodes = b.encodes();
  if (b.kernels_ == nullptr) return nullptr;

  // Which pages of a sequence have which forms.
  const bool both = contents == Contents::kEncoded;
  const size_t raw_newest = kLagPages + (both ? 2 : 1);
  size_t encoded = 0, raw = 0, total_pages = 0;
  for (const int context : b.contexts_) {
    const size_t pages = PagesOf(context);
    b.first_pages_.push_back(uint32_t(total_pages));
    total_pages += pages;
    raw += encodes ? std::min(raw_newest, pages) : pages;
    if (encodes) encoded += both ? pages - 1 : pages - std::min(raw_newest, pages);
  }
  const size_t raw_bytes = b.layout_.raw_bytes(), encoded_bytes = b.encoded_bytes_;
  const size_t set_bytes = encoded * encoded_bytes + raw * raw_bytes;
  b.sets_ = both ? 1 : int(std::clamp<size_t>((kRotateBytes + set_bytes - 1) / set_bytes, 1, kSetsMax));
  if (set_bytes * b.sets_ + (both && b.format_ ? kStageBytes : 0) > pool.size()) return nullptr;
  const size_t encoded_count = encoded * b.sets_, raw_count = raw * b.sets_, raw_at = encoded_count * encoded_bytes;
  b.FillPool(contents, encoded_count, raw_count, pool.data() + raw_at);

  // Tables: of each set the raw slots of all pages, then the encoded ones.
  std::mt19937_64 random(4);
  const auto shuffled = [&](size_t count, size_t first, size_t bytes) {
    std::vector<uint32_t> units(count);
    for (size_t i = 0; i < count; ++i) units[i] = uint32_t((first + i * bytes) / device::kSlotUnitBytes);
    std::shuffle(units.begin(), units.end(), random);
    return units;
  };
  const std::vector<uint32_t> encoded_units = shuffled(encoded_count, 0, encoded_bytes);
  const std::vector<uint32_t> raw_units = shuffled(raw_count, raw_at, raw_bytes);
  b.set_slots_ = total_pages * 2;
  std::vector<uint32_t> slots(b.set_slots_ * b.sets_);
  b.pages_.resize(total_pages);
  size_t encoded_next = 0, raw_next = 0;
  for (int set = 0; set < b.sets_; ++set) {
    uint32_t* const raw_table = slots.data() + set * b.set_slots_;
    uint32_t* const encoded_table = raw_table + total_pages;
    for (size_t s = 0; s < b.contexts_.size(); ++s) {
      const size_t pages = PagesOf(b.contexts_[s]);
      const size_t raw_pages = encodes ? std::min(raw_newest, pages) : pages;
      for (size_t j = 0; j < pages; ++j) {
        OraclePage page;
        if (j + raw_pages >= pages) page.raw = raw_units[raw_next++];
        if (encodes && (both ? j + 1 < pages : j + raw_pages < pages)) page.encoded = encoded_units[encoded_next++];
        const size_t at = b.first_pages_[s] + j;
        raw_table[at] = page.raw == OraclePage::kNone ? 0 : page.raw;
        encoded_table[at] = page.encoded == OraclePage::kNone ? 0 : page.encoded;
        if (set == 0) b.pages_[at] = page;
      }
    }
  }

  DevicePlanner::Options o;
  o.layout = b.layout_;
  o.query_heads = shape.query_heads;
  o.lag_pages = kLagPages;
  o.identity = !encodes;
  o.blocks = b.blocks_ = multiprocessors * b.kernels_->grid.blocks_per_sm;
  o.warps = b.kernels_->grid.warps;
  o.encoded_cost = b.kernels_->encoded_cost;
  o.encoded_units = b.kernels_->encoded_units;
  const device::HeadCosts costs = b.device_codec_ == nullptr ? device::HeadCosts() : b.device_codec_->head_costs(0);
  if (costs.costs != nullptr) o.head_costs.assign(costs.costs, costs.costs + shape.kv_heads);
  std::vector<DeviceSequence> sequences(b.contexts_.size());
  for (size_t s = 0; s < sequences.size(); ++s) {
    sequences[s].raw_table = b.first_pages_[s];
    sequences[s].encoded_table = uint32_t(total_pages + b.first_pages_[s]);
    sequences[s].first_position = b.first_position(int(s));
    sequences[s].tokens = shape.tokens;
  }
  std::vector<device::AttendItem> items(kItemsMax);
  const auto planned = DevicePlanner(o).Plan(sequences, absl::MakeSpan(items));
  if (!planned.ok()) {
    std::fprintf(stderr, "attention_gpu_bench: %s\n", planned.status().ToString().c_str());
    std::exit(1);
  }
  items.resize(planned->items);
  b.rows_max_ = planned->rows_max;
  b.parts_ = int(planned->parts);
  const size_t open = b.contexts_.size(), raw_read = encodes ? open * (kLagPages + 1) : raw;
  b.bytes_ = double(total_pages - raw_read) * double(encoded_bytes) + double(raw_read - open) * double(raw_bytes) +
             double(open) * double(raw_bytes) * shape.open_tokens() / kPageTokens;

  const size_t rows = b.contexts_.size() * shape.tokens * shape.query_heads,
               rows_of_parts = size_t{planned->parts} * device::kTileRows;
  b.items_ = Upload(items);
  b.slots_ = Upload(slots);
  b.q_ = Allocate<uint16_t>(rows * shape.head_dim);
  b.out_ = Allocate<uint16_t>(rows * shape.head_dim);
  b.lse_ = Allocate<float>(rows);
  b.partial_ = Allocate<float>((b.kernels_->maps ? 2 : 1) * rows_of_parts * shape.head_dim);
  b.partial_max_ = Allocate<float>(rows_of_parts * 2);
  b.arrived_ = Allocate<uint32_t>(rows_of_parts);
  CHECK_CUDA(cudaMemset(b.arrived_.get(), 0, rows_of_parts * sizeof(uint32_t)));
  device::AttendParams& p = b.params_;
  p.pool = pool.data();
  p.items = b.items_.get();
  p.q = b.q_.get();
  p.out = b.out_.get();
  p.lse = b.lse_.get();
  p.partial = b.partial_.get();
  p.partial_max = b.partial_max_.get();
  p.arrived = b.arrived_.get();
  p.query_heads = shape.query_heads;
  p.kv_heads = shape.kv_heads;
  p.page_tokens = kPageTokens;
  p.scale_log2 = float(M_LOG2E / std::sqrt(double(shape.head_dim)));
  p.bfloat16 = shape.bfloat16;
  p.codec = b.pairs();
  if (b.device_codec_ != nullptr) {
    p.codec = b.device_codec_->attention_data(0);
    p.heads = costs.heads;
    p.tokens = uint32_t(b.contexts_.size() * shape.tokens);
    b.mapped_ = Allocate<float>(device::kMappedRows * rows * shape.head_dim);
    p.mapped = b.mapped_.get();
  }
  CHECK_CUDA(b.kernels_->prepare());
  b.FillQueries(1);
  return made;
}

void BenchBatch::MakeMapped(const BenchCodec& codec) {
  CodecContext context;
  context.layout = layout_;
  context.query_heads = shape_.query_heads;
  context.calibration = SyntheticCalibration(
      {"made up", "", context.layers, layout_.kv_heads, shape_.query_heads, layout_.head_dim}, 1, {});
  auto made = zack_hack::MakeCodec(context, {{"bytes", absl::StrCat(codec.mapped_bytes * layout_.head_dim / 128)}});
  if (!made.ok()) {
    std::fprintf(stderr, "attention_gpu_bench: %s\n", made.status().ToString().c_str());
    std::exit(1);
  }
  codec_ = *std::move(made);
  const auto& rotated = static_cast<const zack::RotatedCodec&>(*codec_);
  format_ = std::make_unique<hack::HackFormat>(static_cast<const hack::HackCodec&>(rotated.inner(0)).format());
  encoded_bytes_ = format_->page_bytes;
  device_codec_ = codec_->NewDeviceCodec();
  kernels_ = device_codec_ == nullptr ? nullptr : device_codec_->attention(0);
}

void BenchBatch::MakeZack() {
  zack_ = true;
  const CodecContext context = zack::MakeContext(layout_, 1, shape_.query_heads);
  // Of 128 dimensions; K and V of a head differ, and heads do in what they keep.
  constexpr int kOf4[] = {96, 112, 48, 64, 64, 48, 48, 32};
  constexpr int kOf8[] = {112, 112, 32, 96, 96, 80, 48, 64, 80, 64, 64, 48, 48, 32, 32, 16};
  const int heads = shape_.kv_heads;
  std::vector<int32_t> ranks(size_t(2 * heads), 64 * layout_.head_dim / 128);
  for (int i = 0; heads % 4 == 0 && i < 2 * heads; ++i) {
    const int rank = heads % 8 == 0 ? kOf8[i % 16] : kOf4[i % 8];
    ranks[i] = (rank * layout_.head_dim / 128 + 15) / 16 * 16;
  }
  codec_ = std::make_unique<zack::ZackCodec>(zack::MakeFormat(context, "balanced", false, ranks), nullptr);
  encoded_bytes_ = codec_->info().encoded_bytes;
  device_codec_ = codec_->NewDeviceCodec();
  kernels_ = device_codec_ == nullptr ? nullptr : device_codec_->attention(0);
}

void BenchBatch::MakeNamed(const BenchCodec& codec) {
  codec_ = MakeBenchCodec(codec.name, layout_, shape_.query_heads);
  encoded_bytes_ = codec_->info().encoded_bytes;
  device_codec_ = codec_->NewDeviceCodec();
  kernels_ = device_codec_ == nullptr ? nullptr : device_codec_->attention(0);
}

void BenchBatch::FillPool(Contents contents, size_t encoded_count, size_t raw_count, uint8_t* raw_at) {
  CHECK_CUDA(FillRandomElements(raw_at, raw_count * layout_.raw_bytes() / 2, 3, 1, shape_.bfloat16));
  if (!encodes()) return;
  if (zack_) {
    CHECK_CUDA(FillRandomElements(pool_.data(), encoded_count * encoded_bytes_ / 2, 2, 1, false));
    return;
  }
  if (contents == Contents::kEncoded && format_) return EncodeRandomPages(encoded_count);
  // Any code and any 8-bit step or minimum is valid; the largest of them must be numbers.
  CHECK_CUDA(FillRandomBits(pool_.data(), encoded_count * encoded_bytes_, 2));
  if (!format_) return;
  for (const hack::HeadLayout& head : format_->heads) {
    for (const hack::SideLayout& side : head.side) {
      CHECK_CUDA(FillPairs(pool_.data(), encoded_count, format_->page_bytes, head.offset + side.tops, 0.5f, 1.f));
      if (side.norms == 0) continue;
      CHECK_CUDA(FillPairs(pool_.data(), encoded_count, format_->page_bytes, head.offset + side.norm_top, 1.f, 0.f));
    }
  }
}

/// Random centroids.
void BenchBatch::MakeBooks() {
  std::vector<million::MillionPairTables> pairs(shape_.kv_heads);
  std::mt19937_64 random(7);
  for (million::MillionPairTables& head : pairs) {
    for (auto& row : head.rows) {
      for (uint8_t& code : row) code = uint8_t(int(random() % 255) - 127);
    }
    for (int side = 0; side < 2; ++side) {
      for (int c = 0; c < 128; ++c) {
        head.step[side][c] = float(1 + random() % 4) / 256;
        head.mid[side][c] = float(int(random() % 9) - 4) / 16;
      }
    }
  }
  pairs_ = Upload(pairs);
}

void BenchBatch::EncodeRandomPages(size_t count) {
  const hack::HackDeviceFormat format = hack::MakeHackDeviceFormat(*format_);
  const DeviceArray<hack::HackDeviceHead> heads = Upload(format.heads);
  // Raw pages stand in the pool's last bytes until they are encoded.
  uint8_t* const stage = pool_.data() + (pool_.size() - kStageBytes) / 256 * 256;
  const size_t raw_bytes = layout_.raw_bytes(), together = kStageBytes / raw_bytes;
  const DeviceArray<uint32_t> declined = Allocate<uint32_t>(together);
  for (size_t first = 0; first < count; first += together) {
    const size_t pages = std::min(together, count - first);
    CHECK_CUDA(FillRandomElements(stage, pages * raw_bytes / 2, 1000 + first, 1, shape_.bfloat16));
    std::vector<DeviceEncodeItem> items(pages);
    for (size_t i = 0; i < pages; ++i) {
      items[i].raw = stage + i * raw_bytes;
      items[i].encoded = pool_.data() + (first + i) * format_->page_bytes;
    }
    const DeviceArray<DeviceEncodeItem> on_device = Upload(items);
    CHECK_CUDA(
        hack::LaunchHackEncode(format.shape, heads.get(), on_device.get(), uint32_t(pages), declined.get(), nullptr));
    for (const uint32_t refused : Download(declined.get(), pages)) {
      if (refused == 0) continue;
      std::fprintf(stderr, "attention_gpu_bench: a random page cannot be encoded\n");
      std::exit(1);
    }
  }
}

void BenchBatch::FillQueries(float deviation) {
  const size_t count = contexts_.size() * shape_.tokens * shape_.query_heads * shape_.head_dim;
  CHECK_CUDA(FillRandomElements(q_.get(), count, 5, deviation, shape_.bfloat16));
}

int BenchBatch::Launch(int call, CUstream_st* stream) const {
  device::AttendParams mine = params_;
  mine.slots = slots_.get() + size_t(call % sets_) * set_slots_;
  return kernels_->launch(mine, rows_max_, blocks_, stream);
}

}  // namespace kvmanager
