#include "client/client.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "client/connection.h"
#include "client/handles.h"
#include "client/wire.h"

namespace kvmanager::client {
namespace {

constexpr size_t kNameBytesMax = 256;

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return InvalidField(field, value, absl::StrCat(min, "..", max));
}

class ClientImpl final : public Client {
 public:
  explicit ClientImpl(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  const std::shared_ptr<Connection>& connection() const { return connection_; }

  uint64_t boot_epoch() const override { return connection_->boot_epoch(); }
  bool connected() override { return connection_->Connected(); }
  std::string peer_address() const override { return connection_->peer_address(); }
  absl::Status Reconnect() override { return connection_->Reconnect(); }

  absl::StatusOr<std::unique_ptr<Cache>> OpenCache(const CacheOptions& options) override {
    using Result = absl::StatusOr<std::unique_ptr<Cache>>;
    KV_RETURN_IF_ERROR(connection_->Usable());
    KV_RETURN_IF_ERROR(CheckOptions(options));
    auto request = connection_->daemon().openCacheRequest();
    ToWire(options, request.initConfig());
    return connection_->Call<Result>(std::move(request), [this](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      KV_ASSIGN_OR_RETURN(CacheDescription description, FromWire(response.getInfo()));
      return MakeCache(connection_, response.getCache(), std::move(description));
    });
  }

  absl::StatusOr<std::unique_ptr<Arena>> CreateArena(uint64_t bytes) override {
    KV_RETURN_IF_ERROR(connection_->Usable());
    if (!connection_->address().is_unix) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "address", connection_->address().text,
                        "a Unix socket, over which memory can be shared; use inline tensors over TCP");
    }
    auto request = connection_->daemon().createArenaRequest();
    request.setBytes(bytes);
    struct Made {
      api::Arena::Client cap;
      uint32_t id;
    };
    using Result = absl::StatusOr<Made>;
    auto made = connection_->Call<Result>(std::move(request), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      return Made{response.getArena(), response.getId()};
    });
    if (!made.ok()) return made.status();
    return MakeArena(connection_, std::move(made->cap), made->id, bytes);
  }

  absl::Status Ping() override {
    KV_RETURN_IF_ERROR(connection_->Usable());
    return connection_->Call<absl::Status>(connection_->daemon().pingRequest(), [](auto&) { return absl::OkStatus(); });
  }

  absl::StatusOr<DaemonDescription> Status() override {
    using Result = absl::StatusOr<DaemonDescription>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    return admin->Call<Result>(admin->admin().statusRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      return FromWire(response.getStatus());
    });
  }

  absl::StatusOr<std::vector<CacheDescription>> Caches() override {
    using Result = absl::StatusOr<std::vector<CacheDescription>>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    return admin->Call<Result>(admin->admin().cachesRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      KV_RETURN_IF_ERROR(CheckListed("caches", response.getCaches().size()));
      std::vector<CacheDescription> caches;
      for (const auto cache : response.getCaches()) {
        KV_ASSIGN_OR_RETURN(CacheDescription description, FromWire(cache));
        caches.push_back(std::move(description));
      }
      return caches;
    });
  }

  absl::StatusOr<std::vector<SequenceDescription>> Sequences() override {
    using Result = absl::StatusOr<std::vector<SequenceDescription>>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    return admin->Call<Result>(admin->admin().sequencesRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      KV_RETURN_IF_ERROR(CheckListed("sequences", response.getSequences().size()));
      std::vector<SequenceDescription> sequences;
      for (const auto sequence : response.getSequences()) sequences.push_back(FromWire(sequence));
      return sequences;
    });
  }

  absl::StatusOr<std::vector<PeerDescription>> Peers(absl::Span<const std::string> named) override {
    using Result = absl::StatusOr<std::vector<PeerDescription>>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    uint64_t bytes = kMessageOverheadBytes;
    for (const std::string& peer : named) bytes += kPrefixBytes + peer.size();
    KV_RETURN_IF_ERROR(CheckMessageBytes("peers", bytes, admin->message_bytes_max()));
    auto request = admin->admin().peersRequest();
    request.setLoad(true);
    auto peers = request.initPeers(uint(named.size()));
    for (uint i = 0; i < peers.size(); ++i) peers.set(i, ToKj(named[i]));
    return admin->Call<Result>(std::move(request), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      KV_RETURN_IF_ERROR(CheckListed("peers", response.getPeers().size()));
      std::vector<PeerDescription> peers;
      for (const auto peer : response.getPeers()) peers.push_back(FromWire(peer));
      return peers;
    });
  }

  absl::StatusOr<RecomputeDescription> Recompute() override {
    using Result = absl::StatusOr<RecomputeDescription>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    return admin->Call<Result>(admin->admin().recomputeRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      return FromWire(response.getRecompute());
    });
  }

  absl::StatusOr<std::string> MetricsText() override {
    using Result = absl::StatusOr<std::string>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    return admin->Call<Result>(admin->admin().metricsRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      return ToString(response.getText());
    });
  }

  absl::StatusOr<std::vector<LimitDescription>> Limits() override {
    using Result = absl::StatusOr<std::vector<LimitDescription>>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    return admin->Call<Result>(admin->admin().limitsRequest(), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      KV_RETURN_IF_ERROR(CheckListed("limits", response.getLimits().size()));
      std::vector<LimitDescription> limits;
      for (const auto limit : response.getLimits()) limits.push_back(FromWire(limit));
      return limits;
    });
  }

  absl::StatusOr<Explanation> Explain(uint32_t cache_id, absl::Span<const BlockName> names) override {
    using Result = absl::StatusOr<Explanation>;
    KV_RETURN_IF_ERROR(
        CheckMessageBytes("names", kMessageOverheadBytes + names.size() * kBlockNameBytes, kMessageBytesMax));
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    auto request = admin->admin().explainRequest();
    request.setCacheId(cache_id);
    ToWire(names, request.initNames(static_cast<uint32_t>(names.size())));
    return admin->Call<Result>(std::move(request), [asked = names.size()](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getError()));
      if (response.getBlocks().size() == asked) return FromWire(response);
      return absl::InternalError(
          absl::StrCat("the daemon explained ", response.getBlocks().size(), " blocks, was asked for ", asked));
    });
  }

  absl::StatusOr<RetainOutcome> Retain(uint32_t cache_id, absl::Span<const BlockName> names,
                                       const RetentionOptions& options) override {
    using Result = absl::StatusOr<RetainOutcome>;
    KV_RETURN_IF_ERROR(CheckRetention(options));
    KV_RETURN_IF_ERROR(
        CheckMessageBytes("names", kMessageOverheadBytes + names.size() * kBlockNameBytes, kMessageBytesMax));
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    auto request = admin->admin().retainRequest();
    request.setCacheId(cache_id);
    WriteRetention(names, options, request);
    return admin->Call<Result>(std::move(request), [](auto& response) { return ReadRetained(response); });
  }

  absl::StatusOr<PrefixMatch> Prefetch(uint32_t cache_id, absl::Span<const BlockName> names) override {
    using Result = absl::StatusOr<PrefixMatch>;
    KV_RETURN_IF_ERROR(
        CheckMessageBytes("names", kMessageOverheadBytes + names.size() * kBlockNameBytes, kMessageBytesMax));
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    auto request = admin->admin().prefetchRequest();
    request.setCacheId(cache_id);
    ToWire(names, request.initNames(static_cast<uint32_t>(names.size())));
    return admin->Call<Result>(std::move(request), [](auto& response) { return ReadMatch(response); });
  }

  absl::Status Drain(bool on) override {
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    const auto read = [](auto& response) { return FromWire(response.getStatus()); };
    if (on) return admin->Call<absl::Status>(admin->admin().drainRequest(), read);
    return admin->Call<absl::Status>(admin->admin().undrainRequest(), read);
  }

  absl::Status Upgrade(const std::string& program, bool cold) override {
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    auto request = admin->admin().upgradeRequest();
    request.setProgram(ToKj(program));
    request.setCold(cold);
    return admin->Call<absl::Status>(std::move(request), [](auto& response) { return FromWire(response.getStatus()); });
  }

  absl::StatusOr<uint64_t> Purge(uint32_t cache_id) override {
    using Result = absl::StatusOr<uint64_t>;
    KV_ASSIGN_OR_RETURN(Connection* const admin, Admin());
    auto request = admin->admin().purgeRequest();
    if (cache_id == kAllCaches) {
      request.setAll(true);
    } else {
      request.setCacheId(cache_id);
    }
    return admin->Call<Result>(std::move(request), [](auto& response) -> Result {
      KV_RETURN_IF_ERROR(FromWire(response.getStatus()));
      return response.getBlocks();
    });
  }

 private:
  /// Where Admin is: this connection, or one that is made for it. What this client gave back before is given back
  /// there.
  absl::StatusOr<Connection*> Admin() {
    KV_RETURN_IF_ERROR(connection_->Usable());
    if (!connection_->admin_elsewhere()) return connection_.get();
    KV_RETURN_IF_ERROR(Ping());  // the other connection is not behind what this one said
    if (admin_ == nullptr) {
      KV_ASSIGN_OR_RETURN(Address address, AdminAddress());
      Options options = connection_->options();
      options.token.clear();
      auto opened = Connection::Open(address, options);
      if (!opened.ok()) {
        return absl::Status(opened.status().code(),
                            absl::StrCat("administration: ", opened.status().message(),
                                         " (that socket is for the daemon's user and root alone)"));
      }
      admin_ = *std::move(opened);
    } else {
      KV_RETURN_IF_ERROR(admin_->Reconnect());
    }
    if (admin_->boot_epoch() == connection_->boot_epoch()) return admin_.get();
    const std::string there = admin_->address().text;
    admin_.reset();
    if (!connection_->Connected()) return connection_->Usable();
    return FieldError(absl::StatusCode::kFailedPrecondition, "admin_address", there,
                      absl::StrCat("of the daemon at ", connection_->address().text, "; another one listens there"));
  }

  absl::StatusOr<Address> AdminAddress() const {
    const Address& main = connection_->address();
    const std::string& named = connection_->options().admin_address;
    if (named.empty() && !main.is_unix) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "admin_address", "not given",
                        "the daemon's --admin-listen unix:PATH (admin_address, kvctl --admin), on the daemon's host: "
                        "nobody administers it over TCP");
    }
    KV_ASSIGN_OR_RETURN(Address address, ParseAddress(named.empty() ? absl::StrCat(main.text, ".admin") : named));
    if (!address.is_unix || ::faccessat(AT_FDCWD, address.path.c_str(), W_OK, AT_EACCESS) == 0) return address;
    if (errno == EACCES) {
      return FieldError(absl::StatusCode::kPermissionDenied, "admin_address",
                        absl::StrCat(address.text, ", closed to this user"),
                        "asked by the daemon's user or root: only they administer it");
    }
    if (errno == ENOENT || errno == ENOTDIR) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "admin_address",
                        absl::StrCat(address.text, ", not there"),
                        "where the daemon's --admin-listen is (admin_address, kvctl --admin)");
    }
    return address;
  }

  std::shared_ptr<Connection> connection_;  // shared with the handles, which may be destroyed after the Client
  std::shared_ptr<Connection> admin_;       // as Connection::Open gives it; nullptr: not needed so far
};

}  // namespace

const char* PlaceName(BlockPlace place) {
  static constexpr const char* kNames[] = {"nowhere", "memory", "arriving", "disk"};
  return kNames[static_cast<size_t>(place)];
}

const char* LossName(BlockLoss loss) {
  static constexpr const char* kNames[] = {"unknown", "evicted", "purged", "checksum", "disk_record"};
  return kNames[static_cast<size_t>(loss)];
}

std::shared_ptr<Connection> ConnectionOf(Client* client) { return static_cast<ClientImpl*>(client)->connection(); }

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(absl::string_view address, const Options& options) {
  KV_ASSIGN_OR_RETURN(Address parsed, ParseAddress(address));
  if (options.name.size() > kNameBytesMax) {
    return InvalidField("name (bytes)", options.name.size(), absl::StrCat("at most ", kNameBytesMax));
  }
  KV_RETURN_IF_ERROR(CheckRange("deadline_ms", options.deadline_ms, 1, 3600000));
  KV_RETURN_IF_ERROR(CheckRange("connect_ms", options.connect_ms, 1, 3600000));
  KV_RETURN_IF_ERROR(CheckRange("hello_ms", options.hello_ms, 0, 3600000));
  KV_RETURN_IF_ERROR(CheckRange("busy_poll_us", options.busy_poll_us, 0, 1000000));
  if (!options.admin_address.empty()) KV_RETURN_IF_ERROR(ParseAddress(options.admin_address).status());
  if (!options.token.empty()) KV_RETURN_IF_ERROR(CheckRange("token (bytes)", int64_t(options.token.size()), 16, 1024));
  KV_ASSIGN_OR_RETURN(auto connection, Connection::Open(std::move(parsed), options));
  return std::make_unique<ClientImpl>(std::move(connection));
}

}  // namespace kvmanager::client
