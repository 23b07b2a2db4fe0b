// Destroys the objects behind capabilities that nobody holds any more, and the rest that they leave elsewhere, in turns
// of the event loop between which others are served: the end of a connection, or of one call, may leave tens of
// thousands at once.
//
// Owned by the daemon's wiring, which runs all messages of the queue before this goes. The loop's thread.
#pragma once

#include <kj/async.h>
#include <kj/memory.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/taking_turns.h"
#include "kvmanager/rpc/turn_watch.h"

namespace kvmanager {

class Disposals {
 public:
  /// Gives up a piece of what destroyed objects have left. False: that was all.
  using GiveUpSome = absl::AnyInvocable<bool()>;
  /// turns, watch: outlive it.
  Disposals(
      TakingTurns* turns, TurnWatch* watch, GiveUpSome give_up_some = [] { return false; })
      : turns_(turns), watch_(watch), give_up_some_(std::move(give_up_some)) {}
  ~Disposals() {
    while (first_ != nullptr) DestroyFirst();
  }
  Disposals(const Disposals&) = delete;
  Disposals& operator=(const Disposals&) = delete;

  /// A T that is destroyed as soon as its owner lets go of it, or, if that takes longer than a turn, behind those
  /// before it. Where T has LetGo(), that is called at once: it must be quick. The Own may be dropped until this goes.
  template <typename T, typename... Args>
  kj::Own<T> Make(Args&&... args) {
    auto made = std::make_unique<Holder<T>>(this, std::forward<Args>(args)...);
    T* const object = &made->object;
    const kj::Disposer& disposer = *made.release();
    return kj::Own<T>(object, disposer);
  }

  /// There is something to give up.
  void NoteLeft() {
    if (turn_.has_value()) return;  // it goes on anyway
    turn_.emplace(TakingTurns::kLength);
    going_on_ = GoOn().eagerlyEvaluate(nullptr);
  }

 private:
  struct Object : kj::Disposer {
    virtual ~Object() = default;
    Object* next = nullptr;  // behind it, while it waits
  };
  template <typename T>
  struct Holder final : Object {
    template <typename... Args>
    explicit Holder(Disposals* of, Args&&... args) : disposals(of), object(std::forward<Args>(args)...) {}
    void disposeImpl(void*) const override {
      auto* const self = const_cast<Holder*>(this);
      if constexpr (requires { self->object.LetGo(); }) self->object.LetGo();
      disposals->Dispose(self);
    }
    Disposals* const disposals;
    T object;
  };

  void Dispose(Object* object) {
    const bool begins = !turn_.has_value();
    if (begins) turn_.emplace(TakingTurns::kLength);
    // What is let go of while another is destroyed waits, so that a chain of them takes no stack.
    const bool now = !busy_ && first_ == nullptr && !turn_->over();
    (first_ == nullptr ? first_ : last_->next) = object;
    last_ = object;
    if (now) DestroyFirst();
    if (begins) going_on_ = GoOn().eagerlyEvaluate(nullptr);
  }
  void DestroyFirst() {
    std::unique_ptr<Object> object(std::exchange(first_, first_->next));
    busy_ = true;
    object.reset();
    busy_ = false;
  }
  kj::Promise<void> GoOn() {
    return turns_->NextToGiveBack().then([this]() -> kj::Promise<void> {
      const LoopTurn watched(watch_, "dispose");
      turn_.emplace(TakingTurns::kLength);
      bool more = true;
      while (more && !turn_->over()) {
        if (first_ != nullptr) {
          DestroyFirst();
        } else {
          more = give_up_some_() || first_ != nullptr;
        }
      }
      if (more) return GoOn();
      turn_.reset();
      return kj::READY_NOW;
    });
  }

  TakingTurns* const turns_;
  TurnWatch* const watch_;
  GiveUpSome give_up_some_;
  Object *first_ = nullptr, *last_ = nullptr;  // that nobody holds
  std::optional<Turn> turn_;                   // in which objects are destroyed now; empty: none was since the last
  bool busy_ = false;
  kj::Promise<void> going_on_ = nullptr;
};

}  // namespace kvmanager
