#include "codecs/pq/pq_index.h"

#include <algorithm>

#include "codecs/pq/pq_selector.h"
#include "kvmanager/base/status.h"

namespace kvmanager::pq {
namespace {

class Index final : public SequenceIndex {
 public:
  Index(std::shared_ptr<const Shape> shape, const IndexFacts& facts)
      : shape_(std::move(shape)), facts_(facts), layers_(shape_->layers) {
    if (shape_->parameters.iterations != 0) facts_.iterations = shape_->parameters.iterations;
    for (Layer& layer : layers_) ResetCaches(layer);
  }

  IndexFacts facts() const override { return facts_; }
  uint64_t SparseFrom(uint64_t position, int tokens) const override;
  void OnAppend(int layer, uint64_t position, int tokens, int64_t now_ns) override;
  void OnTokens(uint64_t tokens) override {
    for (Layer& layer : layers_) layer.tokens = std::max(layer.tokens, tokens);
  }
  void Crop(uint64_t tokens) override;
  std::unique_ptr<SequenceIndex> Fork() const override;
  void Need(int layer, uint64_t first, uint64_t last, IndexJobs* begin, IndexJobs* wait) override;
  void NeedNext(int layer, IndexJobs* begin) override;
  std::unique_ptr<TokenSelector> Select(int layer, uint64_t first, uint64_t last) override;
  void TakeBack(TokenSelector& selector) override;
  uint64_t bytes() const override;

 private:
  struct Version {
    std::shared_ptr<Training> training;  // shared with forks and the store's job
    Codes codes;                         // the training's, while it writes them, and of tokens since
  };
  struct Layer {
    uint64_t tokens = 0;
    std::vector<Version> versions;                    // by tokens trained on, ascending
    std::vector<std::shared_ptr<BlockCache>> caches;  // [kv_heads], or empty; shared with selectors
  };

  bool prompt_known() const { return facts_.prompt_tokens != 0; }
  uint64_t FirstPosition() const { return shape_->parameters.FirstPosition(facts_.prompt_tokens); }
  Version* Find(Layer& layer, uint64_t trained);
  void ResetCaches(Layer& layer);
  void NotePrefill(int layer, uint64_t position, int tokens, int64_t now_ns);

  const std::shared_ptr<const Shape> shape_;
  IndexFacts facts_;
  uint64_t crops_ = 0;  // what was prepared before one is not taken back
  std::vector<Layer> layers_;

  // Of the prefill: time from one layer's append to the next layer's of the same tokens.
  int last_layer_ = -1;
  uint64_t last_position_ = 0;
  int64_t last_ns_ = 0;
  double prefill_seconds_ = 0;
};

void Index::ResetCaches(Layer& layer) {
  const Parameters& p = shape_->parameters;
  if (p.cache_blocks == 0 || shape_->on_device) return;
  layer.caches.clear();
  const size_t block_bytes = 2 * kCacheBlockTokens * shape_->layout.head_dim * DTypeBytes(shape_->layout.dtype);
  for (int h = 0; h < shape_->layout.kv_heads; ++h) {
    layer.caches.push_back(std::make_shared<BlockCache>(p.cache_blocks, block_bytes, p.cache_policy));
  }
}

Index::Version* Index::Find(Layer& layer, uint64_t trained) {
  for (Version& version : layer.versions) {
    if (version.training->tokens() == trained) return &version;
  }
  return nullptr;
}

void Index::NotePrefill(int layer, uint64_t position, int tokens, int64_t now_ns) {
  if (layer == last_layer_ + 1 && position == last_position_ && layer > 0) {
    prefill_seconds_ += double(now_ns - last_ns_) * 1e-9;
  }
  last_layer_ = layer;
  last_position_ = position;
  last_ns_ = now_ns;
  const bool ends_prompt = position < facts_.prompt_tokens && position + tokens >= facts_.prompt_tokens;
  if (layer + 1 == shape_->layers && layer > 0 && ends_prompt) {
    shape_->model->AddPrefill(position + tokens, prefill_seconds_ / layer);
    prefill_seconds_ = 0;
  }
}

uint64_t Index::SparseFrom(uint64_t position, int tokens) const {
  if (prompt_known()) return FirstPosition();
  return tokens == 1 && position > 0 ? shape_->parameters.FirstPosition(position) : kNever;
}

void Index::OnAppend(int layer, uint64_t position, int tokens, int64_t now_ns) {
  if (!prompt_known() && tokens == 1 && position > 0) facts_.prompt_tokens = position;
  // A GPU's prefill runs when its appends were answered long ago: their times say nothing.
  if (shape_->parameters.iterations == 0 && !shape_->on_device) NotePrefill(layer, position, tokens, now_ns);
  layers_[layer].tokens = position + tokens;
}

void Index::Crop(uint64_t tokens) {
  ++crops_;
  for (Layer& layer : layers_) {
    if (layer.tokens <= tokens) continue;
    layer.tokens = tokens;
    std::erase_if(layer.versions, [tokens](const Version& v) { return v.training->tokens() > tokens; });
    for (Version& version : layer.versions) version.codes.Truncate(tokens);
    ResetCaches(layer);
  }
}

std::unique_ptr<SequenceIndex> Index::Fork() const {
  auto fork = std::make_unique<Index>(shape_, facts_);
  for (size_t l = 0; l < layers_.size(); ++l) {
    fork->layers_[l].tokens = layers_[l].tokens;
    fork->layers_[l].versions = layers_[l].versions;
  }
  return fork;
}

void Index::Need(int layer_index, uint64_t first, uint64_t last, IndexJobs* begin, IndexJobs* wait) {
  if (!prompt_known() || shape_->parameters.scores == Parameters::Scores::kExact || last < FirstPosition()) return;
  Layer& layer = layers_[layer_index];
  const Parameters& p = shape_->parameters;
  const uint64_t oldest = p.TrainedTokens(facts_.prompt_tokens, std::max(first, FirstPosition()));
  const uint64_t newest = p.TrainedTokens(facts_.prompt_tokens, last);
  for (uint64_t trained = oldest;; trained += p.rebuild) {
    Version* version = Find(layer, trained);
    if (version == nullptr && begin != nullptr) {
      if (facts_.iterations == 0) facts_.iterations = shape_->model->Iterations(trained);
      Version made;
      made.training = std::make_shared<Training>(shape_, layer_index, trained, facts_.iterations);
      made.codes = made.training->codes();
      const auto at = std::find_if(layer.versions.begin(), layer.versions.end(),
                                   [trained](const Version& v) { return v.training->tokens() > trained; });
      version = &*layer.versions.insert(at, std::move(made));
    }
    if (version != nullptr && !version->training->done()) {
      if (begin != nullptr && !version->training->begun) {
        version->training->begun = true;
        begin->push_back(version->training);
      }
      if (wait != nullptr) wait->push_back(version->training);
    }
    if (trained == newest) break;
  }
}

void Index::NeedNext(int layer, IndexJobs* begin) {
  // The versions that later queries use are trained as soon as their tokens are there.
  const uint64_t next = layers_[layer].tokens;
  Need(layer, next, next, begin, nullptr);
}

std::unique_ptr<TokenSelector> Index::Select(int layer_index, uint64_t first, uint64_t last) {
  if (!prompt_known() || last < FirstPosition() || shape_->on_device) return nullptr;
  Layer& layer = layers_[layer_index];
  const Parameters& p = shape_->parameters;
  SelectorParts parts;
  parts.shape = shape_;
  parts.layer = layer_index;
  parts.first_position = FirstPosition();
  parts.prompt_tokens = facts_.prompt_tokens;
  parts.crops = crops_;
  parts.caches = layer.caches;
  if (p.scores == Parameters::Scores::kCodes) {
    const uint64_t from = std::max(first, FirstPosition());
    const uint64_t oldest = p.TrainedTokens(facts_.prompt_tokens, from);
    const uint64_t newest = p.TrainedTokens(facts_.prompt_tokens, last);
    for (uint64_t trained = oldest;; trained += p.rebuild) {
      Version* version = Find(layer, trained);
      KV_CHECK(version != nullptr);
      // What this version's last query of the step must see coded.
      const uint64_t last_query = trained == newest ? last : trained + p.rebuild - 1;
      const Parameters::Reads reads = p.ReadsOf(last_query);
      parts.versions.push_back({version->training, version->codes, reads.chosen > 0 ? reads.local_begin : 0});
      if (trained == newest) break;
    }
    if (layer_index + 1 < shape_->layers && !layers_[layer_index + 1].versions.empty()) {
      parts.next_layer = layers_[layer_index + 1].versions.back().codes;
    }
    // Versions of the past go; the newest stay for the queries to come.
    while (layer.versions.size() > std::max(kVersionsKept, parts.versions.size())) {
      layer.versions.erase(layer.versions.begin());
    }
  }
  return MakeSelector(std::move(parts));
}

void Index::TakeBack(TokenSelector& selector) {
  PreparedCodes prepared = PreparedOf(selector);
  if (prepared.crops != crops_) return;
  for (const PreparedCodes::Version& from : prepared.versions) {
    Version* version = Find(layers_[prepared.layer], from.trained);
    if (version == nullptr) continue;
    const uint64_t have = version->codes.tokens(), end = from.first + from.count;
    if (have < from.first || have >= end) continue;
    version->codes.Append(*from.codes, have - from.first, end - have);
  }
}

uint64_t Index::bytes() const {
  uint64_t bytes = 0;
  for (const Layer& layer : layers_) {
    for (const Version& version : layer.versions) {
      bytes += version.training->codebook().bytes() + version.codes.bytes();
    }
    for (const auto& cache : layer.caches) bytes += cache->bytes();
  }
  return bytes;
}

}  // namespace

std::unique_ptr<SequenceIndex> MakeIndex(std::shared_ptr<const Shape> shape, const IndexFacts& facts) {
  return std::make_unique<Index>(std::move(shape), facts);
}

}  // namespace kvmanager::pq
