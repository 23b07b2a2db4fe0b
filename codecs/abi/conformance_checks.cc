#include "codecs/abi/conformance_checks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "codecs/abi/plugin_codec.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::conformance {
namespace {

using Place = GuardedBuffer::Place;

absl::Status Wrong(absl::string_view what) { return absl::InternalError(what); }

/// Demands an error with a text that also fits small buffers.
absl::Status ExpectError(const kvmc_codec_api& api, kvmc_status status, absl::string_view what) {
  if (status == KVMC_OK) return Wrong(absl::StrCat(what, " was accepted"));
  for (const size_t bytes : {256, 8, 1}) {
    GuardedBuffer text("text of last_error", bytes, Place::kAgainstEnd, 1);
    text.Fill(0x7e);
    api.last_error(reinterpret_cast<char*>(text.data()), bytes);
    const size_t length = strnlen(reinterpret_cast<const char*>(text.data()), bytes);
    if (length == bytes) return Wrong(absl::StrCat("last_error gave ", bytes, " bytes without a 0 at the end"));
    if (bytes > 1 && length == 0) return Wrong(absl::StrCat(what, " gave an error without a text"));
    if (const std::string damage = text.Damage(); !damage.empty()) return Wrong(damage);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TableIsSound(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const CodecPlugin> plugin, CodecPlugin::Load(c.options->path));
  const kvmc_codec_api& api = plugin->api();
  if (plugin->help().empty()) return Wrong("help is empty, must be a line that says what the codec is");
  if (plugin->help().find('?') != std::string::npos && std::strchr(api.help, '?') == nullptr) {
    return Wrong("help has bytes that are not printable ASCII");
  }
  if ((api.map_queries == nullptr) != (api.expand_output == nullptr)) {
    return Wrong("map_queries and expand_output come together, or not at all");
  }
  if ((api.project_output == nullptr) != (api.output_factor == nullptr)) {
    return Wrong("project_output and output_factor come together, or not at all");
  }
  if (api.attend_batch == nullptr && api.map_queries != nullptr) return Wrong("map_queries without attend_batch");
  return absl::StrCat("codec ", plugin->name(), ": ", plugin->help());
}

absl::StatusOr<std::string> RefusalsHaveTexts(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const CodecPlugin> plugin, CodecPlugin::Load(c.options->path));
  const kvmc_codec_api& api = plugin->api();
  const CodecParameters& parameters = c.options->parameters;
  const auto refuses = [&](const Case& bad, const CodecParameters& with, absl::string_view what) {
    KV_RETURN_IF_ERROR(ExpectError(api, Describe(api, bad, with).status, absl::StrCat("describe: ", what)));
    const Context context(bad, with);
    kvmc_codec* codec = nullptr;
    return ExpectError(api, api.create(context.get(), &codec), absl::StrCat("create: ", what));
  };
  CodecParameters unknown = parameters;
  unknown.emplace("no_such_parameter", "1");
  KV_RETURN_IF_ERROR(refuses(c, unknown, "parameter no_such_parameter=1"));
  Case bad = c;
  bad.layout.head_dim = 17;
  KV_RETURN_IF_ERROR(refuses(bad, parameters, "head_dim 17"));
  bad = c;
  bad.layout.kv_heads = 0;
  KV_RETURN_IF_ERROR(refuses(bad, parameters, "kv_heads 0"));
  bad = c;
  bad.layout.page_tokens = 0;
  KV_RETURN_IF_ERROR(refuses(bad, parameters, "page_tokens 0"));
  Context odd(c, parameters);
  odd.get()->dtype = 77;
  kvmc_codec* codec = nullptr;
  KV_RETURN_IF_ERROR(ExpectError(api, api.create(odd.get(), &codec), "create: dtype 77"));
  if (c.calibration.empty()) return "";
  bad = c;
  bad.calibration.resize(bad.calibration.size() / 2);
  KV_RETURN_IF_ERROR(refuses(bad, parameters, "half of the calibration's file"));
  return "";
}

absl::StatusOr<std::string> DescriptionIsSound(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const CodecPlugin> plugin, CodecPlugin::Load(c.options->path));
  const kvmc_codec_api& api = plugin->api();
  const Described d = Describe(api, c, c.options->parameters);
  if (d.status == KVMC_INVALID_ARGUMENT || d.status == KVMC_FAILED_PRECONDITION) {
    KV_RETURN_IF_ERROR(ExpectError(api, d.status, "describe"));
    return absl::StrCat(kNotTaken, plugin->StatusOf(d.status, "describe").message());
  }
  KV_RETURN_IF_ERROR(plugin->StatusOf(d.status, "describe"));
  // What the core itself demands, in the core's words.
  CodecContext context;
  context.layout = c.layout;
  context.layers = c.layers;
  context.query_heads = c.query_heads;
  if (!c.calibration.empty()) {
    KV_ASSIGN_OR_RETURN(context.calibration, Calibration::Parse(c.calibration, c.options->calibration_path));
  }
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec,
                      MakePluginCodec(plugin, context, c.options->parameters, nullptr));
  if (!(Describe(api, c, c.options->parameters) == d)) return Wrong("describing twice gives two descriptions");
  CodecParameters canonical;
  KV_ASSIGN_OR_RETURN(const CodecSpec spec,
                      ParseCodecSpec(d.parameters.empty() ? plugin->name() : plugin->name() + ":" + d.parameters));
  if (const Described again = Describe(api, c, spec.parameters); !(again == d)) {
    return Wrong(absl::StrCat("its own parameters \"", d.parameters, "\" give another description",
                              again.status == KVMC_OK ? absl::StrCat(": \"", again.parameters, "\"") : ", an error"));
  }
  const double token_heads = double(c.layout.kv_heads) * c.layout.page_tokens;
  return absl::StrFormat("version %u, %.6g bytes per token and KV head of raw's %g, parameters \"%s\"%s", d.version,
                         double(d.payload_bytes) / token_heads, double(c.layout.raw_bytes()) / token_heads,
                         d.parameters, (d.flags & KVMC_ATTENDS) != 0 ? "" : ", without attention of its own");
}

absl::StatusOr<std::string> EncodingIsDeterministic(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  for (const int layer : subject->layers()) {
    const size_t bytes = subject->bytes(layer);
    for (const Kind kind : {Kind::kNormal, Kind::kOutliers}) {
      GuardedBuffer first("encoded page", bytes), second("encoded page", bytes);
      first.Fill(0x00);
      second.Fill(0xff);
      const GuardedBuffer raw = subject->Page(kind, 1);
      KV_RETURN_IF_ERROR(subject->Encode(raw, layer, 128, first));
      KV_RETURN_IF_ERROR(subject->Encode(subject->Page(Kind::kOutliers, 7), layer, 0, second));
      second.Fill(0xff);
      KV_RETURN_IF_ERROR(subject->Encode(raw, layer, 128, second));
      const auto [a, b] = std::mismatch(first.data(), first.data() + bytes, second.data());
      if (a != first.data() + bytes) {
        return Wrong(
            *a == 0x00 && *b == 0xff
                ? absl::StrCat("byte ", a - first.data(), " of the encoded page is not written")
                : absl::StrCat("the same page gave other bytes the second time, from byte ", a - first.data()));
      }
    }
  }
  return "";
}

absl::StatusOr<std::string> BatchesAreTheirPages(const Case& c) {
  constexpr size_t kPages = 40;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  const int layer = subject->layers().back();
  struct Element {
    kvmc_encode_item item;
    uint8_t more[40];
  };
  std::vector<GuardedBuffer> raw, alone, together;
  std::vector<Element> elements(kPages);
  for (size_t i = 0; i < kPages; ++i) {
    // One that may be declined must not disturb the others.
    raw.push_back(subject->Page(i == 5 ? Kind::kHuge : Kind::kNormal, i));
    alone.emplace_back("encoded page", subject->bytes(layer));
    together.emplace_back("encoded page", subject->bytes(layer));
    bool declined;
    KV_RETURN_IF_ERROR(subject->Encode(raw[i], layer, i * c.layout.page_tokens, alone[i], &declined));
    std::memset(&elements[i], 0xee, sizeof elements[i]);
    elements[i].item = {raw[i].data(), together[i].data(), uint32_t(layer), 0, i * c.layout.page_tokens};
  }
  const size_t workspace_bytes = subject->api().workspace_bytes(subject->codec(), KVMC_FOR_ENCODE, 0);
  GuardedBuffer workspace("workspace", workspace_bytes);
  kvmc_encode_batch batch = {sizeof batch,    &elements[0].item, kPages,
                             sizeof(Element), workspace.data(),  workspace_bytes};
  if (const kvmc_status s = subject->api().encode_batch(subject->codec(), &batch); s != KVMC_OK) {
    return subject->ErrorOf(s, "encode_batch");
  }
  for (size_t i = 0; i < kPages; ++i) {
    if (elements[i].item.declined != 0) continue;
    if (std::memcmp(alone[i].data(), together[i].data(), alone[i].size()) != 0) {
      return Wrong(absl::StrCat("page ", i, " of a batch of ", kPages, " has other bytes than alone"));
    }
    if (const std::string damage = together[i].Damage(); !damage.empty()) return Wrong(damage);
  }
  return "";
}

absl::StatusOr<std::string> BuffersAreKept(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  for (const int layer : subject->layers()) {
    for (const Place place : {Place::kAgainstEnd, Place::kAgainstStart}) {
      GuardedBuffer encoded("encoded page", subject->bytes(layer), place);
      KV_RETURN_IF_ERROR(subject->Encode(subject->Page(Kind::kNormal, 3, place), layer, 0, encoded));
      encoded.SetReadOnly(true);
      for (int heads = 1; heads <= c.layout.kv_heads; ++heads) {
        const GuardedBuffer raw("decoded page", 2 * heads * c.layout.raw_head_bytes(), place);
        KV_RETURN_IF_ERROR(subject->Decode(encoded, layer, c.layout.kv_heads - heads, heads, raw));
      }
      if (const kvmc_status s = subject->Validate(encoded, layer, encoded.size()); s != KVMC_OK) {
        return subject->ErrorOf(s, "validate of its own page");
      }
    }
  }
  return "";
}

absl::StatusOr<std::string> DecodeIsCloseAndFinite(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  std::string note = "relative error of K and V:";
  const size_t elements = c.layout.raw_bytes() / DTypeBytes(c.layout.dtype);
  for (const int layer : subject->layers()) {
    const GuardedBuffer raw = subject->Page(Kind::kNormal, 4);
    KV_ASSIGN_OR_RETURN(const GuardedBuffer encoded, subject->Encoded(Kind::kNormal, 4, layer));
    GuardedBuffer first("decoded page", c.layout.raw_bytes()), second("decoded page", c.layout.raw_bytes());
    first.Fill(0xff);
    KV_RETURN_IF_ERROR(subject->Decode(encoded, layer, 0, c.layout.kv_heads, first));
    KV_RETURN_IF_ERROR(subject->Decode(encoded, layer, 0, c.layout.kv_heads, second));
    if (std::memcmp(first.data(), second.data(), first.size()) != 0) {
      return Wrong("decoding twice gives other bytes: is every element written?");
    }
    if (FindNonFinite(c.layout.dtype, first.data(), elements) != elements)
      return Wrong("a decoded value is not finite");
    const std::vector<double> was = Values(c.layout, raw.data(), elements);
    const std::vector<double> is = Values(c.layout, first.data(), elements);
    absl::StrAppend(&note, " layer ", layer);
    for (size_t side = 0; side < 2; ++side) {
      double error = 0, norm = 0;
      for (size_t i = side * elements / 2; i < (side + 1) * elements / 2; ++i) {
        error += (was[i] - is[i]) * (was[i] - is[i]);
        norm += was[i] * was[i];
      }
      absl::StrAppend(&note, absl::StrFormat(" %.3g", std::sqrt(error / norm)));
      if (!(error <= 4 * norm)) return Wrong(absl::StrCat(note, ": farther from the page than zeros are, twice over"));
    }
  }
  return note;
}

absl::StatusOr<std::string> OneHeadIsThatHeadOfAll(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  const size_t head_bytes = c.layout.raw_head_bytes();
  for (const int layer : subject->layers()) {
    KV_ASSIGN_OR_RETURN(const GuardedBuffer encoded, subject->Encoded(Kind::kNormal, 8, layer));
    const GuardedBuffer all("decoded page", c.layout.raw_bytes());
    KV_RETURN_IF_ERROR(subject->Decode(encoded, layer, 0, c.layout.kv_heads, all));
    for (int head = 0; head < c.layout.kv_heads; ++head) {
      const GuardedBuffer one("decoded head", 2 * head_bytes);
      KV_RETURN_IF_ERROR(subject->Decode(encoded, layer, head, 1, one));
      for (int side = 0; side < 2; ++side) {
        if (std::memcmp(one.data() + side * head_bytes, all.data() + c.layout.raw_offset(side, head, 0), head_bytes) !=
            0) {
          return Wrong(absl::StrCat("layer ", layer, ": ", side == 0 ? "K" : "V", " of head ", head,
                                    " decoded alone is not that of the whole page"));
        }
      }
    }
  }
  return "";
}

absl::StatusOr<std::string> AnyValuesAreEncodedOrDeclined(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  const size_t elements = c.layout.raw_bytes() / DTypeBytes(c.layout.dtype);
  const int layer = subject->layers().back();
  std::string note;
  for (const Kind kind : kKinds) {
    GuardedBuffer encoded("encoded page", subject->bytes(layer));
    bool declined = false;
    KV_RETURN_IF_ERROR(subject->Encode(subject->Page(kind, 11), layer, 0, encoded, &declined));
    if (declined) {
      absl::StrAppend(&note, note.empty() ? "declined: " : ", ", KindName(kind));
      continue;
    }
    if (const kvmc_status s = subject->Validate(encoded, layer, encoded.size()); s != KVMC_OK) {
      return subject->ErrorOf(s, KindName(kind));
    }
    const GuardedBuffer raw("decoded page", c.layout.raw_bytes());
    KV_RETURN_IF_ERROR(subject->Decode(encoded, layer, 0, c.layout.kv_heads, raw));
    const size_t at = FindNonFinite(c.layout.dtype, raw.data(), elements);
    // The largest finite values may round up, which decline or clamping would avoid; attention does not round.
    if (at != elements && kind != Kind::kHuge && kind != Kind::kAlternating) {
      return Wrong(absl::StrCat(KindName(kind), ": decoded element ", at, " is not finite"));
    }
  }
  return note;
}

absl::StatusOr<std::string> NanIsDeclined(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  const int layer = subject->layers().back();
  const size_t elements = c.layout.raw_bytes() / DTypeBytes(c.layout.dtype);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const size_t at : {size_t{0}, elements / 2 - 1, elements / 2, elements - 1}) {
      GuardedBuffer raw = subject->Page(Kind::kNormal, 2);
      raw.SetReadOnly(false);
      StoreElement(raw.data(), c.layout.dtype, at, bad);
      raw.SetReadOnly(true);
      const GuardedBuffer encoded("encoded page", subject->bytes(layer));
      bool declined = false;
      KV_RETURN_IF_ERROR(subject->Encode(raw, layer, 0, encoded, &declined));
      if (!declined) return Wrong(absl::StrCat("a page whose element ", at, " is ", bad, " was encoded, not declined"));
    }
  }
  return "";
}

/// Reads a page that validate accepted as the daemon would.
absl::Status UsePage(const Subject& subject, const GuardedBuffer& page, int layer) {
  const PageLayout& layout = subject.layout();
  const GuardedBuffer raw("decoded page", layout.raw_bytes());
  KV_RETURN_IF_ERROR(subject.Decode(page, layer, 0, layout.kv_heads, raw));
  if (!subject.attends()) return absl::OkStatus();
  const AttendQueries queries = {std::vector<float>(size_t{layout.head_dim} * 4, 0.5f), PlainScale(layout)};
  return subject.Attend({page.data()}, layer, layout.kv_heads - 1, queries).status();
}

absl::StatusOr<std::string> ValidateSurvivesAnyBytes(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  std::mt19937 random(6);
  int accepted = 0;
  for (const int layer : subject->layers()) {
    KV_ASSIGN_OR_RETURN(const GuardedBuffer good, subject->Encoded(Kind::kNormal, 12, layer));
    if (const kvmc_status s = subject->Validate(good, layer, good.size()); s != KVMC_OK) {
      return subject->ErrorOf(s, "validate of its own page");
    }
    for (const size_t bytes : {size_t{0}, size_t{1}, good.size() - 64, good.size() - 1}) {
      GuardedBuffer part("encoded page cut short", bytes, Place::kAgainstEnd, 1);
      std::memcpy(part.data(), good.data(), bytes);
      KV_RETURN_IF_ERROR(ExpectError(subject->api(), subject->Validate(part, layer, bytes),
                                     absl::StrCat("validate: ", bytes, " bytes of a page's ", good.size())));
    }
    for (int round = 0; round < c.options->rounds; ++round) {
      GuardedBuffer page("encoded page", good.size());
      std::memcpy(page.data(), good.data(), good.size());
      const int damaged = round % 4 == 0 ? int(page.size()) : 1 << (round % 8);
      for (int i = 0; i < damaged; ++i) {
        const size_t at = damaged == int(page.size()) ? i : random() % page.size();
        page.data()[at] = uint8_t(random());
      }
      if (round % 16 == 3) page.Fill(round % 32 < 16 ? 0xff : 0x00);
      page.SetReadOnly(true);
      if (subject->Validate(page, layer, page.size()) != KVMC_OK) continue;
      ++accepted;
      KV_RETURN_IF_ERROR(UsePage(*subject, page, layer));
    }
  }
  return absl::StrCat(accepted, " of ", c.options->rounds * subject->layers().size(),
                      " changed pages were accepted, and were safe to read");
}

absl::StatusOr<std::string> ThreadsDoNotMeet(const Case& c) {
  constexpr int kThreads = 4, kRounds = 12, kSeeds = 3;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> subject, Subject::Open(c));
  const int layer = subject->layers().back(), head = c.layout.kv_heads - 1, rows = std::min(subject->group(), 64);
  const kvmc_codec_api& api = subject->api();
  std::vector<GuardedBuffer> raw, encoded, decoded;
  std::vector<AttendResult> attended(kSeeds);
  const AttendQueries queries = {std::vector<float>(size_t(rows) * c.layout.head_dim, 0.25f), PlainScale(c.layout)};
  for (int seed = 0; seed < kSeeds; ++seed) {
    raw.push_back(subject->Page(Kind::kNormal, 50 + seed));
    encoded.emplace_back("encoded page", subject->bytes(layer));
    decoded.emplace_back("decoded page", c.layout.raw_bytes());
    KV_RETURN_IF_ERROR(subject->Encode(raw[seed], layer, 0, encoded[seed]));
    KV_RETURN_IF_ERROR(subject->Decode(encoded[seed], layer, 0, c.layout.kv_heads, decoded[seed]));
    if (!subject->attends()) continue;
    KV_ASSIGN_OR_RETURN(attended[seed], subject->Attend({encoded[seed].data()}, layer, head, queries));
  }
  // Buffers of the threads are plain: guards are one thread's affair.
  struct Buffers {
    explicit Buffers(size_t bytes) : room(bytes + 64) {}
    uint8_t* data() { return room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64; }
    std::vector<uint8_t> room;
  };
  std::atomic<const char*> wrong{nullptr};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const size_t encode_bytes = api.workspace_bytes(subject->codec(), KVMC_FOR_ENCODE, 0);
      const size_t decode_bytes = api.workspace_bytes(subject->codec(), KVMC_FOR_DECODE, 0);
      Buffers page(subject->bytes(layer)), out(c.layout.raw_bytes()), encode_room(encode_bytes),
          decode_room(decode_bytes);
      CodecParameters unknown = c.options->parameters;
      unknown.emplace("no_such_parameter", "1");
      for (int round = 0; round < kRounds && wrong == nullptr; ++round) {
        const int i = (thread + round) % kSeeds;
        kvmc_encode_item encode = {raw[i].data(), page.data(), uint32_t(layer), 0, 0};
        const kvmc_encode_batch encode_batch = {sizeof encode_batch, &encode,     1, sizeof encode,
                                                encode_room.data(),  encode_bytes};
        if (api.encode_batch(subject->codec(), &encode_batch) != KVMC_OK ||
            std::memcmp(page.data(), encoded[i].data(), encoded[i].size()) != 0) {
          wrong = "encoding beside other threads gave other bytes";
        }
        const kvmc_decode_item decode = {page.data(), out.data(), uint32_t(layer), 0, c.layout.kv_heads};
        const kvmc_decode_batch decode_batch = {sizeof decode_batch, &decode,     1, sizeof decode,
                                                decode_room.data(),  decode_bytes};
        if (api.decode_batch(subject->codec(), &decode_batch) != KVMC_OK ||
            std::memcmp(out.data(), decoded[i].data(), decoded[i].size()) != 0) {
          wrong = "decoding beside other threads gave other values";
        }
        if (api.validate(subject->codec(), layer, page.data(), encoded[i].size()) != KVMC_OK) {
          wrong = "validate refused a page beside other threads";
        }
        // Errors of one thread are not another's.
        char text[128] = "";
        const Context context(c, thread % 2 == 0 ? unknown : c.options->parameters);
        kvmc_codec* other = nullptr;
        const kvmc_status made = api.create(context.get(), &other);
        if (made == KVMC_OK) api.destroy(other);
        if (made != KVMC_OK) api.last_error(text, sizeof text);
        if ((made == KVMC_OK) == (thread % 2 == 0)) wrong = "create beside other threads did otherwise than alone";
        if (made != KVMC_OK && text[0] == '\0') wrong = "an error's text went to another thread";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (wrong != nullptr) return Wrong(wrong.load());
  for (int seed = 0; seed < kSeeds && subject->attends(); ++seed) {
    KV_ASSIGN_OR_RETURN(const AttendResult again, subject->Attend({encoded[seed].data()}, layer, head, queries));
    if (again.acc != attended[seed].acc) return Wrong("attention gave other values the second time");
  }
  return "";
}

absl::StatusOr<std::string> CodecsComeAndGo(const Case& c) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> first, Subject::Open(c));
  KV_ASSIGN_OR_RETURN(const GuardedBuffer expected, first->Encoded(Kind::kNormal, 1, 0));
  const int rounds = c.calibration.empty() ? c.options->rounds / 10 + 1 : 2;
  for (int round = 0; round < rounds; ++round) {
    KV_ASSIGN_OR_RETURN(const std::unique_ptr<Subject> other, Subject::Open(c));
    KV_ASSIGN_OR_RETURN(const GuardedBuffer encoded, other->Encoded(Kind::kNormal, 1, 0));
    if (std::memcmp(encoded.data(), expected.data(), expected.size()) != 0) {
      return Wrong("two codecs of one context encode a page differently");
    }
  }
  KV_ASSIGN_OR_RETURN(const GuardedBuffer after, first->Encoded(Kind::kNormal, 1, 0));
  if (std::memcmp(after.data(), expected.data(), expected.size()) != 0) {
    return Wrong("a codec encodes differently after others were destroyed");
  }
  return "";
}

}  // namespace

std::vector<Check> TableChecks() { return {{"table: complete and sound", TableIsSound}}; }

std::vector<Check> LayoutChecks() {
  std::vector<Check> checks = {{"describe: within bounds, the same twice, canonical", DescriptionIsSound},
                               {"errors: what is not taken is refused with a text", RefusalsHaveTexts},
                               {"create: codecs of one context are alike", CodecsComeAndGo},
                               {"encode: deterministic, every byte written", EncodingIsDeterministic},
                               {"encode: a batch is its pages", BatchesAreTheirPages},
                               {"encode, decode: within their buffers", BuffersAreKept},
                               {"encode: any finite values, or declined", AnyValuesAreEncodedOrDeclined},
                               {"encode: NaN and Inf are declined", NanIsDeclined},
                               {"decode: close and finite", DecodeIsCloseAndFinite},
                               {"decode: one head alone is that head of all", OneHeadIsThatHeadOfAll},
                               {"validate: any bytes", ValidateSurvivesAnyBytes}};
  for (const Check& check : AttendChecks()) checks.push_back(check);
  checks.push_back({"threads: many at once", ThreadsDoNotMeet});
  return checks;
}

}  // namespace kvmanager::conformance
