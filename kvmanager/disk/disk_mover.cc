#include "kvmanager/disk/disk_mover.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// The first page that ends behind `at`, of a record.
size_t FirstPage(const MoveJob& job, uint64_t at) {
  const auto& offsets = job.layout.offsets;
  size_t page = std::upper_bound(offsets.begin(), offsets.end(), at) - offsets.begin();
  return page == 0 ? 0 : page - 1;
}

// Calls fn(page, from, in_page, bytes) for the bytes of pages in the record's [begin, end): from: of the record.
template <typename Fn>
void EachPart(const MoveJob& job, uint64_t begin, uint64_t end, const Fn& fn) {
  for (size_t page = FirstPage(job, begin); page < job.page_bytes.size(); ++page) {
    const uint64_t offset = job.layout.offsets[page];
    if (offset >= end) return;
    const uint64_t from = std::max(begin, offset), to = std::min(end, offset + job.page_bytes[page]);
    if (from < to) fn(page, from, from - offset, to - from);
  }
}

void Fill(const WriteJob& job, uint64_t begin, uint64_t end, uint8_t* to) {
  uint64_t filled = begin;
  if (begin < job.header.size()) {
    filled = std::min<uint64_t>(end, job.header.size());
    std::memcpy(to, job.header.data() + begin, filled - begin);
  }
  EachPart(job, begin, end, [&](size_t page, uint64_t from, uint64_t in_page, uint64_t bytes) {
    std::memset(to + (filled - begin), 0, from - filled);
    std::memcpy(to + (from - begin), job.sources[page] + in_page, bytes);
    filled = from + bytes;
  });
  std::memset(to + (filled - begin), 0, end - filled);
}

// Compares a header with what is wanted, and takes the checksums of its pages.
absl::Status TakeHeader(absl::Span<const uint8_t> bytes, ReadJob* job) {
  KV_ASSIGN_OR_RETURN(const DiskRecord record, ParseRecordHeader(bytes));
  const size_t pages = job->page_bytes.size();
  if (record.cache != job->cache || record.name.key != job->key || record.name.tokens != job->tokens ||
      record.index != job->index || static_cast<uint32_t>(RecordHeaderChecksum(bytes)) != job->header_check) {
    return absl::DataLossError("record header: it is another block's");
  }
  if (record.pages.size() != pages) {
    return absl::DataLossError(absl::StrCat("record has ", record.pages.size(), " pages, must be ", pages));
  }
  job->checksums.resize(pages);
  for (size_t i = 0; i < pages; ++i) {
    if (record.pages[i].bytes != job->page_bytes[i]) {
      return absl::DataLossError(
          absl::StrCat("page ", i, " has ", record.pages[i].bytes, " bytes, must be ", job->page_bytes[i]));
    }
    job->checksums[i] = record.pages[i].checksum;
  }
  return absl::OkStatus();
}

}  // namespace

DiskMover::DiskMover(Parts parts) : parts_(std::move(parts)), pieces_(kPieces) {
  static_assert(kPieces <= DiskIo::kOpsMax && kRecordHeaderBytesMax <= kPieceBytes);
  staging_ = static_cast<uint8_t*>(std::aligned_alloc(kRecordAlign, kStagingBytes));
  KV_CHECK(staging_ != nullptr);
  for (int i = kPieces - 1; i >= 0; --i) {  // the first ones are taken first, so that the rest is not touched
    pieces_[i].staging = staging_ + kPieceBytes * i;
    free_.push_back(&pieces_[i]);
  }
  thread_ = std::thread([this] { Run(); });
}

DiskMover::~DiskMover() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  parts_.io->Wake();
  thread_.join();
  std::free(staging_);
}

void DiskMover::Write(std::shared_ptr<WriteJob> job) {
  {
    MutexLock lock(mutex_);
    new_writes_.push_back(std::move(job));
  }
  parts_.io->Wake();
}

void DiskMover::Read(std::shared_ptr<ReadJob> job) {
  {
    MutexLock lock(mutex_);
    new_reads_.push_back(std::move(job));
  }
  parts_.io->Wake();
}

bool DiskMover::TakeNew() {
  MutexLock lock(mutex_);
  for (auto& job : new_writes_) writes_.push_back(std::move(job));
  for (auto& job : new_reads_) reads_.push_back(std::move(job));
  new_writes_.clear();
  new_reads_.clear();
  return !stop_ || !writes_.empty() || !reads_.empty() || free_.size() < pieces_.size();
}

void DiskMover::Run() {
  while (TakeNew()) {
    // What failed at once ends no wait, and the destructor wakes it but once.
    if (StartPieces() && free_.size() == pieces_.size()) continue;
    parts_.io->Wait(&ended_);
    for (DiskOp* const op : ended_) OnEnded(static_cast<Piece*>(op->owner));
    ended_.clear();
  }
  GiveBackReserve();
}

bool DiskMover::StartPieces() {
  bool any = false;
  while (!free_.empty() && StartPiece(&reads_)) any = true;
  while (!free_.empty() && writing_pieces_ < kPiecesOfWritesMax && StartPiece(&writes_)) any = true;
  return any;
}

bool DiskMover::OpenFile(WriteJob* job) {
  int error = 0;
  job->file = parts_.files->Open(job->place.segment, job->is_first, &error);
  if (job->file == nullptr) {
    job->status = FileError(absl::StrCat("opening segment ", job->place.segment), error);
    job->failed_at = "write";
    return false;
  }
  Reserve(*job);
  return true;
}

void DiskMover::Reserve(const WriteJob& job) {
  if (job.place.segment != reserved_segment_) {
    GiveBackReserve();
    reserved_segment_ = job.place.segment;
    reserved_bytes_ = job.place.offset;
  }
  written_bytes_ = job.place.offset + job.place.bytes;
  if (written_bytes_ <= reserved_bytes_) return;
  const uint64_t bytes = std::max(parts_.reserve_bytes, written_bytes_ - reserved_bytes_);
  parts_.files->Reserve(*job.file, reserved_bytes_, bytes);
  reserved_bytes_ += bytes;
}

// Records follow one another, so nothing comes behind the last one of a segment that is left.
void DiskMover::GiveBackReserve() {
  if (reserved_bytes_ == written_bytes_) return;
  (void)parts_.files->Punch({reserved_segment_, written_bytes_, reserved_bytes_ - written_bytes_});
  reserved_bytes_ = written_bytes_;
}

bool DiskMover::OpenFile(ReadJob* job) {
  int error = 0;
  job->file = parts_.files->Open(job->place.segment, /*create=*/false, &error);
  if (job->file != nullptr) return true;
  job->is_lost = error == -ENOENT;
  job->status = error == -ENOENT ? absl::DataLossError("its segment file is gone")
                                 : FileError(absl::StrCat("opening segment ", job->place.segment), error);
  return false;
}

// Of the first job. False: there is none.
template <typename Job>
bool DiskMover::StartPiece(std::deque<std::shared_ptr<Job>>* jobs) {
  if (jobs->empty()) return false;
  const std::shared_ptr<Job> job = jobs->front();
  constexpr bool kIsWrite = std::is_same_v<Job, WriteJob>;
  const bool failed = !job->status.ok() || (job->started == 0 && !OpenFile(job.get()));
  Piece* const piece = free_.back();
  free_.pop_back();
  if constexpr (kIsWrite) {
    piece->write = job;
    ++writing_pieces_;
  } else {
    piece->read = job;
  }
  ++job->in_flight;
  if (failed) {
    // Nothing more of it is started.
    job->started = job->place.bytes;
    jobs->pop_front();
    Finish(piece);
    return true;
  }
  piece->begin = job->started;
  piece->bytes = static_cast<uint32_t>(std::min(kPieceBytes, job->place.bytes - job->started));
  piece->moved = 0;
  job->started += piece->bytes;
  if (job->started == job->place.bytes) jobs->pop_front();
  if constexpr (kIsWrite) Fill(*job, piece->begin, piece->begin + piece->bytes, piece->staging);
  if (Fails(kIsWrite ? Failpoint::kDiskWrite : Failpoint::kDiskRead)) {
    piece->op.result = -EIO;
    OnEnded(piece);
  } else {
    Go(piece);
  }
  return true;
}

void DiskMover::Go(Piece* piece) {
  MoveJob& job = piece->job();
  piece->op = {.kind = piece->write != nullptr ? DiskOp::Kind::kWrite : DiskOp::Kind::kRead,
               .fd = job.file->fd(),
               .offset = job.place.offset + piece->begin + piece->moved,
               .data = piece->staging + piece->moved,
               .bytes = piece->bytes - piece->moved,
               .owner = piece};
  parts_.io->Start(&piece->op);
}

void DiskMover::OnEnded(Piece* piece) {
  MoveJob& job = piece->job();
  const int64_t result = piece->op.result;
  const bool is_write = piece->write != nullptr;
  if (result == -EINTR || result == -EAGAIN) return Go(piece);
  if (result > 0 && result < piece->op.bytes && result % kRecordAlign == 0) {
    piece->moved += static_cast<uint32_t>(result);
    return Go(piece);
  }
  if (result != piece->op.bytes && job.status.ok()) {
    if (is_write) {
      job.status = FileError("writing a block", result < 0 ? static_cast<int>(result) : -EIO);
      piece->write->failed_at = "write";
    } else if (result >= 0) {
      job.status = absl::DataLossError("its segment file ends before it");
      piece->read->is_lost = true;
    } else {
      job.status = FileError("reading a block", static_cast<int>(result));
    }
  } else if (!is_write && job.status.ok()) {
    ReadJob& read = *piece->read;
    if (piece->begin == 0) job.status = TakeHeader({piece->staging, piece->bytes}, &read);
    if (job.status.ok()) {
      EachPart(job, piece->begin, piece->begin + piece->bytes,
               [&](size_t page, uint64_t from, uint64_t in_page, uint64_t bytes) {
                 std::memcpy(read.targets[page] + in_page, piece->staging + (from - piece->begin), bytes);
               });
    } else {
      read.is_lost = true;
    }
  }
  Finish(piece);
}

// The piece is over; perhaps its job is.
void DiskMover::Finish(Piece* piece) {
  MoveJob& job = piece->job();
  const bool is_over = --job.in_flight == 0 && job.started == job.place.bytes;
  if (!is_over) return Release(piece);
  job.file = nullptr;
  if (piece->write != nullptr) {
    parts_.on_written(std::move(piece->write));
    --writing_pieces_;
  } else {
    parts_.on_read(std::move(piece->read));
  }
  free_.push_back(piece);
}

void DiskMover::Release(Piece* piece) {
  if (piece->write != nullptr) --writing_pieces_;
  piece->write = nullptr;
  piece->read = nullptr;
  free_.push_back(piece);
}

}  // namespace kvmanager
