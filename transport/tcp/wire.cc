#include "transport/tcp/wire.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {
namespace {

uint16_t Load16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
uint32_t Load32(const uint8_t* p) { return Load16(p) | static_cast<uint32_t>(Load16(p + 2)) << 16; }
uint64_t Load64(const uint8_t* p) { return Load32(p) | static_cast<uint64_t>(Load32(p + 4)) << 32; }

void Store(uint8_t* p, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) p[i] = static_cast<uint8_t>(value >> (8 * i));
}
void Append(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

absl::Status OutOfRange(absl::string_view field, uint64_t value, uint64_t min, uint64_t max) {
  return InvalidField(field, value, absl::StrCat(min, "..", max));
}

absl::Status CheckRange(absl::string_view field, uint64_t value, uint64_t min, uint64_t max) {
  return value < min || value > max ? OutOfRange(field, value, min, max) : absl::OkStatus();
}

const char* TypeName(FrameType type) {
  static constexpr const char* kNames[] = {"", "OFFER", "ANSWER", "PAGE", "END", "DONE", "ERROR", "CANCEL"};
  return kNames[static_cast<int>(type)];
}

std::string Printable(const uint8_t* bytes, size_t size) {
  std::string text(reinterpret_cast<const char*>(bytes), size);
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text;
}

struct Bounds {
  uint64_t min, max;
};
Bounds BodyBounds(FrameType type) {
  switch (type) {
    case FrameType::kOffer:
      return {kOfferFixedBytes + 1, kOfferBytesMax};
    case FrameType::kAnswer:
      return {kAnswerFixedBytes, kAnswerFixedBytes + (SendRequest::kPagesMax + 7) / 8};
    case FrameType::kPage:
      return {1, SendRequest::kPageBytesMax};
    case FrameType::kEnd:
      return {kEndBytes, kEndBytes};
    case FrameType::kDone:
      return {0, kTicketBytesMax};
    case FrameType::kError:
      return {kErrorFixedBytes, kErrorFixedBytes + 4 * kErrorTextBytesMax};
    case FrameType::kCancel:
      return {0, 0};
  }
  return {0, 0};
}

absl::StatusOr<Frame> ParseHello(absl::Span<const uint8_t> bytes) {
  if (bytes.size() != kHelloBytes) return InvalidField("hello bytes", bytes.size(), absl::StrCat(kHelloBytes));
  HelloFrame hello;
  hello.version = Load16(&bytes[8]);
  hello.version_min = Load16(&bytes[10]);
  hello.features = Load64(&bytes[16]);
  if (Load32(&bytes[12]) != 0) return InvalidField("hello reserved", Load32(&bytes[12]), "0");
  KV_RETURN_IF_ERROR(CheckRange("hello version", hello.version, 1, UINT16_MAX));
  KV_RETURN_IF_ERROR(CheckRange("hello version_min", hello.version_min, 1, hello.version));
  return Frame(hello);
}

absl::StatusOr<Frame> ParseOffer(absl::Span<const uint8_t> body) {
  const uint64_t manifest_bytes = Load32(&body[0]);
  const uint64_t page_count = Load32(&body[4]);
  KV_RETURN_IF_ERROR(CheckRange("offer manifest bytes", manifest_bytes, 1, SendRequest::kManifestBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("offer pages", page_count, 0, SendRequest::kPagesMax));
  const uint64_t expected = kOfferFixedBytes + page_count * kPageRecordBytes + manifest_bytes;
  if (body.size() != expected) return InvalidField("offer body bytes", body.size(), absl::StrCat(expected));
  OfferFrame offer;
  offer.page_bytes.resize(page_count);
  offer.page_checksums.resize(page_count);
  const uint8_t* record = &body[kOfferFixedBytes];
  for (uint64_t i = 0; i < page_count; ++i, record += kPageRecordBytes) {
    const uint64_t page_bytes = Load64(record);
    if (page_bytes < 1 || page_bytes > SendRequest::kPageBytesMax) {
      return OutOfRange(absl::StrCat("offer page ", i, " bytes"), page_bytes, 1, SendRequest::kPageBytesMax);
    }
    offer.page_bytes[i] = page_bytes;
    offer.page_checksums[i] = Load64(record + 8);
    offer.total_bytes += page_bytes;
  }
  offer.manifest.assign(reinterpret_cast<const char*>(record), manifest_bytes);
  return Frame(std::move(offer));
}

absl::StatusOr<Frame> ParseAnswer(absl::Span<const uint8_t> body) {
  AnswerFrame answer;
  answer.page_count = Load32(&body[0]);
  KV_RETURN_IF_ERROR(CheckRange("answer pages", answer.page_count, 0, SendRequest::kPagesMax));
  if (Load32(&body[4]) != 0) return InvalidField("answer reserved", Load32(&body[4]), "0");
  const uint64_t expected = kAnswerFixedBytes + (answer.page_count + 7) / 8;
  if (body.size() != expected) return InvalidField("answer body bytes", body.size(), absl::StrCat(expected));
  answer.bitmap.assign(body.begin() + kAnswerFixedBytes, body.end());
  if (answer.page_count % 8 != 0 && answer.bitmap.back() >> (answer.page_count % 8) != 0) {
    return InvalidField("answer bitmap's last byte", static_cast<int>(answer.bitmap.back()), "zero past the last page");
  }
  return Frame(std::move(answer));
}

absl::StatusOr<Frame> ParseError(absl::Span<const uint8_t> body) {
  const uint32_t code = Load32(&body[0]);
  KV_RETURN_IF_ERROR(CheckRange("error code", code, 1, 16));
  uint64_t sizes[4];
  uint64_t expected = kErrorFixedBytes;
  for (int i = 0; i < 4; ++i) {
    sizes[i] = Load32(&body[4 + 4 * i]);
    KV_RETURN_IF_ERROR(CheckRange("error text bytes", sizes[i], 0, kErrorTextBytesMax));
    expected += sizes[i];
  }
  if (body.size() != expected) return InvalidField("error body bytes", body.size(), absl::StrCat(expected));
  std::string texts[4];
  const uint8_t* p = body.data() + kErrorFixedBytes;
  for (int i = 0; i < 4; p += sizes[i++]) texts[i] = Printable(p, sizes[i]);
  absl::Status status(static_cast<absl::StatusCode>(code), texts[0]);
  return Frame(ErrorFrame{WithDetail(std::move(status), {texts[1], texts[2], texts[3]})});
}

std::string HeaderString(FrameType type, uint64_t body_bytes) {
  std::string out(kHeaderBytes, '\0');
  PutHeader({type, 0, body_bytes}, reinterpret_cast<uint8_t*>(out.data()));
  return out;
}

}  // namespace

absl::StatusOr<FrameHeader> ParseHeader(absl::Span<const uint8_t> bytes) {
  if (bytes.size() != kHeaderBytes) return InvalidField("frame header bytes", bytes.size(), absl::StrCat(kHeaderBytes));
  KV_RETURN_IF_ERROR(CheckRange("frame type", bytes[0], 1, 7));
  FrameHeader header;
  header.type = static_cast<FrameType>(bytes[0]);
  header.page = Load32(&bytes[4]);
  header.body_bytes = Load64(&bytes[8]);
  if (bytes[1] != 0 || bytes[2] != 0 || bytes[3] != 0) return InvalidField("frame reserved", "set", "0");
  KV_RETURN_IF_ERROR(
      CheckRange("frame page", header.page, 0, header.type == FrameType::kPage ? SendRequest::kPagesMax - 1 : 0));
  const Bounds bounds = BodyBounds(header.type);
  if (header.body_bytes < bounds.min || header.body_bytes > bounds.max) {
    return OutOfRange(absl::StrCat(TypeName(header.type), " body bytes"), header.body_bytes, bounds.min, bounds.max);
  }
  return header;
}

absl::StatusOr<Frame> ParseFrame(absl::Span<const uint8_t> bytes) {
  if (bytes.size() >= sizeof(kMagic) && std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) == 0) {
    return ParseHello(bytes);
  }
  if (bytes.size() < kHeaderBytes) {
    return InvalidField("frame bytes", bytes.size(), absl::StrCat("at least ", kHeaderBytes));
  }
  KV_ASSIGN_OR_RETURN(const FrameHeader header, ParseHeader(bytes.subspan(0, kHeaderBytes)));
  const absl::Span<const uint8_t> body = bytes.subspan(kHeaderBytes);
  const uint64_t expected = header.type == FrameType::kPage ? 0 : header.body_bytes;
  if (body.size() != expected) return InvalidField("frame body bytes", body.size(), absl::StrCat(expected));
  switch (header.type) {
    case FrameType::kOffer:
      return ParseOffer(body);
    case FrameType::kAnswer:
      return ParseAnswer(body);
    case FrameType::kPage:
      return Frame(PageFrame{header.page, header.body_bytes});
    case FrameType::kEnd:
      return Frame(EndFrame{Load64(&body[0]), Load64(&body[8])});
    case FrameType::kDone:
      return Frame(DoneFrame{std::string(body.begin(), body.end())});
    case FrameType::kError:
      return ParseError(body);
    case FrameType::kCancel:
      return Frame(CancelFrame{});
  }
  return absl::InternalError("unreachable frame type");
}

absl::Status CheckVersion(const HelloFrame& hello) {
  if (hello.version_min <= kVersion && hello.version >= kVersionMin) return absl::OkStatus();
  return FieldError(absl::StatusCode::kUnimplemented, "peer's transport version",
                    absl::StrCat(hello.version_min, "..", hello.version), absl::StrCat(kVersionMin, "..", kVersion));
}

void PutHeader(const FrameHeader& header, uint8_t* out) {
  Store(out, static_cast<uint8_t>(header.type), 4);
  Store(out + 4, header.page, 4);
  Store(out + 8, header.body_bytes, 8);
}

std::string EncodeHello(const HelloFrame& hello) {
  std::string out(kMagic, sizeof(kMagic));
  Append(out, hello.version, 2);
  Append(out, hello.version_min, 2);
  Append(out, 0, 4);
  Append(out, hello.features, 8);
  return out;
}

std::string EncodeOffer(absl::Span<const SendPage> pages, const std::string& manifest) {
  const size_t body_bytes = kOfferFixedBytes + pages.size() * kPageRecordBytes + manifest.size();
  std::string out;
  out.reserve(kHeaderBytes + body_bytes);
  out += HeaderString(FrameType::kOffer, body_bytes);
  Append(out, manifest.size(), 4);
  Append(out, pages.size(), 4);
  for (const SendPage& page : pages) {
    Append(out, page.bytes.size(), 8);
    Append(out, page.checksum, 8);
  }
  return out += manifest;
}

std::string EncodeAnswer(const AnswerFrame& answer) {
  std::string out = HeaderString(FrameType::kAnswer, kAnswerFixedBytes + answer.bitmap.size());
  Append(out, answer.page_count, 4);
  Append(out, 0, 4);
  return out.append(answer.bitmap.begin(), answer.bitmap.end());
}

std::string EncodeEnd(const EndFrame& end) {
  std::string out = HeaderString(FrameType::kEnd, kEndBytes);
  Append(out, end.pages, 8);
  Append(out, end.bytes, 8);
  return out;
}

std::string EncodeDone(const std::string& ticket) {
  KV_CHECK(ticket.size() <= kTicketBytesMax);
  return HeaderString(FrameType::kDone, ticket.size()) + ticket;
}

std::string EncodeError(const absl::Status& status) {
  KV_CHECK(!status.ok());
  const int raw_code = static_cast<int>(status.code());
  const int code = raw_code >= 1 && raw_code <= 16 ? raw_code : static_cast<int>(absl::StatusCode::kUnknown);
  const ErrorDetail detail = DetailOf(status);
  std::string texts[4] = {std::string(status.message()), detail.field, detail.value, detail.bound};
  size_t body_bytes = kErrorFixedBytes;
  for (std::string& text : texts) {
    if (text.size() > kErrorTextBytesMax) text.resize(kErrorTextBytesMax);
    body_bytes += text.size();
  }
  std::string out = HeaderString(FrameType::kError, body_bytes);
  Append(out, code, 4);
  for (const std::string& text : texts) Append(out, text.size(), 4);
  for (const std::string& text : texts) out += text;
  return out;
}

std::string EncodeCancel() { return HeaderString(FrameType::kCancel, 0); }

}  // namespace kvmanager::tcp
