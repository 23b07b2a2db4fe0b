// What stands behind kvm_object: whose it is, when it is given back, and what this thread's last call left.
//
// Invariants
//  1. The C++ handle of an object is touched on its owner's thread alone, in the process that made it. Whoever else
//     releases the object puts it on the owner's list; but for closed ones of an owner without clients, which nobody
//     else can touch any more.
//  2. A Session's `live` has every object with a C++ handle, so that closing the client gives back all of them.
//  3. The mapping of an arena that callers see is its own, and lives as long as somebody uses it: a view outlives its
//     lease without dangling.
//
// Session is shared by a client's objects, each of which may be released last; Owner by a thread's sessions.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c/kvmanager.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/device.h"
#include "codecs/registry.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::c {

/// A thread that connected clients, and what others released of its objects. Lives as long as the thread, or its
/// objects.
class Owner {
 public:
  /// This thread's.
  static std::shared_ptr<Owner> OfThisThread();

  /// For a client that is connected: FAILED_PRECONDITION where the thread cannot have an event loop. And for one that
  /// is closed: the last takes the loop along, on its own thread, and what is left of closed objects.
  absl::Status Hold();
  void LetGo();

  /// OK on the owner's thread, in its process: then what others released is given back first.
  absl::Status Enter();
  bool forked() const { return forks_ != ForkCount(); }
  /// Gives the object back, here or when the owner comes by. Any thread.
  void Release(kvm_object* object);
  /// Ends WaitForNews, now or when it comes. Any thread.
  void Wake();
  /// REQUIRES: a client holds the loop.
  absl::Status WaitForNews();

 private:
  /// The owner's thread, in its process.
  bool IsHere() const;
  void GiveBack();

  const uint64_t forks_ = ForkCount();
  uint64_t news_ = 0;  // ThreadLoop::news as of the last WaitForNews
  std::atomic<bool> any_left_{false}, woken_{false};
  Mutex mutex_;
  std::vector<kvm_object*> left_ ABSL_GUARDED_BY(mutex_);  // at most the live objects of the thread
  int clients_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<ThreadLoop> loop_ ABSL_GUARDED_BY(mutex_);  // shared by the thread's connections; while clients_ > 0
};

struct ArenaObject;

struct Session {
  std::shared_ptr<Owner> owner;
  std::unordered_set<kvm_object*> live;
  std::vector<ArenaObject*> arenas;    // of them; what tensors are looked up in
  std::shared_ptr<SlabPinner> pinner;  // of the first GPU that blocks were mapped for; shared with the connection
};

/// How the owner's objects are closed with their client: what uses others goes first.
enum class Kind : uint8_t {
  kPending,
  kHandOff,
  kRun,
  kStore,
  kMappedBlocks,
  kPageCodec,
  kSequence,
  kCache,
  kArena,
  kDevice,
  kClient
};
const char* NameOf(Kind kind);

}  // namespace kvmanager::client::c

/// An object of the interface; its subclasses hold the C++ handles.
struct kvm_object {
  using Kind = kvmanager::client::c::Kind;
  kvm_object(Kind kind, std::shared_ptr<kvmanager::client::c::Session> session);
  virtual ~kvm_object();
  kvm_object(const kvm_object&) = delete;

  /// Gives back what it holds. The owner's thread.
  virtual void Drop() = 0;
  /// Whether a tensor may still lie in it when its client is closed.
  virtual bool InUse() const { return false; }
  void Close();
  /// Close, and gone.
  static void Destroy(kvm_object* object);

  const Kind kind;
  bool closed = false;
  const std::shared_ptr<kvmanager::client::c::Session> session;
};

namespace kvmanager::client::c {

/// Leaves the error as this thread's text, and returns its code.
int Report(const absl::Status& status);
/// Leaves a result.
int Leave(std::string text);
/// The JSON text of an error.
std::string ErrorText(const absl::Status& status);

/// Ends exceptions (of memory alone) at the interface.
template <typename F>
int Guard(F f) noexcept {
  try {
    return Report(f());
  } catch (const std::exception& e) {
    return Report(absl::ResourceExhaustedError(e.what()));
  }
}

/// `object` as what it must be, on its thread and not closed.
template <typename T>
absl::StatusOr<T*> Use(kvm_object* object) {
  if (object == nullptr || object->kind != T::kKind) {
    return InvalidField("object", object == nullptr ? "NULL" : NameOf(object->kind), NameOf(T::kKind));
  }
  KV_RETURN_IF_ERROR(object->session->owner->Enter());
  if (object->closed) {
    return absl::FailedPreconditionError(absl::StrCat("this ", NameOf(T::kKind), " is closed; open another"));
  }
  return static_cast<T*>(object);
}

/// An object over one C++ handle.
template <Kind kind_of, typename Handle>
struct Object : kvm_object {
  static constexpr Kind kKind = kind_of;
  Object(std::shared_ptr<Session> session, std::unique_ptr<Handle> made)
      : kvm_object(kind_of, std::move(session)), handle(std::move(made)) {}
  void Drop() override { handle.reset(); }
  std::unique_ptr<Handle> handle;
};

/// It holds its owner's loop.
struct ClientObject final : Object<Kind::kClient, Client> {
  using Object::Object;
  void Drop() override {
    Object::Drop();
    session->pinner.reset();
    session->owner->LetGo();
  }
};

/// The session's, of the first GPU that was named; nullptr: none is named (device < 0).
std::shared_ptr<SlabPinner> PinnerFor(Session& session, int32_t device);

using SequenceObject = Object<Kind::kSequence, Sequence>;
using HandOffObject = Object<Kind::kHandOff, HandOff>;

/// Closes the runs that use `object`, a device or a cache.
void CloseRunsOf(const kvm_object& object);

struct CacheObject final : Object<Kind::kCache, Cache> {
  using Object::Object;
  void Drop() override {
    CloseRunsOf(*this);
    Object::Drop();
  }
};

struct DeviceObject final : Object<Kind::kDevice, DeviceClient> {
  using Object::Object;
  void Drop() override {
    CloseRunsOf(*this);
    Object::Drop();
  }
};

/// Memory that callers see, for as long as anybody does. Any thread.
class Mapping {
 public:
  /// A second mapping of an arena's pages, or the arena's own addresses, of a GPU.
  static absl::StatusOr<Mapping*> Of(absl::Span<uint8_t> pages);
  static Mapping* OfDevice(absl::Span<uint8_t> memory, int ordinal) { return new Mapping(memory, ordinal); }

  void Ref() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void Unref();
  bool shared() const { return refs_.load(std::memory_order_acquire) > 1; }
  uint8_t* data() const { return memory_.data(); }
  uint64_t bytes() const { return memory_.size(); }
  bool on_device() const { return ordinal_ >= 0; }
  int ordinal() const { return ordinal_; }

 private:
  Mapping(absl::Span<uint8_t> memory, int ordinal) : memory_(memory), ordinal_(ordinal) {}
  const absl::Span<uint8_t> memory_;
  const int ordinal_;  // this process's number of the GPU; -1: host memory
  std::atomic<int64_t> refs_{1};
};

struct ArenaObject final : Object<Kind::kArena, Arena> {
  ArenaObject(std::shared_ptr<Session> session, std::unique_ptr<Arena> arena, Mapping* memory);
  ~ArenaObject() override { mapping->Unref(); }
  void Drop() override;
  bool InUse() const override { return mapping->on_device() && mapping->shared(); }
  Mapping* const mapping;
};

/// Makes codecs of caches in this process; the artifacts that they name lie in a folder. Outlives its codecs.
class LocalCodecs {
 public:
  explicit LocalCodecs(const std::string& calibration_dir);
  absl::StatusOr<std::shared_ptr<const Codec>> Create(const CacheOptions& cache) const;

 private:
  std::unique_ptr<CalibrationSource> calibrations_;
  CodecRegistry registry_;
};

/// The caller's entries as the client takes them. Errors: INVALID_ARGUMENT for more tokens than an int holds.
absl::Status ReadEntries(const kvm_entry* entries, uint32_t count, std::vector<StepEntry>* read);

/// A tensor of the caller's as the client takes it: in the session's arena where it lies in one.
TensorView ViewOf(const Session& session, const kvm_tensor& tensor);

/// What a call under way leaves when it is done.
struct Done {
  uint64_t values[3] = {};
  kvm_object* made = nullptr;
  std::string text;
};

/// Blocks that are held where they lie, and what was said of their pages.
struct MappedBlocksObject final : kvm_object {
  static constexpr Kind kKind = Kind::kMappedBlocks;
  MappedBlocksObject(std::shared_ptr<Session> of, MappedBlocks made)
      : kvm_object(kKind, std::move(of)), blocks(std::move(made)) {}
  void Drop() override { blocks.lease.reset(); }
  MappedBlocks blocks;
};

struct PendingObject : kvm_object {
  static constexpr Kind kKind = Kind::kPending;
  explicit PendingObject(std::shared_ptr<Session> session) : kvm_object(kKind, std::move(session)) {}
  virtual bool Ready() = 0;
  virtual absl::StatusOr<Done> Wait() = 0;  // once
};

/// Over a Pending<StatusOr<T>>; finish(T&&) makes the Done.
template <typename T, typename Finish>
struct PendingOf final : PendingObject {
  PendingOf(std::shared_ptr<Session> session, Pending<absl::StatusOr<T>> pending, Finish finish)
      : PendingObject(std::move(session)), pending_(std::in_place, std::move(pending)), finish_(std::move(finish)) {}
  void Drop() override { pending_.reset(); }
  bool Ready() override { return pending_->ready(); }
  absl::StatusOr<Done> Wait() override {
    auto result = pending_->Wait();
    if (!result.ok()) return result.status();
    return finish_(*session, *std::move(result));
  }

 private:
  std::optional<Pending<absl::StatusOr<T>>> pending_;
  Finish finish_;
};

template <typename T, typename Finish>
kvm_object* NewPending(const kvm_object& of, Pending<absl::StatusOr<T>> pending, Finish finish) {
  return new PendingOf<T, Finish>(of.session, std::move(pending), std::move(finish));
}

inline kvm_match_result ResultOf(const PrefixMatch& match) {
  return {match.hit_blocks, static_cast<int32_t>(match.reason), match.in_memory, 0};
}

}  // namespace kvmanager::client::c
