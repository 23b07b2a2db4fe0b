// DeviceStream, and arenas of device memory.
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/rpc/slab_service.h"

namespace kvmanager {
namespace {

absl::StatusOr<absl::Span<uint8_t>> RangeOf(const Session& session, const DeviceStream& stream, absl::string_view field,
                                            uint32_t id, uint64_t offset, uint64_t bytes) {
  const std::shared_ptr<const DeviceArena> arena = session.gpus().ArenaOf(id);
  if (arena == nullptr || arena->ordinal() != stream.ordinal()) {
    return FieldError(absl::StatusCode::kNotFound, field, absl::StrCat(id),
                      absl::StrCat("a device arena of this connection on GPU ", stream.ordinal()));
  }
  const absl::Span<uint8_t> data = arena->data();
  if (bytes == 0 || offset > data.size() || bytes > data.size() - offset) {
    return InvalidField(absl::StrCat(field, " range"), absl::StrCat(bytes, " bytes at ", offset),
                        absl::StrCat("1 byte or more inside its ", data.size()));
  }
  return data.subspan(offset, bytes);
}

absl::Status CheckValue(absl::string_view field, uint64_t value) {
  if (value <= SharedSemaphores::kValueMax) return absl::OkStatus();
  return InvalidField(field, value, absl::StrCat("at most ", SharedSemaphores::kValueMax));
}

class DeviceStreamService final : public api::DeviceStream::Server {
 public:
  DeviceStreamService(std::shared_ptr<Session> session, Gpu* gpu, std::shared_ptr<DeviceStream> stream)
      : session_(std::move(session)), stream_(std::move(stream)), fd_(stream_->words().fd()) {
    session_->gpus().SetStream(gpu, stream_);
  }
  ~DeviceStreamService() { session_->gpus().CloseStream(stream_.get()); }

  kj::Maybe<int> getFd() override { return fd_; }

  kj::Promise<void> mapSlab(MapSlabContext context) override {
    return Serve(*session_, Method::kMapSlab, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const auto params = context.getParams();
      const CacheId cache = params.getCacheId();
      const int ordinal = stream_->ordinal();
      const auto bound = session_->BoundOf(cache);
      if (bound == nullptr || bound->config.device != ordinal) {
        return FieldError(absl::StatusCode::kNotFound, "cacheId", absl::StrCat(cache),
                          absl::StrCat("a cache on GPU ", ordinal, " that this connection opened"));
      }
      KV_ASSIGN_OR_RETURN(const auto process, session_->gpus().ProcessStepsOf(ordinal));
      KV_ASSIGN_OR_RETURN(const int fd, process->MapSlab(cache, params.getSlab()));
      context.getResults().setSlab(kj::heap<SlabService>(fd));
      return Done();
    });
  }

  kj::Promise<void> copy(CopyContext context) override {
    return Serve(*session_, Method::kDeviceCopy, context, [&]() -> absl::StatusOr<kj::Promise<void>> {
      const auto request = context.getParams().getRequest();
      KV_RETURN_IF_ERROR(CheckValue("ready", request.getReady()));
      KV_ASSIGN_OR_RETURN(const auto from, RangeOf(*session_, *stream_, "fromArena", request.getFromArena(),
                                                   request.getFromOffset(), request.getBytes()));
      KV_ASSIGN_OR_RETURN(const auto to, RangeOf(*session_, *stream_, "toArena", request.getToArena(),
                                                 request.getToOffset(), request.getBytes()));
      if (from.data() < to.data() + to.size() && to.data() < from.data() + from.size()) {
        return InvalidField("toArena range", "inside fromArena's", "a range apart");
      }
      KV_RETURN_IF_ERROR(stream_->Begin(request.getReady()));
      const absl::Status status = stream_->device().EnqueueCopy(stream_->stream(), to.data(), from.data(), to.size());
      const absl::StatusOr<uint64_t> done = stream_->End();
      KV_RETURN_IF_ERROR(status);
      KV_RETURN_IF_ERROR(done.status());
      context.getResults().setDone(*done);
      return Done();
    });
  }

 private:
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<DeviceStream> stream_;
  const int fd_;
};

class DeviceArenaService final : public api::Arena::Server {
 public:
  DeviceArenaService(std::shared_ptr<Session> session, std::shared_ptr<DeviceArena> arena, uint32_t* id)
      : session_(std::move(session)), fd_(arena->fd()), id_(session_->NewArenaId()) {
    session_->gpus().AddArena(id_, std::move(arena));
    *id = id_;
  }
  ~DeviceArenaService() { session_->gpus().RemoveArena(id_); }

  kj::Maybe<int> getFd() override { return fd_; }

 private:
  const std::shared_ptr<Session> session_;
  const int fd_;
  const uint32_t id_;
};

}  // namespace

api::DeviceStream::Client MakeDeviceStreamService(std::shared_ptr<Session> session, Gpu* gpu,
                                                  std::shared_ptr<DeviceStream> stream) {
  return kj::heap<DeviceStreamService>(std::move(session), gpu, std::move(stream));
}

api::Arena::Client MakeDeviceArenaService(std::shared_ptr<Session> session, std::shared_ptr<DeviceArena> arena,
                                          uint32_t* id) {
  return kj::heap<DeviceArenaService>(std::move(session), std::move(arena), id);
}

}  // namespace kvmanager
