#include "kvmanager/rpc/step_check.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {
namespace {

std::string EntryField(uint32_t entry, absl::string_view name) { return absl::StrCat("entries[", entry, "].", name); }

uint64_t MultiplyAddsMax(absl::Span<const AttendEntry> entries, uint64_t work_per_pair) {
  uint64_t pairs = 0;  // at most 2^58 for all entries
  for (const AttendEntry& entry : entries) {
    const uint64_t tokens = static_cast<uint64_t>(entry.tokens);
    pairs += tokens * (entry.position + tokens);
  }
  return pairs > UINT64_MAX / work_per_pair ? UINT64_MAX : pairs * work_per_pair;
}

// A query that is not finite: element `at` of q.
absl::Status NonFiniteQuery(const CheckedStep& step, const CacheConfig& config, size_t at) {
  const size_t head_dim = config.layout.head_dim, row = size_t(config.query_heads) * head_dim;
  size_t entry = 0, token = at / row;
  for (; token >= static_cast<size_t>(step.entries[entry].tokens); ++entry) token -= step.entries[entry].tokens;
  return InvalidField(absl::StrCat("entries[", entry, "].q[token ", token, "][head ", at % row / head_dim, "][channel ",
                                   at % head_dim, "]"),
                      "NaN or Inf", "finite");
}

absl::Status OnlyArena(absl::string_view field, const StepTensor& tensor) {
  if (tensor.where != StepTensor::Where::kInline) return absl::OkStatus();
  return InvalidField(field, "inline", "an arena range, or none");
}

// Of a cache on a GPU.
absl::Status CheckOnDevice(const CheckedStep& step, const CacheConfig& config) {
  KV_RETURN_IF_ERROR(OnlyArena("k", step.k));
  KV_RETURN_IF_ERROR(OnlyArena("v", step.v));
  KV_RETURN_IF_ERROR(OnlyArena("q", step.q));
  if (!step.attend()) return absl::OkStatus();
  if (!step.out.given()) return InvalidField("out", "none", "a range of a device arena where q is one");
  if (step.lse_inline)
    return InvalidField("wantLse", "true", "false on a GPU: lse is a range of a device arena, or none");
  if (step.q_dtype != config.layout.dtype) {
    return InvalidField("qDtype", static_cast<int>(step.q_dtype),
                        absl::StrCat(static_cast<int>(config.layout.dtype), ", the cache's, on a GPU"));
  }
  if (step.scale != 0) return InvalidField("scale", step.scale, "0 on a GPU");
  return absl::OkStatus();
}

// What only one kind of memory can do.
absl::Status CheckForMemory(const CheckedStep& step, const CacheConfig& config) {
  if (config.device == CacheConfig::kHost) {
    return step.attend() && !step.queries_unchecked ? CheckQueries(step, config, step.q.bytes) : absl::OkStatus();
  }
  if (step.x.given()) return InvalidField("x", "given", "none: activations are kept in host memory only");
  return CheckOnDevice(step, config);
}

}  // namespace

absl::Status CheckQueries(const CheckedStep& step, const CacheConfig& config, absl::Span<const uint8_t> part) {
  const size_t bytes = DTypeBytes(step.q_dtype), count = part.size() / bytes;
  const size_t at = FindNonFinite(step.q_dtype, part.data(), count);
  if (at == count) return absl::OkStatus();
  return NonFiniteQuery(step, config, size_t(part.data() - step.q.bytes.data()) / bytes + at);
}

absl::StatusOr<CheckedQueryRows> CheckQueryRows(const CacheConfig& config, capnp::List<api::QueryRow>::Reader in) {
  if (in.size() > limits::kQueryRowsMax) {
    return InvalidField("queries", absl::StrCat(in.size(), " long"), absl::StrCat("at most ", limits::kQueryRowsMax));
  }
  const size_t row_bytes = size_t(config.query_heads) * config.layout.head_dim * DTypeBytes(config.layout.dtype);
  CheckedQueryRows rows;
  for (uint32_t i = 0; i < in.size(); ++i) {
    const uint32_t layer = in[i].getLayer();
    const capnp::Data::Reader q = in[i].getQ();
    if (layer >= static_cast<uint32_t>(config.layers)) {
      return InvalidField(absl::StrCat("queries[", i, "].layer"), layer, absl::StrCat("below ", config.layers));
    }
    if (q.size() != row_bytes) {
      return InvalidField(absl::StrCat("queries[", i, "].q"), absl::StrCat(q.size(), " bytes long"),
                          absl::StrCat(row_bytes, " bytes long, as the cache's shape says"));
    }
    rows.push_back({static_cast<int>(layer), {q.begin(), q.size()}});
  }
  return rows;
}

absl::StatusOr<StepTensor> CheckTensor(absl::string_view field, api::Tensor::Reader in, uint64_t want,
                                       absl::FunctionRef<absl::Span<uint8_t>(uint32_t)> arena) {
  StepTensor tensor;
  switch (in.which()) {
    case api::Tensor::NONE:
      return tensor;
    case api::Tensor::INLINE: {
      const capnp::Data::Reader data = in.getInline();
      if (data.size() != want) {
        return InvalidField(absl::StrCat(field, ".inline"), absl::StrCat(data.size(), " bytes long"),
                            absl::StrCat(want, " bytes long, as its shape says"));
      }
      tensor.where = StepTensor::Where::kInline;
      tensor.bytes = {const_cast<uint8_t*>(data.begin()), data.size()};
      return tensor;
    }
    case api::Tensor::ARENA: {
      const auto range = in.getArena();
      const absl::Span<uint8_t> memory = arena(range.getId());
      if (memory.empty()) {
        return FieldError(absl::StatusCode::kNotFound, absl::StrCat(field, ".arena.id"), absl::StrCat(range.getId()),
                          "an arena of this connection");
      }
      if (range.getBytes() != want) {
        return InvalidField(absl::StrCat(field, ".arena.bytes"), range.getBytes(),
                            absl::StrCat(want, ", as its shape says"));
      }
      if (range.getOffset() % limits::kTensorAlign != 0) {
        return InvalidField(absl::StrCat(field, ".arena.offset"), range.getOffset(),
                            absl::StrCat("a multiple of ", limits::kTensorAlign));
      }
      if (want > memory.size() || range.getOffset() > memory.size() - want) {
        return InvalidField(absl::StrCat(field, ".arena.offset"), range.getOffset(),
                            absl::StrCat("such that ", want, " bytes fit the arena's ", memory.size()));
      }
      tensor.where = StepTensor::Where::kArena;
      tensor.arena = range.getId();
      tensor.bytes = memory.subspan(range.getOffset(), want);
      return tensor;
    }
  }
  return InvalidField(field, absl::StrCat("of kind ", static_cast<int>(in.which())), "none, inline or arena");
}

absl::StatusOr<uint64_t> CheckStepEntries(capnp::List<api::StepEntry>::Reader in,
                                          absl::FunctionRef<bool(SequenceId)> owned,
                                          absl::InlinedVector<AttendEntry, 4>* entries) {
  if (in.size() == 0 || in.size() > limits::kStepEntriesMax) {
    return InvalidField("entries", absl::StrCat(in.size(), " long"),
                        absl::StrCat("1..", limits::kStepEntriesMax, " long"));
  }
  entries->resize(in.size());
  uint64_t tokens = 0;
  for (uint32_t i = 0; i < in.size(); ++i) {
    AttendEntry& entry = (*entries)[i];
    entry.sequence = in[i].getSequenceId();
    entry.position = in[i].getPosition();
    if (!owned(entry.sequence)) {
      return FieldError(absl::StatusCode::kNotFound, EntryField(i, "sequenceId"), absl::StrCat(entry.sequence),
                        "a sequence of this cache that this connection holds");
    }
    if (entry.position > limits::kPositionMax) {
      return InvalidField(EntryField(i, "position"), entry.position, absl::StrCat("at most ", limits::kPositionMax));
    }
    const uint64_t left = limits::kStepTokensMax - tokens;
    if (in[i].getTokens() == 0 || in[i].getTokens() > left) {
      return InvalidField(EntryField(i, "tokens"), in[i].getTokens(),
                          absl::StrCat("1..", left, " (", limits::kStepTokensMax, " in all entries)"));
    }
    entry.tokens = static_cast<int>(in[i].getTokens());
    tokens += in[i].getTokens();
  }
  return tokens;
}

absl::StatusOr<CheckedStep> CheckStep(const CacheConfig& config, api::StepRequest::Reader request,
                                      absl::FunctionRef<absl::Span<uint8_t>(uint32_t id)> arena,
                                      absl::FunctionRef<bool(SequenceId)> owned) {
  CheckedStep step;
  if (request.getLayer() >= static_cast<uint32_t>(config.layers)) {
    return InvalidField("layer", request.getLayer(), absl::StrCat("0..", config.layers - 1));
  }
  step.layer = static_cast<int>(request.getLayer());
  step.scale = request.getScale();
  if (!std::isfinite(step.scale) || step.scale < 0)
    return InvalidField("scale", step.scale, "0, or finite and above 0");
  KV_ASSIGN_OR_RETURN(step.q_dtype, ReadDType("qDtype", request.getQDtype()));
  const uint64_t query_channels = uint64_t(config.query_heads) * config.layout.head_dim;
  KV_ASSIGN_OR_RETURN(step.tokens, CheckStepEntries(request.getEntries(), owned, &step.entries));
  step.multiply_adds_max = MultiplyAddsMax(step.entries, 2 * query_channels);

  const uint64_t kv_bytes =
      step.tokens * config.layout.kv_heads * config.layout.head_dim * DTypeBytes(config.layout.dtype);
  const uint64_t q_bytes = step.tokens * query_channels * DTypeBytes(step.q_dtype);
  const uint64_t lse_bytes = step.tokens * config.query_heads * sizeof(float);
  KV_ASSIGN_OR_RETURN(step.k, CheckTensor("k", request.getK(), kv_bytes, arena));
  KV_ASSIGN_OR_RETURN(step.v, CheckTensor("v", request.getV(), kv_bytes, arena));
  const uint64_t x_bytes = step.tokens * config.hidden * DTypeBytes(config.layout.dtype);
  if (config.hidden > 0 || request.getX().which() == api::Tensor::NONE) {
    KV_ASSIGN_OR_RETURN(step.x, CheckTensor("x", request.getX(), x_bytes, arena));
  } else {
    return InvalidField("x", "given", "none: this cache has no hiddenSize");
  }
  KV_ASSIGN_OR_RETURN(step.q, CheckTensor("q", request.getQ(), q_bytes, arena));
  KV_ASSIGN_OR_RETURN(step.out, CheckTensor("out", request.getOut(), q_bytes, arena));
  KV_ASSIGN_OR_RETURN(step.lse, CheckTensor("lse", request.getLse(), lse_bytes, arena));
  if (step.k.given() != step.v.given()) {
    return InvalidField(step.k.given() ? "v" : "k", "none", absl::StrCat("given with ", step.k.given() ? "k" : "v"));
  }
  if (step.x.given() && !step.append()) return InvalidField("x", "given", "none where k and v are none");
  if (!step.append() && !step.attend()) return InvalidField("q", "none", "given where k and v are not");
  KV_RETURN_IF_ERROR(OnlyArena("out", step.out));
  KV_RETURN_IF_ERROR(OnlyArena("lse", step.lse));
  if (!step.attend()) {
    if (step.out.given()) return InvalidField("out", "an arena range", "none where q is none");
    if (step.lse.given() || request.getWantLse()) return InvalidField("lse", "wanted", "none where q is none");
    KV_RETURN_IF_ERROR(CheckForMemory(step, config));
    return step;
  }
  step.queries_unchecked = q_bytes > kQueryBytesAtOnceMax;
  step.lse_inline = !step.lse.given() && request.getWantLse();
  step.out_bytes = q_bytes;
  step.lse_bytes = step.lse.given() || step.lse_inline ? lse_bytes : 0;
  const uint64_t reply_bytes = (step.out.given() ? 0 : step.out_bytes) + (step.lse_inline ? step.lse_bytes : 0);
  if (reply_bytes > limits::kReplyBytesMax) {
    return InvalidField("out", absl::StrCat("inline with ", reply_bytes, " bytes"),
                        absl::StrCat("at most ", limits::kReplyBytesMax, " bytes, or an arena range"));
  }
  KV_RETURN_IF_ERROR(CheckForMemory(step, config));
  return step;
}

absl::StatusOr<CheckedRead> CheckRead(const CacheConfig& config, api::ReadRequest::Reader request,
                                      absl::FunctionRef<absl::Span<uint8_t>(uint32_t id)> arena,
                                      absl::FunctionRef<bool(SequenceId)> owned) {
  CheckedRead read;
  if (request.getLayer() >= static_cast<uint32_t>(config.layers)) {
    return InvalidField("layer", request.getLayer(), absl::StrCat("0..", config.layers - 1));
  }
  read.layer = static_cast<int>(request.getLayer());
  KV_ASSIGN_OR_RETURN(read.tokens, CheckStepEntries(request.getEntries(), owned, &read.entries));
  read.bytes = read.tokens * config.layout.kv_heads * config.layout.head_dim * DTypeBytes(config.layout.dtype);
  KV_ASSIGN_OR_RETURN(read.k, CheckTensor("k", request.getK(), read.bytes, arena));
  KV_ASSIGN_OR_RETURN(read.v, CheckTensor("v", request.getV(), read.bytes, arena));
  KV_RETURN_IF_ERROR(OnlyArena("k", read.k));
  KV_RETURN_IF_ERROR(OnlyArena("v", read.v));
  if (read.k.given() && read.v.given() && read.k.arena == read.v.arena &&
      read.k.bytes.data() < read.v.bytes.data() + read.bytes &&
      read.v.bytes.data() < read.k.bytes.data() + read.bytes) {
    return InvalidField("v.arena.offset", request.getV().getArena().getOffset(), "a range that is not k's, too");
  }
  const uint64_t reply_bytes = (read.k.given() ? 0 : read.bytes) + (read.v.given() ? 0 : read.bytes);
  if (reply_bytes > limits::kReplyBytesMax) {
    return InvalidField(read.k.given() ? "v" : "k", absl::StrCat("inline with ", reply_bytes, " bytes in the reply"),
                        absl::StrCat("at most ", limits::kReplyBytesMax, " bytes, or an arena range"));
  }
  return read;
}

}  // namespace kvmanager
