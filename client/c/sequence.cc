// Sequences and hand-offs.
#include "client/c/describe.h"
#include "client/c/object.h"

namespace kvmanager::client::c {
namespace {

template <typename F>
int Ask(kvm_object* sequence, F f) {
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(SequenceObject * object, Use<SequenceObject>(sequence));
    return f(*object);
  });
}

absl::string_view BytesOf(const uint8_t* data, size_t bytes) { return {reinterpret_cast<const char*>(data), bytes}; }

HandOffOptions OptionsOf(const kvm_hand_off_options& options) {
  return {options.timeout_ms, options.room_ms, options.will_append != 0};
}

absl::StatusOr<Done> OutcomeOf(const Session&, const HandOffOutcome& outcome) {
  return Done{{}, nullptr, Text(Describe(outcome))};
}

}  // namespace
}  // namespace kvmanager::client::c

using namespace kvmanager::client;     // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_fork(kvm_object* sequence, kvm_object** fork, uint64_t* id) {
  *fork = nullptr;
  return Ask(sequence, [&](SequenceObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(auto made, object.handle->Fork());
    *id = made->id();
    *fork = new SequenceObject(object.session, std::move(made));
    return absl::OkStatus();
  });
}

int kvm_crop(kvm_object* sequence, uint64_t tokens) {
  return Ask(sequence, [&](SequenceObject& object) { return object.handle->Crop(tokens); });
}

int kvm_publish(kvm_object* sequence, const uint8_t* names, uint32_t blocks, int32_t* outcome) {
  return Ask(sequence, [&](SequenceObject& object) -> absl::Status {
    const auto* const named = reinterpret_cast<const kvmanager::BlockName*>(names);
    KV_ASSIGN_OR_RETURN(const PublishOutcome published, object.handle->Publish({named, blocks}));
    outcome[0] = published.published;
    outcome[1] = published.shared;
    outcome[2] = published.deferred;
    return absl::OkStatus();
  });
}

int kvm_info(kvm_object* sequence) {
  return Ask(sequence, [&](SequenceObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const SequenceDescription description, object.handle->Info());
    Leave(Text(Describe(description)));
    return absl::OkStatus();
  });
}

int kvm_hand_off(kvm_object* sequence, const char* peer, size_t peer_bytes, const uint8_t* blob, size_t blob_bytes,
                 const kvm_hand_off_options* options, kvm_object** pending) {
  *pending = nullptr;
  return Ask(sequence, [&](SequenceObject& object) -> absl::Status {
    auto sent = object.handle->HandOffAsync({peer, peer_bytes}, BytesOf(blob, blob_bytes), OptionsOf(*options));
    *pending = NewPending(object, std::move(sent), OutcomeOf);
    return absl::OkStatus();
  });
}

int kvm_begin_hand_off(kvm_object* sequence, const char* peer, size_t peer_bytes, uint64_t tokens,
                       const kvm_hand_off_options* options, kvm_object** pending) {
  *pending = nullptr;
  return Ask(sequence, [&](SequenceObject& object) -> absl::Status {
    auto begun = object.handle->BeginHandOffAsync({peer, peer_bytes}, tokens, OptionsOf(*options));
    *pending =
        NewPending(object, std::move(begun),
                   [session = object.session](const Session&, std::unique_ptr<HandOff> made) -> absl::StatusOr<Done> {
                     std::string text = Text({{"ticket", Hex(made->ticket())}, {"peer", made->peer()}});
                     return Done{{}, new HandOffObject(session, std::move(made)), std::move(text)};
                   });
    return absl::OkStatus();
  });
}

int kvm_finish(kvm_object* hand_off, const uint8_t* blob, size_t blob_bytes, kvm_object** pending) {
  *pending = nullptr;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(HandOffObject * object, Use<HandOffObject>(hand_off));
    *pending = NewPending(*object, object->handle->FinishAsync(BytesOf(blob, blob_bytes)), OutcomeOf);
    return absl::OkStatus();
  });
}

}  // extern "C"
