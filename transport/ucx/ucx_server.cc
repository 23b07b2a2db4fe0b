#include "transport/ucx/ucx_server.h"

#include <openssl/crypto.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::ucx {
namespace {

std::string Text(const absl::Status& status) { return std::string(status.message()); }

}  // namespace

absl::Status Server::Failed(const char* what, ucs_status_t status) const {
  return absl::UnavailableError(absl::StrCat("UCX: ", what, ": ", ucx_.ucs_status_string(status)));
}

void Server::Say(const Packet& packet) {
  const std::string bytes = EncodePacket(packet);
  // Waits where the daemon is slow; that it has ended shows when it is listened to.
  while (::send(kSocketFd, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

absl::Status Server::Start(const Packet& set_up) {
  KV_RETURN_IF_ERROR(MapMemory(set_up));
  KV_CHECK(getrandom(ticket_.data(), ticket_.size(), 0) == static_cast<ssize_t>(ticket_.size()));
  KV_RETURN_IF_ERROR(StartUcx());
  Packet ready{{.type = PacketType::kReady}};
  unsigned release = 0;
  ucx_.ucp_get_version(&ready.head.major, &ready.head.minor, &release);
  std::copy(ticket_.begin(), ticket_.end(), ready.head.ticket);
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  const ucs_status_t status = ucx_.ucp_worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) return Failed("asking for the worker's address", status);
  ready.payload.assign(reinterpret_cast<const char*>(address), bytes);
  ucx_.ucp_worker_release_address(worker_, address);
  if (bytes > kAddressBytesMax) {
    return FieldError(absl::StatusCode::kUnavailable, "UCX address bytes", absl::StrCat(bytes),
                      absl::StrCat("at most ", kAddressBytesMax, ": name fewer networks in UCX_NET_DEVICES"));
  }
  Say(ready);
  return absl::OkStatus();
}

absl::Status Server::MapMemory(const Packet& set_up) {
  KV_CHECK(set_up.head.memory <= kMemoriesMax && set_up.payload.size() >= 8 * set_up.head.memory);
  KV_ASSIGN_OR_RETURN(staging_, Region::Map(kStagingFd, set_up.head.bytes, /*writable=*/true));
  for (uint32_t i = 0; i < set_up.head.memory; ++i) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, set_up.payload.data() + 8 * i, 8);
    KV_ASSIGN_OR_RETURN(auto mapped, Region::Map(kMemoryFd + static_cast<int>(i), bytes, /*writable=*/false));
    memory_.push_back(std::move(mapped));
  }
  KV_ASSIGN_OR_RETURN(answers_, Region::Create({.bytes = set_up.head.offset, .keep_descriptor = false}));
  free_answers_ = std::make_unique<RangeAllocator>(answers_->bytes());
  return absl::OkStatus();
}

absl::Status Server::StartUcx() {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx_.ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return Failed("reading its configuration", status);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  status = ucx_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  ucx_.ucp_config_release(config);
  if (status != UCS_OK) return Failed("starting", status);
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SINGLE;
  status = ucx_.ucp_worker_create(context_, &worker, &worker_);
  if (status != UCS_OK) return Failed("making a worker", status);
  status = ucx_.ucp_worker_get_efd(worker_, &event_fd_);
  if (status != UCS_OK) return Failed("asking for its descriptor of events", status);
  status = SetHandler(kAsk, [](void* self, const void* header, size_t header_bytes, void*, size_t bytes,
                               const ucp_am_recv_param_t* param) {
    return static_cast<Server*>(self)->OnAsk(header, header_bytes, bytes, param);
  });
  if (status != UCS_OK) return Failed("setting a handler", status);
  status = SetHandler(kTell, [](void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                const ucp_am_recv_param_t* param) {
    return static_cast<Server*>(self)->OnTell(header, header_bytes, data, bytes, param);
  });
  return status == UCS_OK ? absl::OkStatus() : Failed("setting a handler", status);
}

ucs_status_t Server::SetHandler(Message message, ucp_am_recv_callback_t handler) {
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = message;
  params.flags = UCP_AM_FLAG_WHOLE_MSG;
  params.cb = handler;
  params.arg = this;
  return ucx_.ucp_worker_set_am_recv_handler(worker_, &params);
}

void Server::Run() {
  while (TakePackets()) {
    for (const std::shared_ptr<Peer>& failed : std::exchange(failed_, {})) Close(failed, failed->failed);
    bool progressed = false;
    for (int i = 0; i < 64 && ucx_.ucp_worker_progress(worker_) != 0; ++i) progressed = true;
    if (progressed || !failed_.empty()) continue;
    if (ucx_.ucp_worker_arm(worker_) == UCS_ERR_BUSY) continue;
    pollfd events[] = {{event_fd_, POLLIN, 0}, {kSocketFd, POLLIN, 0}};
    ::poll(events, 2, reads_.empty() && closing_.empty() && sent_.empty() ? -1 : kLookMs);
  }
}

bool Server::TakePackets() {
  char bytes[sizeof(PacketHead) + kPayloadBytesMax];
  for (;;) {
    const ssize_t n = ::recv(kSocketFd, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 && errno == EAGAIN;
    const absl::optional<Packet> packet = ParsePacket({bytes, static_cast<size_t>(n)});
    KV_CHECK(packet.has_value());
    OnPacket(*packet);
  }
}

void Server::OnPacket(const Packet& packet) {
  if (packet.head.type == PacketType::kOpen) return Open(packet);
  if (packet.head.type == PacketType::kRead) return Begin(packet);
  if (packet.head.type == PacketType::kRelease) return Release(packet.head.source);
}

void Server::Open(const Packet& packet) {
  Source& source = sources_[packet.head.source];
  source.memory = packet.head.memory;
  std::copy_n(packet.head.ticket, source.ticket.size(), source.ticket.begin());
  absl::StatusOr<std::shared_ptr<Peer>> peer = Connect(packet.payload + std::string(kPaddingBytes, '\0'));
  if (!peer.ok()) {
    source.failed = Text(peer.status());
    return;
  }
  source.peer = *std::move(peer);
  ++source.peer->users;
}

absl::StatusOr<std::shared_ptr<Server::Peer>> Server::Connect(const std::string& address) {
  const auto found = peers_.find(address);
  if (found != peers_.end()) return found->second;
  auto peer = std::make_shared<Peer>();
  peer->server = this;
  peer->address = address;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer->address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* arg, ucp_ep_h, ucs_status_t status) {
    Peer& failed = *static_cast<Peer*>(arg);
    if (!failed.failed.empty()) return;
    failed.failed = Text(failed.server->Failed("a connection", status));
    failed.server->failed_.push_back(failed.shared_from_this());  // closed later, not within UCX's call
  };
  params.err_handler.arg = peer.get();
  const ucs_status_t status = ucx_.ucp_ep_create(worker_, &params, &peer->connection);
  if (status != UCS_OK) return Failed("connecting", status);
  peers_[address] = peer;
  return peer;
}

void Server::Begin(const Packet& packet) {
  const auto source = sources_.find(packet.head.source);
  KV_CHECK(source != sources_.end());
  const std::string* failed = &source->second.failed;
  if (source->second.peer != nullptr) failed = &source->second.peer->failed;
  Read& read = reads_[packet.head.read];
  if (!failed->empty()) return End(packet.head.read, *failed);
  read.peer = source->second.peer;
  read.place = packet.head.place;
  read.bytes = packet.head.bytes;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
  struct Asked {
    Server* server;
    AskHeader header;
  };
  // Not the read's: that may end before its question is sent.
  auto asked = std::make_unique<Asked>(Asked{
      this,
      {packet.head.read, packet.head.offset, packet.head.bytes, source->second.memory, 0, source->second.ticket}});
  params.user_data = asked.get();
  params.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    const std::unique_ptr<Asked> sent(static_cast<Asked*>(user_data));
    Server& server = *sent->server;
    server.ucx_.ucp_request_free(request);
    if (status != UCS_OK) server.End(sent->header.read, Text(server.Failed("asking for a page", status)));
  };
  const ucs_status_ptr_t request =
      ucx_.ucp_am_send_nbx(read.peer->connection, kAsk, &asked->header, sizeof(asked->header), nullptr, 0, &params);
  if (UCS_PTR_IS_PTR(request)) {
    asked.release();
  } else if (request != nullptr) {
    End(packet.head.read, Text(Failed("asking for a page", UCS_PTR_STATUS(request))));
  }
}

void Server::End(uint64_t read, const std::string& why) {
  if (reads_.erase(read) == 0) return;
  Say({{.type = PacketType::kDone, .read = read}, why.substr(0, kPayloadBytesMax)});
}

void Server::Release(uint64_t source) {
  const auto found = sources_.find(source);
  KV_CHECK(found != sources_.end());
  const std::shared_ptr<Peer> peer = found->second.peer;
  sources_.erase(found);
  if (peer != nullptr && --peer->users == 0) Close(peer, "nobody reads from this peer any more");
}

void Server::Close(const std::shared_ptr<Peer>& peer, const std::string& why) {
  if (peer->failed.empty()) peer->failed = why;
  const auto found = peers_.find(peer->address);
  if (found == peers_.end() || found->second != peer) return;  // closed before
  peers_.erase(found);
  std::vector<uint64_t> waiting;  // UCX ends those that arrive
  for (const auto& [read, facts] : reads_) {
    if (facts.peer == peer && !facts.arriving) waiting.push_back(read);
  }
  for (const uint64_t read : waiting) End(read, why);
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  params.cb.send = [](void* request, ucs_status_t, void* user_data) {
    const Peer* const closed = static_cast<Peer*>(user_data);
    Server& server = *closed->server;
    server.ucx_.ucp_request_free(request);
    server.closing_.remove_if([&](const std::shared_ptr<Peer>& other) { return other.get() == closed; });
  };
  params.user_data = peer.get();
  closing_.push_back(peer);  // UCX names it until it is closed
  const ucs_status_ptr_t request = ucx_.ucp_ep_close_nbx(peer->connection, &params);
  if (!UCS_PTR_IS_PTR(request)) closing_.remove(peer);
}

ucs_status_t Server::OnAsk(const void* header, size_t header_bytes, size_t bytes, const ucp_am_recv_param_t* param) {
  AskHeader asked;
  if (header_bytes != sizeof(asked) || bytes != 0 || (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) {
    return UCS_OK;  // no question; nobody is owed an answer
  }
  std::memcpy(&asked, header, sizeof(asked));
  if (CRYPTO_memcmp(asked.ticket.data(), ticket_.data(), ticket_.size()) != 0) return UCS_OK;
  const bool there = asked.memory < memory_.size() && asked.bytes > 0 && asked.bytes <= answers_->bytes() &&
                     asked.offset <= memory_[asked.memory]->bytes() &&
                     asked.bytes <= memory_[asked.memory]->bytes() - asked.offset;
  const absl::optional<uint64_t> place = there ? free_answers_->Take(asked.bytes) : absl::nullopt;
  Answer& answer = sent_.emplace_front();
  answer.server = this;
  answer.self = sent_.begin();
  answer.header = {asked.read, place.has_value() ? 0u : 1u};
  if (place.has_value()) {
    answer.place = *place;
    answer.bytes = asked.bytes;
    std::memcpy(answers_->data() + *place, memory_[asked.memory]->data() + asked.offset, asked.bytes);
  }
  SendAnswer(param->reply_ep, answer);
  return UCS_OK;
}

void Server::SendAnswer(ucp_ep_h to, Answer& answer) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = &answer;
  params.cb.send = [](void* request, ucs_status_t, void* user_data) {
    Answer& sent = *static_cast<Answer*>(user_data);
    sent.server->ucx_.ucp_request_free(request);
    sent.server->Forget(sent);  // whether it went or not: who asked learns it from its connection
  };
  const ucs_status_ptr_t request = ucx_.ucp_am_send_nbx(to, kTell, &answer.header, sizeof(answer.header),
                                                        answers_->data() + answer.place, answer.bytes, &params);
  if (!UCS_PTR_IS_PTR(request)) Forget(answer);
}

void Server::Forget(Answer& answer) {
  if (answer.bytes > 0) free_answers_->GiveBack(answer.place, answer.bytes);
  sent_.erase(answer.self);
}

ucs_status_t Server::OnTell(const void* header, size_t header_bytes, void* data, size_t bytes,
                            const ucp_am_recv_param_t* param) {
  TellHeader told;
  if (header_bytes != sizeof(told)) return UCS_OK;
  std::memcpy(&told, header, sizeof(told));
  const auto found = reads_.find(told.read);
  if (found == reads_.end() || found->second.arriving) return UCS_OK;  // of a read that has been given up, or none
  Read& read = found->second;
  if (told.refused != 0 || bytes != read.bytes) {
    End(told.read, told.refused != 0 ? "the peer has no room for an answer, or not that memory"
                                     : "the peer answered with another number of bytes");
    return UCS_OK;
  }
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
    std::memcpy(staging_->data() + read.place, data, bytes);
    End(told.read, "");
    return UCS_OK;
  }
  read.arriving = true;
  struct Arriving {
    Server* server;
    uint64_t read;
  };
  auto* const arriving = new Arriving{this, told.read};
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = arriving;
  params.cb.recv_am = [](void* request, ucs_status_t status, size_t, void* user_data) {
    const std::unique_ptr<Arriving> arrived(static_cast<Arriving*>(user_data));
    Server& server = *arrived->server;
    server.ucx_.ucp_request_free(request);
    server.End(arrived->read, status == UCS_OK ? "" : Text(server.Failed("a page", status)));
  };
  const ucs_status_ptr_t request =
      ucx_.ucp_am_recv_data_nbx(worker_, data, staging_->data() + read.place, bytes, &params);
  if (UCS_PTR_IS_PTR(request)) return UCS_INPROGRESS;
  delete arriving;
  End(told.read, request == nullptr ? "" : Text(Failed("a page", UCS_PTR_STATUS(request))));
  return UCS_INPROGRESS;
}

}  // namespace kvmanager::ucx
