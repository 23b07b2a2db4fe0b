#include "client/c/object.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace kvmanager::client::c {
namespace {

thread_local std::shared_ptr<Owner> owner_of_this_thread;  // shared by the thread and its objects
thread_local std::string text_of_this_thread;

}  // namespace

std::shared_ptr<Owner> Owner::OfThisThread() {
  if (owner_of_this_thread == nullptr || owner_of_this_thread->forked())
    owner_of_this_thread = std::make_shared<Owner>();
  return owner_of_this_thread;
}

absl::Status Owner::Hold() {
  KV_ASSIGN_OR_RETURN(auto loop, ThreadLoop::OfThisThread());
  MutexLock lock(mutex_);
  ++clients_;
  loop_ = std::move(loop);
  return absl::OkStatus();
}

void Owner::LetGo() {
  std::shared_ptr<ThreadLoop> loop;  // goes after the lock
  {
    MutexLock lock(mutex_);
    if (--clients_ > 0) return;
    loop = std::move(loop_);
  }
  GiveBack();
}

bool Owner::IsHere() const { return owner_of_this_thread.get() == this && !forked(); }

absl::Status Owner::Enter() {
  if (forked()) {
    return absl::FailedPreconditionError(
        "this process was forked from the client's; it must connect a client of its own");
  }
  if (!IsHere()) {
    return absl::FailedPreconditionError(
        "called on another thread than the one that connected; use a client per thread");
  }
  if (any_left_.load(std::memory_order_acquire)) GiveBack();
  return absl::OkStatus();
}

void Owner::Release(kvm_object* object) {
  if (forked()) return;  // it is the parent's
  if (IsHere()) {
    kvm_object::Destroy(object);
    return;
  }
  {
    MutexLock lock(mutex_);
    if (clients_ > 0 || !object->closed) {
      left_.push_back(object);
      any_left_.store(true, std::memory_order_release);
      if (loop_ != nullptr) loop_->port.wake();  // if the owner waits for news, this is some
      return;
    }
  }
  delete object;
}

void Owner::Wake() {
  if (forked()) return;
  woken_.store(true);
  MutexLock lock(mutex_);
  if (loop_ != nullptr) loop_->port.wake();
}

absl::Status Owner::WaitForNews() {
  ThreadLoop* loop;
  {
    MutexLock lock(mutex_);
    loop = loop_.get();
  }
  // Whoever drives the loop may have taken the wake and the answers; what comes from here on ends the wait.
  const bool woken = woken_.exchange(false), answered = std::exchange(news_, loop->news) != loop->news;
  if (woken || answered || any_left_.load()) return absl::OkStatus();
  try {
    loop->port.wait();
    loop->scope->poll();
    news_ = loop->news;
  } catch (const kj::Exception& e) {
    return absl::InternalError(absl::string_view(e.getDescription().begin(), e.getDescription().size()));
  }
  return absl::OkStatus();
}

void Owner::GiveBack() {
  std::vector<kvm_object*> left;
  {
    MutexLock lock(mutex_);
    left.swap(left_);
    any_left_.store(false, std::memory_order_release);
  }
  // What uses others goes first.
  std::stable_sort(left.begin(), left.end(), [](const auto* a, const auto* b) { return a->kind < b->kind; });
  for (kvm_object* object : left) kvm_object::Destroy(object);
}

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kPending:
      return "pending call";
    case Kind::kHandOff:
      return "hand-off";
    case Kind::kRun:
      return "in-process run";
    case Kind::kStore:
      return "store of blocks";
    case Kind::kMappedBlocks:
      return "lease of blocks";
    case Kind::kPageCodec:
      return "page codec";
    case Kind::kSequence:
      return "sequence";
    case Kind::kCache:
      return "cache";
    case Kind::kArena:
      return "arena";
    case Kind::kDevice:
      return "device";
    case Kind::kClient:
      return "client";
  }
  return "object";
}

std::string ErrorText(const absl::Status& status) {
  const ErrorDetail detail = DetailOf(status);
  return nlohmann::json{{"code", int(status.code())},
                        {"message", std::string(status.message())},
                        {"field", detail.field},
                        {"value", detail.value},
                        {"bound", detail.bound}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

int Report(const absl::Status& status) {
  if (status.ok()) return 0;
  text_of_this_thread = ErrorText(status);
  return int(status.code());
}

int Leave(std::string text) {
  text_of_this_thread = std::move(text);
  return 0;
}

absl::StatusOr<Mapping*> Mapping::Of(absl::Span<uint8_t> pages) {
  // A length of 0 makes a second mapping of shared pages.
  void* data = ::mremap(pages.data(), 0, pages.size(), MREMAP_MAYMOVE);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("mapping an arena of ", pages.size(), " bytes: ", std::strerror(errno)));
  }
  return new Mapping(absl::MakeSpan(static_cast<uint8_t*>(data), pages.size()), -1);
}

void Mapping::Unref() {
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (!on_device()) ::munmap(memory_.data(), memory_.size());
  delete this;
}

absl::Status ReadEntries(const kvm_entry* entries, uint32_t count, std::vector<StepEntry>* read) {
  constexpr uint64_t kTokensMax = INT32_MAX;
  read->resize(count);
  for (uint32_t i = 0; i < count; ++i) {
    if (entries[i].tokens > kTokensMax) {
      return InvalidField(absl::StrCat("entries[", i, "].tokens"), entries[i].tokens,
                          absl::StrCat("at most ", kTokensMax));
    }
    (*read)[i] = {entries[i].sequence, entries[i].position, int(entries[i].tokens)};
  }
  return absl::OkStatus();
}

ArenaObject::ArenaObject(std::shared_ptr<Session> session, std::unique_ptr<Arena> arena, Mapping* memory)
    : Object(std::move(session), std::move(arena)), mapping(memory) {
  this->session->arenas.push_back(this);
}

void ArenaObject::Drop() {
  auto& arenas = session->arenas;
  arenas.erase(std::find(arenas.begin(), arenas.end(), this));
  Object::Drop();
}

TensorView ViewOf(const Session& session, const kvm_tensor& tensor) {
  constexpr uint64_t kOffsetMultiple = 64;  // api/kvmanager.capnp, Tensor
  auto* const data = static_cast<uint8_t*>(tensor.data);
  for (const ArenaObject* arena : session.arenas) {
    const Mapping& mapping = *arena->mapping;
    if (data < mapping.data() || data >= mapping.data() + mapping.bytes()) continue;
    const size_t offset = size_t(data - mapping.data());
    if (!mapping.on_device() && offset % kOffsetMultiple != 0) break;  // copied
    return {arena->handle->data().data() + offset, tensor.bytes, arena->handle.get()};
  }
  return TensorView::Inline(tensor.data, tensor.bytes);
}

}  // namespace kvmanager::client::c

using kvmanager::client::c::Guard;

kvm_object::kvm_object(Kind kind_of, std::shared_ptr<kvmanager::client::c::Session> of)
    : kind(kind_of), session(std::move(of)) {
  session->live.insert(this);
}

kvm_object::~kvm_object() {
  if (!closed) session->live.erase(this);
}

void kvm_object::Close() {
  if (closed) return;
  closed = true;
  session->live.erase(this);
  Drop();
}

void kvm_object::Destroy(kvm_object* object) {
  object->Close();
  delete object;
}

extern "C" {

uint32_t kvm_abi(void) { return KVM_ABI; }

const char* kvm_text(uint64_t* bytes) {
  *bytes = kvmanager::client::c::text_of_this_thread.size();
  return kvmanager::client::c::text_of_this_thread.c_str();
}

int kvm_close(kvm_object* object) {
  return Guard([&]() -> absl::Status {
    if (object == nullptr) return kvmanager::InvalidField("object", "NULL", "an object");
    KV_RETURN_IF_ERROR(object->session->owner->Enter());
    if (object->kind != kvm_object::Kind::kClient || object->closed) {
      object->Close();
      return absl::OkStatus();
    }
    std::vector<kvm_object*> live(object->session->live.begin(), object->session->live.end());
    std::sort(live.begin(), live.end(), [](const auto* a, const auto* b) { return a->kind < b->kind; });
    for (kvm_object* each : live) {
      if (!each->InUse()) each->Close();
    }
    return absl::OkStatus();
  });
}

void kvm_release(kvm_object* object) {
  if (object == nullptr) return;
  const std::shared_ptr<kvmanager::client::c::Owner> owner = object->session->owner;  // may go with the object
  owner->Release(object);
}

}  // extern "C"
