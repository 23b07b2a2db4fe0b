#include "kvmanager/rpc/read.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/serve.h"

namespace kvmanager {
namespace {

constexpr size_t kReplyWords = 32;             // of a ReadReply without its rows
constexpr uint64_t kStagedBytesMax = 4 << 20;  // of a GPU's pages that are brought to the host at once, or one page

DeviceReader* ReaderOf(const Gpus& gpus, int device) {
  Gpu* const gpu = FindGpu(gpus, device);
  return gpu == nullptr ? nullptr : gpu->reads();
}

// Some tokens of one page, and the row of the first.
struct Piece {
  const uint8_t* raw = nullptr;      // or
  const uint8_t* encoded = nullptr;  // to be decoded
  uint8_t rung = 0;                  // of the encoded form
  uint32_t entry = 0;
  int first = 0;  // token of the page
  int tokens = 0;
  uint64_t row = 0;
};

// Rows [tokens][kv_heads][head_dim] of one side out of a raw page.
void CopyRows(const PageLayout& layout, const uint8_t* page, int side, const Piece& piece, uint8_t* rows) {
  const size_t head_bytes = layout.head_dim * DTypeBytes(layout.dtype);
  const size_t row_bytes = layout.kv_heads * head_bytes;
  for (int head = 0; head < layout.kv_heads; ++head) {
    const uint8_t* from = page + layout.raw_offset(side, head, piece.first);
    uint8_t* to = rows + piece.row * row_bytes + head * head_bytes;
    for (int token = 0; token < piece.tokens; ++token) {
      std::memcpy(to, from, head_bytes);
      from += head_bytes;
      to += row_bytes;
    }
  }
}

// Whether some value of the piece's tokens is NaN or Inf.
bool IsSpoilt(const PageLayout& layout, const uint8_t* page, const Piece& piece) {
  const size_t count = size_t(piece.tokens) * layout.head_dim;
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      const uint8_t* from = page + layout.raw_offset(side, head, piece.first);
      if (FindNonFinite(layout.dtype, from, count) != count) return true;
    }
  }
  return false;
}

// Shared by the promise that waits for it and by its workers, whichever lives longer; made and destroyed on the loop's
// thread.
class ReadCall final : public std::enable_shared_from_this<ReadCall> {
 public:
  ReadCall(const Reads::Parts& parts, const Session& session, const StepCache& cache, const CheckedRead& read,
           std::unique_ptr<AttendLease> lease)
      : parts_(parts),
        codec_(cache.codec),
        workers_(WorkersOf(*cache.codec, parts.workers)),
        owner_(cache.owner),
        layout_(cache.config->layout),
        reader_(ReaderOf(parts.gpus, cache.config->device)),
        read_(read),
        lease_(std::move(lease)) {
    for (const StepTensor* tensor : {&read_.k, &read_.v}) {
      if (tensor->given()) arenas_.push_back(session.FindArena(tensor->arena));
    }
  }

  ~ReadCall() {
    charge_.Keep(std::move(k_));
    charge_.Keep(std::move(v_));
  }

  // For rows that go inline, and their reply.
  uint64_t bytes_to_reserve() const {
    return (uint64_t{!read_.k.given()} + uint64_t{!read_.v.given()}) * SessionMessages::BytesToReserve(read_.bytes);
  }

  // charge: for bytes_to_book().
  kj::Promise<void> Begin(MessageShare::Charge charge) {
    charge_ = std::move(charge);
    status_ = Allocate();
    if (!status_.ok()) return kj::READY_NOW;
    auto waiting = kj::newPromiseAndFulfiller<void>();
    fulfiller_ = kj::mv(waiting.fulfiller);
    lease_->OnReady([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->Run();
    });
    return kj::mv(waiting.promise);
  }

  // Nobody waits any more: what is not begun need not be read.
  void GiveUp() {
    given_up_ = true;
    next_.store(kNone / 2, std::memory_order_relaxed);
  }

  void Fail(absl::Status status) { status_ = std::move(status); }
  const absl::Status& status() const { return status_; }

  // REQUIRES: status() is OK.
  void WriteReply(Session& session, ReadContext& context) {
    auto reply = context.getResults(capnp::MessageSize{kReplyWords, 0}).initReply();
    const auto orphanage = capnp::Orphanage::getForMessageContaining(reply);
    if (!read_.k.given()) reply.adoptK(SessionMessages::DataOf(orphanage, k_));
    if (!read_.v.given()) reply.adoptV(SessionMessages::DataOf(orphanage, v_));
    reply.setEncodedTokens(encoded_tokens_);
    reply.setRawTokens(read_.tokens - encoded_tokens_);
    MessageShare::Lent parts;
    parts.push_back(std::move(k_));
    parts.push_back(std::move(v_));
    session.messages().SendReply(std::move(charge_), std::move(parts));
  }

 private:
  absl::Status Allocate() {
    if (Fails(Failpoint::kReadAllocate)) return absl::ResourceExhaustedError("failpoint read.allocate");
    if (!read_.k.given()) {
      KV_ASSIGN_OR_RETURN(k_, charge_.Make("K that is read", read_.bytes));
    }
    if (!read_.v.given()) {
      KV_ASSIGN_OR_RETURN(v_, charge_.Make("V that is read", read_.bytes));
    }
    return absl::OkStatus();
  }

  // May be called by the lease: it must outlive this.
  void Run() {
    status_ = lease_->status();
    if (!status_.ok()) {
      fulfiller_->fulfill();
      return;
    }
    start_ns_ = parts_.clock->NowNs();
    unanswered_ = UnansweredBy(*codec_);
    Plan();
    if (reader_ != nullptr) return StageNext();
    end_ = pieces_.size();
    RunPieces();
  }

  // The pieces up to end_, on the workers.
  void RunPieces() {
    self_ = shared_from_this();
    // Who takes part decides when the last is done, so the count comes first.
    const int tasks = static_cast<int>(std::min<size_t>(workers_->threads(), end_ - staged_));
    tasks_left_ = tasks;
    for (int task = 0; task < tasks; ++task) PostTurn();
  }

  // Pages of a GPU come to the host some at a time; nullptr as their bytes: the GPU has failed.
  void StageNext() {
    staged_ = end_;
    uint64_t bytes = 0;
    std::vector<absl::Span<const uint8_t>> ranges;
    for (; end_ < pieces_.size(); ++end_) {
      const Piece& piece = pieces_[end_];
      if (bytes > 0 && bytes + StagedBytes(piece) > kStagedBytesMax) break;
      bytes += StagedBytes(piece);
      ranges.push_back({piece.raw != nullptr ? piece.raw : piece.encoded, StagedBytes(piece)});
    }
    // This object owns the pages until they came.
    const bool reads = reader_->Read(ranges, [this, self = shared_from_this()](std::shared_ptr<const uint8_t> copies) {
      copies_ = std::move(copies);
      if (given_up_ || copies_ == nullptr) return Finish();
      const uint8_t* at = copies_.get();
      for (size_t i = staged_; i < end_; ++i) {
        Piece& piece = pieces_[i];
        (piece.raw != nullptr ? piece.raw : piece.encoded) = at;
        at += StagedBytes(piece);
      }
      next_.store(staged_, std::memory_order_relaxed);
      RunPieces();
    });
    if (reads) return;
    end_ = staged_;
    if (!reader_->MayRead(bytes)) return Finish();
    // Others read, too.
    parts_.polls->Add([self = shared_from_this()] {
      if (!self->given_up_) self->StageNext();
      return true;
    });
  }

  const Codec& CodecOf(const Piece& piece) const { return codec_->rung(piece.rung); }
  size_t EncodedBytes(const Piece& piece) const { return CodecOf(piece).info().page_bytes(read_.layer); }
  uint64_t StagedBytes(const Piece& piece) const {
    return DeviceReader::Aligned(piece.raw != nullptr ? layout_.raw_bytes() : EncodedBytes(piece));
  }

  void Plan() {
    const uint64_t page_tokens = layout_.page_tokens;
    const bool identity = codec_->info().identity;
    uint64_t row = 0;
    for (uint32_t i = 0; i < read_.entries.size(); ++i) {
      const AttendEntry& entry = read_.entries[i];
      const uint64_t end = entry.position + entry.tokens;
      const absl::Span<const AttentionPage> pages = lease_->pages(i);
      for (uint64_t begin = entry.position, page = 0; begin < end; ++page) {
        const uint64_t next = std::min(end, (begin / page_tokens + 1) * page_tokens);
        Piece piece{.entry = i, .first = int(begin % page_tokens), .tokens = int(next - begin), .row = row};
        // Of an identity codec both forms are the raw one.
        piece.raw = pages[page].raw != nullptr ? pages[page].raw : identity ? pages[page].encoded : nullptr;
        if (piece.raw == nullptr) {
          piece.encoded = pages[page].encoded;
          piece.rung = pages[page].rung;
          encoded_tokens_ += piece.tokens;
        }
        KV_CHECK(piece.raw != nullptr || piece.encoded != nullptr);
        pieces_.push_back(piece);
        row += piece.tokens;
        begin = next;
      }
    }
  }

  // Workers hold no reference, so that none of them is the last: self_ goes back to the loop with the last one's
  // message.
  void PostTurn() {
    workers_->Post(
        WorkerPool::Priority::kAttend, [this] { RunTurn(); }, owner_);
  }

  void RunTurn() {
    AlignedBuffer scratch;
    const Turn turn = workers_->NewTurn();
    do {
      const size_t at = next_.fetch_add(1, std::memory_order_relaxed);
      if (at >= end_) {
        if (tasks_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        parts_.queue->Post([self = std::move(self_)] { self->PiecesEnded(); });
        return;
      }
      ReadPiece(at, &scratch);
    } while (!turn.over());
    PostTurn();
  }

  void ReadPiece(size_t at, AlignedBuffer* scratch) {
    const Piece& piece = pieces_[at];
    const uint8_t* page = piece.raw;
    // An engine that maps a GPU's pages may have written anything there.
    if (reader_ != nullptr &&
        (page != nullptr ? IsSpoilt(layout_, page, piece)
                         : !CodecOf(piece).Validate(read_.layer, {piece.encoded, EncodedBytes(piece)}).ok())) {
      return Spoilt(at);
    }
    if (page == nullptr) {
      if (scratch->size() == 0) *scratch = AlignedBuffer(layout_.raw_bytes());
      const DecodeItem item{piece.encoded, scratch->data(), static_cast<uint32_t>(read_.layer)};
      CodecOf(piece).Decode(absl::MakeConstSpan(&item, 1));
      page = scratch->data();
      // Raw pages were looked at as they were appended. A codec that fails to decode says so by NaN.
      if (IsSpoilt(layout_, page, piece)) return Spoilt(at);
    }
    CopyRows(layout_, page, 0, piece, read_.k.given() ? read_.k.bytes.data() : k_.data());
    CopyRows(layout_, page, 1, piece, read_.v.given() ? read_.v.bytes.data() : v_.data());
  }

  void Spoilt(size_t at) {
    size_t first = spoilt_.load(std::memory_order_relaxed);
    while (at < first && !spoilt_.compare_exchange_weak(first, at, std::memory_order_relaxed)) {
    }
  }

  void PiecesEnded() {
    if (end_ == pieces_.size() || given_up_ || spoilt_.load() != kNone) return Finish();
    copies_ = nullptr;
    StageNext();
  }

  void Finish() {
    const bool failed = reader_ != nullptr && copies_ == nullptr;
    copies_ = nullptr;
    if (!fulfiller_->isWaiting()) return;
    if (failed) {
      status_ = absl::UnavailableError("the GPU has failed, or its pages are too large to be brought to the host");
    } else if (UnansweredBy(*codec_) != unanswered_) {
      status_ = absl::UnavailableError(absl::StrCat("the process of codec ", codec_->info().name,
                                                    ", a plug-in, did not answer, and is started again: read again"));
    } else if (const size_t at = spoilt_.load(); at != kNone) {
      const Piece& piece = pieces_[at];
      const AttendEntry& entry = read_.entries[piece.entry];
      const uint64_t page = (entry.position + (piece.row - RowOf(piece.entry))) / layout_.page_tokens;
      status_ = FieldError(absl::StatusCode::kDataLoss, absl::StrCat("entries[", piece.entry, "]"),
                           absl::StrCat("page ", page, " of sequence ", entry.sequence, " that decodes to NaN or Inf"),
                           "pages that their codec can decode: compute these tokens anew");
    } else {
      parts_.metrics->seconds.Observe(double(parts_.clock->NowNs() - start_ns_) * 1e-9);
      parts_.metrics->encoded_tokens.Increment(double(encoded_tokens_));
      parts_.metrics->raw_tokens.Increment(double(read_.tokens - encoded_tokens_));
    }
    fulfiller_->fulfill();
  }

  uint64_t RowOf(uint32_t entry) const {
    uint64_t row = 0;
    for (uint32_t i = 0; i < entry; ++i) row += read_.entries[i].tokens;
    return row;
  }

  static constexpr size_t kNone = SIZE_MAX;

  const Reads::Parts& parts_;
  const std::shared_ptr<const Codec> codec_;
  WorkerPool* const workers_;  // the codec's
  const WorkerPool::Owner owner_;
  const PageLayout layout_;
  DeviceReader* const reader_;  // nullptr: pages are in host memory
  const CheckedRead read_;
  std::unique_ptr<AttendLease> lease_;
  absl::InlinedVector<std::shared_ptr<Region>, 2> arenas_;  // that it writes to
  MessageShare::Charge charge_;                             // for inline rows
  ReplyBuffer k_, v_;                                       // inline rows
  std::vector<Piece> pieces_;
  uint64_t encoded_tokens_ = 0;
  int64_t start_ns_ = 0;
  uint64_t unanswered_ = 0;                // by the codec, before it began
  size_t staged_ = 0, end_ = 0;            // pieces that workers are at; all of host memory at once
  std::shared_ptr<const uint8_t> copies_;  // of a GPU's pages of these
  bool given_up_ = false;
  std::shared_ptr<ReadCall> self_;  // while workers use it
  std::atomic<size_t> next_{0};
  std::atomic<int> tasks_left_{0};
  std::atomic<size_t> spoilt_{kNone};  // the first piece that did not decode
  absl::Status status_;
  kj::Own<kj::PromiseFulfiller<void>> fulfiller_;
};

}  // namespace

absl::StatusOr<kj::Promise<void>> Reads::Run(const std::shared_ptr<Session>& session, const BoundCache& bound,
                                             const CheckedRead& read, ReadContext& context) const {
  const StepCache& cache = bound.cache;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<AttendLease> lease, parts_.store->Load(cache.id, read.layer, read.entries));
  auto call = std::make_shared<ReadCall>(parts_, *session, cache, read, std::move(lease));
  KV_ASSIGN_OR_RETURN(kj::Promise<MessageShare::Charge> room,
                      session->messages().ReserveReply(call->bytes_to_reserve()));
  context.releaseParams();
  // The pages are pinned as they are now; what kernels append to them comes first.
  absl::flat_hash_set<SequenceId> sequences;
  for (const AttendEntry& entry : read.entries) sequences.insert(entry.sequence);
  auto written = kj::heapArrayBuilder<kj::Promise<absl::Status>>(sequences.size());
  for (const SequenceId sequence : sequences) written.add(bound.calls->WhenAllWritten(session, cache, sequence));
  kj::Promise<void> ran =
      kj::joinPromises(written.finish())
          .then([call, room = kj::mv(room)](kj::Array<absl::Status> results) mutable -> kj::Promise<void> {
            for (const absl::Status& status : results) {
              if (status.ok()) continue;
              call->Fail(status);
              return kj::READY_NOW;
            }
            return room.then([call](MessageShare::Charge charge) { return call->Begin(std::move(charge)); });
          });
  ran = ran.attach(kj::defer([call] { call->GiveUp(); }));
  return ran.then([call, context, session]() mutable {
    if (call->status().ok()) return call->WriteReply(*session, context);
    ServeError(*session, Method::kRead, call->status(), context);
  });
}

}  // namespace kvmanager
