// The training of one layer's codebooks and the coding of the tokens that they were trained on: a task per KV head and
// sub-vector (PQCache, section 3.3).
//
// Made on the store's thread by an index, shared by it, by its forks and by the store while it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "codecs/pq/codebook.h"
#include "codecs/pq/cost_model.h"
#include "codecs/pq/selection.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/clock.h"

namespace kvmanager::pq {

/// What all indexes of one codec share; immutable but for the model. Outlives the codec.
struct Shape {
  Parameters parameters;
  PageLayout layout;
  int layers = 1;
  bool on_device = false;  // codes are made by a GPU, which also chooses
  const Kernels* kernels = nullptr;
  std::shared_ptr<CostModel> model;  // shared: indexes may outlive the codec

  int width() const { return layout.head_dim / parameters.m; }
  size_t code_rows() const { return size_t(layout.kv_heads) * parameters.m; }
};

/// Sub-vectors of tokens first .. first + count - 1 as fp32 [count][width].
void LoadSubVectors(const Shape& shape, absl::Span<const uint8_t* const> pages, int head, int sub, uint64_t first,
                    uint64_t count, float* out);

class Training final : public IndexJob {
 public:
  Training(std::shared_ptr<const Shape> shape, int layer, uint64_t tokens, uint32_t iterations);

  int layer() const override { return layer_; }
  uint64_t tokens() const override { return tokens_; }
  int tasks() const override { return int(shape_->code_rows()); }
  void RunTask(int task, absl::Span<const uint8_t* const> pages) override;
  void Finish() override;
  bool done() const override { return done_; }
  uint64_t image_bytes() const override;
  void WriteImage(uint8_t* to) override;

  const Codebook& codebook() const { return codebook_; }
  /// Of the tokens that it reads; the tasks write them.
  const Codes& codes() const { return codes_; }

  bool begun = false;  // given to the store to run

 private:
  const std::shared_ptr<const Shape> shape_;
  const int layer_;
  const uint64_t tokens_;
  const uint32_t iterations_;
  Codebook codebook_;
  Codes codes_;
  std::atomic<int64_t> first_ns_{INT64_MAX}, last_ns_{0};
  std::atomic<uint64_t> iterations_run_{0};
  bool done_ = false;
};

}  // namespace kvmanager::pq
