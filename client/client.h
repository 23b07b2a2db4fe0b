// The C++ client of kvmanagerd: leases in, views out.
//
//   auto client = Client::Connect("unix:/run/kvmanager/kvmanager.sock", {});
//   auto cache = (*client)->OpenCache(config);
//   auto made = (*cache)->CreateSequence(names);              // begins with the blocks found
//   StepBatch step{.layer = 0, .entries = {{made->sequence->id(), position, 1}}, .k = k, .v = v, .q = q, .out = out};
//   auto done = (*cache)->Step(step);                         // append and attend: one call, one layer, a whole batch
//
// A handle is a lease: destroying it gives back what it names. Handles keep the connection alive, not the daemon: when
// the daemon is gone every call returns UNAVAILABLE at once, and handles of an earlier boot stay void
// (FAILED_PRECONDITION) after Reconnect(). Every call has a deadline (Options::deadline_ms): past it the call is
// cancelled and DEADLINE_EXCEEDED returned.
//
// Threads: a Client and its handles belong to the thread that made it (they share one event loop). Use a Client per
// thread. fork(): the child's copy of the socket is closed at once, so that a child cannot hold its parent's leases;
// every call there returns FAILED_PRECONDITION.
//
// Blocking and asynchronous: X() waits; XAsync() returns a Pending that is waited for later, so that several calls
// overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::client {

class Arena;
class Cache;
class HandOff;
class Projections;
class Sequence;
template <typename T>
class Pending;

/// What a cache is (api/kvmanager.capnp, CacheConfig): all of it is part of every block's name.
struct CacheOptions {
  std::string model, revision, tenant, rope;
  std::string calibration_digest;  // of the artifact that the codec names; empty: any. As opened: its digest
  int layers = 0, kv_heads = 0, query_heads = 0, head_dim = 0;
  int page_tokens = 64;
  DType dtype = DType::kFloat16;  // kFloat16 or kBFloat16
  int tensor_parallel_rank = 0, tensor_parallel_size = 1;
  std::string codec = "raw";  // "NAME[:key=value,...]", a policy: "SPEC[;FIRST..LAST=SPEC...][;sinks=N]", or a ladder:
                              // "ladder=SPEC>SPEC..."; without sinks, a lossy codec keeps the first page of every
                              // context raw
  int lag_pages = 2;
  int device = -1;      // where pages are computed on: host memory, or the daemon's GPU with this ordinal (device.h)
  int hidden_size = 0;  // values per token of activations, which steps may then give; 0: none are kept
};

struct CacheDescription {
  CacheOptions options;  // codec canonical
  uint32_t id = 0;
  CacheDigest digest;
  uint64_t raw_page_bytes = 0;
  uint64_t encoded_page_bytes = 0;  // padding included, the mean over layers, rounded up
  uint64_t payload_page_bytes = 0;  // likewise without padding
  uint64_t sink_tokens = 0;         // at the beginning of every context, whose pages stay raw; whole pages
  uint64_t pool_bytes = 0;          // of its memory, that its tenant may have at most; 0: an earlier daemon's
  uint64_t resident_raw_bytes = 0, resident_encoded_bytes = 0, resident_activation_bytes = 0;
  uint64_t sequences = 0, published_blocks = 0;
};

/// A dense array, either in an Arena (the daemon reads or writes it in place) or in the caller's memory (copied through
/// the socket). `data` must stay valid until the call is done; for an arena range it points into the arena.
struct TensorView {
  void* data = nullptr;  // nullptr: none
  size_t bytes = 0;
  const Arena* arena = nullptr;

  static TensorView Inline(const void* data, size_t bytes) { return {const_cast<void*>(data), bytes, nullptr}; }
};

struct StepEntry {
  uint64_t sequence = 0;
  uint64_t position = 0;
  int tokens = 1;
};

/// One layer's step of a batch; shapes as in api/kvmanager.capnp, StepRequest. Append: k and v. Attend: q and out. NaN
/// or Inf in k, v or q is INVALID_ARGUMENT for the whole batch, naming entry, token, head and channel. Arena ranges
/// must stay as they are until the call is done: a q that changes meanwhile is not checked again, and spoils this
/// client's output.
struct StepBatch {
  int layer = 0;
  absl::Span<const StepEntry> entries;
  TensorView k, v;    // [sum of tokens][kv_heads][head_dim] of the cache's dtype
  TensorView x;       // with them, optional: activations, [sum of tokens][hidden_size] of the cache's dtype
  TensorView q, out;  // [sum of tokens][query_heads][head_dim] of q_dtype
  DType q_dtype = DType::kFloat32;
  TensorView lse;   // [sum of tokens][query_heads] float32, optional
  float scale = 0;  // 0: 1/sqrt(head_dim)
  /// Of a cache on a GPU, whose tensors are in device arenas: the daemon's stream begins when the word `ready` is at
  /// least this (device.h); 0: at once. NaN and Inf in k and v are then found later: the sequence's next call says so.
  uint64_t ready = 0;
};

struct StepResult {
  uint64_t encoded_pairs = 0, raw_pairs = 0;  // (query token, context token) pairs read in either form
  uint64_t done = 0;  // of a cache on a GPU: out and lse are there when the word `done` is at least this
};

/// K and V of tokens of one layer, as dense rows: what an engine with KV pages of its own loads them from. Waits, as a
/// step does, for pages that are still to be encoded or to arrive. A page that is raw for its sequence (within the lag,
/// or declined) gives the bytes that were appended, another what its codec decodes: what a prefix hit gives is decoded.
/// Of a cache on a GPU, behind what this client appended: the arenas are of host memory. Of a daemon that has the
/// feature "read" (else UNIMPLEMENTED).
struct ReadBatch {
  int layer = 0;
  absl::Span<const StepEntry> entries;  // tokens that are there: position + tokens <= the layer's tokens
  TensorView k, v;                      // [sum of tokens][kv_heads][head_dim] of the cache's dtype, both; written
};

struct ReadResult {
  uint64_t encoded_tokens = 0, raw_tokens = 0;  // that were decoded, and that were copied from raw pages
};

/// Queries of one token of an earlier step, [query_heads][head_dim] of the cache's dtype.
struct QueryRow {
  int layer = 0;
  absl::Span<const uint8_t> q;
};

/// A step of all layers whose kernels are this process's: in_process.h makes such calls.
struct ExtendBatch {
  absl::Span<const StepEntry> entries;
  bool append = true;
  bool attend = true;
  bool encode_here = true;
  absl::Span<const uint32_t> words;  // [entries] of the non-finite table
  absl::Span<const QueryRow> queries;
};

/// api/kvmanager.capnp, ExtendReply.
struct ExtendOutcome {
  uint64_t epoch = 0;
  std::vector<uint32_t> aged, changes, encode_items;
  std::vector<uint64_t> sparse_from;  // empty: no query chooses what it reads
  uint64_t encode_batch = 0;
  uint32_t encode_at = 0;
};

/// kIncomplete: of ReadBlocks alone, a page is still to be encoded.
enum class Miss : uint8_t { kNone, kNotFound, kTokenMismatch, kChecksum, kIncomplete };

/// Whole blocks of a cache in host memory, in the form in which they are stored: api/kvmanager.capnp, BlocksRequest,
/// says how pages lie in an arena. For engines that encode and decode pages themselves (c/kvmanager.h, kvm_page_codec).
/// Of a daemon that has the feature "blocks" (else UNIMPLEMENTED).
struct BlockRange {
  uint32_t first = 0;  // place of names[0] in its sequence
  absl::Span<const BlockName> names;
  TensorView pages;  // a range of an arena
};

struct ReadBlocksResult {
  uint32_t blocks = 0;        // from names[0] on
  Miss reason = Miss::kNone;  // why no more; kNone: all, or no more fit
  uint64_t bytes = 0;         // of `pages` that they take
  std::string raw;            // [blocks][layers] 1 where a page is raw, else 0
};

/// Pins memory that is mapped for reading, so that a GPU copies from it as fast as the bus goes. Lives until the memory
/// is unmapped; called on the client's thread.
class SlabPinner {
 public:
  virtual ~SlabPinner() = default;
  /// Whole pages.
  virtual absl::Status Pin(const uint8_t* data, size_t bytes) = 0;
  virtual void Unpin(const uint8_t* data) = 0;
};

/// Pages that are held where they lie: until Release is answered or this is gone, the daemon neither moves them nor
/// writes to them.
class BlocksLease {
 public:
  virtual ~BlocksLease() = default;
  /// To be asked when they were copied. OK: they were held all the time. UNAVAILABLE: they were not (the daemon's or
  /// the connection's end, or the daemon ended the lease after 30 s), and what was copied is of no use. corrupt_block:
  /// of those that were read, one whose bytes had not their checksum; the daemon compares it itself, and forgets it if
  /// that is so.
  virtual Pending<absl::Status> ReleaseAsync(std::optional<uint32_t> corrupt_block) = 0;
  absl::Status Release(std::optional<uint32_t> corrupt_block = std::nullopt);
};

/// Blocks of which this process copies the pages itself. It compares its copy with the checksums: the daemon has not.
struct MappedBlocks {
  uint32_t blocks = 0;        // from names[0] on
  Miss reason = Miss::kNone;  // why no more; kNone: all, or no more fit
  uint64_t bytes = 0;         // of the range that pages take which do not lie in memory that is mapped
  std::string raw;            // [blocks][layers] 1 where a page is raw, else 0
  /// [blocks][layers] where the page begins in this process, a multiple of 64: in the range, or in memory that is
  /// mapped for reading and stays so as long as the lease does: the daemon may want back what no lease holds.
  std::vector<uint64_t> pages;
  std::vector<uint64_t> checksums;     // [blocks][layers] XXH3-64 of the page's bytes
  std::unique_ptr<BlocksLease> lease;  // nullptr: all pages are in the range
  /// Why memory could not be pinned; said once, of the connection. What is not pinned is copied more slowly.
  absl::Status pinned;
};

struct WriteBlocksResult {
  uint32_t written = 0;  // and named
  uint32_t present = 0;  // that the daemon had already
};

/// How long published blocks are kept when memory is short, in every memory of the daemon and on its disk.
struct RetentionOptions {
  /// 0..100. Below 50: they go before all others of who pays for them (0: they will not return). 50: as the daemon's
  /// eviction decides, which takes an earlier call back. Above: they go after all others, the lowest priority first,
  /// then what ends first. Nothing is kept for good: whoever retains all that it pays for loses of that.
  int priority = 50;
  /// Until the eviction decides again: 0..315360000000 (ten years) milliseconds; 0: with the block, or the daemon.
  int64_t ttl_ms = 0;
};

struct RetainOutcome {
  uint64_t blocks = 0;  // of the names, that are in a memory or on the disk
  uint64_t bytes = 0;   // of these, each copy counted
};

struct PrefixMatch {
  int hit_blocks = 0;         // consecutive, from the first
  Miss reason = Miss::kNone;  // of the first block that was no hit
  int in_memory = 0;  // of the hits, from the first on: in the cache's own memory; 0: a daemon before schema 1.20
};

struct MatchOptions {
  /// What only the disk has of the hits begins to come to host memory; nothing waits for it. It ends with the
  /// connection. Daemons of earlier versions ignore it.
  bool prefetch = false;
};

struct PublishOutcome {
  int published = 0, shared = 0, deferred = 0;
};

struct HandOffOptions {
  int64_t timeout_ms = 30000;  // of each call but for what room_ms allows: 1..3600000
  int64_t room_ms = 0;         // how long a receiver that is full may let it wait for room: 0..3600000
  /// Whoever claims the sequence appends to it before it reads or crops, as an engine does whose blob holds the next
  /// token. Pages then travel as that token will read them: one that the last token filled goes encoded where the lag
  /// lets it, and the receiver cannot crop into it.
  bool will_append = false;
};

/// When the pages of a layer went, in seconds since the offer; negative: none did.
struct LayerTimes {
  double ready_first = -1, ready_last = -1;  // full, and encoded where they travel so
  double sent_first = -1;                    // given to a connection
  double arrived_last = -1;                  // the receiver said that it has them all
};

struct HandOffOutcome {
  std::string ticket;
  uint64_t bytes_sent = 0, pages_sent = 0, pages_skipped = 0;
  uint64_t bytes_resent = 0, resumes = 0;  // of bytes_sent, after connections that broke
  double seconds = 0;                      // from the offer to the receiver's confirmation
  double sending_seconds = 0;              // of these, with pages to send, or on their way
  std::string peer;                        // who has it: of several, the one that was chosen
  int64_t begun_unix_ns = 0;               // when it was offered, by the sender's clock
  std::vector<LayerTimes> layers;
};

struct SequenceDescription {
  uint64_t id = 0;
  uint32_t cache_id = 0;
  uint64_t tokens = 0;
  int hit_blocks = 0, published_blocks = 0;
  uint64_t bytes = 0;
  std::string client;  // who holds it: Options::name; empty: received, not claimed yet
  uint32_t pid = 0;    // of that process, if it came over a Unix socket; 0: unknown
};

struct PoolDescription {
  std::string tier;
  uint64_t capacity_bytes = 0, used_bytes = 0, slab_bytes = 0, free_slabs = 0;
  std::string huge_pages;
};

struct DiskDescription {
  std::string path;
  uint64_t capacity_bytes = 0, used_bytes = 0, blocks = 0;
  uint64_t unwritten_blocks = 0;  // of host memory, that are being written or wait for that
  std::string state;              // "ready", "reading its index", or what is wrong
};

/// Host memory that outlives the daemon.
struct KeptMemoryDescription {
  std::string state_dir;
  std::string state;              // who keeps it, or why nobody does
  uint32_t pid = 0;               // of the process that keeps it; 0: nobody does
  uint64_t unclaimed_blocks = 0;  // of an earlier daemon, that no cache has taken yet
};

struct DaemonDescription {
  std::string version;
  uint64_t boot_epoch = 0;
  double uptime_seconds = 0;
  bool draining = false;
  std::vector<PoolDescription> pools;
  std::optional<DiskDescription> disk;               // nothing: the daemon has none
  std::optional<KeptMemoryDescription> kept_memory;  // nothing: without --state-dir
  uint32_t connections = 0, caches = 0, threads = 0;
  uint64_t leases = 0, published_blocks = 0;
  uint64_t waiting_hand_offs = 0;  // received sequences that nobody has claimed yet
  std::string cpu_target, listen, peer_listen, metrics_listen, http_listen;
  std::string gpus;                                // what GPUs the daemon sees, or why none
  std::string ucx;                                 // whether pages go to and from peers through UCX, or why not
  uint64_t pinned_bytes = 0, pin_total_bytes = 0;  // of the host pool; 0: no GPU
  std::string pin_error;                           // why the rest stays unpinned
};

/// How much a peer has to do, as it says itself.
struct PeerLoad {
  uint64_t capacity_bytes = 0, free_bytes = 0;  // of its host pool; free: to be had at once, what it may evict included
  uint64_t queued_bytes = 0;                    // of hand-offs that it accepted, or lets wait, and that are to come yet
  uint64_t waiting_offers = 0;                  // for room
  uint64_t active_transfers = 0;                // that it receives
};

struct PeerDescription {
  std::string peer;
  bool incoming = false;
  uint64_t transfers = 0, failures = 0, bytes = 0, active = 0;
  uint64_t copied_bytes = 0;    // of `bytes`: from one daemon's memory to the other's, or through UCX
  double bytes_per_second = 0;  // measured while there was something to send, recent transfers counting most; 0: never
  std::string last_error;
  absl::StatusOr<PeerLoad> load = absl::UnavailableError("not asked");  // of peers that sequences are handed to
};

/// A bound of the daemon; scope "daemon", "tenant", "connection", "process", "call" or "peer".
struct LimitDescription {
  std::string name, scope, unit;
  uint64_t limit = 0;
  std::optional<uint64_t> used;  // by the daemon, or by the one of its scope that has most; nothing: not counted
  std::string flag;              // from which it follows; empty: fixed
  std::string bounds;
};

/// kArriving: on its way to memory, from another memory or the disk.
enum class BlockPlace : uint8_t { kNowhere, kMemory, kArriving, kDisk };
/// kUnknown: it was not stored, as far as the daemon remembers. kChecksum: its bytes had changed. kDiskRecord: its
/// record on the disk was wrong, or could not be read.
enum class BlockLoss : uint8_t { kUnknown, kEvicted, kPurged, kChecksum, kDiskRecord };

/// "nowhere", "memory", "arriving", "disk".
const char* PlaceName(BlockPlace place);
/// "unknown", "evicted", "purged", "checksum", "disk_record".
const char* LossName(BlockLoss loss);

/// Where a block is, or why it is not found by its name. Tenants are labels, as in metrics.
struct BlockExplanation {
  BlockPlace place = BlockPlace::kNowhere;
  BlockLoss loss = BlockLoss::kUnknown;  // of one that is nowhere: how it went the last time
  std::string tier;                      // where it is, or was: "host", "device:N", "disk"; empty: unknown
  uint32_t cache_id = 0;                 // which has it, or had it; 0: unknown, or not open when it went
  double seconds_ago = 0;                // when it went
  std::string owner;                     // whose it was then; empty: unknown
  std::string taker;                     // evicted: for whose request; empty: unknown
  bool other_tokens = false;             // what has its key there has other tokens: a miss
  int priority = 50;                     // of one that is there: RetentionOptions; 50: the eviction decides
  uint64_t retained_ms = 0;              // until the eviction decides again; 0: no end, or it does now
  uint32_t same_tokens_cache_id = 0;     // of one that is nowhere: of `others`, a cache that has the same tokens in
                                         // memory under another name; 0: none
};

struct Explanation {
  std::vector<BlockExplanation> blocks;  // [names]
  struct Other {
    uint32_t cache_id = 0;
    std::string tenant, tier;
    std::vector<std::string> differs;  // from the cache that was asked about: fields of CacheOptions, as the schema has
                                       // them; none: the tokens before these differ
  };
  std::vector<Other> others;
  // Of how many blocks that went the daemon knows how, of at most how many, and how far back that goes.
  uint32_t remembered = 0, remembered_max = 0;
  double remembered_seconds = 0;
};

/// How K is rotated; api/kvmanager.capnp, ProjectionFacts. Scaled frequencies are not known.
struct ProjectionFacts {
  int rotary_dims = 0;  // the first ones of a head; 0: K is not rotated
  double theta = 10000;
  bool interleaved = false;    // channel 2 i with 2 i + 1; else i with i + rotary_dims / 2
  bool double_angles = false;  // frequency times position in double precision; else rounded to float
};

/// W_K and W_V of a layer, [kv_heads][head_dim][hidden_size] of `dtype`, as Linear layers keep them, with biases
/// [kv_heads][head_dim] or none; and a proof: K and V that the engine itself made of x at these positions, all of the
/// cache's dtype, against which the daemon compares its own. tokens: 1..page_tokens; position: 256 or more where K is
/// rotated.
struct LayerProjections {
  int layer = 0;
  DType dtype = DType::kFloat16;
  TensorView k, v, k_bias, v_bias;
  struct Proof {
    uint64_t position = 0;
    int tokens = 0;
    TensorView x, k, v;  // [tokens][hidden_size], [tokens][kv_heads][head_dim]
  } proof;
};

/// What the daemon plans reloads by: rates are medians of what it measured.
struct RecomputeDescription {
  struct Rate {
    double per_second = 0;
    uint32_t samples = 0;  // 0: not measured
    bool stale = false;    // not within the last minute
  };
  struct Set {
    CacheDigest digest;
    uint32_t hidden_size = 0, kv_width = 0, layers = 0, layers_ready = 0, chunk_tokens = 0;
    int device = -1;  // where it is projected: the CPU, or this GPU
    Rate flops;
    std::string failed;  // why nothing is recomputed with it any more
  };
  struct Link {
    std::string peer;  // host that pages came from
    Rate bytes;
  };
  struct Device {
    int ordinal = 0;
    uint64_t weight_bytes = 0, weight_bytes_max = 0;
  };
  uint64_t weight_bytes = 0, weight_bytes_max = 0;  // of host memory
  std::vector<Set> sets;
  std::vector<Link> links;
  std::vector<Device> devices;  // GPUs that project
};

/// What a call will give. Waiting drives the client's event loop. Destroying an unfinished one cancels the call.
template <typename T>
class Pending {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual bool ready() = 0;  // drives the loop without blocking
    virtual T Wait() = 0;
  };
  explicit Pending(std::unique_ptr<State> state) : state_(std::move(state)) {}
  bool ready() { return state_->ready(); }
  /// At most once.
  T Wait() { return state_->Wait(); }

 private:
  std::unique_ptr<State> state_;
};

class Client {
 public:
  struct Options {
    std::string name = "client";  // for listings
    int64_t deadline_ms = 30000;  // of every call: 1..3600000
    int64_t connect_ms = 5000;    // connecting, with back-off from 1 ms doubling to 250 ms
    int64_t hello_ms = 0;         // once connected, for the first answer: 0 (what is left of connect_ms), or 1..3600000
    int64_t busy_poll_us = 0;     // spin this long for an answer before blocking: 0..1000000
    /// Where administration below is asked: the daemon's --admin-listen, for its own user and root. Empty: "PATH.admin"
    /// of "unix:PATH". Connected to when first needed.
    std::string admin_address;
    /// Shows who this is to a daemon whose --tenants knows its SHA-256: 16..1024 bytes; empty: none. Over "tcp:" it is
    /// sent as it is. Of a daemon that has the feature "tokens" (else UNIMPLEMENTED).
    std::string token;
    /// Files in PEM, of an address "tls:HOST:PORT", read at each connecting. tls_ca: whose signature the daemon's
    /// certificate must have; empty: that of an authority which the system knows. tls_cert and tls_key: this client's
    /// own, which say who it is; both or none.
    std::string tls_ca, tls_cert, tls_key;
    /// The host name or IP address that the daemon's certificate must have; empty: HOST.
    std::string tls_name;
  };

  /// address: "unix:PATH", "tcp:HOST:PORT" or "tls:HOST:PORT". Errors: INVALID_ARGUMENT (address, a file of TLS),
  /// UNAVAILABLE, UNAUTHENTICATED (a certificate, and which side refused it), FAILED_PRECONDITION (API version; the
  /// daemon speaks TLS there, or does not).
  static absl::StatusOr<std::unique_ptr<Client>> Connect(absl::string_view address, const Options& options);
  virtual ~Client() = default;

  virtual uint64_t boot_epoch() const = 0;
  virtual bool connected() = 0;
  virtual std::string peer_address() const = 0;  // where other daemons hand sequences to
  /// After UNAVAILABLE: connects again, with back-off. Handles from before are void.
  virtual absl::Status Reconnect() = 0;

  virtual absl::StatusOr<std::unique_ptr<Cache>> OpenCache(const CacheOptions& options) = 0;
  /// Shared memory made by the daemon; Unix sockets only (else FAILED_PRECONDITION: use inline tensors).
  virtual absl::StatusOr<std::unique_ptr<Arena>> CreateArena(uint64_t bytes) = 0;
  /// An empty round trip.
  virtual absl::Status Ping() = 0;

  // Administration, through Options::admin_address. Errors besides the calls' own: PERMISSION_DENIED (this user may
  // not), FAILED_PRECONDITION (there is no such socket, or it is not known where).
  virtual absl::StatusOr<DaemonDescription> Status() = 0;
  virtual absl::StatusOr<std::vector<CacheDescription>> Caches() = 0;
  virtual absl::StatusOr<std::vector<SequenceDescription>> Sequences() = 0;
  /// The daemons that sequences were handed to or came from; the former are asked how much they have to do, all at
  /// once, for at most half a second.
  absl::StatusOr<std::vector<PeerDescription>> Peers() { return Peers({}); }
  /// If `peers` is not empty, of these alone, in this order: at most 256 of "HOST:PORT".
  virtual absl::StatusOr<std::vector<PeerDescription>> Peers(absl::Span<const std::string> peers) = 0;
  /// Every metric, in Prometheus' text format. UNIMPLEMENTED by daemons of earlier versions.
  virtual absl::StatusOr<std::string> MetricsText() {
    return absl::UnimplementedError("this client does not ask for metrics");
  }
  virtual absl::StatusOr<RecomputeDescription> Recompute() {
    return absl::UnimplementedError("this client does not ask what is recomputed");
  }
  /// Every bound of the daemon. UNIMPLEMENTED by daemons of earlier versions.
  virtual absl::StatusOr<std::vector<LimitDescription>> Limits() {
    return absl::UnimplementedError("this client does not ask for limits");
  }
  /// Why these blocks are found, or not. cache_id: whose names they are; then what is missing is also looked for under
  /// other names. 0: keys of any open cache. A name's `tokens` may be all zeros: not known. Errors: INVALID_ARGUMENT
  /// (more than 65,536 names), NOT_FOUND (cache); UNIMPLEMENTED by daemons of earlier versions.
  virtual absl::StatusOr<Explanation> Explain(uint32_t cache_id, absl::Span<const BlockName> names) {
    return absl::UnimplementedError("this client does not ask why blocks are missing");
  }
  /// Cache::Retain, of any tenant's cache. Errors: INVALID_ARGUMENT (names, options), NOT_FOUND (cache); UNIMPLEMENTED
  /// by daemons of earlier versions.
  virtual absl::StatusOr<RetainOutcome> Retain(uint32_t cache_id, absl::Span<const BlockName> names,
                                               const RetentionOptions& options) {
    return absl::UnimplementedError("this client retains no blocks");
  }
  /// Cache::Prefetch, of any tenant's cache. Errors: INVALID_ARGUMENT (names), NOT_FOUND (cache); UNIMPLEMENTED by
  /// daemons of earlier versions.
  virtual absl::StatusOr<PrefixMatch> Prefetch(uint32_t cache_id, absl::Span<const BlockName> names) {
    return absl::UnimplementedError("this client prefetches no blocks");
  }
  /// Refuses new sequences, forks and incoming hand-offs; claims, outgoing hand-offs and all else go on.
  virtual absl::Status Drain(bool on) = 0;
  /// Another program goes on in the daemon's process: once this returned, the connection ends, and one that is made
  /// waits until it serves. program: an absolute path there; empty: the one that the daemon was started by. cold: what
  /// is in memory alone may be lost. Errors: INVALID_ARGUMENT (the program is not there, or refuses the daemon's
  /// flags), FAILED_PRECONDITION (memory would be lost): the daemon serves on; UNIMPLEMENTED by daemons of earlier
  /// versions.
  virtual absl::Status Upgrade(const std::string& program, bool cold) {
    return absl::UnimplementedError("this client upgrades no daemon");
  }
  /// Published blocks that nothing pins; of one cache, or of all if `cache_id` is kAllCaches. Returns how many.
  static constexpr uint32_t kAllCaches = UINT32_MAX;
  virtual absl::StatusOr<uint64_t> Purge(uint32_t cache_id) = 0;
};

/// A memfd of the daemon, mapped here. The daemon never reads past it, whatever the client does to it.
class Arena {
 public:
  virtual ~Arena() = default;
  virtual absl::Span<uint8_t> data() const = 0;
  /// A range of it; offset a multiple of 64.
  TensorView View(size_t offset, size_t bytes) const { return {data().data() + offset, bytes, this}; }
};

struct CreatedSequence {
  std::unique_ptr<Sequence> sequence;
  PrefixMatch match;
};

struct ClaimedSequence {
  std::unique_ptr<Sequence> sequence;
  uint64_t tokens = 0;
  std::string blob;
};

class Cache {
 public:
  virtual ~Cache() = default;
  virtual const CacheDescription& description() const = 0;  // as of OpenCache
  virtual absl::StatusOr<CacheDescription> Refresh() = 0;

  absl::StatusOr<std::vector<PrefixMatch>> Match(absl::Span<const absl::Span<const BlockName>> prefixes,
                                                 const MatchOptions& options) {
    return MatchAsync(prefixes, options).Wait();
  }
  virtual Pending<absl::StatusOr<std::vector<PrefixMatch>>> MatchAsync(
      absl::Span<const absl::Span<const BlockName>> prefixes, const MatchOptions& options) = 0;
  absl::StatusOr<std::vector<PrefixMatch>> Match(absl::Span<const absl::Span<const BlockName>> prefixes) {
    return Match(prefixes, {});
  }
  /// Brings blocks of a prefix ahead of need, at most 65,536: from the disk into host memory and, of a cache on a GPU,
  /// on to that GPU. Waits until all is there that has room; what has come when the deadline is over stays, and the
  /// next call goes on. Nothing is pinned: they are the blocks that were used last, and Retain keeps them longer.
  /// Returns what there is of the names then. Errors: INVALID_ARGUMENT (names); UNIMPLEMENTED by daemons of earlier
  /// versions.
  virtual absl::StatusOr<PrefixMatch> Prefetch(absl::Span<const BlockName> names) {
    return absl::UnimplementedError("this client prefetches no blocks");
  }
  /// How long these blocks are kept: published ones, in any order, at most 65,536. The last call for a block counts;
  /// publishing it again and using it change nothing. It is forgotten when the daemon ends. A block is of no use
  /// without its parents: retain them as well. What is nowhere is not counted, and no error. A name's `tokens` may be
  /// all zeros: not known. Errors: INVALID_ARGUMENT naming priority, ttl_ms or names; UNIMPLEMENTED by daemons of
  /// earlier versions.
  virtual absl::StatusOr<RetainOutcome> Retain(absl::Span<const BlockName>, const RetentionOptions&) {
    return absl::UnimplementedError("this client retains no blocks");
  }
  /// prompt_tokens: of each sequence's prompt, its prefix included, for codecs whose queries choose what they read
  /// behind it ("pq"); 0, or no list: the prompt ends where the first append of a single token begins.
  virtual absl::StatusOr<std::vector<absl::StatusOr<CreatedSequence>>> CreateSequences(
      absl::Span<const absl::Span<const BlockName>> prefixes, absl::Span<const uint64_t> prompt_tokens) = 0;
  absl::StatusOr<std::vector<absl::StatusOr<CreatedSequence>>> CreateSequences(
      absl::Span<const absl::Span<const BlockName>> prefixes) {
    return CreateSequences(prefixes, {});
  }
  absl::StatusOr<CreatedSequence> CreateSequence(absl::Span<const BlockName> prefix = {}, uint64_t prompt_tokens = 0);

  absl::StatusOr<StepResult> Step(const StepBatch& batch) { return StepAsync(batch).Wait(); }
  virtual Pending<absl::StatusOr<StepResult>> StepAsync(const StepBatch& batch) = 0;
  /// Errors: INVALID_ARGUMENT (also of a GPU's sequence to which a NaN or an infinity was appended), NOT_FOUND
  /// (sequence), FAILED_PRECONDITION (a GPU's, which this connection has not opened), RESOURCE_EXHAUSTED, UNAVAILABLE
  /// (the hand-off by which it was arriving ended early; the GPU has failed); DATA_LOSS: the codec could not decode a
  /// page, and what k and v hold is of no use.
  absl::StatusOr<ReadResult> Read(const ReadBatch& batch) { return ReadAsync(batch).Wait(); }
  /// k and v must stay until the result was waited for, or the Pending is gone; arena ranges may still be written to a
  /// little after that: use others.
  virtual Pending<absl::StatusOr<ReadResult>> ReadAsync(const ReadBatch& batch) = 0;
  /// Into range.pages, as many blocks as fit. The range may be written to until the result was waited for, and a little
  /// longer where the Pending is gone before.
  virtual Pending<absl::StatusOr<ReadBlocksResult>> ReadBlocksAsync(const BlockRange& range) = 0;
  absl::StatusOr<ReadBlocksResult> ReadBlocks(const BlockRange& range) { return ReadBlocksAsync(range).Wait(); }
  /// The same without copying what lies in memory that this process may map: the first call that names it maps it, and
  /// has `pinner` (of the connection's first call with one; nullptr: none) pin it. range.pages has the other pages; it
  /// may be none, and blocks then end at the first of these. Errors: UNIMPLEMENTED (a daemon without the feature
  /// "map-blocks"); FAILED_PRECONDITION (no Unix socket; memory that is not to be mapped, or no more of it): use
  /// ReadBlocks; RESOURCE_EXHAUSTED (it cannot be mapped here); INTERNAL for a reply that cannot be.
  virtual Pending<absl::StatusOr<MappedBlocks>> MapBlocksAsync(const BlockRange& range,
                                                               std::shared_ptr<SlabPinner> pinner);
  absl::StatusOr<MappedBlocks> MapBlocks(const BlockRange& range, std::shared_ptr<SlabPinner> pinner = nullptr);
  /// Maps memory of the daemon's ahead of need, pinned as by MapBlocksAsync, so that calls of that need not: until the
  /// slabs of the cache's tenant that this process has mapped are `bytes`, or the daemon gives no more: half of its
  /// pool, 7/8 while nobody else has some. Each step of it has the deadline. Returns how many bytes of them are mapped.
  /// Errors: as MapBlocksAsync's, where memory was mapped before them too; and why it could not be pinned.
  virtual absl::StatusOr<uint64_t> BindSlabs(uint64_t bytes, std::shared_ptr<SlabPinner> pinner);
  /// raw: [names][layers], 1 where a page is raw. The range must not change before the result was waited for; it may be
  /// in a device arena (Device::CreateArena). Errors: INVALID_ARGUMENT naming page and place (NaN or Inf), DATA_LOSS
  /// (no page of the codec's), RESOURCE_EXHAUSTED; of a device arena UNAVAILABLE until the daemon has pinned its
  /// memory, also for no names.
  /// checksums: of a device arena, [names][layers] XXH3-64 of the pages' bytes, 0: not known; or empty. The daemon
  /// takes those of encoded pages as they are, and compares them when a page is first used.
  virtual Pending<absl::StatusOr<WriteBlocksResult>> WriteBlocksAsync(const BlockRange& range,
                                                                      absl::Span<const uint8_t> raw,
                                                                      absl::Span<const uint64_t> checksums = {}) = 0;
  absl::StatusOr<WriteBlocksResult> WriteBlocks(const BlockRange& range, absl::Span<const uint8_t> raw) {
    return WriteBlocksAsync(range, raw).Wait();
  }
  /// Of a cache on a GPU.
  virtual Pending<absl::StatusOr<ExtendOutcome>> ExtendAsync(const ExtendBatch& batch) = 0;

  /// Takes over a sequence that was handed off. Of a hand-off that is under way it waits until the sequence has all of
  /// its tokens; steps then wait for the pages that they need. UNAVAILABLE, then or from later calls: the hand-off
  /// ended early, and the sequence can only be dropped.
  absl::StatusOr<ClaimedSequence> Claim(absl::string_view ticket) { return ClaimAsync(ticket, 0).Wait(); }
  /// deadline_ms: of this call; 0: Options::deadline_ms.
  virtual Pending<absl::StatusOr<ClaimedSequence>> ClaimAsync(absl::string_view ticket, int64_t deadline_ms) = 0;

  /// [kv_heads][head_dim][head_dim], row-major, where steps of `layer` leave their outputs in the codec's space (a
  /// codec with fold=1): an output o' of a query head stands for A o', A being its KV head's factor; FoldOutputWeights
  /// (fold.h) makes it part of W_O. Empty: outputs are as usual.
  virtual absl::StatusOr<std::vector<float>> OutputFactors(int layer) = 0;

  /// Of a cache with a hidden_size. Errors: INVALID_ARGUMENT, FAILED_PRECONDITION (others registered other facts),
  /// RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<Projections>> OpenProjections(const ProjectionFacts&) {
    return absl::UnimplementedError("this client registers no projections");
  }
};

/// Weights that a daemon recomputes K and V with, where a received sequence's activations cross the link faster. A
/// lease: they stay while somebody holds one of the cache.
class Projections {
 public:
  virtual ~Projections() = default;
  /// Copies what it needs. Errors: INVALID_ARGUMENT (shapes, NaN or Inf, a proof that does not match),
  /// FAILED_PRECONDITION (others were registered for the layer), RESOURCE_EXHAUSTED (--recompute-bytes,
  /// --recompute-device-bytes).
  virtual absl::Status SetLayer(const LayerProjections& layer) = 0;
};

/// A hand-off of a sequence that still grows. It keeps the sequence.
class HandOff {
 public:
  virtual ~HandOff() = default;  // cancels it, unless it has ended
  /// The receiver's clients may claim the sequence with it from now on.
  virtual const std::string& ticket() const = 0;
  /// Who has it: of several peers, the one that was chosen.
  virtual const std::string& peer() const = 0;
  /// Every layer has its tokens: sends the rest, and waits until the receiver has all of it. FAILED_PRECONDITION naming
  /// the shortest layer: it may be called again.
  absl::StatusOr<HandOffOutcome> Finish(absl::string_view blob) { return FinishAsync(blob).Wait(); }
  virtual Pending<absl::StatusOr<HandOffOutcome>> FinishAsync(absl::string_view blob) = 0;
};

class Sequence {
 public:
  virtual ~Sequence() = default;  // drops it
  virtual uint64_t id() const = 0;
  virtual absl::StatusOr<std::unique_ptr<Sequence>> Fork() = 0;
  virtual absl::Status Crop(uint64_t tokens) = 0;
  virtual absl::StatusOr<PublishOutcome> Publish(absl::Span<const BlockName> names) = 0;
  /// peer: "HOST:PORT" of the other daemon's --peer-listen, or up to 16 of them, "HOST:PORT,HOST:PORT": of those that
  /// answer and have room, the one that would have it first gets it (docs/operating.md, "Several decode hosts"); if it
  /// refuses, the next. The deadline of this call is timeout_ms and room_ms plus a second.
  virtual Pending<absl::StatusOr<HandOffOutcome>> HandOffAsync(absl::string_view peer, absl::string_view blob,
                                                               const HandOffOptions& options) = 0;
  Pending<absl::StatusOr<HandOffOutcome>> HandOffAsync(absl::string_view peer, absl::string_view blob,
                                                       int64_t timeout_ms, int64_t room_ms = 0) {
    return HandOffAsync(peer, blob, HandOffOptions{timeout_ms, room_ms});
  }
  absl::StatusOr<HandOffOutcome> HandOff(absl::string_view peer, absl::string_view blob,
                                         const HandOffOptions& options) {
    return HandOffAsync(peer, blob, options).Wait();
  }
  absl::StatusOr<HandOffOutcome> HandOff(absl::string_view peer, absl::string_view blob, int64_t timeout_ms = 30000,
                                         int64_t room_ms = 0) {
    return HandOff(peer, blob, HandOffOptions{timeout_ms, room_ms});
  }
  /// The same while the sequence still grows, to `tokens` tokens in every layer: its pages go as soon as they are full
  /// and encoded. Done when the receiver has room. Until Finish the sequence cannot be cropped, nor grow beyond
  /// `tokens`. Deadlines of this call and of Finish as HandOff's.
  virtual Pending<absl::StatusOr<std::unique_ptr<client::HandOff>>> BeginHandOffAsync(
      absl::string_view peer, uint64_t tokens, const HandOffOptions& options) = 0;
  Pending<absl::StatusOr<std::unique_ptr<client::HandOff>>> BeginHandOffAsync(absl::string_view peer, uint64_t tokens,
                                                                              int64_t timeout_ms, int64_t room_ms) {
    return BeginHandOffAsync(peer, tokens, HandOffOptions{timeout_ms, room_ms});
  }
  absl::StatusOr<std::unique_ptr<client::HandOff>> BeginHandOff(absl::string_view peer, uint64_t tokens,
                                                                const HandOffOptions& options) {
    return BeginHandOffAsync(peer, tokens, options).Wait();
  }
  absl::StatusOr<std::unique_ptr<client::HandOff>> BeginHandOff(absl::string_view peer, uint64_t tokens,
                                                                int64_t timeout_ms = 30000, int64_t room_ms = 0) {
    return BeginHandOff(peer, tokens, HandOffOptions{timeout_ms, room_ms});
  }
  virtual absl::StatusOr<SequenceDescription> Info() = 0;
  /// Of a cache on a GPU: the word `done` is at least this once what crops of this sequence, or the fork that made it,
  /// copy is there. In the daemon's stream it is there anyway.
  virtual uint64_t copied() const { return 0; }
};

}  // namespace kvmanager::client
