// A small HTTP/1.1 server for people's browsers and for Prometheus: answers GET and HEAD of a few paths, and holds
// nothing a stranger may want.
//
// Owned by whoever started it; it has one thread, on which the handler and the tick run too, so what they share needs
// no lock. Destroying it closes every connection and joins the thread. Requests are hostile: only their first line and
// header fields are read, by Boost.Beast, within kHeaderBytesMax and kRequestMs; a body or another method is refused; a
// reader that does not take its answer within kAnswerMs is cut off. Where kConnectionsMax are open, a new one takes the
// place of the one that has waited longest for a whole request; where all are being answered, it is closed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager {

struct HttpAnswer {
  int status = 404;
  std::string content_type = "text/plain; charset=utf-8";
  std::shared_ptr<const std::string> body;  // nullptr: the status in words
};

class HttpServer {
 public:
  static constexpr size_t kConnectionsMax = 64;
  static constexpr uint32_t kHeaderBytesMax = 8 << 10;  // of a request: its line and fields
  static constexpr int64_t kRequestMs = 10000;          // from a connection, or the answer before, to a whole request
  static constexpr int64_t kAnswerMs = 10000;
  static constexpr int64_t kTickMs = 1000;

  struct Options {
    std::string field = "http-listen";  // the flag, for errors
    std::string listen;                 // "HOST:PORT": a numeric address or localhost; port 0 takes a free one
    int inherited = -1;                 // a socket that listens there already, which stays the caller's; -1: none
    /// Whether a request with this Host field is answered, "" if it has none, so that a page of the Internet whose name
    /// was made to resolve to this address reads nothing here. nullptr: every one is.
    std::function<bool(absl::string_view host)> answers_host;
    /// path: of a GET or HEAD, as sent, without the query.
    std::function<HttpAnswer(absl::string_view path)> handler;
    std::function<void()> tick;  // every kTickMs, the first time at once
  };

  /// Errors: INVALID_ARGUMENT (listen), UNAVAILABLE (the address cannot be bound).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(Options options);
  virtual ~HttpServer() = default;
  virtual int port() const = 0;  // the bound one
  virtual int listen_fd() = 0;
};

/// Whether a Host header field names this machine itself: localhost, 127.0.0.0/8 or [::1], with any port, since a
/// tunnel has its own.
bool IsLoopbackHost(absl::string_view host);

/// Whether a Host header field is none that somebody else can make resolve to this address: a numeric one, localhost,
/// what the host calls itself, or one of `names`, of which "any" is every one; with any port, in any case.
bool IsOwnHost(absl::string_view host, absl::Span<const std::string> names);

/// Whether "HOST:PORT" has a loopback address.
bool IsLoopbackAddress(absl::string_view listen);

}  // namespace kvmanager
