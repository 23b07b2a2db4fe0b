#include "transport/tcp/wire.h"

#include <cstring>
#include <random>

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {
namespace {

absl::Span<const uint8_t> Bytes(const std::string& s) { return {reinterpret_cast<const uint8_t*>(s.data()), s.size()}; }
void Poke(std::string& s, size_t at, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) s[at + i] = static_cast<char>(value >> (8 * i));
}
std::string ExampleOffer() {
  static const uint8_t kPage[5] = {};
  const SendPage pages[] = {{absl::MakeConstSpan(kPage, 5), 0x1122334455667788}, {absl::MakeConstSpan(kPage, 1), 7}};
  return EncodeOffer(pages, "manifest");
}
std::string ExamplePage() {
  std::string out(kHeaderBytes, 0);
  PutHeader({FrameType::kPage, 3, 77}, reinterpret_cast<uint8_t*>(out.data()));
  return out;
}
std::vector<std::string> Examples() {
  return {EncodeHello(),     ExampleOffer(),       EncodeAnswer({10, {0xff, 0x03}}),       ExamplePage(),
          EncodeEnd({2, 6}), EncodeDone("ticket"), EncodeError(InvalidField("f", 1, "2")), EncodeCancel()};
}
template <typename T>
T Parsed(const std::string& bytes) {
  absl::StatusOr<Frame> frame = ParseFrame(Bytes(bytes));
  EXPECT_TRUE(frame.ok()) << frame.status();
  EXPECT_TRUE(std::holds_alternative<T>(*frame));
  return std::get<T>(*frame);
}
void ExpectInvalid(const std::string& bytes, absl::string_view field) {
  const absl::StatusOr<Frame> frame = ParseFrame(Bytes(bytes));
  ASSERT_FALSE(frame.ok()) << "accepted with a bad " << std::string(field.data(), field.size());
  EXPECT_EQ(frame.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(frame.status()).field, std::string(field.data(), field.size())) << frame.status();
}

TEST(Wire, RoundTrips) {
  EXPECT_EQ(Parsed<HelloFrame>(EncodeHello({3, 2, 0x8000000000000001})).features, 0x8000000000000001u);
  const OfferFrame offer = Parsed<OfferFrame>(ExampleOffer());
  EXPECT_EQ(offer.manifest, "manifest");
  EXPECT_EQ(offer.page_bytes, (std::vector<uint64_t>{5, 1}));
  EXPECT_EQ(offer.page_checksums, (std::vector<uint64_t>{0x1122334455667788, 7}));
  EXPECT_EQ(offer.total_bytes, 6u);
  const AnswerFrame answer = Parsed<AnswerFrame>(EncodeAnswer({10, {0x81, 0x02}}));
  EXPECT_TRUE(answer.wanted(0) && answer.wanted(7) && answer.wanted(9));
  EXPECT_FALSE(answer.wanted(1) || answer.wanted(8));
  EXPECT_EQ(Parsed<AnswerFrame>(EncodeAnswer({})).page_count, 0u);
  EXPECT_EQ(Parsed<PageFrame>(ExamplePage()).page, 3u);
  EXPECT_EQ(Parsed<PageFrame>(ExamplePage()).bytes, 77u);
  EXPECT_EQ(Parsed<EndFrame>(EncodeEnd({2, uint64_t{1} << 40})).bytes, uint64_t{1} << 40);
  EXPECT_EQ(Parsed<DoneFrame>(EncodeDone(std::string("a\0b", 3))).ticket, std::string("a\0b", 3));
  const absl::Status sent = FieldError(absl::StatusCode::kDataLoss, "field", "value", "bound");
  const absl::Status status = Parsed<ErrorFrame>(EncodeError(sent)).status;
  EXPECT_EQ(status, sent);
  EXPECT_EQ(DetailOf(status).bound, "bound");
}

TEST(Wire, LayoutIsTheDocumentedOne) {
  const std::string hello("KVMPAGE\0\1\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0", 24);
  EXPECT_EQ(EncodeHello(), hello);
  EXPECT_EQ(EncodeEnd({1, 2}), std::string("\4\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0", 32));
  EXPECT_EQ(EncodeDone("t"), std::string("\5\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0t", 17));
}

TEST(Wire, EveryTruncationAndExtensionIsAnError) {
  for (const std::string& frame : Examples()) {
    ASSERT_TRUE(ParseFrame(Bytes(frame)).ok());
    for (size_t n = 0; n < frame.size(); ++n) EXPECT_FALSE(ParseFrame(Bytes(frame.substr(0, n))).ok()) << n;
    EXPECT_FALSE(ParseFrame(Bytes(frame + '\0')).ok());
  }
}

TEST(Wire, LimitsAreNamed) {
  std::string offer = ExampleOffer();
  Poke(offer, 16, SendRequest::kManifestBytesMax + 1, 4);
  ExpectInvalid(offer, "offer manifest bytes");
  Poke(offer, 16, 0, 4);
  ExpectInvalid(offer, "offer manifest bytes");
  offer = ExampleOffer();
  Poke(offer, 20, SendRequest::kPagesMax + 1, 4);
  ExpectInvalid(offer, "offer pages");
  Poke(offer, 20, 3, 4);
  ExpectInvalid(offer, "offer body bytes");
  for (const uint64_t bytes : {uint64_t{0}, SendRequest::kPageBytesMax + 1, ~uint64_t{0}}) {
    offer = ExampleOffer();
    Poke(offer, 40, bytes, 8);
    ExpectInvalid(offer, "offer page 1 bytes");
  }
  for (const uint64_t bytes : {uint64_t{kOfferBytesMax + 1}, ~uint64_t{0}, uint64_t{0}}) {
    offer = ExampleOffer();
    Poke(offer, 8, bytes, 8);
    ExpectInvalid(offer, "OFFER body bytes");
  }
  std::string page = ExamplePage();
  Poke(page, 4, SendRequest::kPagesMax, 4);
  ExpectInvalid(page, "frame page");
  page = ExamplePage();
  Poke(page, 8, SendRequest::kPageBytesMax + 1, 8);
  ExpectInvalid(page, "PAGE body bytes");
  std::string cancel = EncodeCancel();
  Poke(cancel, 4, 1, 4);
  ExpectInvalid(cancel, "frame page");
  for (const int type : {0, 8, 255}) {
    cancel = EncodeCancel();
    Poke(cancel, 0, type, 1);
    ExpectInvalid(cancel, "frame type");
  }
  for (const int at : {1, 2, 3}) {
    cancel = EncodeCancel();
    Poke(cancel, at, 1, 1);
    ExpectInvalid(cancel, "frame reserved");
  }
  ExpectInvalid(EncodeAnswer({10, {0xff, 0x07}}), "answer bitmap's last byte");
  ExpectInvalid(EncodeAnswer({17, {0xff, 0x03}}), "answer body bytes");
  std::string error = EncodeError(absl::InternalError("x"));
  Poke(error, 16, 0, 4);
  ExpectInvalid(error, "error code");
  Poke(error, 16, 17, 4);
  ExpectInvalid(error, "error code");
  error = EncodeError(absl::InternalError("x"));
  Poke(error, 20, kErrorTextBytesMax + 1, 4);
  ExpectInvalid(error, "error text bytes");
  Poke(error, 20, 2, 4);
  ExpectInvalid(error, "error body bytes");
  ExpectInvalid(EncodeHello({0, 1, 0}), "hello version");
  ExpectInvalid(EncodeHello({1, 2, 0}), "hello version_min");
}

TEST(Wire, ErrorTextsAreCutAndPrintable) {
  const absl::Status status = Parsed<ErrorFrame>(EncodeError(absl::InternalError(std::string(9000, '\xff')))).status;
  EXPECT_EQ(status.message(), std::string(kErrorTextBytesMax, '?'));
}

TEST(Wire, VersionsOverlapOrNot) {
  EXPECT_TRUE(CheckVersion({1, 1, 0}).ok());
  EXPECT_TRUE(CheckVersion({9, 1, ~uint64_t{0}}).ok());
  EXPECT_EQ(CheckVersion({9, 2, 0}).code(), absl::StatusCode::kUnimplemented);
}

TEST(Wire, RandomMutationsNeverCrash) {
  std::mt19937_64 random(1);
  const std::vector<std::string> examples = Examples();
  for (int i = 0; i < 50000; ++i) {
    std::string frame = examples[random() % examples.size()];
    for (int flips = 1 + random() % 4; flips > 0; --flips) {
      frame[random() % frame.size()] = static_cast<char>(random() % 4 == 0 ? 0xff : random());
    }
    const absl::StatusOr<Frame> parsed = ParseFrame(Bytes(frame));
    if (!parsed.ok()) continue;
    if (const auto* offer = std::get_if<OfferFrame>(&*parsed)) {
      for (const uint64_t bytes : offer->page_bytes) ASSERT_LE(bytes, SendRequest::kPageBytesMax);
    }
  }
}

}  // namespace
}  // namespace kvmanager::tcp
