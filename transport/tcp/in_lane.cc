#include "transport/tcp/in_lane.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/incoming.h"

namespace kvmanager::tcp {

void InLane::ReadHeader() {
  head_.resize(kHeaderBytes);
  asio::async_read(socket_, asio::buffer(head_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->session_ == nullptr) return;
    if (error) return self->BreakSocket(error);
    const absl::StatusOr<FrameHeader> header = ParseHeader(self->head_);
    if (!header.ok()) return self->Break(header.status());
    if (header->type != FrameType::kPages) {
      return self->Break(InvalidField("frame type on a lane", FrameTypeName(header->type), "PAGES"));
    }
    self->ReadRecords(header->body_bytes);
  });
}

void InLane::ReadRecords(size_t bytes) {
  head_.resize(kHeaderBytes + bytes);
  asio::async_read(socket_, asio::buffer(head_.data() + kHeaderBytes, bytes),
                   [self = shared_from_this()](const ErrorCode& error, size_t) {
                     if (self->session_ == nullptr) return;
                     if (error) return self->BreakSocket(error);
                     self->OnRecords();
                   });
}

void InLane::OnRecords() {
  absl::StatusOr<Frame> frame = ParseFrame(head_);
  if (!frame.ok()) return Break(std::move(frame).status());
  pages_ = std::move(std::get<PagesFrame>(*frame).pages);
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
    if (checksum != pages_[next_].checksum) {
      loop_.metrics.checksum_failures.Increment();
      return Break(FieldError(absl::StatusCode::kDataLoss, absl::StrCat("checksum of page ", pages_[next_].page),
                              absl::StrCat(absl::Hex(checksum, absl::kZeroPad16)),
                              absl::StrCat(absl::Hex(pages_[next_].checksum, absl::kZeroPad16))),
                   /*bad_page=*/true);
    }
    session_->OnPage(pages_[next_].page);
    ++next_;
    offset_ = 0;
  }
  session_->Confirm(/*all=*/next_ == pages_.size());
  if (session_ == nullptr) return;
  if (next_ == pages_.size()) return ReadHeader();
  ReadPayload();
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
