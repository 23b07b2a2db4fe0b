// A batch of attention_gpu_bench: random pages in a pool on the device, tables of their slots, a plan, queries.
//
// The pages of a sequence are distinct and shuffled; the newest is open. A batch that is small beside the second-level
// cache has several sets of pages, which launches take in turn, and one plan for all of them. It uses the pool it was
// given until it goes; one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "attention/gpu_oracle.h"
#include "codecs/device/attend_launch.h"
#include "codecs/device/attend_params.h"
#include "codecs/device/device_codec.h"
#include "codecs/hack/hack_format.h"
#include "codecs/million/million_device_format.h"
#include "kvmanager/base/page_layout.h"
#include "kvmanager/memory/gpu_benchmark.h"

namespace kvmanager {

struct BenchShape {
  int batch = 0;  // sequences of `context` tokens; 0: one of 128 Ki and 31 of 4 Ki
  int context = 0;
  int query_heads = 0, kv_heads = 0;
  int head_dim = 128;
  int tokens = 1;  // queries of a sequence
  bool bfloat16 = false;

  /// Tokens that a sequence's pages hold; the newest of them is open, with open_tokens().
  std::vector<int> contexts() const;
  /// Of several queries some are then on the page before.
  int open_tokens() const { return tokens == 1 ? 33 : tokens / 2 + 1; }
};

struct BenchCodec {
  const char* name;
  int k_bits, v_bits;       // of HACK; 0: raw, or
  bool million = false;     // 64 subspaces of 8 bits
  double mapped_bytes = 0;  // instead: zack+hack of so many bytes of a token and head, by an artifact made up
  bool zack = false;        // instead: zack with mixed ranks that keep half of all dimensions
  bool made = false;        // instead: million or zack+million whose spec `name` is, by an artifact made up
};

class BenchBatch {
 public:
  static constexpr int kPageTokens = 64, kLagPages = 2, kSetsMax = 8;
  enum class Contents {
    kAnyBits,  // encoded pages of random codes and metadata; only the newest pages are raw
    kEncoded,  // encoded pages are random pages, encoded, but MILLION's of random indices; a page beyond the lag has
               // both forms
  };

  /// nullptr: there is no kernel, or it does not fit in the pool.
  static std::unique_ptr<BenchBatch> Make(const BenchCodec& codec, const BenchShape& shape, Contents contents,
                                          absl::Span<uint8_t> pool, int multiprocessors);

  /// Queries of this deviation.
  void FillQueries(float deviation);
  /// Returns a cudaError_t. Launches of different `call` read different sets.
  int Launch(int call, CUstream_st* stream) const;
  /// What a launch reads of pages.
  double bytes() const { return bytes_; }
  int sets() const { return sets_; }
  int parts() const { return parts_; }

  // For a comparison with RunOracle: of the set that call 0 reads.
  const BenchShape& shape() const { return shape_; }
  const PageLayout& layout() const { return layout_; }
  bool encodes() const { return encoded_bytes_ != 0; }
  const hack::HackFormat* format() const { return format_.get(); }          // nullptr: not HACK
  const million::MillionPairTables* pairs() const { return pairs_.get(); }  // on the device; nullptr: not MILLION
  /// Of ZACK: a device::MappedSpace and heads, on the device; else nullptr.
  const void* zack() const { return zack_ ? params_.codec : nullptr; }
  const device::AttendParams& params() const { return params_; }
  absl::Span<const OraclePage> pages() const { return pages_; }
  uint32_t first_page(int sequence) const { return first_pages_[sequence]; }
  uint64_t first_position(int sequence) const;

 private:
  BenchBatch() = default;
  void FillPool(Contents contents, size_t encoded_count, size_t raw_count, uint8_t* raw_at);
  void EncodeRandomPages(size_t count);
  void MakeMapped(const BenchCodec& codec);
  void MakeZack();
  void MakeNamed(const BenchCodec& codec);
  void MakeBooks();

  BenchShape shape_;
  PageLayout layout_;
  std::unique_ptr<hack::HackFormat> format_;
  // Of codecs that map.
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<DeviceCodec> device_codec_;
  DeviceArray<million::MillionPairTables> pairs_;  // [kv_heads]
  bool zack_ = false;
  size_t encoded_bytes_ = 0;  // of a page; 0: raw
  const device::AttendKernels* kernels_ = nullptr;
  absl::Span<uint8_t> pool_;
  std::vector<int> contexts_;
  std::vector<uint32_t> first_pages_;  // [sequences], in pages_
  std::vector<OraclePage> pages_;
  size_t set_slots_ = 0;
  int sets_ = 0, blocks_ = 0, rows_max_ = 0, parts_ = 0;
  double bytes_ = 0;
  device::AttendParams params_;
  DeviceArray<device::AttendItem> items_;
  DeviceArray<uint32_t> slots_, arrived_;
  DeviceArray<uint16_t> q_, out_;
  DeviceArray<float> lse_, partial_, partial_max_, mapped_;
};

}  // namespace kvmanager
