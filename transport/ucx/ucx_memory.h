// Memory that daemons read out of one another through UCX: over RDMA, shared memory or TCP, whichever UCX finds.
//
// UCX 1.13 is made for peers that trust one another and end together. kvmanager's daemons do neither. Therefore:
//  - UCX runs in a process of its own (ucx_process.h), which maps this daemon's memory read-only. UCX may end that
//    process when a peer fails; then the reads under way fail and the process is started again.
//  - Reads go to staging memory of this object, never into a slot: a read that was given up may still complete later.
//  - A peer's address, which UCX does not check, reaches UCX only if a holder of the same key has made it
//    (description.h).
//
// UCX does not check what arrives on its own connections. Whoever can reach UCX's TCP ports, which are open on every
// network that UCX_NET_DEVICES allows, can take over that process, read this daemon's pool and act as its user. So use
// it only on networks that nobody but trusted daemons can reach; it is off by default.
//
// Owned by main(); outlives the transport that uses it. Any thread. A thread of its own, which starts the process,
// exchanges packets with it and calls `done`. Sources and pieces may outlive this object.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/remote_memory.h"

namespace kvmanager {

class UcxProcessClient;

class UcxMemory final : public RemoteMemory {
 public:
  /// What peers may read: all of it, for as long as this lives.
  struct Memory {
    const uint8_t* data = nullptr;
    uint64_t bytes = 0;
    int fd = -1;  // of a memfd that can neither shrink nor be mapped for writing
  };
  struct Options {
    std::vector<std::string> program;               // that calls RunUcxProcess, and its arguments
    std::vector<Memory> memory;                     // at most kMemoriesMax
    std::string key;                                // kKeyBytesMin..kKeyBytesMax, which all peers have
    uint64_t staging_bytes = kStagingBytesDefault;  // that reads go to: the longest read, and what is under way at once
    uint64_t answer_bytes = kAnswerBytesDefault;    // on their way to peers; more are refused
    std::vector<std::pair<std::string, std::string>> settings;  // of UCX, as {"TLS", "tcp"}, over the environment's
  };
  static constexpr size_t kMemoriesMax = 4096;
  static constexpr size_t kKeyBytesMin = 16, kKeyBytesMax = 4096;
  static constexpr uint64_t kStagingBytesDefault = 64 << 20, kAnswerBytesDefault = 128 << 20;
  static constexpr uint64_t kStagingBytesMin = 1 << 20, kStagingBytesMax = uint64_t{4} << 30;
  static constexpr int64_t kStartMs = 20000;    // for the process to be ready
  static constexpr int64_t kRestartMs = 1000;   // between an end of it and the next start
  static constexpr int64_t kReadMsMax = 30000;  // a read that has not ended then ends the process

  /// INVALID_ARGUMENT naming the field; UNAVAILABLE, RESOURCE_EXHAUSTED: built without UCX, it is not installed, or it
  /// does not start: why.
  static absl::StatusOr<std::unique_ptr<UcxMemory>> Create(Options options);
  /// Ends the process; reads that have not ended are not answered.
  ~UcxMemory() override;

  absl::Span<const absl::Span<const uint8_t>> memory() const override;
  /// Empty while the process is being started anew.
  std::string Describe(size_t index, Context context) const override;
  absl::StatusOr<std::shared_ptr<Source>> Open(absl::Span<const uint8_t> description, Context context) override;
  void Read(std::shared_ptr<Source> from, uint64_t offset, uint64_t bytes, Done done) override;

  /// "1.13": of the library.
  std::string version() const;
  /// Its process; 0: it is being started anew.
  pid_t process() const;
  /// Nothing is being read and no piece is held.
  bool idle() const;

 private:
  explicit UcxMemory(std::shared_ptr<UcxProcessClient> client);
  std::shared_ptr<UcxProcessClient> client_;  // shared with sources and pieces
};

}  // namespace kvmanager
