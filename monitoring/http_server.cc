#include "monitoring/http_server.h"

#include <algorithm>
#include <array>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <list>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;

// No script, style or connection but this server's own, and no other page may frame it or read from it.
constexpr char kSecurityFields[] =
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Frame-Options: DENY\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Cross-Origin-Opener-Policy: same-origin\r\n"
    "Cache-Control: no-store\r\n";

// Says what to do; a scraper shows it.
std::shared_ptr<const std::string> MisdirectedText() {
  return std::make_shared<const std::string>(
      "421 Misdirected Request: the Host field is a name that this daemon does not know for its own. Ask by the "
      "numeric address, or start kvmanagerd with --http-hosts NAME.\n");
}

// Of "HOST:PORT".
asio::ip::address AddressOf(absl::string_view listen, error_code& error) {
  const size_t colon = listen.rfind(':');
  absl::string_view host = listen.substr(0, colon == absl::string_view::npos ? 0 : colon);
  if (host == "localhost") host = "127.0.0.1";
  if (absl::ConsumePrefix(&host, "[") && !absl::ConsumeSuffix(&host, "]")) host = "";
  return asio::ip::make_address(std::string(host), error);
}

// A Host field without its port, and an address without its brackets; empty: it is malformed.
absl::string_view NameIn(absl::string_view host) {
  const bool bracketed = absl::ConsumePrefix(&host, "[");
  const size_t end = std::min(host.find(bracketed ? ']' : ':'), host.size());
  absl::string_view behind = host.substr(end);
  if (bracketed && !absl::ConsumePrefix(&behind, "]")) return "";
  if (absl::ConsumePrefix(&behind, ":") ? behind.find_first_not_of("0123456789") != behind.npos : !behind.empty()) {
    return "";
  }
  return host.substr(0, end);
}

class Connection;

// What the connections share, which are either idle (wait for a whole request) or being answered; a closed one is
// neither.
struct Shared {
  HttpServer::Options options;
  std::list<Connection*> idle;  // the longest idle first
  size_t answering = 0;
  bool full() const { return idle.size() + answering >= HttpServer::kConnectionsMax; }
};

// One connection: reads a request, answers, reads the next. Kept by the operation that is under way.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, Shared* shared) : stream_(std::move(socket)), shared_(shared) {}
  ~Connection() { SetState(State::kClosed); }

  void Read() {
    SetState(State::kIdle);
    parser_.emplace();
    parser_->header_limit(HttpServer::kHeaderBytesMax);
    stream_.expires_after(std::chrono::milliseconds(HttpServer::kRequestMs));
    http::async_read_header(stream_, buffer_, *parser_,
                            [self = shared_from_this()](error_code error, size_t) { self->OnRequest(error); });
  }

  // Of an idle one: gives its place to another.
  void MakeRoom() {
    SetState(State::kClosed);
    stream_.close();
  }

 private:
  enum class State { kIdle, kAnswering, kClosed };

  void SetState(State state) {
    if (state_ == State::kIdle) shared_->idle.erase(place_);
    if (state_ == State::kAnswering) --shared_->answering;
    if (state == State::kIdle) place_ = shared_->idle.insert(shared_->idle.end(), this);
    if (state == State::kAnswering) ++shared_->answering;
    state_ = state;
  }

  void OnRequest(error_code error) {
    if (state_ == State::kClosed) return;  // it had to make room
    SetState(State::kAnswering);
    // An error of the parser deserves an answer; of the socket (closed, timed out) there is nobody to answer.
    if (error == http::error::end_of_stream || error == http::error::partial_message) return Close();
    if (error == http::error::body_limit) return Answer({413}, /*head=*/false, /*close=*/true);
    if (error == http::error::header_limit || error == http::error::buffer_overflow)
      return Answer({431}, /*head=*/false, /*close=*/true);
    if (error) {
      static const auto& kParserErrors = http::make_error_code(http::error::end_of_stream).category();
      return error.category() == kParserErrors ? Answer({400}, false, true) : Close();
    }
    const auto& request = parser_->get();
    const bool head = request.method() == http::verb::head;
    if (!parser_->is_done() || parser_->chunked() || parser_->content_length().value_or(0) > 0) {
      return Answer({413}, head, true);  // a body is not even read
    }
    if (!head && request.method() != http::verb::get) return Answer({405}, false, true);
    if (request.count(http::field::host) > 1) return Answer({400}, head, true);
    const auto host = request[http::field::host];
    if (shared_->options.answers_host && !shared_->options.answers_host({host.data(), host.size()})) {
      return Answer({421, HttpAnswer().content_type, MisdirectedText()}, head, true);
    }
    absl::string_view path(request.target().data(), request.target().size());
    path = path.substr(0, path.find('?'));
    Answer(shared_->options.handler(path), head, !request.keep_alive());
  }

  void Answer(HttpAnswer answer, bool head, bool close) {
    if (answer.body == nullptr) {
      const auto reason = http::obsolete_reason(http::int_to_status(static_cast<unsigned>(answer.status)));
      answer.body = std::make_shared<const std::string>(
          absl::StrCat(answer.status, " ", absl::string_view(reason.data(), reason.size()), "\n"));
    }
    const auto reason = http::obsolete_reason(http::int_to_status(static_cast<unsigned>(answer.status)));
    head_ = absl::StrCat("HTTP/1.1 ", answer.status, " ", absl::string_view(reason.data(), reason.size()),
                         "\r\nContent-Type: ", answer.content_type, "\r\nContent-Length: ", answer.body->size(),
                         answer.status == 405 ? "\r\nAllow: GET, HEAD" : "", close ? "\r\nConnection: close" : "",
                         "\r\n", kSecurityFields, "\r\n");
    body_ = std::move(answer.body);
    const std::array<asio::const_buffer, 2> parts = {asio::buffer(head_),
                                                     head ? asio::const_buffer() : asio::buffer(*body_)};
    stream_.expires_after(std::chrono::milliseconds(HttpServer::kAnswerMs));
    asio::async_write(stream_, parts, [self = shared_from_this(), close](error_code error, size_t) {
      if (error || close) return self->Close();
      self->Read();
    });
  }

  void Close() {
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  }

  beast::tcp_stream stream_;
  Shared* const shared_;
  State state_ = State::kClosed;
  std::list<Connection*>::iterator place_;  // among the idle, while it is
  beast::flat_buffer buffer_{HttpServer::kHeaderBytesMax};
  std::optional<http::request_parser<http::empty_body>> parser_;
  std::string head_;
  std::shared_ptr<const std::string> body_;
};

class HttpServerImpl final : public HttpServer {
 public:
  explicit HttpServerImpl(Options options) { shared_.options = std::move(options); }
  ~HttpServerImpl() noexcept override {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Open() {
    const std::string& listen = shared_.options.listen;
    uint32_t port = 0;
    error_code error;
    const auto address = AddressOf(listen, error);
    if (error || !absl::SimpleAtoi(listen.substr(listen.rfind(':') + 1), &port) || port > 65535) {
      return InvalidField(shared_.options.field, listen,
                          "HOST:PORT, a numeric address or localhost and a port 0..65535");
    }
    const tcp::endpoint endpoint(address, static_cast<uint16_t>(port));
    if (const int fd = TakeListening(shared_.options.inherited, endpoint.protocol().family()); fd >= 0) {
      acceptor_.assign(endpoint.protocol(), fd, error);
    } else {
      acceptor_.open(endpoint.protocol(), error);
      if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
      if (!error) acceptor_.bind(endpoint, error);
      if (!error) acceptor_.listen(tcp::acceptor::max_listen_connections, error);
    }
    if (error) {
      return absl::UnavailableError(
          absl::StrCat(shared_.options.field, " ", listen, " cannot be bound: ", error.message()));
    }
    port_ = acceptor_.local_endpoint().port();
    Accept();
    asio::post(io_, [this] { Tick(); });
    thread_ = std::thread([this] { io_.run(); });
    return absl::OkStatus();
  }

  int port() const override { return port_; }
  int listen_fd() override { return acceptor_.native_handle(); }

 private:
  void Accept() {
    acceptor_.async_accept([this](error_code error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      // Where nobody can make room the socket is closed by its destructor. Errors (no descriptors) pass: the tick tries
      // again.
      if (!error) {
        if (shared_.full() && !shared_.idle.empty()) shared_.idle.front()->MakeRoom();
        if (!shared_.full()) std::make_shared<Connection>(std::move(socket), &shared_)->Read();
      }
      if (error) {
        accepting_ = false;
        return;
      }
      Accept();
    });
    accepting_ = true;
  }

  void Tick() {
    if (shared_.options.tick) shared_.options.tick();
    if (!accepting_) Accept();
    timer_.expires_after(std::chrono::milliseconds(kTickMs));
    timer_.async_wait([this](error_code error) {
      if (!error) Tick();
    });
  }

  Shared shared_;  // outlives the connections, which io_ holds
  asio::io_context io_{1};
  tcp::acceptor acceptor_{io_};
  asio::steady_timer timer_{io_};
  bool accepting_ = false;
  int port_ = 0;
  std::thread thread_;
};

}  // namespace

bool IsLoopbackHost(absl::string_view host) {
  host = NameIn(host);
  if (absl::EqualsIgnoreCase(host, "localhost")) return true;
  error_code error;
  const auto address = asio::ip::make_address(std::string(host), error);
  return !error && address.is_loopback();
}

bool IsOwnHost(absl::string_view host, absl::Span<const std::string> names) {
  if (IsLoopbackHost(host)) return true;
  host = NameIn(host);
  for (const std::string& name : names) {
    if (name == "any" || (!host.empty() && absl::EqualsIgnoreCase(host, name))) return true;
  }
  error_code error;
  asio::ip::make_address(std::string(host), error);
  if (!error) return true;
  const std::string own = asio::ip::host_name(error);
  return !error && !host.empty() && absl::EqualsIgnoreCase(host, own);
}

bool IsLoopbackAddress(absl::string_view listen) {
  error_code error;
  const auto address = AddressOf(listen, error);
  return !error && address.is_loopback();
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(Options options) {
  auto server = std::make_unique<HttpServerImpl>(std::move(options));
  KV_RETURN_IF_ERROR(server->Open());
  return server;
}

}  // namespace kvmanager
