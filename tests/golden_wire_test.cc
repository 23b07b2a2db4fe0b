// What daemons say to one another in a hand-off has the bytes of tests/golden/wire.txt, and those bytes are still
// understood: each frame of transport/tcp/wire.h, and the manifests in it. Pages' bytes follow PAGES as they are.
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/manifest.h"
#include "kvmanager/store/hand_off_lease.h"
#include "tests/golden.h"
#include "transport/tcp/wire.h"

namespace kvmanager::testing {
namespace {

using namespace tcp;

constexpr Token kToken = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr HostId kHost = {21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36};

HandOffPart Part() {
  HandOffPart part;
  part.manifest = "manifest";
  part.page_bytes = {7936, 7936, 32768};
  return part;
}
HandOffPart GpuPart() {
  HandOffPart part = Part();
  part.gpu = {41, 42, 43};
  return part;
}
HandOffPart LastPart() {
  HandOffPart part = Part();
  part.withdrawn = {0, 2};
  return part;
}
PageBitmap Bitmap() {
  PageBitmap bitmap(11);
  for (const uint32_t page : {0, 7, 10}) bitmap.Add(page);
  return bitmap;
}
std::string PagesHead() {
  const PageRecord pages[] = {{3, 0x1122334455667788}, {7, 9}};
  std::string out(kHeaderBytes + std::size(pages) * kPageRecordBytes, 0);
  PutPagesHead(pages, reinterpret_cast<uint8_t*>(&out[0]));
  return out;
}
RegionFrame Slab() {
  RegionFrame slab;
  slab.region = 3;
  slab.bytes = 1 << 21;
  slab.gpu = {41, 42, 43};
  slab.name = {51, 52};
  return slab;
}

struct Example {
  const char* name;
  std::string bytes;
};
std::vector<Example> Frames() {
  const absl::Status error = InvalidField("pages[0].bytes", 32768, "7936");
  return {{"HELLO", EncodeHello({2, 2, kFeatureGpuPages, 4000})},
          {"OFFER", EncodeOffer(kToken, 7, Part(), kHost)},
          {"OFFER of a GPU", EncodeOffer(kToken, 0, GpuPart(), kHost)},
          {"JOIN", EncodeJoin({kToken, 3})},
          {"WAITING", EncodeWaiting(absl::ResourceExhaustedError("full"))},
          {"ACCEPT", EncodeAccept({1 << 20, 4, "ticket", Bitmap()})},
          {"ACCEPT with local connections", EncodeAccept({1 << 20, 4, "ticket", Bitmap(), "name"})},
          {"LAST", EncodeTrailer(LastPart())},
          {"EXTENDED", EncodeExtended({Bitmap()})},
          {"PAGES", PagesHead()},
          {"GOT", EncodeGot(1 << 20, {1, 2, 300})},
          {"JOINED", EncodeJoined({true, Bitmap()})},
          {"PING", EncodeEmpty(FrameType::kPing)},
          {"DONE", EncodeEmpty(FrameType::kDone)},
          {"CANCEL", EncodeEmpty(FrameType::kCancel)},
          {"PROBE", EncodeEmpty(FrameType::kProbe)},
          {"ERROR", EncodeError(error)},
          {"LOAD", EncodeLoad({1, 2, 3, 4, 5})},
          {"REGION", EncodeRegion({3, 1 << 21})},
          {"REGION of a GPU", EncodeRegion(Slab())},
          {"MEMORY", EncodeMemory({3, "described"})},
          {"LOCAL", EncodeLocal({{1, 3, 64, 0x1122334455667788}, {2, 3, 128, 9}})}};
}

BlockName NameOfBlock(uint8_t number) {
  BlockName name;
  name.key.bytes.fill(number);
  name.tokens.bytes.fill(uint8_t(number + 1));
  return name;
}
HandOffHeader First() {
  HandOffHeader first;
  CacheConfig& config = first.config;
  config.model = "model";
  config.revision = "1";
  config.tenant = "tenant";
  config.rope = "default:theta=10000";
  config.layers = 2;
  config.query_heads = 4;
  config.layout.kv_heads = 2;
  config.layout.head_dim = 64;
  config.layout.dtype = DType::kBFloat16;
  config.codec = "hack:k_bits=4,v_bits=3;sinks=64";
  config.lag_pages = 1;
  first.codec_version = 2;
  first.tokens = 4 * 64 + 5;
  first.blocks.resize(4);
  first.blocks[0] = {NameOfBlock(61), true};
  first.aged = {3, 3};
  first.pages = {{0, 0, 32768}, {1, 0, 7936}, {2, 0, 7936}, {0, 1, 32768}, {1, 1, 7936}, {2, 1, 7936}};
  return first;
}
HandOffHeader WithActivations() {
  HandOffHeader first = First();
  first.config.hidden = 256;
  first.activations = {{1, 0, 32768}, {2, 0, 32768}};
  return first;
}
HandOffTrailer Last() {
  HandOffTrailer last;
  last.withdrawn = {1};
  last.pages = {{1, 0, 32768}, {3, 0, 32768}, {4, 0, 32768}, {3, 1, 32768}, {4, 1, 32768}};
  last.blocks.resize(4);
  last.blocks[1] = {NameOfBlock(71), true};
  last.index = {200, 5};
  return last;
}
PageSizes SizesOf(const std::vector<HandOffPage>& pages, const std::vector<HandOffPage>& more = {}) {
  PageSizes sizes;
  for (const HandOffPage& page : pages) sizes.push_back(page.bytes);
  for (const HandOffPage& page : more) sizes.push_back(page.bytes);
  return sizes;
}

/// A manifest as it was written when its version was new. It must be read as `manifest`, but need not be written so
/// now: a field that was added since makes messages longer.
GoldenLine OfManifest(const GoldenFile& file, const std::string& key, const std::string& manifest,
                      const std::function<std::string(absl::string_view)>& read_and_write) {
  EXPECT_EQ(HexOf(read_and_write(manifest)), HexOf(manifest)) << key;
  const std::string golden = GoldenValue(file, key);
  if (golden.empty()) return {key, HexOf(manifest)};
  EXPECT_EQ(HexOf(read_and_write(absl::HexStringToBytes(golden))), HexOf(manifest))
      << key << " of tests/golden/wire.txt is not read as it was. " << file.advice;
  return {key, golden};
}

std::string ReadAndWriteFirst(const HandOffHeader& sizes_of, absl::string_view bytes) {
  const absl::StatusOr<HandOffHeader> read = ParseHandOffHeader(bytes, SizesOf(sizes_of.pages, sizes_of.activations));
  EXPECT_TRUE(read.ok()) << read.status();
  return read.ok() ? WriteHandOffHeader(*read) : "";
}
std::string ReadAndWriteLast(absl::string_view bytes) {
  const absl::StatusOr<TrailerManifest> read = ParseHandOffTrailer(bytes, SizesOf(Last().pages), Last().withdrawn);
  EXPECT_TRUE(read.ok()) << read.status();
  return read.ok() ? WriteHandOffTrailer(read->trailer, read->blob) : "";
}

TEST(GoldenWire, FramesAndManifestsAreTheSame) {
  GoldenFile file;
  file.name = "wire";
  file.about =
      "Frames between daemons (transport/tcp/wire.h) and the manifests of hand-offs, as hexadecimal digits.\n"
      "A value here never changes: a daemon of an earlier release sends and expects these bytes. A frame whose bytes\n"
      "must change gets a new version of the wire, or a feature bit and a line of its own; then write the file:\n"
      "  bazel run --config=opt //tests:golden_wire_test -- --write_golden\n"
      "Manifests are Cap'n Proto messages: these must be read as they were, but a new field may make new ones longer.";
  file.advice =
      "Daemons of earlier releases send and expect these bytes: restore them, or raise the version (wire.h: a change "
      "of "
      "meaning raises the version, an addition that old peers need not know takes a feature bit) and write the file.";
  std::vector<GoldenLine> lines;
  for (const Example& frame : Frames()) {
    lines.push_back({absl::StrCat("version ", kVersion, " ", frame.name), HexOf(frame.bytes)});
  }
  for (const HandOffHeader& first : {First(), WithActivations()}) {
    const bool activations = !first.activations.empty();
    lines.push_back(OfManifest(file,
                               absl::StrCat("manifest ", activations ? kActivationsManifestVersion : kManifestVersion,
                                            activations ? " first with activations" : " first"),
                               WriteHandOffHeader(first),
                               [&first](absl::string_view bytes) { return ReadAndWriteFirst(first, bytes); }));
  }
  lines.push_back(OfManifest(file, absl::StrCat("manifest ", kManifestVersion, " last"),
                             WriteHandOffTrailer(Last(), "blob"), ReadAndWriteLast));
  ExpectGolden(file, lines);
}

// The golden bytes are what is written now (above), so this is what a peer of an earlier release says.
TEST(GoldenWire, FramesAreUnderstood) {
  for (const Example& frame : Frames()) {
    SCOPED_TRACE(frame.name);
    const absl::StatusOr<Frame> parsed =
        ParseFrame({reinterpret_cast<const uint8_t*>(frame.bytes.data()), frame.bytes.size()});
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    if (const auto* const offer = std::get_if<OfferFrame>(&*parsed)) {
      EXPECT_EQ(EncodeOffer(offer->token, offer->room_ms, offer->part, offer->host), frame.bytes);
    }
    if (const auto* const last = std::get_if<TrailerFrame>(&*parsed)) EXPECT_EQ(EncodeTrailer(last->part), frame.bytes);
    if (const auto* const accept = std::get_if<AcceptFrame>(&*parsed)) EXPECT_EQ(EncodeAccept(*accept), frame.bytes);
    if (const auto* const joined = std::get_if<JoinedFrame>(&*parsed)) EXPECT_EQ(EncodeJoined(*joined), frame.bytes);
    if (const auto* const got = std::get_if<GotFrame>(&*parsed)) {
      EXPECT_EQ(EncodeGot(got->window, got->pages), frame.bytes);
    }
    if (const auto* const error = std::get_if<ErrorFrame>(&*parsed)) EXPECT_EQ(EncodeError(error->status), frame.bytes);
  }
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) { return kvmanager::testing::GoldenMain(argc, argv); }
