#include "transport/tcp/in_lane.h"

#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/incoming.h"
#include "transport/tcp/local.h"

namespace kvmanager::tcp {

InLane::InLane(Loop& loop, Incoming& session, uint32_t index, Socket socket)
    : loop_(loop),
      session_(&session),
      index_(index),
      socket_(std::move(socket)),
      local_(socket_.local_endpoint().protocol().family() == AF_UNIX) {}

InLane::~InLane() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void InLane::ReadHeader() {
  head_.resize(kHeaderBytes);
  head_bytes_ = 0;
  if (local_) return ReadHeaderLocally();
  asio::async_read(socket_, asio::buffer(head_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->session_ == nullptr) return;
    if (error) return self->BreakSocket(error);
    self->OnHeader();
  });
}

void InLane::ReadHeaderLocally() {
  // A descriptor comes with a header's first byte, and only who asks for it while reading that byte gets it.
  int descriptor = -1;
  const ssize_t n =
      ReceiveWithDescriptor(socket_.native_handle(), absl::MakeSpan(head_).subspan(head_bytes_), &descriptor);
  if (descriptor >= 0) {
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

void InLane::OnHeader() {
  const absl::StatusOr<FrameHeader> header = ParseHeader(head_);
  if (!header.ok()) return Break(header.status());
  const bool of_local = header->type == FrameType::kRegion || header->type == FrameType::kLocal;
  if (header->type != FrameType::kPages && !(local_ && of_local)) {
    return Break(
        InvalidField("frame type on a lane", FrameTypeName(header->type), local_ ? "PAGES, REGION, LOCAL" : "PAGES"));
  }
  ReadBody(header->type, header->body_bytes);
}

void InLane::ReadBody(FrameType type, size_t bytes) {
  head_.resize(kHeaderBytes + bytes);
  asio::async_read(socket_, asio::buffer(head_.data() + kHeaderBytes, bytes),
                   [self = shared_from_this(), type](const ErrorCode& error, size_t) {
                     if (self->session_ == nullptr) return;
                     if (error) return self->BreakSocket(error);
                     absl::StatusOr<Frame> frame = ParseFrame(self->head_);
                     if (!frame.ok()) return self->Break(std::move(frame).status());
                     if (type == FrameType::kRegion) return self->OnRegion(std::get<RegionFrame>(*frame));
                     if (type == FrameType::kLocal) return self->OnLocal(std::get<LocalFrame>(*frame));
                     self->OnPages(std::move(std::get<PagesFrame>(*frame).pages));
                   });
}

void InLane::OnRegion(const RegionFrame& region) {
  if (descriptor_ < 0) return Break(InvalidField("REGION", "without a descriptor", "with one"));
  if (regions_.count(region.region) > 0) return Break(InvalidField("region", region.region, "named once"));
  absl::StatusOr<std::unique_ptr<Region>> mapped =
      Region::Map(std::exchange(descriptor_, -1), region.bytes, /*writable=*/false);
  if (!mapped.ok()) {
    return Break(InvalidField(
        "region",
        absl::StrCat(region.region, ", which cannot be mapped: ",
                     absl::string_view(mapped.status().message().data(), mapped.status().message().size())),
        "memory that can be mapped"));
  }
  regions_[region.region] = *std::move(mapped);
  ReadHeader();
}

void InLane::OnLocal(const LocalFrame& local) {
  const auto self = shared_from_this();
  for (const LocalRecord& page : local.pages) {
    const auto region = regions_.find(page.region);
    if (region == regions_.end()) return Break(InvalidField("region", page.region, "one that was passed"));
    absl::StatusOr<absl::Span<uint8_t>> target = session_->BeginPage(page.page);
    if (!target.ok()) return Break(std::move(target).status());
    const uint64_t bytes = region->second->bytes();
    if (page.offset > bytes || target->size() > bytes - page.offset) {
      session_->DropPage(page.page);
      return Break(InvalidField("offset", page.offset, absl::StrCat("a page of ", target->size(), " within ", bytes)));
    }
    const uint64_t checksum = copy_.Copy(region->second->data() + page.offset, target->data(), target->size());
    session_->OnPayload(target->size());
    if (checksum != page.checksum) {
      session_->DropPage(page.page);
      return BadPage(page.page, checksum, page.checksum);
    }
    session_->OnPage(page.page);
  }
  session_->Confirm(/*all=*/true);
  if (session_ != nullptr) ReadHeader();
}

void InLane::OnPages(std::vector<PageRecord> pages) {
  pages_ = std::move(pages);
  targets_.clear();
  next_ = offset_ = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    absl::StatusOr<absl::Span<uint8_t>> target = session_->BeginPage(pages_[i].page);
    if (!target.ok()) {
      pages_.resize(i);  // those that are this lane's
      return Break(std::move(target).status());
    }
    targets_.push_back(*target);
  }
  ReadPayload();
}

void InLane::ReadPayload() {
  size_t count = 0;
  for (size_t i = next_; i < pages_.size(); ++i) {
    const size_t skipped = i == next_ ? offset_ : 0;
    buffers_[count++] = asio::mutable_buffer(targets_[i].data() + skipped, targets_[i].size() - skipped);
  }
  socket_.async_read_some(absl::MakeConstSpan(buffers_.data(), count),
                          [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                            if (self->session_ == nullptr) return;
                            if (error) return self->BreakSocket(error);
                            self->OnPayload(bytes);
                          });
}

void InLane::OnPayload(size_t bytes) {
  const auto self = shared_from_this();
  session_->OnPayload(bytes);
  while (bytes > 0) {
    const absl::Span<uint8_t> target = targets_[next_];
    const size_t taken = std::min(bytes, target.size() - offset_);
    bytes -= taken;
    offset_ += taken;
    if (offset_ < target.size()) break;
    const uint64_t checksum = XXH3_64bits(target.data(), target.size());
    if (checksum != pages_[next_].checksum) return BadPage(pages_[next_].page, checksum, pages_[next_].checksum);
    session_->OnPage(pages_[next_].page);
    ++next_;
    offset_ = 0;
  }
  session_->Confirm(/*all=*/next_ == pages_.size());
  if (session_ == nullptr) return;
  if (next_ == pages_.size()) return ReadHeader();
  ReadPayload();
}

void InLane::BadPage(uint32_t page, uint64_t checksum, uint64_t announced) {
  loop_.metrics.checksum_failures.Increment();
  Break(FieldError(absl::StatusCode::kDataLoss, absl::StrCat("checksum of page ", page),
                   absl::StrCat(absl::Hex(checksum, absl::kZeroPad16)),
                   absl::StrCat(absl::Hex(announced, absl::kZeroPad16))),
        /*bad_page=*/true);
}

void InLane::Close() {
  if (session_ == nullptr) return;
  for (size_t i = next_; i < pages_.size(); ++i) session_->DropPage(pages_[i].page);
  pages_.clear();
  session_ = nullptr;
  ErrorCode ignored;
  socket_.close(ignored);
}

void InLane::Break(absl::Status why, bool bad_page) {
  Incoming* session = session_;
  session->Confirm(/*all=*/true);
  if (session_ == nullptr) return;
  Close();
  session->OnLaneBroken(index_, std::move(why), bad_page);
}

void InLane::BreakSocket(const ErrorCode& error) { Break(absl::UnavailableError(error.message())); }

}  // namespace kvmanager::tcp
