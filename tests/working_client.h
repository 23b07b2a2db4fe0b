// A client that works at a daemon at random: creates, appends, attends, reads, forks, crops, publishes, hands sequences
// to other daemons and claims them there, drops calls and connections, and asks for what must be refused. It compares
// every byte that it reads with what it wrote.
//
// One thread, but for counts(). A seed and equal answers give equal calls.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "kvmanager/base/mutex.h"
#include "tests/known_rows.h"

namespace kvmanager::testing {

/// What it does in a turn.
enum class Work {
  kCreate,   // begins with the blocks found, appends some tokens, may publish
  kAppend,   //
  kStep,     // appends and attends, a token or a few
  kAttend,   // up to 64 of the newest tokens: more than the event loop attends to itself
  kRead,     //
  kMatch,    // several prefixes
  kPublish,  //
  kFork,
  kCrop,
  kHandOff,         // may be claimed, read, and handed back
  kHandOffAsGrows,  // begun before the sequence has all of its tokens
  kArena,           // reads into shared memory
  kCancel,          // drops calls that are under way
  kHoard,           // keeps sequences until it is refused, or has kHoardMax
  kMistake,         // what must be refused
  kList,            // administration
  kLeave,           // drops the connection with all that it holds, calls under way too
  kCut,             // has somebody else end it
};

struct WorkingClientOptions {
  struct At {
    std::string address;
    client::Client::Options client;
    std::string peer;  // where it receives hand-offs
  };
  struct OfCache {
    client::CacheOptions options;
    KnownRows::Form form = KnownRows::Form::kWritten;
    bool raw = false;  // cropped anywhere, and its attention is compared
  };
  At here;                // where it works
  std::vector<At> there;  // that it hands sequences to
  std::vector<OfCache> caches;
  uint64_t seed = 1;
  std::vector<Work> works;  // one is drawn, all alike
  int64_t grace_ms = 1500;  // beyond a call's deadline, for a machine with other work
  int64_t hand_off_ms = 2500;
  bool administers = false;
  std::function<void()> cut;                                        // of kCut
  std::function<int64_t()> now_ms;                                  // a clock that may stand while the process does
  std::function<void(const char* what, const std::string&)> shout;  // "WRONG", "LATE", "UNEXPECTED": must never be
};

struct WorkCounts {
  uint64_t calls = 0, checked_bytes = 0, hits = 0, handed_off = 0, refused = 0, unavailable = 0, late = 0, wrong = 0,
           unexpected = 0, over_share = 0, passed_back = 0;
  std::map<std::string, std::map<absl::StatusCode, uint64_t>> by_call;         // how they ended
  std::map<std::pair<std::string, absl::StatusCode>, std::string> first_said;  // errors' messages
  void Add(const WorkCounts& other);
};

class WorkingClient {
 public:
  WorkingClient(KnownRows& known, WorkingClientOptions options);
  ~WorkingClient() { Rest(); }

  /// One work. Connects first, if it has to.
  void Turn();
  /// Gives back all that it holds, and its connections.
  void Rest();
  /// Since the last TakeCounts(). Any thread.
  WorkCounts counts() const;
  WorkCounts TakeCounts();

 private:
  struct Side {
    const WorkingClientOptions::At* at = nullptr;
    std::unique_ptr<client::Client> client;
    std::vector<std::unique_ptr<client::Cache>> caches;
  };
  struct Held {
    size_t cache = 0;
    uint64_t seed = 0;
    uint64_t tokens = 0;
    std::unique_ptr<client::Sequence> sequence;
  };

  uint64_t Draw(uint64_t below) { return random_() % below; }
  void Do(Work work);
  bool Ready(Side& side);
  void Drop(Side& side);
  Held* Any();  // one that is held, or nullptr
  void Forget(Held* held) { held_.erase(held_.begin() + (held - held_.data())); }
  client::Cache& CacheOf(const Held& held) { return *here_.caches[held.cache]; }
  const WorkingClientOptions::OfCache& KindOf(const Held& held) const { return options_.caches[held.cache]; }

  /// Runs a call: how long it took, and whether its error is one that quotas or faults explain.
  template <typename Call>
  auto Timed(const char* what, int64_t deadline_ms, Call call) {
    const int64_t begun = options_.now_ms();
    auto result = call();
    Note(what, deadline_ms, options_.now_ms() - begun, StatusOf(result));
    return result;
  }
  template <typename Call>
  auto Timed(const char* what, Call call) {
    return Timed(what, options_.here.client.deadline_ms, std::move(call));
  }
  static absl::Status StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }
  void Note(const char* what, int64_t deadline_ms, int64_t took_ms, const absl::Status& status);
  void Wrong(const std::string& text);
  void Count(const std::function<void(WorkCounts&)>& add);

  /// Of both layers.
  bool AppendRows(client::Cache& cache, Held& held, uint64_t tokens);
  /// Reads and compares. False: they could not be read.
  bool Check(client::Cache& cache, const Held& held, uint64_t first, uint64_t tokens, const char* when,
             client::Arena* arena = nullptr);
  void Create();
  void Append();
  void Step();
  void Attend();
  void Read();
  void Match();
  void Publish();
  void Fork();
  void Crop();
  void HandOff(bool while_it_grows);
  void ClaimAt(Side& side, const Held& held, const std::string& ticket, const std::string& blob);
  void UseArena();
  void Cancel();
  void Hoard();
  void Mistake();
  void List();
  void Leave(bool cut);
  template <typename Call>
  void MustRefuse(const char* what, Call call);

  KnownRows& known_;
  const WorkingClientOptions options_;
  std::mt19937_64 random_;
  Side here_;
  std::vector<Side> there_;
  std::vector<Held> held_;
  mutable Mutex mutex_;
  WorkCounts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmanager::testing
