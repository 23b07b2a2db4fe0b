// Engines that run steps of a cache: on the CPU, on the GPU in the daemon, on the GPU in this process; and counterparts
// of them.
//
// Each belongs to one thread, that of its client.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/device.h"
#include "client/in_process.h"
#include "codecs/codec.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/ids.h"

namespace kvmanager::testing {

inline constexpr int kPage = 64;

/// Q, K and V of a text, fp16, as an engine has them: [tokens][heads][head_dim] per layer.
struct Text {
  int layers = 2, kv_heads = 2, query_heads = 8, head_dim = 128;
  uint64_t tokens = 1024;
  std::vector<std::vector<uint16_t>> q, k, v;  // [layers]

  size_t kv_row() const { return size_t(kv_heads) * head_dim; }
  size_t q_row() const { return size_t(query_heads) * head_dim; }
};

/// shape: its tensors are ignored.
Text RandomText(uint64_t seed, Text shape = {});

/// An artifact for the text's shape, trained on nothing, as `name`.safetensors in `directory`; specs: of codecs with
/// codebooks, which it has too.
void WriteArtifact(const Text& text, std::vector<std::string> specs, const std::string& directory,
                   const std::string& name);

client::CacheOptions OptionsFor(const Text& text, const std::string& codec, int device,
                                const std::string& tenant = "a");

/// Names of the full blocks of some text of `tokens` tokens, of kPage each; another one for each `salt`.
std::vector<BlockName> NamesOf(const client::Cache& cache, uint64_t tokens, uint32_t salt);

/// Sums over rows of squares, of a difference and of what it is compared with.
struct Difference {
  double error = 0, norm = 0;
  double relative() const { return norm == 0 ? 0 : std::sqrt(error / norm); }
  void Add(const std::vector<uint16_t>& got, const std::vector<uint16_t>& expected);
  void Add(const Difference& other) { error += other.error, norm += other.norm; }
};

/// Where tokens of a batch come from: entry i takes tokens [first, first + tokens), rows from first + shift on.
struct Part {
  uint64_t sequence;
  uint64_t first;
  int tokens;
  uint64_t shift = 0;
};

using LayerRows = std::vector<std::vector<uint16_t>>;  // [layers] rows of all parts

/// Of a GPU's answers and a CPU's. `decoded`: of entries of so many tokens that a GPU decodes encoded pages for them,
/// where a CPU multiplies codes by codes of q and of weights.
struct StepDifference {
  static constexpr int kDecodedTokens = 64;
  /// What rounding q and weights to 8 bits makes of that (codecs/hack/hack_reference.h).
  static constexpr double kDecodedError = 1e-1;
  /// Of a whole run, whose steps' scores are of all sizes.
  static constexpr double kDecodedRunError = 3e-2;

  Difference same, decoded;
  std::vector<Difference> same_of_layer;
  void Add(const Text& text, const std::vector<Part>& parts, const LayerRows& got, const LayerRows& expected);
  void Add(const StepDifference& other);
};

/// One way of running the steps of a cache.
class Engine {
 public:
  virtual ~Engine() = default;
  /// Appends (if asked) and attends to layers from first_layer on, which is only given to go on after an error; out:
  /// those layers' rows. After an error, layers below failed_layer() have been appended to, the others have not.
  absl::Status Step(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                    int first_layer = 0) {
    return RunStep(text, parts, append, out, first_layer);
  }
  int failed_layer() const { return failed_layer_; }
  /// Before a sequence that was forked or cropped is used again.
  virtual absl::Status After(const client::Sequence& sequence) { return absl::OkStatus(); }
  virtual void Forget(const client::Sequence& sequence) {}
  client::Cache& cache() { return *cache_; }

 protected:
  virtual absl::Status RunStep(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                               int first_layer) = 0;

  std::unique_ptr<client::Cache> cache_;
  int failed_layer_ = 0;
};

/// The CPU path: tensors through the socket.
class HostEngine final : public Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Make(client::Client* client, const client::CacheOptions& options);

 private:
  absl::Status RunStep(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                       int first_layer) override;
};

/// What engines on the GPU share: a stream, rows of steps in an arena, and steps in the daemon.
class GpuEngine : public Engine {
 public:
  ~GpuEngine() override;

  // Several steps of one sequence or more may be on their way: Restart, Submit..., Collect.

  void Restart() { used_ = 0; }
  /// Appends to outs where each layer's rows will be.
  absl::Status SubmitInDaemon(const Text& text, const std::vector<Part>& parts, bool append, int first_layer,
                              std::vector<client::TensorView>* outs);
  /// Waits for the stream. out: the rows of each of outs.
  absl::Status Collect(const std::vector<client::TensorView>& outs, LayerRows* out);
  cudaStream_t stream() const { return stream_; }

 protected:
  static constexpr size_t kArenaBytes = 64 << 20;

  /// stream: outlives the engine; nullptr: one of its own.
  absl::Status Init(client::Client* client, client::DeviceClient* device, const client::CacheOptions& options,
                    cudaStream_t stream = nullptr);
  /// Uploads rows to the next free place of the arena.
  absl::StatusOr<client::TensorView> Put(const std::vector<uint16_t>& rows);
  absl::StatusOr<client::TensorView> Room(size_t bytes);

  client::DeviceClient* device_ = nullptr;
  std::unique_ptr<client::Arena> arena_;
  cudaStream_t stream_ = nullptr;

 private:
  uint8_t* Staged(const client::TensorView& view) const {
    return staging_ + (static_cast<uint8_t*>(view.data) - arena_->data().data());
  }

  cudaStream_t owned_stream_ = nullptr;
  uint8_t* staging_ = nullptr;  // [kArenaBytes] pinned; every place of the arena has its own
  size_t used_ = 0;
  uint64_t ready_ = 0;
};

/// Attention in the daemon.
class DaemonEngine final : public GpuEngine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Make(client::Client* client, client::DeviceClient* device,
                                                      const client::CacheOptions& options);

 private:
  absl::Status RunStep(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                       int first_layer) override;
};

/// Attention in this process.
class OwnEngine final : public GpuEngine {
 public:
  static absl::StatusOr<std::unique_ptr<OwnEngine>> Make(client::Client* client, client::DeviceClient* device,
                                                         const client::CacheOptions& options, bool encode_here,
                                                         const std::string& artifacts = "",
                                                         cudaStream_t stream = nullptr);
  ~OwnEngine() override;
  absl::Status Submit(const Text& text, const std::vector<Part>& parts, bool append,
                      std::vector<client::TensorView>* outs);

  // A step that appends and attends, in three, of which a graph may capture the second: rows of steps of one shape are
  // at the same places.

  absl::Status BeginStep(const Text& text, const std::vector<Part>& parts);
  absl::Status LaunchStep();
  /// Waits for the stream.
  absl::Status EndStep(LayerRows* out);

  absl::Status After(const client::Sequence& sequence) override { return run_->After(sequence); }
  void Forget(const client::Sequence& sequence) override { run_->Forget(sequence.id()); }
  client::InProcess& run() { return *run_; }

 private:
  absl::Status RunStep(const Text& text, const std::vector<Part>& parts, bool append, LayerRows* out,
                       int first_layer) override;
  absl::Status AppendRows(const Text& text, int layer, const std::vector<Part>& parts);

  struct StepRows {
    client::TensorView k, v, q, out;
  };
  std::vector<StepRows> rows_;  // [layers] of the step that has begun by BeginStep
  std::unique_ptr<client::InProcess> run_;
};

/// As the daemon makes it for this cache. artifacts: a directory of them; empty: none.
absl::StatusOr<std::shared_ptr<const Codec>> CodecOf(const client::Cache& cache, const std::string& artifacts);

enum class Way { kDaemon, kOwn, kOwnButEncoding };
/// artifacts: the daemon's directory of them.
absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(Way way, client::Client* client, client::DeviceClient* device,
                                                   const client::CacheOptions& options,
                                                   const std::string& artifacts = "");

/// The same steps on the GPU and on the CPU.
struct Counterparts {
  std::unique_ptr<Engine> gpu, cpu;
  StepDifference difference;

  absl::Status Step(const Text& text, const std::vector<std::pair<client::Sequence*, client::Sequence*>>& sequences,
                    const std::vector<uint64_t>& firsts, const std::vector<int>& tokens, bool append);
};

}  // namespace kvmanager::testing
