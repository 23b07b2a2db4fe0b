// A client that asks for what the client library never would, and counts what it gets.
//
//   Offence    where the daemon is, and the tally
//   Offender   one connection of it, with calls that nobody waits for
//
// One thread; one Offender at a time, as each has the thread's event loop.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/misbehaviour/tally.h"
#include "tests/raw_rpc.h"

namespace kvmanager::testing {

struct Offence {
  std::string listen, admin, peer, metrics;
  Tally& tally;
};

class Offender final : private kj::TaskSet::ErrorHandler {
 public:
  /// Throws kj::Exception when the daemon does not take the connection.
  explicit Offender(Offence& offence, const std::string& address = "")
      : offence_(offence), connection_(raw_.Connect(address.empty() ? offence.listen : address)), tasks_(*this) {
    KJ_REQUIRE(connection_ != nullptr, "the daemon does not listen");
  }

  api::Daemon::Client& daemon() { return connection_->daemon; }
  kj::WaitScope& wait() { return raw_.wait(); }
  /// Calls that were begun and are not answered.
  int in_flight() const { return in_flight_; }
  /// False once the connection has ended.
  bool alive() const { return alive_; }

  /// Runs the loop for so long.
  void Turn(int64_t ms) { raw_.timer().afterDelay(ms * kj::MILLISECONDS).wait(wait()); }
  /// Sends what was begun, and takes hardly an answer.
  void Flush() {
    for (int i = 0; i < 20; ++i) {
      wait().poll();
      usleep(2000);
    }
  }
  /// Runs it until fewer calls than `most` wait, or the connection has ended. False: it has.
  bool Room(int most) {
    while (alive_ && in_flight_ >= most) Turn(1);
    return alive_;
  }

  /// Begins a call; its answer is counted, then given to `take`.
  template <typename Request, typename Take>
  void Begin(Request&& request, Take take) {
    ++offence_.tally.calls;
    ++in_flight_;
    tasks_.add(request.send().then([this, take = kj::mv(take)](auto&& response) mutable {
      --in_flight_;
      Note(StatusOf(response));
      take(response);
    }));
  }
  template <typename Request>
  void Begin(Request&& request) {
    Begin(std::forward<Request>(request), [](auto&) {});
  }
  /// A call that is waited for.
  template <typename Request>
  auto Call(Request&& request) {
    ++offence_.tally.calls;
    auto response = request.send().wait(wait());
    Note(StatusOf(response));
    return response;
  }
  void Count() { ++offence_.tally.calls; }

  /// What every way needs. Throw when they are refused: the caller begins anew.
  api::Cache::Client OpenCache(const client::CacheOptions& options) {
    auto request = daemon().openCacheRequest();
    FillConfig(options, request.initConfig());
    auto response = Call(kj::mv(request));
    KJ_REQUIRE(response.getStatus().getCode() == 0, "openCache", response.getStatus().getMessage());
    return response.getCache();
  }
  struct Made {
    api::Sequence::Client sequence = nullptr;
    uint64_t id = 0;
  };
  Made Create(api::Cache::Client& cache) {
    auto request = cache.createSequencesRequest();
    request.initRequests(1);
    auto response = Call(kj::mv(request));
    const auto reply = response.getReplies()[0];
    KJ_REQUIRE(reply.getStatus().getCode() == 0, "createSequences", reply.getStatus().getMessage());
    return {reply.getSequence(), reply.getSequenceId()};
  }
  /// Appends zeros to layer 0 of a cache of two KV heads of 64.
  auto AppendRequest(api::Cache::Client& cache, uint64_t id, uint64_t position, uint32_t tokens) {
    auto request = cache.stepRequest();
    auto step = request.initRequest();
    auto entry = step.initEntries(1)[0];
    entry.setSequenceId(id);
    entry.setPosition(position);
    entry.setTokens(tokens);
    zeros_.resize(std::max<size_t>(zeros_.size(), tokens * 256));
    step.initK().setInline(kj::arrayPtr(zeros_.data(), tokens * 256));
    step.initV().setInline(kj::arrayPtr(zeros_.data(), tokens * 256));
    return request;
  }
  void Append(api::Cache::Client& cache, uint64_t id, uint64_t position, uint32_t tokens) {
    auto response = Call(AppendRequest(cache, id, position, tokens));
    const auto status = response.getReply().getStatus();
    KJ_REQUIRE(status.getCode() == 0, "append", status.getMessage());
  }

  void Note(const kj::Exception& exception) {
    if (exception.getType() == kj::Exception::Type::DISCONNECTED) {
      ++offence_.tally.ended;
      alive_ = false;
    } else {
      ++offence_.tally.refused;
    }
    Tally::Say(offence_.tally.refusal, exception.getDescription().cStr());
  }

 private:
  struct Code {
    int code = 0;
    std::string message;
  };
  static Code CodeOf(api::Status::Reader status) { return {status.getCode(), status.getMessage().cStr()}; }
  template <typename Response>
  static Code StatusOf(const Response& response) {
    if constexpr (requires { response.getReplies(); }) {
      return response.getReplies().size() == 0 ? Code{3, "nothing was asked"}
                                               : CodeOf(response.getReplies()[0].getStatus());
    } else if constexpr (requires { response.getReply().getStatus(); }) {
      return CodeOf(response.getReply().getStatus());
    } else if constexpr (requires { response.getError(); }) {
      return CodeOf(response.getError());
    } else if constexpr (requires { response.getStatus(); }) {
      return CodeOf(response.getStatus());
    } else {
      return {};
    }
  }
  void Note(const Code& code) {
    if (code.code == 0) {
      ++offence_.tally.served;
    } else if (code.code == 2 || code.code == 13 || code.message.empty()) {
      ++offence_.tally.dishonest;
      Tally::Say(offence_.tally.lie, absl::StrCat("code ", code.code, ": ", code.message));
    } else {
      ++offence_.tally.refused;
      Tally::Say(offence_.tally.refusal, code.message);
    }
  }
  void taskFailed(kj::Exception&& exception) override {
    --in_flight_;
    Note(exception);
  }

  Offence& offence_;
  RawRpc raw_;
  std::unique_ptr<RawRpc::Connection> connection_;
  std::vector<uint8_t> zeros_;
  int in_flight_ = 0;
  bool alive_ = true;
  kj::TaskSet tasks_;
};

}  // namespace kvmanager::testing
