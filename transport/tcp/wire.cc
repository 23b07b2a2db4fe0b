#include "transport/tcp/wire.h"

#include <xxhash.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {
namespace {

constexpr size_t kTokenBytes = sizeof(Token);
constexpr size_t kOfferFixedBytes = 48;
constexpr size_t kJoinBytes = 24;
constexpr size_t kAcceptFixedBytes = 24;
constexpr size_t kLastFixedBytes = 16;
constexpr size_t kRunBytes = 8;
constexpr size_t kExtendedFixedBytes = 8;
constexpr size_t kGotFixedBytes = 8;
constexpr size_t kJoinedFixedBytes = 8;
constexpr size_t kErrorFixedBytes = 20;
constexpr size_t kLoadBytes = 40;
constexpr size_t kRegionBytes = 16;
constexpr size_t kMemoryFixedBytes = 8;
constexpr size_t kRegionNameBytes = 32;  // of a GPU's memory
constexpr size_t kGpuNameBytes = sizeof(GpuName);
constexpr size_t kHelloCheckAt = 12;
constexpr size_t kHeaderCheckAt = 4;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "lists of numbers are copied as they are");
constexpr uint64_t kBitmapBytesMax = (HandOffPart::kPagesMax + 7) / 8;

uint16_t Load16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
uint32_t Load32(const uint8_t* p) { return Load16(p) | static_cast<uint32_t>(Load16(p + 2)) << 16; }
uint64_t Load64(const uint8_t* p) { return Load32(p) | static_cast<uint64_t>(Load32(p + 4)) << 32; }

void Store(uint8_t* p, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) p[i] = static_cast<uint8_t>(value >> (8 * i));
}
void Append(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}
void Append(std::string& out, absl::Span<const uint8_t> bytes) { out.append(bytes.begin(), bytes.end()); }
/// Of 4 bytes each; lists may have hundreds of thousands.
void AppendList(std::string& out, absl::Span<const uint32_t> list) {
  out.append(reinterpret_cast<const char*>(list.data()), 4 * list.size());
}

/// The check of a frame that has it at `at`.
uint32_t CheckOf(absl::Span<const uint8_t> frame, size_t at) {
  return static_cast<uint32_t>(
      XXH3_64bits_withSeed(frame.data() + at + 4, frame.size() - at - 4, Load32(&frame[at - 4])));
}
void Seal(uint8_t* frame, size_t size, size_t at) { Store(frame + at, CheckOf({frame, size}, at), 4); }
std::string Sealed(std::string frame, size_t at = kHeaderCheckAt) {
  Seal(reinterpret_cast<uint8_t*>(frame.data()), frame.size(), at);
  return frame;
}
absl::Status VerifyCheck(absl::Span<const uint8_t> frame, size_t at) {
  const uint32_t said = Load32(&frame[at]);
  const uint32_t is = CheckOf(frame, at);
  if (said == is) return absl::OkStatus();
  return FieldError(absl::StatusCode::kDataLoss, "frame check", absl::StrCat(absl::Hex(is, absl::kZeroPad8)),
                    absl::StrCat(absl::Hex(said, absl::kZeroPad8)));
}

absl::Status CheckRange(absl::string_view field, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return InvalidField(field, value, absl::StrCat(min, "..", max));
}
absl::Status CheckBodyBytes(FrameType type, uint64_t bytes, uint64_t expected) {
  if (bytes == expected) return absl::OkStatus();
  return InvalidField(absl::StrCat(FrameTypeName(type), " body bytes"), bytes, absl::StrCat(expected));
}
absl::Status CheckZero(FrameType type, uint32_t value) {
  if (value == 0) return absl::OkStatus();
  return InvalidField(absl::StrCat(FrameTypeName(type), " reserved"), value, "0");
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
  constexpr uint64_t kPartMax = HandOffPart::kManifestBytesMax + kRunBytes * HandOffPart::kPagesMax;  // a run for each
  switch (type) {
    case FrameType::kOffer:
      return {kOfferFixedBytes + 1, kOfferFixedBytes + kGpuNameBytes + kPartMax};
    case FrameType::kJoin:
      return {kJoinBytes, kJoinBytes};
    case FrameType::kAccept:
      return {kAcceptFixedBytes + 1,
              kAcceptFixedBytes + HandOffReceiver::kTicketBytesMax + kLocalNameBytesMax + kBitmapBytesMax};
    case FrameType::kLast:
      return {kLastFixedBytes + 1, kLastFixedBytes + kPartMax + 4 * HandOffPart::kPagesMax};
    case FrameType::kExtended:
      return {kExtendedFixedBytes, kExtendedFixedBytes + kBitmapBytesMax};
    case FrameType::kPages:
      return {kPageRecordBytes, kPageRecordBytes * kPagesPerFrameMax};
    case FrameType::kGot:
      return {kGotFixedBytes, kGotFixedBytes + 4 * kGotPagesMax};
    case FrameType::kJoined:
      return {kJoinedFixedBytes, kJoinedFixedBytes + kBitmapBytesMax};
    case FrameType::kWaiting:
    case FrameType::kError:
      return {kErrorFixedBytes, kErrorFixedBytes + 4 * kErrorTextBytesMax};
    case FrameType::kLoad:
      return {kLoadBytes, kLoadBytes};
    case FrameType::kRegion:
      return {kRegionBytes, kRegionBytes + kRegionNameBytes};
    case FrameType::kLocal:
      return {kLocalRecordBytes, kLocalRecordBytes * kDevicePagesPerFrameMax};
    case FrameType::kMemory:
      return {kMemoryFixedBytes + 1, kMemoryFixedBytes + RemoteMemory::kDescriptionBytesMax};
    case FrameType::kPing:
    case FrameType::kDone:
    case FrameType::kCancel:
    case FrameType::kProbe:
      return {0, 0};
  }
  return {0, 0};
}

absl::StatusOr<Frame> ParseHello(absl::Span<const uint8_t> bytes) {
  if (bytes.size() != kHelloBytes) return InvalidField("hello bytes", bytes.size(), absl::StrCat(kHelloBytes));
  HelloFrame hello;
  hello.version = Load16(&bytes[8]);
  hello.version_min = Load16(&bytes[10]);
  hello.features = Load32(&bytes[16]);
  hello.stall_ms = Load32(&bytes[20]);
  KV_RETURN_IF_ERROR(CheckRange("hello version", hello.version, 1, UINT16_MAX));
  KV_RETURN_IF_ERROR(CheckRange("hello version_min", hello.version_min, 1, hello.version));
  // The rest is version 2's: of a version that cannot be spoken, the version alone is looked at.
  if (!CheckVersion(hello).ok()) return Frame(hello);
  KV_RETURN_IF_ERROR(VerifyCheck(bytes, kHelloCheckAt));
  KV_RETURN_IF_ERROR(CheckRange("hello stall_ms", hello.stall_ms, 1, kStallMsMax));
  return Frame(hello);
}

void AppendRuns(std::string& out, const PageSizes& sizes) {
  uint32_t begin = 0;
  for (const PageSizes::Run& run : sizes.runs()) {
    Append(out, run.end - begin, 4);
    Append(out, run.bytes, 4);
    begin = run.end;
  }
}

absl::StatusOr<PageSizes> ParseRuns(const uint8_t* p, uint64_t runs) {
  PageSizes sizes;
  for (uint64_t i = 0; i < runs; ++i, p += kRunBytes) {
    const uint32_t pages = Load32(p);
    KV_RETURN_IF_ERROR(CheckRange("pages of a run", pages, 1, HandOffPart::kPagesMax - sizes.size()));
    sizes.Append(pages, Load32(p + 4));
  }
  return sizes;
}

std::vector<uint32_t> ParseList(const uint8_t* p, uint64_t count) {
  std::vector<uint32_t> list(count);
  if (count > 0) std::memcpy(list.data(), p, 4 * count);
  return list;
}

absl::StatusOr<Frame> ParseOffer(absl::Span<const uint8_t> body) {
  OfferFrame offer;
  std::memcpy(offer.token.data(), body.data(), kTokenBytes);
  offer.room_ms = Load32(&body[16]);
  const uint64_t manifest_bytes = Load32(&body[20]);
  const uint64_t runs = Load32(&body[24]);
  KV_RETURN_IF_ERROR(CheckRange("OFFER room_ms", static_cast<uint64_t>(offer.room_ms), 0, SendRequest::kRoomMsMax));
  KV_RETURN_IF_ERROR(CheckRange("manifest bytes", manifest_bytes, 1, HandOffPart::kManifestBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("runs of pages", runs, 0, HandOffPart::kPagesMax));
  KV_RETURN_IF_ERROR(CheckRange("OFFER gpu", Load32(&body[28]), 0, 1));
  std::memcpy(offer.host.data(), &body[32], sizeof(HostId));
  const size_t name_bytes = Load32(&body[28]) == 1 ? kGpuNameBytes : 0;
  const size_t list_at = kOfferFixedBytes + name_bytes;
  KV_RETURN_IF_ERROR(CheckBodyBytes(FrameType::kOffer, body.size(), list_at + kRunBytes * runs + manifest_bytes));
  std::memcpy(offer.part.gpu.data(), body.data() + kOfferFixedBytes, name_bytes);
  if (name_bytes > 0 && offer.part.gpu == GpuName()) return InvalidField("OFFER GPU's name", "zeros", "a name");
  KV_ASSIGN_OR_RETURN(offer.part.page_bytes, ParseRuns(body.data() + list_at, runs));
  offer.part.manifest.assign(body.end() - manifest_bytes, body.end());
  KV_RETURN_IF_ERROR(CheckPart(offer.part, 0));
  return Frame(std::move(offer));
}

absl::StatusOr<Frame> ParseTrailer(absl::Span<const uint8_t> body) {
  TrailerFrame trailer;
  const uint64_t manifest_bytes = Load32(&body[0]);
  const uint64_t runs = Load32(&body[4]);
  const uint64_t withdrawn = Load32(&body[8]);
  KV_RETURN_IF_ERROR(CheckRange("manifest bytes", manifest_bytes, 1, HandOffPart::kManifestBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("runs of pages", runs, 0, HandOffPart::kPagesMax));
  KV_RETURN_IF_ERROR(CheckRange("withdrawn pages", withdrawn, 0, HandOffPart::kPagesMax));
  KV_RETURN_IF_ERROR(CheckZero(FrameType::kLast, Load32(&body[12])));
  const size_t withdrawn_at = kLastFixedBytes + kRunBytes * runs;
  KV_RETURN_IF_ERROR(CheckBodyBytes(FrameType::kLast, body.size(), withdrawn_at + 4 * withdrawn + manifest_bytes));
  KV_ASSIGN_OR_RETURN(trailer.part.page_bytes, ParseRuns(&body[kLastFixedBytes], runs));
  trailer.part.withdrawn = ParseList(&body[withdrawn_at], withdrawn);
  trailer.part.manifest.assign(body.end() - manifest_bytes, body.end());
  return Frame(std::move(trailer));
}

absl::StatusOr<PageBitmap> ParseBitmap(FrameType type, uint64_t pages, absl::Span<const uint8_t> bytes) {
  KV_RETURN_IF_ERROR(CheckRange(absl::StrCat(FrameTypeName(type), " pages"), pages, 0, HandOffPart::kPagesMax));
  PageBitmap bitmap(pages);
  if (bytes.size() != bitmap.bits.size()) {
    return InvalidField(absl::StrCat(FrameTypeName(type), " bitmap bytes"), bytes.size(),
                        absl::StrCat(bitmap.bits.size()));
  }
  if (pages % 8 != 0 && bytes.back() >> (pages % 8) != 0) {
    return InvalidField(absl::StrCat(FrameTypeName(type), " bitmap's last byte"), static_cast<int>(bytes.back()),
                        "zero past the last page");
  }
  bitmap.bits.assign(bytes.begin(), bytes.end());
  return bitmap;
}

absl::StatusOr<Frame> ParseAccept(absl::Span<const uint8_t> body) {
  AcceptFrame accept;
  accept.window = Load64(&body[0]);
  accept.connections = Load32(&body[8]);
  const uint64_t ticket_bytes = Load32(&body[12]);
  KV_RETURN_IF_ERROR(CheckRange("ACCEPT window", accept.window, 1, UINT64_MAX));
  KV_RETURN_IF_ERROR(CheckRange("ACCEPT connections", accept.connections, 1, kConnectionsMax));
  KV_RETURN_IF_ERROR(CheckRange("ACCEPT ticket bytes", ticket_bytes, 1, HandOffReceiver::kTicketBytesMax));
  const uint64_t local_bytes = Load32(&body[20]);
  KV_RETURN_IF_ERROR(CheckRange("ACCEPT local name bytes", local_bytes, 0, kLocalNameBytesMax));
  absl::Span<const uint8_t> rest = body.subspan(kAcceptFixedBytes);
  KV_RETURN_IF_ERROR(CheckRange("ACCEPT ticket bytes", ticket_bytes, 1, rest.size()));
  accept.ticket.assign(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(ticket_bytes));
  rest.remove_prefix(ticket_bytes);
  KV_RETURN_IF_ERROR(CheckRange("ACCEPT local name bytes", local_bytes, 0, rest.size()));
  accept.local_name.assign(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(local_bytes));
  rest.remove_prefix(local_bytes);
  KV_ASSIGN_OR_RETURN(accept.wanted, ParseBitmap(FrameType::kAccept, Load32(&body[16]), rest));
  return Frame(std::move(accept));
}

absl::StatusOr<Frame> ParsePages(absl::Span<const uint8_t> body) {
  if (body.size() % kPageRecordBytes != 0) {
    return InvalidField("PAGES body bytes", body.size(), absl::StrCat("a multiple of ", kPageRecordBytes));
  }
  PagesFrame frame;
  frame.pages.resize(body.size() / kPageRecordBytes);
  for (size_t i = 0; i < frame.pages.size(); ++i) {
    const uint8_t* record = &body[i * kPageRecordBytes];
    frame.pages[i] = {Load32(record), Load64(record + 8)};
    KV_RETURN_IF_ERROR(CheckZero(FrameType::kPages, Load32(record + 4)));
    KV_RETURN_IF_ERROR(CheckRange("page", frame.pages[i].page, 0, HandOffPart::kPagesMax - 1));
  }
  return Frame(std::move(frame));
}

absl::StatusOr<Frame> ParseRegion(absl::Span<const uint8_t> body) {
  RegionFrame region;
  region.region = Load32(&body[0]);
  region.bytes = Load64(&body[8]);
  KV_RETURN_IF_ERROR(CheckRange("region", region.region, 0, kRegionsMax - 1));
  KV_RETURN_IF_ERROR(CheckRange("REGION gpu", Load32(&body[4]), 0, 1));
  KV_RETURN_IF_ERROR(CheckRange("region bytes", region.bytes, 1, uint64_t{1} << 42));
  const size_t name_bytes = Load32(&body[4]) == 1 ? kRegionNameBytes : 0;
  KV_RETURN_IF_ERROR(CheckBodyBytes(FrameType::kRegion, body.size(), kRegionBytes + name_bytes));
  if (name_bytes == 0) return Frame(region);
  std::memcpy(region.gpu.data(), &body[kRegionBytes], kGpuNameBytes);
  std::memcpy(region.name.data(), &body[kRegionBytes + kGpuNameBytes], sizeof(region.name));
  if (region.gpu == GpuName()) return InvalidField("REGION GPU's name", "zeros", "a name");
  return Frame(region);
}

absl::StatusOr<Frame> ParseLocal(absl::Span<const uint8_t> body) {
  if (body.size() % kLocalRecordBytes != 0) {
    return InvalidField("LOCAL body bytes", body.size(), absl::StrCat("a multiple of ", kLocalRecordBytes));
  }
  LocalFrame frame;
  frame.pages.reserve(body.size() / kLocalRecordBytes);
  for (size_t at = 0; at < body.size(); at += kLocalRecordBytes) {
    const uint8_t* record = &body[at];
    frame.pages.push_back({Load32(record), Load32(record + 4), Load64(record + 8), Load64(record + 16)});
    if (Load64(record + 24) != 0) return InvalidField("LOCAL reserved", Load64(record + 24), "0");
  }
  return Frame(std::move(frame));
}

absl::StatusOr<Frame> ParseMemory(absl::Span<const uint8_t> body) {
  MemoryFrame memory;
  memory.region = Load32(&body[0]);
  KV_RETURN_IF_ERROR(CheckRange("region", memory.region, 0, kRegionsMax - 1));
  KV_RETURN_IF_ERROR(CheckZero(FrameType::kMemory, Load32(&body[4])));
  memory.description.assign(body.begin() + kMemoryFixedBytes, body.end());
  return Frame(std::move(memory));
}

absl::StatusOr<Frame> ParseGot(absl::Span<const uint8_t> body) {
  GotFrame got;
  got.window = Load64(&body[0]);
  KV_RETURN_IF_ERROR(CheckRange("GOT window", got.window, 1, UINT64_MAX));
  if ((body.size() - kGotFixedBytes) % 4 != 0) {
    return InvalidField("GOT body bytes", body.size(), absl::StrCat(kGotFixedBytes, " and a multiple of 4"));
  }
  for (size_t at = kGotFixedBytes; at < body.size(); at += 4) got.pages.push_back(Load32(&body[at]));
  return Frame(std::move(got));
}

absl::StatusOr<Frame> ParseJoin(absl::Span<const uint8_t> body) {
  JoinFrame join;
  std::memcpy(join.token.data(), body.data(), kTokenBytes);
  join.connection = Load32(&body[16]);
  KV_RETURN_IF_ERROR(CheckRange("JOIN connection", join.connection, 0, kConnectionsMax));
  KV_RETURN_IF_ERROR(CheckZero(FrameType::kJoin, Load32(&body[20])));
  return Frame(join);
}

absl::StatusOr<Frame> ParseJoined(absl::Span<const uint8_t> body) {
  JoinedFrame joined;
  KV_RETURN_IF_ERROR(CheckRange("JOINED last_known", Load32(&body[4]), 0, 1));
  joined.last_known = Load32(&body[4]) == 1;
  KV_ASSIGN_OR_RETURN(joined.arrived,
                      ParseBitmap(FrameType::kJoined, Load32(&body[0]), body.subspan(kJoinedFixedBytes)));
  return Frame(std::move(joined));
}

absl::StatusOr<Frame> ParseExtended(absl::Span<const uint8_t> body) {
  ExtendedFrame extended;
  KV_RETURN_IF_ERROR(CheckZero(FrameType::kExtended, Load32(&body[4])));
  KV_ASSIGN_OR_RETURN(extended.wanted,
                      ParseBitmap(FrameType::kExtended, Load32(&body[0]), body.subspan(kExtendedFixedBytes)));
  return Frame(std::move(extended));
}

absl::StatusOr<Frame> ParseStatus(FrameType type, absl::Span<const uint8_t> body) {
  const uint32_t code = Load32(&body[0]);
  KV_RETURN_IF_ERROR(CheckRange("error code", code, 1, 16));
  uint64_t sizes[4];
  uint64_t expected = kErrorFixedBytes;
  for (int i = 0; i < 4; ++i) {
    sizes[i] = Load32(&body[4 + 4 * i]);
    KV_RETURN_IF_ERROR(CheckRange("error text bytes", sizes[i], 0, kErrorTextBytesMax));
    expected += sizes[i];
  }
  KV_RETURN_IF_ERROR(CheckBodyBytes(type, body.size(), expected));
  std::string texts[4];
  const uint8_t* p = body.data() + kErrorFixedBytes;
  for (int i = 0; i < 4; p += sizes[i++]) texts[i] = Printable(p, sizes[i]);
  absl::Status status(static_cast<absl::StatusCode>(code), texts[0]);
  status = WithDetail(std::move(status), {texts[1], texts[2], texts[3]});
  return type == FrameType::kWaiting ? Frame(WaitingFrame{std::move(status)}) : Frame(ErrorFrame{std::move(status)});
}

std::string HeaderString(FrameType type, uint64_t body_bytes) {
  std::string out;
  out.reserve(kHeaderBytes + body_bytes);
  Append(out, static_cast<uint8_t>(type), 4);
  Append(out, 0, 4);
  Append(out, body_bytes, 8);
  return out;
}

std::string EncodeStatus(FrameType type, const absl::Status& status) {
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
  std::string out = HeaderString(type, body_bytes);
  Append(out, code, 4);
  for (const std::string& text : texts) Append(out, text.size(), 4);
  for (const std::string& text : texts) out += text;
  return Sealed(std::move(out));
}

}  // namespace

const char* FrameTypeName(FrameType type) {
  static constexpr const char* kNames[] = {"",      "OFFER", "JOIN",   "WAITING", "ACCEPT", "LAST",  "EXTENDED",
                                           "PAGES", "GOT",   "JOINED", "PING",    "DONE",   "ERROR", "CANCEL",
                                           "PROBE", "LOAD",  "REGION", "LOCAL",   "MEMORY"};
  return kNames[static_cast<int>(type)];
}

absl::StatusOr<FrameHeader> ParseHeader(absl::Span<const uint8_t> bytes) {
  if (bytes.size() != kHeaderBytes) return InvalidField("frame header bytes", bytes.size(), absl::StrCat(kHeaderBytes));
  KV_RETURN_IF_ERROR(CheckRange("frame type", bytes[0], 1, static_cast<int>(FrameType::kMemory)));
  FrameHeader header;
  header.type = static_cast<FrameType>(bytes[0]);
  header.check = Load32(&bytes[kHeaderCheckAt]);
  header.body_bytes = Load64(&bytes[8]);
  if (bytes[1] != 0 || bytes[2] != 0 || bytes[3] != 0) return InvalidField("frame reserved", "set", "0");
  const Bounds bounds = BodyBounds(header.type);
  KV_RETURN_IF_ERROR(
      CheckRange(absl::StrCat(FrameTypeName(header.type), " body bytes"), header.body_bytes, bounds.min, bounds.max));
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
  if (body.size() != header.body_bytes) {
    return InvalidField("frame body bytes", body.size(), absl::StrCat(header.body_bytes));
  }
  KV_RETURN_IF_ERROR(VerifyCheck(bytes, kHeaderCheckAt));
  switch (header.type) {
    case FrameType::kOffer:
      return ParseOffer(body);
    case FrameType::kJoin:
      return ParseJoin(body);
    case FrameType::kAccept:
      return ParseAccept(body);
    case FrameType::kLast:
      return ParseTrailer(body);
    case FrameType::kExtended:
      return ParseExtended(body);
    case FrameType::kPages:
      return ParsePages(body);
    case FrameType::kRegion:
      return ParseRegion(body);
    case FrameType::kLocal:
      return ParseLocal(body);
    case FrameType::kMemory:
      return ParseMemory(body);
    case FrameType::kGot:
      return ParseGot(body);
    case FrameType::kJoined:
      return ParseJoined(body);
    case FrameType::kPing:
      return Frame(PingFrame{});
    case FrameType::kDone:
      return Frame(DoneFrame{});
    case FrameType::kWaiting:
    case FrameType::kError:
      return ParseStatus(header.type, body);
    case FrameType::kCancel:
      return Frame(CancelFrame{});
    case FrameType::kProbe:
      return Frame(ProbeFrame{});
    case FrameType::kLoad:
      return Frame(
          LoadFrame{{Load64(&body[0]), Load64(&body[8]), Load64(&body[16]), Load64(&body[24]), Load64(&body[32])}});
  }
  return absl::InternalError("unreachable frame type");
}

absl::Status CheckVersion(const HelloFrame& hello) {
  if (hello.version_min <= kVersion && hello.version >= kVersionMin) return absl::OkStatus();
  return FieldError(absl::StatusCode::kUnimplemented, "peer's transport version",
                    absl::StrCat(hello.version_min, "..", hello.version), absl::StrCat(kVersionMin, "..", kVersion));
}

absl::Status CheckPart(const HandOffPart& part, size_t pages_before) {
  KV_RETURN_IF_ERROR(CheckRange("manifest bytes", part.manifest.size(), 1, HandOffPart::kManifestBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("pages", pages_before + part.page_bytes.size(), 0, HandOffPart::kPagesMax));
  size_t page = pages_before;
  for (const PageSizes::Run& run : part.page_bytes.runs()) {
    if (run.bytes < 1 || run.bytes > HandOffPart::kPageBytesMax) {
      return InvalidField(absl::StrCat("page ", page, " bytes"), run.bytes,
                          absl::StrCat("1..", HandOffPart::kPageBytesMax));
    }
    page = pages_before + run.end;
  }
  for (size_t i = 0; i < part.withdrawn.size(); ++i) {
    const uint32_t page = part.withdrawn[i];
    if (page >= pages_before || (i > 0 && page <= part.withdrawn[i - 1])) {
      return InvalidField(absl::StrCat("withdrawn[", i, "]"), page,
                          absl::StrCat("ascending, below ", pages_before, ", the pages of the header"));
    }
  }
  return absl::OkStatus();
}

std::string EncodeHello(const HelloFrame& hello) {
  std::string out(kMagic, sizeof(kMagic));
  Append(out, hello.version, 2);
  Append(out, hello.version_min, 2);
  Append(out, 0, 4);
  Append(out, hello.features, 4);
  Append(out, hello.stall_ms, 4);
  return Sealed(std::move(out), kHelloCheckAt);
}

std::string EncodeOffer(const Token& token, int64_t room_ms, const HandOffPart& part, const HostId& host) {
  const bool of_gpu = part.gpu != GpuName();
  std::string out =
      HeaderString(FrameType::kOffer, kOfferFixedBytes + (of_gpu ? kGpuNameBytes : 0) +
                                          kRunBytes * part.page_bytes.runs().size() + part.manifest.size());
  Append(out, token);
  Append(out, static_cast<uint64_t>(room_ms), 4);
  Append(out, part.manifest.size(), 4);
  Append(out, part.page_bytes.runs().size(), 4);
  Append(out, of_gpu, 4);
  Append(out, host);
  if (of_gpu) Append(out, part.gpu);
  AppendRuns(out, part.page_bytes);
  return Sealed(std::move(out += part.manifest));
}

std::string EncodeTrailer(const HandOffPart& part) {
  std::string out = HeaderString(FrameType::kLast, kLastFixedBytes + kRunBytes * part.page_bytes.runs().size() +
                                                       4 * part.withdrawn.size() + part.manifest.size());
  Append(out, part.manifest.size(), 4);
  Append(out, part.page_bytes.runs().size(), 4);
  Append(out, part.withdrawn.size(), 4);
  Append(out, 0, 4);
  AppendRuns(out, part.page_bytes);
  AppendList(out, part.withdrawn);
  return Sealed(std::move(out += part.manifest));
}

std::string EncodeJoin(const JoinFrame& join) {
  std::string out = HeaderString(FrameType::kJoin, kJoinBytes);
  Append(out, join.token);
  Append(out, join.connection, 4);
  Append(out, 0, 4);
  return Sealed(std::move(out));
}

std::string EncodeWaiting(const absl::Status& why) { return EncodeStatus(FrameType::kWaiting, why); }
std::string EncodeError(const absl::Status& status) { return EncodeStatus(FrameType::kError, status); }

std::string EncodeAccept(const AcceptFrame& accept) {
  KV_CHECK(!accept.ticket.empty() && accept.ticket.size() <= HandOffReceiver::kTicketBytesMax);
  KV_CHECK(accept.local_name.size() <= kLocalNameBytesMax);
  std::string out = HeaderString(FrameType::kAccept, kAcceptFixedBytes + accept.ticket.size() +
                                                         accept.local_name.size() + accept.wanted.bits.size());
  Append(out, accept.window, 8);
  Append(out, accept.connections, 4);
  Append(out, accept.ticket.size(), 4);
  Append(out, accept.wanted.count, 4);
  Append(out, accept.local_name.size(), 4);
  out += accept.ticket;
  out += accept.local_name;
  Append(out, accept.wanted.bits);
  return Sealed(std::move(out));
}

std::string EncodeExtended(const ExtendedFrame& extended) {
  std::string out = HeaderString(FrameType::kExtended, kExtendedFixedBytes + extended.wanted.bits.size());
  Append(out, extended.wanted.count, 4);
  Append(out, 0, 4);
  Append(out, extended.wanted.bits);
  return Sealed(std::move(out));
}

void PutPagesHead(absl::Span<const PageRecord> pages, uint8_t* out) {
  KV_CHECK(!pages.empty() && pages.size() <= kPagesPerFrameMax);
  Store(out, static_cast<uint8_t>(FrameType::kPages), 8);
  Store(out + 8, kPageRecordBytes * pages.size(), 8);
  uint8_t* record = out + kHeaderBytes;
  for (const PageRecord& page : pages) {
    Store(record, page.page, 8);
    Store(record + 8, page.checksum, 8);
    record += kPageRecordBytes;
  }
  Seal(out, kHeaderBytes + kPageRecordBytes * pages.size(), kHeaderCheckAt);
}

std::string EncodeRegion(const RegionFrame& region) {
  const bool of_gpu = region.gpu != GpuName();
  std::string out = HeaderString(FrameType::kRegion, kRegionBytes + (of_gpu ? kRegionNameBytes : 0));
  Append(out, region.region, 4);
  Append(out, of_gpu, 4);
  Append(out, region.bytes, 8);
  if (of_gpu) {
    Append(out, region.gpu);
    Append(out, region.name);
  }
  return Sealed(std::move(out));
}

std::string EncodeMemory(const MemoryFrame& memory) {
  KV_CHECK(!memory.description.empty() && memory.description.size() <= RemoteMemory::kDescriptionBytesMax);
  std::string out = HeaderString(FrameType::kMemory, kMemoryFixedBytes + memory.description.size());
  Append(out, memory.region, 4);
  Append(out, 0, 4);
  return Sealed(std::move(out += memory.description));
}

std::string EncodeLocal(absl::Span<const LocalRecord> pages) {
  KV_CHECK(!pages.empty() && pages.size() <= kDevicePagesPerFrameMax);
  std::string out = HeaderString(FrameType::kLocal, kLocalRecordBytes * pages.size());
  out.resize(kHeaderBytes + kLocalRecordBytes * pages.size());  // zeros
  auto* record = reinterpret_cast<uint8_t*>(out.data()) + kHeaderBytes;
  for (const LocalRecord& page : pages) {
    Store(record, page.page, 4);
    Store(record + 4, page.region, 4);
    Store(record + 8, page.offset, 8);
    Store(record + 16, page.checksum, 8);
    record += kLocalRecordBytes;
  }
  return Sealed(std::move(out));
}

std::string EncodeGot(uint64_t window, absl::Span<const uint32_t> pages) {
  KV_CHECK(pages.size() <= kGotPagesMax);
  std::string out = HeaderString(FrameType::kGot, kGotFixedBytes + 4 * pages.size());
  Append(out, window, 8);
  AppendList(out, pages);
  return Sealed(std::move(out));
}

std::string EncodeJoined(const JoinedFrame& joined) {
  std::string out = HeaderString(FrameType::kJoined, kJoinedFixedBytes + joined.arrived.bits.size());
  Append(out, joined.arrived.count, 4);
  Append(out, joined.last_known ? 1 : 0, 4);
  Append(out, joined.arrived.bits);
  return Sealed(std::move(out));
}

std::string EncodeLoad(const ReceiverLoad& load) {
  std::string out = HeaderString(FrameType::kLoad, kLoadBytes);
  for (const uint64_t value :
       {load.capacity_bytes, load.free_bytes, load.waiting_offers, load.active_transfers, load.queued_bytes}) {
    Append(out, value, 8);
  }
  return Sealed(std::move(out));
}

std::string EncodeEmpty(FrameType type) {
  KV_CHECK(BodyBounds(type).max == 0);
  return Sealed(HeaderString(type, 0));
}

}  // namespace kvmanager::tcp
