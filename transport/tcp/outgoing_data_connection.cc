#include "transport/tcp/outgoing_data_connection.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "transport/remote_memory.h"
#include "transport/tcp/outgoing.h"

namespace kvmanager::tcp {

OutgoingDataConnection::OutgoingDataConnection(Loop& loop, Outgoing& session, uint32_t index)
    : loop_(loop),
      session_(&session),
      index_(index),
      socket_(loop.io),
      rate_timer_(loop.io),
      local_(session.data_address().local),
      by_ucx_(session.by_ucx()),
      passed_(by_ucx_ ? loop.options.remote_memory->memory().size() : loop.options.memory.size()),
      zero_copy_(loop.options.zero_copy, loop.metrics.zero_copy) {}

void OutgoingDataConnection::Start() {
  dial_ = std::make_shared<Dial>(loop_, session_->data_address(), session_->stall_ms(),
                                 [self = shared_from_this()](absl::StatusOr<Dial::Connection> connection) {
                                   self->dial_ = nullptr;
                                   if (!connection.ok()) return self->Break(std::move(connection).status());
                                   self->Join(*std::move(connection));
                                 });
  const auto dial = dial_;
  dial->Start(EncodeJoin({session_->token(), index_}));
}

void OutgoingDataConnection::Join(Dial::Connection connection) {
  link_ = std::make_shared<FrameLink>(loop_, std::move(connection.socket));
  const auto self = shared_from_this();
  link_->Listen({FrameType::kJoined, FrameType::kError}, {[self](Frame frame) { self->OnJoined(std::move(frame)); },
                                                          [self](absl::Status why) { self->Break(std::move(why)); }});
}

void OutgoingDataConnection::OnJoined(Frame frame) {
  if (auto* error = std::get_if<ErrorFrame>(&frame)) return Break(std::move(error->status));
  if (!link_->idle()) return Break(absl::InvalidArgumentError("JOINED before JOIN was read"));
  socket_ = std::exchange(link_, nullptr)->Release();
  write_ = std::make_shared<SocketJob>(SocketJob::Way::kWrite, socket_.native_handle());
  if (!local_) zero_copy_.Enable(socket_.native_handle());
  const auto self = shared_from_this();
  session_->OnConnectionJoined(index_, std::get<JoinedFrame>(frame));
  if (session_ == nullptr) return;
  ready_ = true;
  WatchForEnd();
  Pump();
}

void OutgoingDataConnection::WatchForEnd() {
  socket_.async_read_some(asio::buffer(&unexpected_, 1), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->session_ == nullptr) return;
    if (!error) return self->Break(absl::InvalidArgumentError("the receiver wrote on a data connection"));
    self->Break(absl::UnavailableError(error.message()));
  });
}

void OutgoingDataConnection::Pump() {
  if (!ready_ || busy_ || session_ == nullptr) return;
  if (!session_->TakeFrame(index_, &pages_)) return;
  written_ = 0;
  if (session_->of_gpu()) {
    MakeDeviceLocal();
    frame_bytes_ = head_.size();
    session_->OnNamed(pages_);
    return WriteRegions();
  }
  if (local_ && MakeLocal()) {
    frame_bytes_ = head_.size();
    session_->OnNamed(pages_);
    return WriteRegions();
  }
  if (by_ucx_ && MakeRemote()) {
    frame_bytes_ = head_.size();
    session_->OnNamed(pages_);
    return WriteHead();
  }
  std::array<PageRecord, kPagesPerFrameMax> records;
  for (size_t i = 0; i < pages_.size(); ++i) records[i] = {pages_[i].page, pages_[i].checksum};
  head_.resize(kHeaderBytes + kPageRecordBytes * pages_.size());
  PutPagesHead(absl::MakeConstSpan(records.data(), pages_.size()), head_.data());
  frame_bytes_ = head_.size();
  write_->Clear();
  write_->Add(head_.data(), head_.size());
  for (const SendPage& page : pages_) {
    frame_bytes_ += page.bytes.size();
    write_->Add(page.bytes.data(), page.bytes.size());
  }
  Write();
}

template <typename MemoryAt>
std::pair<size_t, uint64_t> OutgoingDataConnection::FindMemory(absl::Span<const uint8_t> page, size_t count,
                                                               MemoryAt memory_at) {
  size_t low = 0, high = count;  // the first that begins behind the page's begin
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (page.data() < memory_at(middle).data()) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == 0) return {count, 0};
  const absl::Span<const uint8_t> memory = memory_at(low - 1);
  const auto offset = static_cast<uint64_t>(page.data() - memory.data());
  if (offset > memory.size() || page.size() > memory.size() - offset) return {count, 0};
  return {low - 1, offset};
}

bool OutgoingDataConnection::MakeLocal() {
  const std::vector<SharedMemory>& memory = loop_.options.memory;
  std::vector<LocalRecord> records;
  to_pass_.clear();
  for (const SendPage& page : pages_) {
    const auto [at, offset] = FindMemory(
        page.bytes, memory.size(), [&](size_t i) { return absl::MakeConstSpan(memory[i].data, memory[i].bytes); });
    if (at == memory.size()) return false;
    const auto index = static_cast<uint32_t>(at);
    records.push_back({page.page, index, offset, page.checksum});
    if (!passed_[index] && std::find(to_pass_.begin(), to_pass_.end(), index) == to_pass_.end()) {
      to_pass_.push_back(index);
    }
  }
  const std::string frame = EncodeLocal(records);
  head_.assign(frame.begin(), frame.end());
  return true;
}

bool OutgoingDataConnection::MakeRemote() {
  const RemoteMemory& remote = *loop_.options.remote_memory;
  const absl::Span<const absl::Span<const uint8_t>> memory = remote.memory();
  std::vector<LocalRecord> records;
  std::vector<size_t> news;
  for (const SendPage& page : pages_) {
    const auto [at, offset] = FindMemory(page.bytes, memory.size(), [&](size_t i) { return memory[i]; });
    if (at == memory.size()) return false;
    records.push_back({page.page, static_cast<uint32_t>(at), offset, page.checksum});
    if (!passed_[at] && std::find(news.begin(), news.end(), at) == news.end()) news.push_back(at);
  }
  std::string frames;
  for (const size_t at : news) {
    MemoryFrame frame{static_cast<uint32_t>(at), remote.Describe(at, session_->token())};
    if (frame.description.empty()) return false;  // for the moment
    frames += EncodeMemory(frame);
  }
  for (const size_t at : news) passed_[at] = true;
  frames += EncodeLocal(records);
  head_.assign(frames.begin(), frames.end());
  return true;
}

void OutgoingDataConnection::MakeDeviceLocal() {
  std::vector<LocalRecord> records;
  records.reserve(pages_.size());
  to_pass_.clear();
  size_t index = 0;  // most pages lie where the one before does
  for (const SendPage& page : pages_) {
    if (index >= slabs_.size() || slabs_[index] != page.slab) {
      index = std::find(slabs_.begin(), slabs_.end(), page.slab) - slabs_.begin();
      if (index == slabs_.size()) {
        slabs_.push_back(page.slab);
        to_pass_.push_back(static_cast<uint32_t>(index));
      }
    }
    records.push_back({page.page, static_cast<uint32_t>(index),
                       static_cast<uint64_t>(page.bytes.data() - page.slab->data), page.checksum});
  }
  const std::string frame = EncodeLocal(records);
  head_.assign(frame.begin(), frame.end());
}

std::pair<std::string, int> OutgoingDataConnection::RegionOf(uint32_t index) const {
  RegionFrame region;
  region.region = index;
  if (session_->of_gpu()) {
    const DeviceSlab& slab = *slabs_[index];
    region.bytes = slab.bytes;
    region.gpu = slab.gpu;
    region.name = slab.name;
    return {EncodeRegion(region), slab.fd};
  }
  const SharedMemory& memory = loop_.options.memory[index];
  region.bytes = memory.bytes;
  return {EncodeRegion(region), memory.fd};
}

void OutgoingDataConnection::WriteRegions() {
  busy_ = true;
  while (!to_pass_.empty()) {
    const uint32_t index = to_pass_.back();
    const auto [frame, fd] = RegionOf(index);
    const absl::Span<const uint8_t> rest(reinterpret_cast<const uint8_t*>(frame.data()) + region_written_,
                                         frame.size() - region_written_);
    const ssize_t n = SendWithDescriptor(socket_.native_handle(), rest, region_written_ == 0 ? fd : -1, MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
      return Break(absl::UnavailableError(ErrorCode(errno, asio::error::get_system_category()).message()));
    }
    if (n > 0) region_written_ += n;
    if (region_written_ == frame.size()) {
      if (!session_->of_gpu()) passed_[index] = true;
      to_pass_.pop_back();
      region_written_ = 0;
      continue;
    }
    return socket_.async_wait(Socket::wait_write, [self = shared_from_this()](const ErrorCode& error) {
      if (self->session_ == nullptr) return;
      if (error) return self->Break(absl::UnavailableError(error.message()));
      self->WriteRegions();
    });
  }
  WriteHead();
}

void OutgoingDataConnection::WriteHead() {
  busy_ = true;
  socket_.async_write_some(asio::buffer(head_.data() + written_, head_.size() - written_),
                           [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                             if (self->session_ == nullptr) return;
                             if (error) return self->Break(absl::UnavailableError(error.message()));
                             self->Count(bytes);
                             self->OnWritten();
                           });
}

void OutgoingDataConnection::Write() {
  busy_ = true;
  const uint64_t granted = loop_.rate.Take(frame_bytes_ - written_, NowNs());
  if (granted == 0) {
    rate_timer_.expires_after(std::chrono::milliseconds(kRateWaitMs));
    rate_timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
      if (!error && self->session_ != nullptr) self->Write();
    });
    return;
  }
  WaitToWrite(granted);
}

void OutgoingDataConnection::WaitToWrite(uint64_t granted) {
  socket_.async_wait(Socket::wait_write, [self = shared_from_this(), granted](const ErrorCode& error) {
    if (self->session_ == nullptr) return self->loop_.rate.GiveBack(granted);
    if (error) return self->Break(absl::UnavailableError(error.message()));
    // The wait ends as well when the error queue has something: of use to a worker only if it can write.
    const int fd = self->socket_.native_handle();
    if (!self->zero_copy_.idle() && self->zero_copy_.Read(fd)) {
      pollfd now = {fd, POLLOUT, 0};
      if (::poll(&now, 1, 0) == 0) return self->WaitToWrite(granted);
    }
    self->StartWriting(granted);
  });
}

void OutgoingDataConnection::StartWriting(uint64_t granted) {
  writing_ = true;
  write_->AllowZeroCopy(/*first=*/1, zero_copy_.allowed(), ZeroCopy::kPieceBytesMin);
  SocketJob::Start(write_, *loop_.copiers, granted, [gate = loop_.gate, self = shared_from_this(), granted] {
    gate->Post([self, granted](Loop& loop) {
      if (self->session_ == nullptr) return;
      loop.rate.GiveBack(granted - self->CountJob());
      if (const int error = self->write_->error(); error != 0) {
        return self->Break(absl::UnavailableError(ErrorCode(error, asio::error::get_system_category()).message()));
      }
      self->OnWritten();
    });
  });
}

void OutgoingDataConnection::Count(uint64_t bytes) {
  const uint64_t head_left = head_.size() - std::min<uint64_t>(written_, head_.size());
  session_->OnPayload(bytes - std::min<uint64_t>(bytes, head_left), PageWay::kSocket);
  written_ += bytes;
  if (written_ == frame_bytes_ && !by_place()) session_->OnPagesWritten(pages_.size());
}

uint64_t OutgoingDataConnection::CountJob() {
  writing_ = false;
  zero_copy_.OnWritten(write_->zero_copied(), write_->zero_copy_refused_bytes());
  Count(write_->bytes());
  return write_->bytes();
}

void OutgoingDataConnection::OnWritten() {
  if (written_ < frame_bytes_) return by_place() ? WriteHead() : Write();
  pages_.clear();
  busy_ = false;
  Pump();
}

void OutgoingDataConnection::Close() {
  if (session_ == nullptr) return;
  if (write_ != nullptr) write_->Abandon();
  // The receiver may have all of it, and have said so, before this thread hears of it from the worker.
  if (writing_) CountJob();
  Outgoing& session = *std::exchange(session_, nullptr);
  if (dial_ != nullptr) std::exchange(dial_, nullptr)->Cancel();
  if (link_ != nullptr) std::exchange(link_, nullptr)->Close();
  rate_timer_.cancel();
  ErrorCode ignored;
  if (!zero_copy_.idle()) {
    zero_copy_.Read(socket_.native_handle());
    if (!zero_copy_.idle()) return session.DrainConnection(std::move(socket_), std::move(zero_copy_));
  }
  socket_.close(ignored);
}

void OutgoingDataConnection::Break(absl::Status why) {
  Outgoing* session = session_;
  const auto self = shared_from_this();
  Close();
  if (session != nullptr) session->OnConnectionBroken(index_, std::move(why));
}

}  // namespace kvmanager::tcp
