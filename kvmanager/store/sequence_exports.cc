#include "kvmanager/store/sequence_exports.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/exported_sequence.h"
#include "kvmanager/store/host_export.h"
#include "kvmanager/store/memory_backend.h"

namespace kvmanager {
namespace {

// Lists a hand-off, and takes room in the host for one that goes by way of it.
class Beginning final : public ExportBeginning {
 public:
  /// host: nullptr: directly.
  Beginning(std::weak_ptr<const bool> alive, std::unique_ptr<ExportedSequence> sent, std::shared_ptr<HostExport> host)
      : alive_(std::move(alive)), sent_(std::move(sent)), host_(std::move(host)) {}

  Next DoPiece() override {
    if (status_.ok() && alive_.expired()) status_ = absl::UnavailableError("the store has closed");
    if (!status_.ok()) return Next::kDone;
    const absl::StatusOr<bool> more = sent_ != nullptr ? sent_->ListNext() : host_->ReserveNext();
    status_ = more.status();
    if (!status_.ok()) return Next::kDone;
    if (*more) return Next::kPiece;
    if (host_ == nullptr || sent_ == nullptr) return Next::kDone;
    host_->Take(std::move(sent_));
    return Next::kPiece;
  }
  bool CompareOne() override { return false; }
  absl::StatusOr<std::unique_ptr<ExportLease>> Commit() override {
    KV_RETURN_IF_ERROR(status_);
    if (alive_.expired()) return absl::UnavailableError("the store has closed");
    if (host_ != nullptr) return HostExport::Start(std::move(host_));
    return std::move(sent_);
  }

 private:
  const std::weak_ptr<const bool> alive_;
  std::unique_ptr<ExportedSequence> sent_;  // nullptr: host_ has it
  std::shared_ptr<HostExport> host_;        // shared: see there
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ExportBeginning>> SequenceExports::BeginWhole(SequenceId id,
                                                                             const ExportOptions& options) {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts_.sequences->FindWhole(id));
  if (!sequence->index_places.empty()) return sequence->cache->IndexStaysHere();
  KV_RETURN_IF_ERROR(sequence->cache->LadderStaysHere());
  const uint64_t longest = *std::max_element(sequence->tokens.begin(), sequence->tokens.end());
  ExportOptions direct = options;
  direct.way = ExportWay::kDirect;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ExportedSequence> sent, Begin(*sequence, longest, direct, /*written=*/true));
  KV_RETURN_IF_ERROR(sent->Complete());
  return std::make_unique<Beginning>(parts_.alive, std::move(sent), nullptr);
}

absl::StatusOr<std::unique_ptr<ExportBeginning>> SequenceExports::BeginGrowing(SequenceId id, uint64_t tokens,
                                                                               const ExportOptions& options) {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts_.sequences->FindWhole(id));
  const std::shared_ptr<Cache> cache = sequence->cache;
  const bool direct = options.way == ExportWay::kDirect;
  if (direct && !sequence->index_places.empty()) return cache->IndexStaysHere();
  KV_RETURN_IF_ERROR(cache->LadderStaysHere());
  const bool written = cache->tier->memory().writes_at_once();
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ExportedSequence> sent, Begin(*sequence, tokens, options, written));
  std::shared_ptr<HostExport> host;
  if (!direct) {
    KV_ASSIGN_OR_RETURN(host, HostExport::Make(this, cache));
  }
  return std::make_unique<Beginning>(parts_.alive, std::move(sent), std::move(host));
}

absl::StatusOr<std::unique_ptr<ExportedSequence>> SequenceExports::Begin(const Sequence& sequence, uint64_t tokens,
                                                                         const ExportOptions& options, bool written) {
  const std::shared_ptr<Cache> cache = sequence.cache;
  const uint64_t longest = *std::max_element(sequence.tokens.begin(), sequence.tokens.end());
  const uint64_t tokens_max = kSequenceBlocksMax * cache->page_tokens();
  if (tokens < longest || tokens > tokens_max) {
    return InvalidField(
        "tokens", tokens,
        absl::StrCat(longest, "..", tokens_max, ": what sequence ", sequence.id, " has, and a sequence's limit"));
  }
  // Before they are listed.
  const uint64_t pages = (tokens + cache->page_tokens() - 1) / cache->page_tokens() * cache->layers();
  if (pages > kHandOffPagesMax) {
    return InvalidField("tokens", tokens,
                        absl::StrCat("what has at most ", kHandOffPagesMax, " pages, of a block one in each of ",
                                     cache->layers(), " layers"));
  }
  KV_RETURN_IF_ERROR(CheckRoom(cache->payer, pages));
  pages_.Add(cache->payer, pages);
  return std::make_unique<ExportedSequence>(this, sequence.id, tokens, options, written, pages);
}

// A client could begin and end hand-offs faster than what they hold is given back.
absl::Status SequenceExports::CheckRoom(PayerId payer, uint64_t pages) const {
  const struct {
    const char* whose;
    uint64_t has, max;
  } bounds[] = {{kOfTenant, pages_.Of(payer), kTenantSentPagesMax}, {"", pages_.all(), kSentPagesMax}};
  for (const auto& [whose, has, max] : bounds) {
    if (has + pages <= max) continue;
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("pages of hand-offs being sent", whose),
                      absl::StrCat(has, " and ", pages, " more"), absl::StrCat("at most ", max));
  }
  return absl::OkStatus();
}

bool SequenceExports::AwaitsWrites(SequenceId sequence) const {
  return std::any_of(parts_.encodes->followers().begin(), parts_.encodes->followers().end(),
                     [sequence](const PageFollower* follower) { return follower->AwaitsWrites(sequence); });
}

void SequenceExports::Written(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) {
  for (PageFollower* follower : parts_.encodes->followers()) follower->OnWritten(sequence, first_layer, tokens);
  parts_.encodes->TellFollowers();
}

void SequenceExports::GiveBack(ExportHolds holds) {
  if (!holds.GiveBackSome(parts_.blocks, kPagesAtOnce)) return Closed(holds);
  left_.push_back(std::move(holds));
  on_leftovers_();
}

bool SequenceExports::ReleaseSome() {
  if (left_.empty()) return false;
  // Room that comes may be taken at once, by somebody who looks for more here.
  ExportHolds holds = std::move(left_.front());
  left_.pop_front();
  if (holds.GiveBackSome(parts_.blocks, kPagesAtOnce)) {
    left_.push_front(std::move(holds));
  } else {
    Closed(holds);
  }
  return !left_.empty();
}

void SequenceExports::Closed(const ExportHolds& holds) {
  pages_.Remove(holds.cache->payer, holds.counted);
  --holds.cache->leases;
  if (!holds.cache->wanted) parts_.caches->CloseIfUnused(holds.cache);
}

void SequenceExports::Later(ExportWork* work) {
  KV_CHECK(std::find(work_.begin(), work_.end(), work) == work_.end());
  work_.push_back(work);
  on_leftovers_();
}

void SequenceExports::Forget(ExportWork* work) { std::erase(work_, work); }

bool SequenceExports::GoOnSome() {
  if (work_.empty()) return false;
  ExportWork* const work = work_.front();
  work_.pop_front();
  if (work->DoSome()) work_.push_back(work);
  work->Tell();
  return !work_.empty();
}

}  // namespace kvmanager
