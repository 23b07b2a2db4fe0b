// Interfaces of a plug-in's entries, wherever the plug-in runs: in this process (local_entries.h) or in one of its own
// (process_entries.h). PluginCodec (plugin_codec.h) calls them and checks what they say.
//
// Implementations are immutable to their callers, and any thread may call them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/abi/kvmanager_codec.h"
#include "codecs/registry.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

/// The optional entries that a plug-in has.
struct OptionalEntries {
  bool attend_batch = false, map_queries = false, expand_output = false, project_output = false, output_factor = false;
  friend bool operator==(const OptionalEntries&, const OptionalEntries&) = default;
};

/// The entries of one codec. A status that is not OK is the plug-in's error, or UNAVAILABLE where its process did not
/// answer (was_answered).
class CodecEntries {
 public:
  enum class Map { kMapQueries, kExpandOutput, kProjectOutput };
  /// Bytes of scratch that a call may ask for, whatever the plug-in says.
  static constexpr size_t kWorkspaceBytesMax = size_t{256} << 20;

  virtual ~CodecEntries() = default;
  /// Bytes of the caller's scratch; as the plug-in says, unchecked.
  virtual size_t workspace_bytes(uint32_t purpose, uint32_t rows) const = 0;
  virtual absl::Status EncodeBatch(const kvmc_encode_batch& batch) const = 0;
  virtual absl::Status DecodeBatch(const kvmc_decode_batch& batch) const = 0;
  /// announced: PageAttentionTask::announced of the batch's one item.
  virtual absl::Status AttendBatch(const kvmc_attend_batch& batch, bool announced) const = 0;
  virtual absl::Status MapRows(Map map, const kvmc_map_item& item) const = 0;
  virtual absl::Status OutputFactor(uint32_t layer, uint32_t kv_head, float* factor) const = 0;
  virtual absl::Status Validate(uint32_t layer, absl::Span<const uint8_t> encoded) const = 0;
  /// Whether `error`, of one of the calls above, is the plug-in's; false: its process did not answer.
  virtual bool was_answered(const absl::Status& error) const = 0;
};

/// What `describe` said, unchecked.
struct RawDescription {
  uint32_t version = 0, flags = 0;
  uint64_t payload_bytes = 0;
  std::vector<uint32_t> bytes_of_layer, layer_flags;
  std::array<char, KVMC_PARAMETERS_BYTES_MAX> parameters = {};
  friend bool operator==(const RawDescription&, const RawDescription&) = default;
};

/// A plug-in: makes codecs' entries.
class CodecSource {
 public:
  struct Made {
    RawDescription description;
    std::unique_ptr<CodecEntries> entries;  // may outlive the source's other users, not the source
  };

  virtual ~CodecSource() = default;
  virtual const std::string& path() const = 0;
  virtual const std::string& name() const = 0;
  virtual const std::string& help() const = 0;
  virtual OptionalEntries optional_entries() const = 0;
  /// describe, then create.
  virtual absl::StatusOr<Made> Make(const CodecContext& context, const CodecParameters& parameters) const = 0;
  /// WaitingCodec::workers() of its codecs.
  virtual WorkerPool* workers() const = 0;
};

}  // namespace kvmanager
