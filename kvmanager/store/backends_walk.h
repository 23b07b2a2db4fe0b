// One walk of random operations on two stores, one in host memory and one on a simulated GPU, beside one model of
// tokens, forms (rule 2 of page_store.h) and bytes.
//
// Each operation is drawn once and made in both. What they answer must be as the model says, and equal: the code of a
// status and the field that it names, what a prefix finds, what a publish shares, token counts, the form in which each
// query reads each page, the form in which pages are read back or sent, and bytes. A hand-off of one may be received by
// the other.
//
// What may differ, and is therefore not compared:
//  - ids of sequences, caches and slots, and what a message says of them;
//  - timing: when jobs end and kernels run, when a lease is ready, which of several wrong entries it names, and whether
//    the raw form of an aged page is still there;
//  - room: a sequence for which one memory had room and the other had none is dropped in both. Large pools have room
//    for everything, in both;
//  - the pages that leases pin. So a purge under leases may leave other names, an eviction does, and a hand-off shares
//    a named block if its raw form is still there. From then on, until the cache is cleared, what is found is compared
//    with the model's bound alone;
//  - what one memory has alone. Host memory: activations, calls of one layer, K and V that are looked at. A GPU: calls
//    of several layers, which host memory gets one by one, and all that device_walk.h walks.
//
// One thread. Differences are GoogleTest's failures; the walk is over then.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kvmanager/store/device_walk_model.h"
#include "kvmanager/store/simulated_gpu.h"
#include "kvmanager/store/store_testing.h"

namespace kvmanager::backends_walk {

using device_walk::Client;
using device_walk::Job;
using device_walk::kBlocksMax;
using device_walk::kClients;
using device_walk::kSequencesMax;
using device_walk::Submission;
using testing::PageRead;
using testing::TestDevice;
using testing::TestStore;
using testing::Text;

enum Memory { kHost = 0, kGpu = 1 };
inline constexpr Memory kMemories[] = {kHost, kGpu};
inline constexpr size_t kReadsMax = 12;
inline constexpr size_t kSendsMax = 4;

struct WalkedCache : device_walk::ModelCache {
  std::array<CacheId, 2> ids{};
  bool names_lost = false;              // by a purge: fewer are found than the model knows
  bool names_differ = false;            // the memories may find different ones
  std::array<double, 2> evicted{0, 0};  // blocks of the whole store, when it was last cleared
};

struct WalkedSequence : device_walk::ModelSequence {
  std::array<SequenceId, 2> ids{};
};

/// What one page of a lease must be, as of its making.
struct ExpectedPage {
  std::vector<uint8_t> raw;  // empty: must not be offered
  int raw_tokens = 0;
  std::vector<uint8_t> encoded;  // empty: must not be offered
  bool lag_applies = false;
};

/// A lease that lists pages.
struct Listed {
  std::unique_ptr<AttendLease> lease;
  std::shared_ptr<bool> called = std::make_shared<bool>(false);  // since it is ready
  std::vector<std::vector<ExpectedPage>> expected;               // [entry][page]
  std::vector<std::vector<PageRead>> reads;                      // [entry], once answered
  bool refused = false;                                          // as the model says
  bool answered = false;
  absl::Status status;  // once answered
};

/// Queries of some layers of some sequences.
struct Read {
  Client* client = nullptr;
  size_t cache = 0;
  int first_layer = 0, layers = 0;
  std::vector<uint64_t> sequences;  // numbers, by entry
  std::array<std::vector<AttendEntry>, 2> entries;
  bool refused = false;                                           // as the model says
  size_t wrong_entries = 0;                                       // by which
  std::vector<Listed> host;                                       // [layers]
  std::unique_ptr<AttendLease> waits;                             // on the GPU
  uint64_t submitted = 0;                                         // the client's submission that queries
  std::vector<std::shared_ptr<std::vector<PageRead>>> gpu_reads;  // [layers][entries]
  bool gpu_answered = false, gpu_given_up = false, compared = false;
  absl::Status gpu_status;
};

/// Pages that are read back.
struct Load {
  const Client* client = nullptr;
  size_t cache = 0;
  std::array<Listed, 2> listed;
  bool compared = false;
};

/// A sequence that is being sent.
struct Send {
  const Client* client = nullptr;
  WalkedSequence model;
  bool will_append = false;
  std::array<std::unique_ptr<ExportLease>, 2> leases;
};

/// What a receiver was sent, the sender being gone.
struct Packet {
  HandOffHeader header;
  HandOffTrailer trailer;
  std::vector<testing::SentPage> pages;
  std::vector<std::vector<uint8_t>> bytes;  // [pages], which point here
};
struct Transfer {
  WalkedSequence model;
  std::array<Packet, 2> packets;  // by the sender's memory
};

class BackendsWalk {
 public:
  /// Equal seeds walk equally.
  explicit BackendsWalk(uint64_t seed);
  BackendsWalk(const BackendsWalk&) = delete;
  BackendsWalk& operator=(const BackendsWalk&) = delete;

  /// One operation, what became ready meanwhile, and a look at both stores' invariants.
  void Step();
  /// Ends what is under way and gives everything back: no slot may be left in use. Once.
  void Finish();

  struct Counts {
    uint64_t statuses = 0, refused = 0, no_room = 0, room_differs = 0, matches = 0, hits = 0, shared = 0, publishes = 0;
    uint64_t reads = 0, reads_refused = 0, raw = 0, encoded = 0, loads = 0, sent = 0, received = 0, named = 0,
             activations = 0, recomputed = 0, purged = 0, deaths = 0;
    testing::SimulatedStream::Counts kernels;
  };
  Counts counts;

 private:
  using Sequences = std::map<uint64_t, WalkedSequence>;  // by number
  enum class Answer { kOk, kRefused, kNoRoom, kRoomDiffers };

  uint64_t Below(uint64_t n) { return random_() % n; }
  PageStore& store(Memory memory) { return *tests_[memory]->store; }

  // backends_walk.cc: caches, clients, jobs, and what both answer.
  void OpenCaches();
  void SetQuotas();
  Client* NewClient();
  void KillClient();
  void BuryClients();
  void RunSome();
  void RunGpuJob(size_t index);
  /// Until everything of the sequence is written on the GPU.
  void RunWrites(const WalkedSequence& model);
  /// Compares code and field. no_room_in_part: host memory did a part before it had no room.
  Answer Compare(const absl::Status& host, const absl::Status& gpu, bool no_room_in_part = false);
  /// Whether both memories must find the same blocks.
  bool NamesAreEqual(const WalkedCache& cache) const;
  /// Of submissions to a GPU.
  Submission NewSubmission(size_t cache) const;
  uint64_t OpenPlan(Client* client);
  void TakeChanges(const WalkedSequence& model, int first_layer, int layers, Submission* submission);
  /// The executor's jobs since the last call run behind this submission; client: nullptr, at any time.
  void NoteJobs(const Client* client, uint64_t after);
  testing::SimulatedRows RowsOf(const WalkedSequence& model, int layer, uint64_t position, int tokens) const;

  // backends_walk_sequences.cc: operations on sequences.
  Sequences::iterator Pick() {
    return sequences_.empty() ? sequences_.end() : std::next(sequences_.begin(), Below(sequences_.size()));
  }
  /// Few different texts, so that sequences meet.
  uint32_t NextId(const Text& text) { return text.ids.size() % 48 == 3 ? static_cast<uint32_t>(Below(2)) : 7; }
  Text RandomText(const WalkedCache& cache);
  /// How far both find `names`; the same, unless that may differ.
  int MatchBoth(const WalkedCache& cache, const std::vector<BlockName>& names);
  void Create();
  void AddSequence(WalkedSequence model);
  /// Some sequences of one client and cache, and layers in which all of them are equally long; perhaps none. waiting:
  /// also those of which a step waits.
  std::vector<uint64_t> PickSome(bool waiting, int* first_layer, int* layers);
  void AppendSome();
  /// A wrong append, refused by both.
  void AppendWrong(std::array<std::vector<AppendEntry>, 2> entries, size_t which, int layer);
  void AppendNotFinite(std::vector<AppendEntry> entries, size_t which, int layer);
  void ForkOne();
  void CropOne();
  void PublishOne();
  void RetainSome();
  void Describe();
  void Drop(uint64_t number);
  void DropMade(const std::array<SequenceId, 2>& ids);
  void Purge(size_t which);
  /// Ends everything of a cache: both then find nothing.
  void ClearCache();

  // backends_walk_reads.cc
  ExpectedPage Expect(const WalkedCache& cache, const WalkedSequence& model, int layer, uint32_t page,
                      bool some_query_beyond_lag) const;
  void AttendSome();
  void AttendWrong(std::array<std::vector<AttendEntry>, 2> entries, size_t which, int first_layer, int layers);
  void AttendHost(Read* read, int layer);
  void AttendGpu(Read* read);
  void MarkWaiting(const Read& read, int change);
  void CheckReads();
  void CompareRead(Read* read);
  void LoadSome();
  void CheckLoads();
  /// Both: pages as expected, with their bytes.
  void CheckListed(const Listed& listed, const PageLayout& layout) const;
  static void Await(Listed* listed, std::unique_ptr<AttendLease> lease);
  void Answered(Listed* listed, const PageLayout& layout);
  void EndRead(size_t index);
  void EndLoad(size_t index);

  // backends_walk_sends.cc
  void StartSend();
  void FinishSend();
  void ReceiveOne();
  /// By layer and block: whether it is encoded, and its bytes.
  using SentPages = std::map<std::pair<uint32_t, uint32_t>, std::pair<bool, std::vector<uint8_t>>>;
  SentPages CheckSent(const Send& send, const Packet& packet) const;
  /// breaks_off: the transfer does, and there is no sequence (0).
  absl::StatusOr<SequenceId> Receive(Memory to, const WalkedSequence& model, const Packet& packet, bool breaks_off);

  std::mt19937_64 random_;
  const bool ample_;  // both have room for everything
  std::array<std::unique_ptr<TestStore>, 2> tests_;
  std::vector<std::unique_ptr<Client>> all_clients_;  // dead ones too
  std::array<Client*, kClients> clients_{};           // live ones
  std::vector<WalkedCache> caches_;
  Sequences sequences_;
  uint64_t next_number_ = 1;
  std::vector<Read> reads_;
  std::vector<Load> loads_;
  std::vector<Send> sends_;
  std::vector<Transfer> transfers_;
  std::vector<Job> jobs_;  // of the GPU's executor, by its index
};

}  // namespace kvmanager::backends_walk
