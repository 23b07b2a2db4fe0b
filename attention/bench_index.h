// Indexes as a sequence would have them, for decodes with codecs that choose what they read.
//
// One thread. Layers take turns, so that the codes a decode reads were last read several decodes ago.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "codecs/codec.h"

namespace kvmanager {

class BenchIndex {
 public:
  /// nullptr for a codec without indexes. pages: raw pages of the context's tokens, of which the first 2048 are the
  /// prompt; every layer is trained on them.
  static std::unique_ptr<BenchIndex> Make(const Codec& codec, int layers, absl::Span<const uint8_t* const> pages,
                                          uint64_t tokens);

  /// A selector for the last token, in the next layer.
  std::unique_ptr<TokenSelector> Select();
  /// After the decode: codes of new tokens stay, so that the next decode finds them.
  void TakeBack(TokenSelector& selector) { index_->TakeBack(selector); }

 private:
  BenchIndex(std::unique_ptr<SequenceIndex> index, int layers, uint64_t tokens)
      : index_(std::move(index)), layers_(layers), tokens_(tokens) {}

  const std::unique_ptr<SequenceIndex> index_;
  const int layers_;
  const uint64_t tokens_;
  int next_ = 0;
};

}  // namespace kvmanager
