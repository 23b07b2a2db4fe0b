// A walk of random operations on caches of a simulated GPU, beside a model of what every query must read and every
// hand-off send.
//
// Each client has a stream, whose submissions run late and in order, each under a plan; encode jobs run behind the
// writes of their client. Walks of an even seed have pages move to the host and back, when the walk says so: what was
// fetched, or copied to the host and back, is queried as all else. Sequences are sent while they grow: what is offered
// must be there when it is, and stay.
//
// One thread. Where the store and the model differ, GoogleTest's fatal failures say so; the walk is over then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "kvmanager/store/device_walk_model.h"
#include "kvmanager/store/device_walk_sampler.h"
#include "kvmanager/store/simulated_gpu.h"
#include "kvmanager/store/store_testing.h"

namespace kvmanager::device_walk {

class DeviceWalk {
 public:
  /// Equal seeds walk equally.
  explicit DeviceWalk(uint64_t seed);
  DeviceWalk(const DeviceWalk&) = delete;
  DeviceWalk& operator=(const DeviceWalk&) = delete;

  /// One operation, what became ready meanwhile, and a look at the store's invariants.
  void Step();
  /// Ends what is under way and gives everything back: no slot may be left in use. Once.
  void Finish();

  struct Counts {
    uint64_t hits = 0, shared = 0, exhausted = 0, awaited = 0, waits = 0, refused = 0, deaths = 0, copies = 0;
    uint64_t sampled = 0, tried_again = 0, demoted = 0, fetched = 0, waited_arrivals = 0, copied_out = 0,
             copied_back = 0;
    uint64_t sent = 0, sent_by_host = 0, sent_early = 0, withdrawn = 0;
    SimulatedStream::Counts kernels;
  };
  Counts counts;
  uint64_t sampled() const { return sampler_.compared(); }
  uint64_t demoted() const { return static_cast<uint64_t>(test_.store_metrics.demoted_blocks.Value()); }
  uint64_t fetched() const { return static_cast<uint64_t>(test_.store_metrics.fetched_blocks.Value()); }

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }
  PageStore& store() { return *test_.store; }

  // device_walk.cc: clients, their streams and jobs.
  /// Opens what a purge may have closed; names known so far stay, as an upper bound of what can be hit.
  void OpenCaches();
  Client* NewClient();
  uint64_t OpenPlan(Client* client);
  Submission NewSubmission(size_t cache) const;
  void TakeChanges(SequenceId sequence, int first_layer, int layers, Submission* submission);
  void RunJob(size_t index);
  void RunJobs();
  /// Its stream runs on, or what is left of it never runs.
  void KillClient();
  /// Of dead clients whose streams are empty nothing is left.
  void BuryClients();
  void Purge();

  // device_walk_sequences.cc: operations on single sequences.
  std::map<SequenceId, ModelSequence>::iterator Pick() {
    return sequences_.empty() ? sequences_.end() : std::next(sequences_.begin(), Below(sequences_.size()));
  }
  /// Few different texts, so that sequences meet.
  uint32_t NextId(const Text& text) { return text.ids.size() % 48 == 3 ? static_cast<uint32_t>(Below(2)) : 7; }
  void Create();
  void AddSequence(size_t which, Text text, const CreateResult& made);
  void ForkOne();
  void CropOne();
  void PublishOne();
  void Drop(SequenceId id);
  void DropOne();
  void DropSequencesOf(const Client* client);

  // device_walk_steps.cc: appends and queries of some sequences of a client.
  /// A cache's layers, all or some.
  void PickLayers(const ModelCache& cache, int* first, int* layers);
  /// Some sequences of one client and cache whose layers do not wait, begun by a random one; perhaps none.
  std::set<SequenceId> PickSome(Client** client, size_t* which, int* first, int* layers);
  void ExtendSome();
  void ReadSome();
  static SimulatedRows RowsOf(SequenceId id, const ModelSequence& model, int layer, uint64_t position, int tokens);
  /// nullptr: refused, as it must be.
  void StartRead(size_t which, int first, int layers, const std::vector<AttendEntry>& entries,
                 std::unique_ptr<AttendLease>* out);
  void AddQueries(int first, int layers, const std::vector<AttendEntry>& entries, const AttendLease& lease,
                  Submission* submission);
  void Wait(Client* client, size_t which, int first, int layers, std::vector<AttendEntry> entries,
            std::unique_ptr<AttendLease> lease);
  void MarkWaiting(const Waiting& step, int change);
  /// Queries of steps that waited: what they read is encoded now, and another look tells which slots that left.
  void SubmitWaiting();

  // device_walk_moves.cc: between the GPU and the host.
  void CopyOne();
  void Await(Arrival arrival);
  void CommitArrivals();
  /// What a hand-off would send of it.
  void CheckOnHost(SequenceId id, const ModelSequence& model);

  // device_walk_sends.cc: sequences that are sent while they grow.
  bool IsSent(SequenceId id) const;
  uint64_t TokensMax(SequenceId id) const;
  /// Who submits for a sequence says when that has run; of a client that died nobody says anything.
  void TellWrites(bool all);
  void SendOne();
  void GoOnSending();
  void GoOnSending(size_t index);
  void ExpectSent(const Sending& sending, const Text& text, const testing::SentPage& sent);

  std::mt19937_64 random_;
  const bool moves_;
  HoldingSampler sampler_;      // outlives the store
  std::mt19937_64 samples_{1};  // apart from the walk's, which goes where it goes without them
  TestStore test_;
  std::vector<std::unique_ptr<Client>> all_clients_;  // dead ones too
  Client* clients_[kClients];                         // live ones
  std::vector<ModelCache> caches_;
  std::map<SequenceId, ModelSequence> sequences_;
  std::vector<Waiting> waiting_;
  std::vector<Arrival> arrivals_;
  std::vector<Sending> sendings_;
  std::vector<Write> writes_;
  std::vector<Job> jobs_;  // of the executor, by its index
  bool lost_names_ = false;
  bool slow_encoding_ = false;
  SequenceId published_ = 0;  // the last one that shares what it published: it is looked at often
};

}  // namespace kvmanager::device_walk
