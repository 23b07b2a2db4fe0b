#include "transport/tcp/incoming_data_connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/incoming.h"

namespace kvmanager::tcp {

IncomingDataConnection::IncomingDataConnection(Loop& loop, Incoming& session, uint32_t index, Socket socket)
    : loop_(loop),
      session_(&session),
      index_(index),
      socket_(std::move(socket)),
      local_(socket_.local_endpoint().protocol().family() == AF_UNIX),
      read_(std::make_shared<SocketJob>(SocketJob::Way::kRead, socket_.native_handle())) {}

IncomingDataConnection::~IncomingDataConnection() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void IncomingDataConnection::ReadHeader() {
  head_.resize(kHeaderBytes);
  head_bytes_ = 0;
  if (local_) return ReadHeaderLocally();
  asio::async_read(socket_, asio::buffer(head_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->session_ == nullptr) return;
    if (error) return self->BreakSocket(error);
    self->OnHeader();
  });
}

void IncomingDataConnection::ReadHeaderLocally() {
  // A descriptor comes with a header's first byte, and only who asks for it while reading that byte gets it.
  int descriptor = -1;
  const ssize_t n = ReceiveWithDescriptor(socket_.native_handle(), absl::MakeSpan(head_).subspan(head_bytes_),
                                          &descriptor, MSG_DONTWAIT);
  if (descriptor != -1) {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = descriptor;
  }
  if (n == 0) return BreakSocket(asio::error::eof);
  if (n < 0 && errno != EAGAIN && errno != EINTR)
    return BreakSocket(ErrorCode(errno, asio::error::get_system_category()));
  if (n > 0) head_bytes_ += n;
  if (head_bytes_ == kHeaderBytes) return OnHeader();
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const ErrorCode& error) {
    if (self->session_ == nullptr) return;
    if (error) return self->BreakSocket(error);
    self->ReadHeaderLocally();
  });
}

void IncomingDataConnection::OnHeader() {
  const absl::StatusOr<FrameHeader> header = ParseHeader(head_);
  if (!header.ok()) return Break(header.status());
  const bool of_local = header->type == FrameType::kRegion || header->type == FrameType::kLocal;
  const bool of_remote = header->type == FrameType::kMemory || header->type == FrameType::kLocal;
  const bool into_gpu = session_->device() >= 0;
  const bool remote = !local_ && !into_gpu && loop_.options.remote_memory != nullptr;
  if ((header->type != FrameType::kPages || into_gpu) && !(local_ && of_local) && !(remote && of_remote)) {
    const char* const some = local_ ? "PAGES, REGION, LOCAL" : (remote ? "PAGES, MEMORY, LOCAL" : "PAGES");
    return Break(InvalidField("frame type on a data connection", FrameTypeName(header->type),
                              into_gpu ? "REGION, LOCAL on a local one" : some));
  }
  ReadBody(header->type, header->body_bytes);
}

void IncomingDataConnection::ReadBody(FrameType type, size_t bytes) {
  head_.resize(kHeaderBytes + bytes);
  asio::async_read(socket_, asio::buffer(head_.data() + kHeaderBytes, bytes),
                   [self = shared_from_this(), type](const ErrorCode& error, size_t) {
                     if (self->session_ == nullptr) return;
                     if (error) return self->BreakSocket(error);
                     absl::StatusOr<Frame> frame = ParseFrame(self->head_);
                     if (!frame.ok()) return self->Break(std::move(frame).status());
                     if (type == FrameType::kRegion) return self->OnRegion(std::get<RegionFrame>(*frame));
                     if (type == FrameType::kMemory) return self->OnMemory(std::get<MemoryFrame>(*frame));
                     if (type == FrameType::kLocal) return self->OnLocal(std::get<LocalFrame>(*frame));
                     self->OnPages(std::move(std::get<PagesFrame>(*frame).pages));
                   });
}

void IncomingDataConnection::OnRegion(const RegionFrame& region) {
  if (descriptor_ == kDescriptorLost) return Break(absl::UnavailableError("no descriptor is left for a region"));
  if (descriptor_ < 0) return Break(InvalidField("REGION", "without a descriptor", "with one"));
  if (regions_.count(region.region) + device_regions_.count(region.region) > 0) {
    return Break(InvalidField("region", region.region, "named once"));
  }
  if ((region.gpu != GpuName()) != (session_->device() >= 0)) {
    return Break(InvalidField("REGION gpu", region.gpu != GpuName() ? 1 : 0, "as the offer"));
  }
  if (region.gpu != GpuName()) {
    DeviceSlab slab;
    slab.gpu = region.gpu;
    slab.name = region.name;
    slab.bytes = region.bytes;
    slab.fd = std::exchange(descriptor_, -1);
    device_regions_[region.region] = {loop_.options.device_copier->Open(slab), region.bytes};
    return ReadHeader();
  }
  absl::StatusOr<std::shared_ptr<const Region>> mapped =
      loop_.regions->Map(std::exchange(descriptor_, -1), region.bytes, socket_.native_handle());
  if (!mapped.ok()) {
    const absl::string_view why(mapped.status().message().data(), mapped.status().message().size());
    // This process's limits are not the sender's fault: it sends by TCP instead.
    if (!absl::IsFailedPrecondition(mapped.status())) return Break(absl::UnavailableError(why));
    return Break(InvalidField("region", absl::StrCat(region.region, ", which cannot be mapped: ", why),
                              "memory that can be mapped"));
  }
  regions_[region.region] = *std::move(mapped);
  ReadHeader();
}

void IncomingDataConnection::OnMemory(const MemoryFrame& memory) {
  if (remote_regions_.count(memory.region) > 0) return Break(InvalidField("region", memory.region, "named once"));
  absl::StatusOr<std::shared_ptr<RemoteMemory::Source>> opened = loop_.options.remote_memory->Open(
      {reinterpret_cast<const uint8_t*>(memory.description.data()), memory.description.size()}, session_->token());
  if (!opened.ok()) return Break(std::move(opened).status());
  remote_regions_[memory.region] = *std::move(opened);
  ReadHeader();
}

void IncomingDataConnection::OnLocal(const LocalFrame& local) {
  if (session_->device() >= 0) return OnDeviceLocal(local);
  if (!local_) return OnRemoteLocal(local);
  if (local.pages.size() > kPagesPerFrameMax) {
    return Break(InvalidField("LOCAL pages", local.pages.size(), absl::StrCat("at most ", kPagesPerFrameMax)));
  }
  std::vector<CopyJob::Page> pages;
  const auto refuse = [&](absl::Status why) {
    for (const CopyJob::Page& page : pages) session_->DropPage(page.page);
    Break(std::move(why));
  };
  for (const LocalRecord& record : local.pages) {
    const auto region = regions_.find(record.region);
    if (region == regions_.end()) return refuse(InvalidField("region", record.region, "one that was passed"));
    absl::StatusOr<absl::Span<uint8_t>> target = session_->BeginPage(record.page);
    if (!target.ok()) return refuse(std::move(target).status());
    pages.push_back({record.page, nullptr, *target, record.checksum});
    const uint64_t bytes = region->second->bytes();
    if (record.offset > bytes || target->size() > bytes - record.offset) {
      return refuse(
          InvalidField("offset", record.offset, absl::StrCat("a page of ", target->size(), " within ", bytes)));
    }
    pages.back().from = region->second->data() + record.offset;
  }
  auto job = std::make_shared<CopyJob>(std::move(pages));
  jobs_.push_back(job);
  CopyJob::Start(job, *loop_.copiers, [gate = loop_.gate, self = shared_from_this()] {
    gate->Post([self](Loop&) {
      if (self->session_ != nullptr) self->OnCopied();
    });
  });
  if (jobs_.size() < kJobsMax) ReadHeader();
}

void IncomingDataConnection::OnRemoteLocal(const LocalFrame& local) {
  if (local.pages.size() > kPagesPerFrameMax) {
    return Break(InvalidField("LOCAL pages", local.pages.size(), absl::StrCat("at most ", kPagesPerFrameMax)));
  }
  std::vector<CopyJob::Page> pages;
  std::vector<CopyJob::Place> places;
  absl::Status wrong;
  for (const LocalRecord& record : local.pages) {
    const auto region = remote_regions_.find(record.region);
    if (region == remote_regions_.end()) {
      wrong = InvalidField("region", record.region, "one that was described");
      break;
    }
    absl::StatusOr<absl::Span<uint8_t>> target = session_->BeginPage(record.page);
    if (!target.ok()) {
      wrong = std::move(target).status();
      break;
    }
    pages.push_back({record.page, nullptr, *target, record.checksum});
    const uint64_t bytes = region->second->bytes();
    if (record.offset > bytes || target->size() > bytes - record.offset) {
      wrong = InvalidField("offset", record.offset, absl::StrCat("a page of ", target->size(), " within ", bytes));
      break;
    }
    places.push_back({region->second, record.offset});
  }
  if (!wrong.ok()) {
    for (const CopyJob::Page& page : pages) session_->DropPage(page.page);
    return Break(std::move(wrong));
  }
  auto job = std::make_shared<CopyJob>(std::move(pages));
  if (jobs_.empty()) jobs_moved_ = Now();
  jobs_.push_back(job);
  CopyJob::StartRemotely(job, *loop_.options.remote_memory, loop_.copiers, std::move(places),
                         [gate = loop_.gate, self = shared_from_this()] {
                           gate->Post([self](Loop&) {
                             if (self->session_ != nullptr) self->OnCopied();
                           });
                         });
  if (jobs_.size() < kJobsMax) ReadHeader();
}

void IncomingDataConnection::CheckStall(int64_t stall_ms) {
  if (remote_regions_.empty() || jobs_.empty() || Now() - jobs_moved_ < std::chrono::milliseconds(stall_ms)) return;
  Break(absl::UnavailableError(absl::StrCat("nothing came of remote memory in ", stall_ms, " ms")));
}

void IncomingDataConnection::OnDeviceLocal(const LocalFrame& local) {
  std::vector<CopyJob::Page> pages;
  std::vector<DeviceCopier::Page> copies;
  std::vector<std::shared_ptr<DeviceCopier::Source>> sources;
  pages.reserve(local.pages.size());
  copies.reserve(local.pages.size());
  absl::Status wrong;
  auto region = device_regions_.end();  // most pages lie where the one before does
  for (const LocalRecord& record : local.pages) {
    if (region == device_regions_.end() || region->first != record.region) {
      region = device_regions_.find(record.region);
      if (region == device_regions_.end()) {
        wrong = InvalidField("region", record.region, "one that was passed");
        break;
      }
      sources.push_back(region->second.source);
    }
    absl::StatusOr<absl::Span<uint8_t>> target = session_->BeginPage(record.page);
    if (!target.ok()) {
      wrong = std::move(target).status();
      break;
    }
    pages.push_back({record.page, nullptr, *target, record.checksum});
    const uint64_t bytes = region->second.bytes;
    if (record.offset > bytes || target->size() > bytes - record.offset || record.offset % kDeviceOffsetAlign != 0) {
      wrong = InvalidField(
          "offset", record.offset,
          absl::StrCat("a page of ", target->size(), " within ", bytes, ", a multiple of ", kDeviceOffsetAlign));
      break;
    }
    copies.push_back(
        {region->second.source.get(), record.offset, target->data(), static_cast<uint32_t>(target->size())});
  }
  if (!wrong.ok()) {
    for (const CopyJob::Page& page : pages) session_->DropPage(page.page);
    return Break(std::move(wrong));
  }
  auto job = std::make_shared<CopyJob>(std::move(pages));
  jobs_.push_back(job);
  CopyJob::StartOnDevice(job, *loop_.options.device_copier, session_->device(), std::move(sources), std::move(copies),
                         [gate = loop_.gate, self = shared_from_this()] {
                           gate->Post([self](Loop&) {
                             if (self->session_ != nullptr) self->OnCopied();
                           });
                         });
  if (jobs_.size() < kJobsMax) ReadHeader();
}

void IncomingDataConnection::OnCopied() {
  // In the order of the frames, whichever was copied first.
  const auto self = shared_from_this();
  const bool full = jobs_.size() == kJobsMax;
  while (!jobs_.empty() && jobs_.front()->done()) {
    const std::shared_ptr<CopyJob> job = std::move(jobs_.front());
    jobs_.pop_front();
    if (absl::Status failed = job->TakeStatus(); !failed.ok()) {
      for (const CopyJob::Page& page : job->pages()) session_->DropPage(page.page);
      return Break(std::move(failed));
    }
    const CopyJob::Page* bad = nullptr;
    uint64_t bytes = 0;
    for (const CopyJob::Page& page : job->pages()) {
      bytes += page.to.size();
      if (page.copied_checksum == page.checksum) {
        session_->OnPage(page.page);
      } else {
        session_->DropPage(page.page);
        bad = &page;
      }
    }
    jobs_moved_ = Now();
    session_->OnPayload(bytes, remote_regions_.empty() ? PageWay::kCopy : PageWay::kUcx);
    if (bad != nullptr) return BadPage(bad->page, bad->copied_checksum, bad->checksum);
    session_->Confirm(/*all=*/jobs_.empty());
    if (session_ == nullptr) return;
  }
  if (full && jobs_.size() < kJobsMax) ReadHeader();
}

void IncomingDataConnection::OnPages(std::vector<PageRecord> pages) {
  pages_ = std::move(pages);
  next_ = 0;
  read_->Clear();
  for (size_t i = 0; i < pages_.size(); ++i) {
    absl::StatusOr<absl::Span<uint8_t>> target = session_->BeginPage(pages_[i].page);
    if (!target.ok()) {
      pages_.resize(i);  // those of this connection
      return Break(std::move(target).status());
    }
    read_->Add(target->data(), target->size());
  }
  ReadPayload();
}

void IncomingDataConnection::ReadPayload() {
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const ErrorCode& error) {
    if (self->session_ == nullptr) return;
    if (error) return self->BreakSocket(error);
    self->StartReading();
  });
}

void IncomingDataConnection::StartReading() {
  SocketJob::Start(read_, *loop_.copiers, UINT64_MAX, [gate = loop_.gate, self = shared_from_this()] {
    gate->Post([self](Loop&) {
      if (self->session_ != nullptr) self->OnRead();
    });
  });
}

void IncomingDataConnection::OnRead() {
  const auto self = shared_from_this();
  if (read_->bytes() > 0) session_->OnPayload(read_->bytes(), PageWay::kSocket);
  while (next_ < read_->whole()) {
    const PageRecord& page = pages_[next_];
    if (read_->checksum(next_) != page.checksum) return BadPage(page.page, read_->checksum(next_), page.checksum);
    session_->OnPage(page.page);
    ++next_;
  }
  session_->Confirm(/*all=*/read_->complete());
  if (session_ == nullptr) return;
  if (read_->error() == SocketJob::kEnd) return BreakSocket(asio::error::eof);
  if (read_->error() != 0) return BreakSocket(ErrorCode(read_->error(), asio::error::get_system_category()));
  if (read_->complete()) return ReadHeader();
  ReadPayload();
}

void IncomingDataConnection::BadPage(uint32_t page, uint64_t checksum, uint64_t announced) {
  loop_.metrics.checksum_failures.Increment();
  Break(FieldError(absl::StatusCode::kDataLoss, absl::StrCat("checksum of page ", page),
                   absl::StrCat(absl::Hex(checksum, absl::kZeroPad16)),
                   absl::StrCat(absl::Hex(announced, absl::kZeroPad16))),
        /*bad_page=*/true);
}

void IncomingDataConnection::Close() {
  if (session_ == nullptr) return;
  read_->Abandon();  // nothing is written after this
  for (size_t i = next_; i < pages_.size(); ++i) session_->DropPage(pages_[i].page);
  for (const auto& job : std::exchange(jobs_, {})) {
    if (session_->device() >= 0 && session_->AwaitGpu(job)) continue;
    job->Abandon();
    for (const CopyJob::Page& page : job->pages()) session_->DropPage(page.page);
  }
  pages_.clear();
  regions_.clear();
  remote_regions_.clear();
  session_ = nullptr;
  ErrorCode ignored;
  socket_.close(ignored);
}

void IncomingDataConnection::Break(absl::Status why, bool bad_page) {
  Incoming* session = session_;
  session->Confirm(/*all=*/true);
  if (session_ == nullptr) return;
  Close();
  session->OnConnectionBroken(index_, std::move(why), bad_page);
}

void IncomingDataConnection::BreakSocket(const ErrorCode& error) { Break(absl::UnavailableError(error.message())); }

}  // namespace kvmanager::tcp
