#include "client/c/object.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace kvmanager::client::c {
namespace {

thread_local std::weak_ptr<Owner> owner_of_this_thread;
thread_local const Owner* here = nullptr;  // the same, to be compared
thread_local std::string text_of_this_thread;

}  // namespace

absl::StatusOr<std::shared_ptr<Owner>> Owner::OfThisThread() {
  if (auto owner = owner_of_this_thread.lock(); owner != nullptr && !owner->forked()) return owner;
  KV_ASSIGN_OR_RETURN(auto loop, ThreadLoop::OfThisThread());
  auto owner = std::make_shared<Owner>(std::move(loop));
  owner_of_this_thread = owner;
  here = owner.get();
  return owner;
}

Owner::~Owner() {
  if (here == this) here = nullptr;
}

bool Owner::IsHere() const { return here == this && !forked(); }

absl::Status Owner::Enter() {
  if (forked()) {
    return absl::FailedPreconditionError(
        "this process was forked from the client's; it must connect a client of its own");
  }
  if (here != this) {
    return absl::FailedPreconditionError(
        "called on another thread than the one that connected; use a client per thread");
  }
  if (any_left_.load(std::memory_order_acquire)) GiveBack();
  return absl::OkStatus();
}

void Owner::Leave(kvm_object* object) {
  MutexLock lock(mutex_);
  left_.push_back(object);
  any_left_.store(true, std::memory_order_release);
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

kvm_object::~kvm_object() { session->live.erase(this); }

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
  const std::shared_ptr<kvmanager::client::c::Session> session = object->session;
  if (session->owner->forked()) return;  // it is the parent's
  if (session->owner->IsHere()) {
    kvm_object::Destroy(object);
  } else {
    session->owner->Leave(object);
  }
}

}  // extern "C"
