#include "transport/tcp/wire.h"

#include <cstring>
#include <random>

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/wire_testing.h"

namespace kvmanager::tcp {
namespace {

absl::Span<const uint8_t> Bytes(const std::string& s) { return {reinterpret_cast<const uint8_t*>(s.data()), s.size()}; }
HandOffPart ExamplePart() {
  HandOffPart part;
  part.manifest = "manifest";
  part.page_bytes = {5, 1};
  return part;
}
HandOffPart ExampleLast() {
  HandOffPart part = ExamplePart();
  part.withdrawn = {0, 3};
  return part;
}
PageBitmap BitmapOf(size_t pages, std::initializer_list<uint32_t> in) {
  PageBitmap bitmap(pages);
  for (const uint32_t page : in) bitmap.Add(page);
  return bitmap;
}
std::string ExamplePages() {
  const PageRecord pages[] = {{3, 0x1122334455667788}, {7, 9}};
  std::string out(kHeaderBytes + 2 * kPageRecordBytes, 0);
  PutPagesHead(pages, reinterpret_cast<uint8_t*>(out.data()));
  return out;
}
constexpr Token kExampleToken = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
HandOffPart ExampleGpuPart() {
  HandOffPart part = ExamplePart();
  part.gpu = {1, 2, 3};
  return part;
}
RegionFrame ExampleSlab() {
  RegionFrame slab;
  slab.region = 3;
  slab.bytes = 4096;
  slab.gpu = {1, 2};
  slab.name = {4, 5};
  return slab;
}
std::vector<std::string> Examples() {
  const absl::Status error = InvalidField("f", 1, "2");
  return {EncodeHello({}),
          EncodeOffer(kExampleToken, 7, ExamplePart()),
          EncodeJoin({kExampleToken, 3}),
          EncodeWaiting(error),
          EncodeAccept({1 << 20, 4, "ticket", BitmapOf(10, {0, 7, 9})}),
          EncodeTrailer(ExampleLast()),
          EncodeExtended({BitmapOf(2, {1})}),
          ExamplePages(),
          EncodeGot(99, {1, 2, 3}),
          EncodeJoined({true, BitmapOf(3, {2})}),
          EncodeEmpty(FrameType::kPing),
          EncodeEmpty(FrameType::kDone),
          EncodeError(error),
          EncodeEmpty(FrameType::kCancel),
          EncodeEmpty(FrameType::kProbe),
          EncodeLoad({1, 2, 3, 4, 5}),
          EncodeOffer(kExampleToken, 7, ExampleGpuPart()),
          EncodeRegion({3, 4096}),
          EncodeRegion(ExampleSlab()),
          EncodeMemory({3, "described"}),
          EncodeLocal({{1, 3, 64, 0x1122334455667788}, {2, 3, 128, 9}})};
}
template <typename T>
T Parsed(const std::string& bytes) {
  absl::StatusOr<Frame> frame = ParseFrame(Bytes(bytes));
  EXPECT_TRUE(frame.ok()) << frame.status();
  EXPECT_TRUE(std::holds_alternative<T>(*frame));
  return std::get<T>(*frame);
}
/// `bytes` with a changed field and a good check, so that the field itself is looked at.
std::string Poke(std::string bytes, size_t at, uint64_t value, int size) {
  for (int i = 0; i < size; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
  return WithGoodCheck(std::move(bytes));
}
void ExpectInvalid(const std::string& bytes, absl::string_view field) {
  const absl::StatusOr<Frame> frame = ParseFrame(Bytes(bytes));
  ASSERT_FALSE(frame.ok()) << "accepted with a bad " << std::string(field.data(), field.size());
  EXPECT_EQ(frame.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(frame.status()).field, std::string(field.data(), field.size())) << frame.status();
}

TEST(Wire, RoundTrips) {
  const HelloFrame hello = Parsed<HelloFrame>(EncodeHello({3, 2, 0x80000001, 77}));
  EXPECT_EQ(hello.features, 0x80000001u);
  EXPECT_EQ(hello.stall_ms, 77u);
  const OfferFrame offer = Parsed<OfferFrame>(EncodeOffer(kExampleToken, 7, ExamplePart()));
  EXPECT_EQ(offer.token, kExampleToken);
  EXPECT_EQ(offer.room_ms, 7);
  EXPECT_EQ(offer.part.manifest, "manifest");
  EXPECT_TRUE(offer.part.page_bytes == (PageSizes{5, 1}));
  const TrailerFrame last = Parsed<TrailerFrame>(EncodeTrailer(ExampleLast()));
  EXPECT_TRUE(last.part.page_bytes == (PageSizes{5, 1}));
  EXPECT_EQ(last.part.withdrawn, (std::vector<uint32_t>{0, 3}));
  EXPECT_EQ(last.part.manifest, "manifest");
  const AcceptFrame accept = Parsed<AcceptFrame>(EncodeAccept({1 << 20, 4, "ti\0ck", BitmapOf(10, {0, 7, 9})}));
  EXPECT_TRUE(accept.wanted.has(0) && accept.wanted.has(7) && accept.wanted.has(9));
  EXPECT_FALSE(accept.wanted.has(1) || accept.wanted.has(8) || accept.wanted.has(10));
  EXPECT_EQ(accept.window, 1u << 20);
  EXPECT_EQ(accept.connections, 4u);
  EXPECT_EQ(accept.ticket, "ti");
  EXPECT_EQ(Parsed<ExtendedFrame>(EncodeExtended({})).wanted.count, 0u);
  const PagesFrame pages = Parsed<PagesFrame>(ExamplePages());
  ASSERT_EQ(pages.pages.size(), 2u);
  EXPECT_EQ(pages.pages[0].page, 3u);
  EXPECT_EQ(pages.pages[0].checksum, 0x1122334455667788u);
  EXPECT_EQ(Parsed<GotFrame>(EncodeGot(99, {1, 2, 3})).pages, (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_TRUE(Parsed<JoinedFrame>(EncodeJoined({true, BitmapOf(3, {2})})).arrived.has(2));
  EXPECT_EQ(Parsed<JoinFrame>(EncodeJoin({kExampleToken, 3})).connection, 3u);
  EXPECT_EQ(Parsed<LoadFrame>(EncodeLoad({1, 2, 3, 4, 5})).load.queued_bytes, 5u);
  const absl::Status sent = FieldError(absl::StatusCode::kDataLoss, "field", "value", "bound");
  EXPECT_EQ(Parsed<ErrorFrame>(EncodeError(sent)).status, sent);
  EXPECT_EQ(DetailOf(Parsed<WaitingFrame>(EncodeWaiting(sent)).why).bound, "bound");
}

TEST(Wire, LocalConnectionsRoundTrip) {
  const HostId host = {9, 8, 7};
  EXPECT_EQ(Parsed<OfferFrame>(EncodeOffer(kExampleToken, 7, ExamplePart(), host)).host, host);
  EXPECT_EQ(Parsed<AcceptFrame>(EncodeAccept({1, 1, "ticket", BitmapOf(10, {9}), "name"})).local_name, "name");
  EXPECT_TRUE(Parsed<AcceptFrame>(EncodeAccept({1, 1, "ticket", BitmapOf(10, {9}), "name"})).wanted.has(9));
  EXPECT_EQ(Parsed<RegionFrame>(EncodeRegion({3, 4096})).bytes, 4096u);
  const HandOffPart of_gpu = ExampleGpuPart();
  const OfferFrame gpu_offer = Parsed<OfferFrame>(EncodeOffer(kExampleToken, 7, of_gpu, host));
  EXPECT_EQ(gpu_offer.part.gpu, of_gpu.gpu);
  EXPECT_EQ(gpu_offer.part.page_bytes, of_gpu.page_bytes);
  EXPECT_EQ(gpu_offer.part.manifest, of_gpu.manifest);
  const MemoryFrame memory = Parsed<MemoryFrame>(EncodeMemory({3, "described"}));
  EXPECT_EQ(memory.region, 3u);
  EXPECT_EQ(memory.description, "described");
  const RegionFrame slab = ExampleSlab();
  const RegionFrame said = Parsed<RegionFrame>(EncodeRegion(slab));
  EXPECT_EQ(said.gpu, slab.gpu);
  EXPECT_EQ(said.name, slab.name);
  const LocalFrame local = Parsed<LocalFrame>(EncodeLocal({{1, 3, 64, 0x1122334455667788}, {2, 3, 128, 9}}));
  ASSERT_EQ(local.pages.size(), 2u);
  EXPECT_EQ(local.pages[0].checksum, 0x1122334455667788u);
  EXPECT_EQ(local.pages[1].offset, 128u);
}

TEST(Wire, LayoutIsTheDocumentedOne) {
  EXPECT_EQ(EncodeHello({}).substr(0, 12), std::string("KVMPAGE\0\2\0\2\0", 12));
  EXPECT_EQ(EncodeHello({}).substr(16), std::string("\1\0\0\0\xa0\x0f\0\0", 8));
  const std::string got = EncodeGot(258, {3});
  EXPECT_EQ(got.substr(0, 4), std::string("\x08\0\0\0", 4));
  EXPECT_EQ(got.substr(8), std::string("\x0c\0\0\0\0\0\0\0\2\1\0\0\0\0\0\0\3\0\0\0", 20));
}

TEST(Wire, EveryTruncationAndExtensionIsAnError) {
  for (const std::string& frame : Examples()) {
    ASSERT_TRUE(ParseFrame(Bytes(frame)).ok());
    for (size_t n = 0; n < frame.size(); ++n) EXPECT_FALSE(ParseFrame(Bytes(frame.substr(0, n))).ok()) << n;
    EXPECT_FALSE(ParseFrame(Bytes(frame + '\0')).ok());
  }
}

TEST(Wire, EveryFlippedBitIsAnError) {
  for (const std::string& frame : Examples()) {
    for (size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      std::string changed = frame;
      changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << (bit % 8));
      const absl::StatusOr<Frame> parsed = ParseFrame(Bytes(changed));
      if (!parsed.ok()) continue;
      // A hello of a version that is not spoken is read no further.
      const HelloFrame* hello = std::get_if<HelloFrame>(&*parsed);
      ASSERT_TRUE(hello != nullptr && !CheckVersion(*hello).ok()) << bit;
    }
  }
}

TEST(Wire, LimitsAreNamed) {
  const std::string offer = EncodeOffer(kExampleToken, 7, ExamplePart());
  ExpectInvalid(Poke(offer, 16 + 16, SendRequest::kRoomMsMax + 1, 4), "OFFER room_ms");
  ExpectInvalid(Poke(offer, 16 + 20, HandOffPart::kManifestBytesMax + 1, 4), "manifest bytes");
  ExpectInvalid(Poke(offer, 16 + 20, 0, 4), "manifest bytes");
  ExpectInvalid(Poke(offer, 16 + 24, HandOffPart::kPagesMax + 1, 4), "runs of pages");
  ExpectInvalid(Poke(offer, 16 + 24, 3, 4), "OFFER body bytes");
  ExpectInvalid(Poke(offer, 16 + 28, 2, 4), "OFFER gpu");
  ExpectInvalid(Poke(offer, 16 + 28, 1, 4), "OFFER body bytes");
  ExpectInvalid(Poke(offer, 16 + 52, 0, 4), "page 0 bytes");
  ExpectInvalid(Poke(offer, 16 + 60, HandOffPart::kPageBytesMax + 1, 4), "page 1 bytes");
  ExpectInvalid(Poke(offer, 16 + 56, 0, 4), "pages of a run");
  ExpectInvalid(Poke(offer, 16 + 56, HandOffPart::kPagesMax, 4), "pages of a run");
  EXPECT_TRUE(ParseFrame(Bytes(Poke(offer, 16 + 56, HandOffPart::kPagesMax - 1, 4))).ok());
  ExpectInvalid(Poke(offer, 8, uint64_t{1} << 40, 8), "OFFER body bytes");
  ExpectInvalid(Poke(offer, 0, 19, 1), "frame type");
  ExpectInvalid(Poke(offer, 0, 0, 1), "frame type");
  ExpectInvalid(Poke(offer, 1, 1, 1), "frame reserved");
  const std::string last = EncodeTrailer(ExampleLast());
  ExpectInvalid(Poke(last, 16 + 8, HandOffPart::kPagesMax + 1, 4), "withdrawn pages");
  ExpectInvalid(Poke(last, 16 + 8, 1, 4), "LAST body bytes");
  const std::string accept = EncodeAccept({1 << 20, 4, "ticket", BitmapOf(10, {0, 7, 9})});
  ExpectInvalid(Poke(accept, 16, 0, 8), "ACCEPT window");
  ExpectInvalid(Poke(accept, 16 + 8, 0, 4), "ACCEPT connections");
  ExpectInvalid(Poke(accept, 16 + 8, kConnectionsMax + 1, 4), "ACCEPT connections");
  ExpectInvalid(Poke(accept, 16 + 12, 0, 4), "ACCEPT ticket bytes");
  ExpectInvalid(Poke(accept, 16 + 12, 4000, 4), "ACCEPT ticket bytes");
  ExpectInvalid(Poke(accept, 16 + 16, 17, 4), "ACCEPT bitmap bytes");
  ExpectInvalid(Poke(accept, accept.size() - 1, 0x04, 1), "ACCEPT bitmap's last byte");
  ExpectInvalid(Poke(accept, 16 + 20, kLocalNameBytesMax + 1, 4), "ACCEPT local name bytes");
  ExpectInvalid(Poke(accept, 16 + 20, 50, 4), "ACCEPT local name bytes");
  ExpectInvalid(Poke(EncodeRegion({3, 4096}), 16, kRegionsMax, 4), "region");
  ExpectInvalid(Poke(EncodeRegion({3, 4096}), 16 + 8, 0, 8), "region bytes");
  ExpectInvalid(Poke(EncodeRegion({3, 4096}), 16 + 4, 1, 4), "REGION body bytes");
  ExpectInvalid(Poke(EncodeRegion({3, 4096}), 16 + 4, 2, 4), "REGION gpu");
  ExpectInvalid(Poke(EncodeRegion(ExampleSlab()), 16 + 4, 0, 4), "REGION body bytes");
  ExpectInvalid(Poke(EncodeRegion(ExampleSlab()), 16 + 16, 0, 8), "REGION GPU's name");
  const std::string of_gpu = EncodeOffer(kExampleToken, 7, ExampleGpuPart());
  ExpectInvalid(Poke(of_gpu, 16 + 28, 0, 4), "OFFER body bytes");
  ExpectInvalid(Poke(of_gpu, 16 + 48, 0, 8), "OFFER GPU's name");
  const std::string join = EncodeJoin({kExampleToken, 3});
  ExpectInvalid(Poke(join, 16 + 16, kConnectionsMax + 1, 4), "JOIN connection");
  ExpectInvalid(Poke(EncodeJoined({}), 16 + 4, 2, 4), "JOINED last_known");
  ExpectInvalid(Poke(EncodeGot(1, {}), 16, 0, 8), "GOT window");
  ExpectInvalid(Poke(ExamplePages(), 16, HandOffPart::kPagesMax, 4), "page");
  ExpectInvalid(Poke(ExamplePages(), 16 + 4, 1, 4), "PAGES reserved");
  ExpectInvalid(Poke(ExamplePages(), 8, kPageRecordBytes * (kPagesPerFrameMax + 1), 8), "PAGES body bytes");
  const std::string error = EncodeError(absl::InternalError("x"));
  ExpectInvalid(Poke(error, 16, 0, 4), "error code");
  ExpectInvalid(Poke(error, 16, 17, 4), "error code");
  ExpectInvalid(Poke(error, 16 + 4, kErrorTextBytesMax + 1, 4), "error text bytes");
  ExpectInvalid(Poke(error, 16 + 4, 2, 4), "ERROR body bytes");
  ExpectInvalid(Poke(EncodeMemory({3, "described"}), kHeaderBytes, kRegionsMax, 4), "region");
  ExpectInvalid(Poke(EncodeMemory({3, "described"}), kHeaderBytes + 4, 1, 4), "MEMORY reserved");
  ExpectInvalid(EncodeHello({0, 1, 0, 1}), "hello version");
  ExpectInvalid(EncodeHello({2, 3, 0, 1}), "hello version_min");
  ExpectInvalid(EncodeHello({2, 2, 0, 0}), "hello stall_ms");
}

TEST(Wire, BitmapsOfEverySize) {
  for (uint32_t count = 0; count < 40; ++count) {
    PageBitmap all = PageBitmap::All(count), one_by_one(count);
    for (uint32_t page = 0; page < count; ++page) one_by_one.Add(page);
    EXPECT_EQ(all.bits, one_by_one.bits);
    std::vector<uint32_t> removed, missing;
    for (uint32_t page = count % 3; page < count; page += 1 + count % 7) removed.push_back(page);
    for (const uint32_t page : removed) all.Remove(page);
    all.ForEachMissing([&](uint32_t page) { missing.push_back(page); });
    EXPECT_EQ(missing, removed);
  }
}

TEST(Wire, RunsOfPagesAreShort) {
  HandOffPart part = ExamplePart();
  part.page_bytes = {};
  part.page_bytes.Append(500, 5);
  part.page_bytes.Append(1, 6);
  part.page_bytes.Append(499, 5);
  const std::string offer = EncodeOffer(kExampleToken, 7, part, {});
  EXPECT_EQ(offer.size(), EncodeOffer(kExampleToken, 7, ExamplePart(), {}).size() + 8);  // three runs, not two
  EXPECT_TRUE(Parsed<OfferFrame>(offer).part.page_bytes == part.page_bytes);
  part.withdrawn = {7};
  EXPECT_TRUE(Parsed<TrailerFrame>(EncodeTrailer(part)).part.page_bytes == part.page_bytes);
  part.page_bytes = {};
  EXPECT_TRUE(Parsed<TrailerFrame>(EncodeTrailer(part)).part.page_bytes.empty());
}

TEST(Wire, PartsAreChecked) {
  HandOffPart part = ExamplePart();
  EXPECT_TRUE(CheckPart(part, 0).ok());
  const auto field_of = [](const HandOffPart& bad, size_t before) { return DetailOf(CheckPart(bad, before)).field; };
  part.page_bytes = {};
  part.page_bytes.Append(HandOffPart::kPagesMax, 1);
  EXPECT_EQ(field_of(part, 1), "pages");
  part = ExampleLast();
  EXPECT_TRUE(CheckPart(part, 4).ok());
  EXPECT_EQ(field_of(part, 3), "withdrawn[1]");
  part.withdrawn = {2, 2};
  EXPECT_EQ(field_of(part, 4), "withdrawn[1]");
  part = ExamplePart();
  part.page_bytes = {1, 0};
  EXPECT_EQ(field_of(part, 5), "page 6 bytes");
}

TEST(Wire, ErrorTextsAreCutAndPrintable) {
  const absl::Status status = Parsed<ErrorFrame>(EncodeError(absl::InternalError(std::string(9000, '\xff')))).status;
  EXPECT_EQ(status.message(), std::string(kErrorTextBytesMax, '?'));
}

TEST(Wire, VersionsOverlapOrNot) {
  EXPECT_TRUE(CheckVersion({2, 2, 0, 1}).ok());
  EXPECT_TRUE(CheckVersion({9, 1, ~uint32_t{0}, 1}).ok());
  EXPECT_EQ(CheckVersion({9, 3, 0, 1}).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(CheckVersion({1, 1, 0, 1}).code(), absl::StatusCode::kUnimplemented);
}

TEST(Wire, RandomMutationsNeverCrash) {
  std::mt19937_64 random(1);
  const std::vector<std::string> examples = Examples();
  for (int i = 0; i < 50000; ++i) {
    std::string frame = examples[random() % examples.size()];
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
      frame[random() % frame.size()] = static_cast<char>(random() % 4 == 0 ? 0xff : random());
    }
    frame = Poke(frame, random() % frame.size(), random(), 1);  // with a good check
    const absl::StatusOr<Frame> parsed = ParseFrame(Bytes(frame));
    if (!parsed.ok()) continue;
    if (const auto* offer = std::get_if<OfferFrame>(&*parsed)) {
      for (const uint64_t bytes : offer->part.page_bytes) ASSERT_LE(bytes, HandOffPart::kPageBytesMax);
    }
  }
}

}  // namespace
}  // namespace kvmanager::tcp
