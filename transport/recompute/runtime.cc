#include "transport/recompute/runtime.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

/// Of a chunk after a smaller first one: its activations arrive while the one before is projected, if their time on the
/// link is at most 5/7 of that of their projections, as it is where both take as long as they can.
constexpr int kGrowth = 7, kGrowthOf = 5;

int64_t PageCount(int64_t tokens, int64_t page_tokens) { return (tokens + page_tokens - 1) / page_tokens; }

absl::Status CheckPointers(const std::string& field, absl::Span<const uint8_t* const> pointers, int64_t want) {
  if (int64_t(pointers.size()) != want) {
    return InvalidField(absl::StrCat(field, ".size"), pointers.size(), absl::StrCat(want));
  }
  for (size_t i = 0; i < pointers.size(); ++i) {
    if (pointers[i] == nullptr) return InvalidField(absl::StrCat(field, "[", i, "]"), "null", "a page");
  }
  return absl::OkStatus();
}

absl::Status CheckSequence(const std::string& field, const ReloadSequence& s, int64_t page_tokens) {
  if (s.tokens < 1 || s.tokens > ReloadSequence::kTokensMax) {
    return InvalidField(field + ".tokens", s.tokens, absl::StrCat("1..", ReloadSequence::kTokensMax));
  }
  if (s.split_tokens < 0 || s.split_tokens > s.tokens ||
      (s.split_tokens % page_tokens != 0 && s.split_tokens != s.tokens)) {
    return InvalidField(field + ".split_tokens", s.split_tokens,
                        absl::StrCat("a multiple of ", page_tokens, " up to ", s.tokens, ", or that"));
  }
  if (s.first_position < 0 || s.first_position > RopeFacts::kPositionMax - s.tokens) {
    return InvalidField(field + ".first_position", s.first_position,
                        absl::StrCat("0..", RopeFacts::kPositionMax - s.tokens));
  }
  const int64_t pages = PageCount(s.tokens, page_tokens), recomputed = PageCount(s.split_tokens, page_tokens);
  KV_RETURN_IF_ERROR(CheckPointers(field + ".activations", s.activations, recomputed));
  KV_RETURN_IF_ERROR(CheckPointers(field + ".pages", s.pages, pages));
  return CheckPointers(field + ".sources", s.sources, pages - recomputed);
}

}  // namespace

int64_t SplitOfSequence(int64_t batch_split, int64_t batch, int64_t tokens, int64_t page_tokens, int64_t i) {
  if (batch_split >= batch * tokens) return tokens;
  const int64_t pages = batch_split / page_tokens;
  return std::min(tokens, (pages / batch + (i < pages % batch ? 1 : 0)) * page_tokens);
}

absl::Status ReloadRuntime::Check(const ReloadRequest& request) const {
  const ProjectionModel& model = executor_->model();
  if (request.layer < 0 || request.layer >= model.layers) {
    return InvalidField("layer", request.layer, absl::StrCat("0..", model.layers - 1));
  }
  if (request.kv_page_bytes < 1 || request.kv_page_bytes > ReloadRequest::kPageBytesMax) {
    return InvalidField("kv_page_bytes", request.kv_page_bytes, absl::StrCat("1..", ReloadRequest::kPageBytesMax));
  }
  if (request.sequences.empty() || request.sequences.size() > ReloadRequest::kSequencesMax) {
    return InvalidField("sequences.size", request.sequences.size(), absl::StrCat("1..", ReloadRequest::kSequencesMax));
  }
  bool recomputes = false;
  for (size_t i = 0; i < request.sequences.size(); ++i) {
    const ReloadSequence& sequence = request.sequences[i];
    KV_RETURN_IF_ERROR(CheckSequence(absl::StrCat("sequences[", i, "]"), sequence, model.layout.page_tokens));
    recomputes |= sequence.split_tokens > 0;
  }
  if (recomputes && !executor_->HasWeights(request.layer)) {
    return absl::FailedPreconditionError(absl::StrCat("layer ", request.layer, " has no weights registered"));
  }
  return absl::OkStatus();
}

void ReloadRuntime::Cut(const ReloadRequest& request) {
  const ProjectionModel& model = executor_->model();
  const int64_t page_tokens = model.layout.page_tokens;
  const size_t row_bytes = size_t(model.hidden) * DTypeBytes(model.layout.dtype);
  activations_.clear(), pages_.clear(), copies_.clear(), chunks_.clear(), pieces_.clear();
  const size_t piece_bytes = executor_->kv_piece_bytes();
  int64_t chunk_rows = 0, chunk_rows_max = executor_->first_chunk_rows();
  size_t bytes = 0;
  for (const ReloadSequence& s : request.sequences) {
    const int64_t recomputed = int64_t(s.activations.size());
    for (int64_t p = 0; p < recomputed; ++p) {
      const int tokens = int(std::min(page_tokens, s.split_tokens - p * page_tokens));
      if (chunks_.empty() || chunk_rows + tokens > chunk_rows_max) {
        if (!chunks_.empty()) {
          chunk_rows_max = std::min<int64_t>(executor_->chunk_rows(), chunk_rows_max * kGrowth / kGrowthOf);
        }
        chunks_.push_back({activations_.size(), 0});
        chunk_rows = 0;
      }
      activations_.push_back({s.activations[p], tokens * row_bytes});
      pages_.push_back({s.pages[p], tokens, s.first_position + p * page_tokens});
      chunk_rows += tokens;
      ++chunks_.back().count;
    }
    for (size_t i = 0; i < s.sources.size(); ++i) {
      for (size_t begin = 0; begin < request.kv_page_bytes;) {
        if (pieces_.empty() || bytes == piece_bytes) {
          pieces_.push_back({copies_.size(), 0});
          bytes = 0;
        }
        const size_t part = std::min(piece_bytes - bytes, request.kv_page_bytes - begin);
        copies_.push_back({s.sources[i] + begin, s.pages[recomputed + i] + begin, part});
        begin += part;
        bytes += part;
        ++pieces_.back().count;
      }
    }
  }
}

absl::StatusOr<ReloadReport> ReloadRuntime::Run(const ReloadRequest& request) {
  KV_RETURN_IF_ERROR(Check(request));
  Cut(request);
  ReloadReport report;
  for (const ActivationRows& rows : activations_) report.activation_bytes += int64_t(rows.bytes);
  for (const CopyPiece& piece : copies_) report.kv_bytes += int64_t(piece.bytes);
  for (const PageRows& page : pages_) {
    report.flops += 4.0 * page.tokens * executor_->model().hidden * executor_->model().width();
  }

  using What = ReloadExecutor::Done::What;
  const int64_t begin_ns = clock_->NowNs();
  executor_->Begin(request.cancelled);
  std::vector<int> free_buffers;
  for (int b = executor_->buffers(); b-- > 0;) free_buffers.push_back(b);
  size_t next_chunk = 0, next_piece = 0;
  int copies = 0, projections = 0;
  absl::Status error;
  while (true) {
    while (error.ok() && copies < kCopiesInFlight) {
      if (next_chunk < chunks_.size() && !free_buffers.empty()) {
        const Range chunk = chunks_[next_chunk++];
        const int buffer = free_buffers.back();
        free_buffers.pop_back();
        executor_->PostActivations(buffer, absl::MakeConstSpan(activations_).subspan(chunk.begin, chunk.count));
        executor_->PostProjection(buffer, request.layer, absl::MakeConstSpan(pages_).subspan(chunk.begin, chunk.count));
        ++projections;
      } else if (next_piece < pieces_.size()) {
        const Range piece = pieces_[next_piece++];
        executor_->PostKv(absl::MakeConstSpan(copies_).subspan(piece.begin, piece.count));
      } else {
        break;
      }
      ++copies;
    }
    if (copies + projections == 0) break;
    ReloadExecutor::Done done = executor_->Wait();
    if (done.what == What::kProjection) {
      --projections;
      report.compute_ns += done.elapsed_ns;
      free_buffers.push_back(done.buffer);
    } else {
      --copies;
      report.link_ns += done.elapsed_ns;
    }
    if (!done.status.ok() && error.ok()) {
      error = std::move(done.status);
      executor_->Abort();
    }
  }
  if (!error.ok()) return error;
  report.elapsed_ns = clock_->NowNs() - begin_ns;
  if (profile_ != nullptr) {
    profile_->RecordCopy(report.activation_bytes + report.kv_bytes, report.link_ns);
    profile_->RecordProjection({executor_->model().hidden, executor_->model().width()}, report.flops,
                               report.compute_ns);
  }
  return report;
}

absl::Status ReloadRuntime::Measure(const ReloadRequest& request) {
  for (const bool recompute : {false, true}) {
    std::vector<ReloadSequence> sequences(request.sequences.begin(), request.sequences.end());
    for (ReloadSequence& s : sequences) {
      s.split_tokens = recompute ? s.tokens : 0;
      (recompute ? s.sources : s.activations) = {};
    }
    ReloadRequest one = request;
    one.sequences = sequences;
    KV_RETURN_IF_ERROR(Run(one).status());
  }
  return absl::OkStatus();
}

}  // namespace kvmanager::recompute
