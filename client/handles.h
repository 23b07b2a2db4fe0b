// The client's leases: Cache, Sequence and Arena over a capability each. Made by Client and by one another; see
// client.h.
#pragma once

#include <memory>

#include "client/client.h"
#include "client/connection.h"
#include "kvmanager/api/kvmanager.capnp.h"

namespace kvmanager::client {

std::unique_ptr<Cache> MakeCache(std::shared_ptr<Connection> connection, api::Cache::Client cap,
                                 CacheDescription description);

/// An arena of either kind, as tensors name it: what every Arena is.
class ArenaHandle : public Arena {
 public:
  ArenaHandle(std::shared_ptr<Connection> connection, api::Arena::Client cap, uint32_t id)
      : handle_(std::move(connection), std::move(cap)), id_(id) {}
  uint32_t id() const { return id_; }
  const Handle<api::Arena::Client>& handle() const { return handle_; }

 private:
  Handle<api::Arena::Client> handle_;
  const uint32_t id_;
};

/// The connection of a Client that Client::Connect made.
std::shared_ptr<Connection> ConnectionOf(Client* client);

/// The descriptor that came with `cap`, and stays its. FAILED_PRECONDITION if none came.
template <typename Cap>
absl::StatusOr<int> DescriptorOf(Connection& connection, Cap& cap) {
  using MaybeFd = absl::StatusOr<int>;
  auto got = connection.WithDeadline<MaybeFd>(cap.getFd().then([](kj::Maybe<int> fd) -> MaybeFd {
    KJ_IF_MAYBE (value, fd) {
      return *value;
    }
    return absl::FailedPreconditionError("the daemon sent no descriptor of its shared memory; use inline tensors");
  }),
                                              connection.options().deadline_ms);
  return connection.Await(got);
}

/// That an arena range is in an arena of this connection; adds the bytes of an inline tensor to `inline_bytes`. Errors:
/// FAILED_PRECONDITION, INVALID_ARGUMENT naming `field`.
absl::Status CheckTensor(absl::string_view field, const TensorView& tensor, const Connection& connection,
                         uint64_t generation, uint64_t* inline_bytes);
/// REQUIRES: CheckTensor.
void WriteTensor(const TensorView& tensor, api::Tensor::Builder wire);

std::unique_ptr<Projections> MakeProjections(std::shared_ptr<Connection> connection, api::Projections::Client cap);

/// Maps the memfd of `cap`, which must be of `bytes`. FAILED_PRECONDITION if no descriptor came, INTERNAL if it is of
/// another size, RESOURCE_EXHAUSTED if it cannot be mapped.
absl::StatusOr<std::unique_ptr<Arena>> MakeArena(std::shared_ptr<Connection> connection, api::Arena::Client cap,
                                                 uint32_t id, uint64_t bytes);

}  // namespace kvmanager::client
