// TLS on sockets that are connected to a daemon: files, handshake, and what went wrong in words of this client.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/dial.h"
#include "kvmanager/base/tls.h"

namespace kvmanager::client {

/// What Options::tls_ca, tls_cert and tls_key say; nullptr for an address without TLS. Errors: INVALID_ARGUMENT (a
/// file, or options of TLS beside "tcp:").
absl::StatusOr<std::shared_ptr<const TlsContext>> MakeTlsContext(const Address& address,
                                                                 const Client::Options& options);

/// A handshake over `fd`, which outlives the link. Errors: TlsFailure's, UNAVAILABLE (none within timeout_ms).
absl::StatusOr<std::unique_ptr<TlsLink>> ShakeHands(std::shared_ptr<const TlsContext> context, const Address& address,
                                                    const Client::Options& options, int fd, int64_t timeout_ms);

/// `why`, a TlsLink's failure, naming the address and what to do.
absl::Status TlsFailure(const Address& address, const absl::Status& why);
/// The other way round: this side is plain, the daemon is not.
absl::Status SpeaksTls(const Address& address);

}  // namespace kvmanager::client
