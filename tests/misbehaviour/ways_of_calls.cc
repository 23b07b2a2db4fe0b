// Calls that are large, many, wrong, or not waited for.
#include <signal.h>

#include <random>
#include <thread>

#include "tests/misbehaviour/ways.h"

namespace kvmanager::testing {
namespace {

constexpr uint32_t kContext = 16384;  // its K and V take 8 MiB
constexpr uint32_t kQueries = 8192;   // an attend of them takes a core more than a second
constexpr int kPublished = 96;        // blocks that A has published, in the ways that ask for them
constexpr int64_t kForeverMs = 3600 * 1000;

struct Context {
  api::Cache::Client cache;
  Offender::Made made;
};

Context Long(Offender& a, uint32_t tokens = kContext) {
  Context context{a.OpenCache(OneLayer()), {}};
  context.made = a.Create(context.cache);
  a.Append(context.cache, context.made.id, 0, tokens);
  return context;
}

auto ReadRequest(Context& of, uint32_t tokens, int entries) {
  auto request = of.cache.readRequest();
  for (auto entry : request.initRequest().initEntries(entries)) {
    entry.setSequenceId(of.made.id);
    entry.setTokens(tokens);
  }
  return request;
}

auto AttendRequest(Context& of, uint64_t position, uint32_t tokens) {
  static const std::vector<uint8_t> queries(size_t{kQueries} * 4 * 64 * 4, 0);
  auto request = of.cache.stepRequest();
  auto step = request.initRequest();
  auto entry = step.initEntries(1)[0];
  entry.setSequenceId(of.made.id);
  entry.setPosition(position);
  entry.setTokens(tokens);
  step.initQ().setInline(kj::arrayPtr(queries.data(), size_t{tokens} * 4 * 64 * 4));
  return request;
}

// A sequence of kPublished blocks, named 0, 1, ...
Context Published(Offender& a) {
  Context context = Long(a, kPublished * 64);
  auto request = context.made.sequence.publishRequest();
  FillNames(request.initNames(kPublished), 0);
  a.Call(kj::mv(request));
  return context;
}

void UnreadReplies(Offence& offence) {
  Offender a(offence);
  Context of = Long(a);
  for (int i = 0; i < 1000; ++i) a.Begin(ReadRequest(of, kContext, 3));
  a.Flush();
  usleep(1500 * 1000);  // takes no answer
}

void TakenReads(Offence& offence) {
  Offender a(offence);
  Context of = Long(a);
  while (a.Room(64)) a.Begin(ReadRequest(of, kContext, 3));
}

void LongAttends(Offence& offence) {
  InChild(offence, 400, [](Offence& of_child) {
    Offender a(of_child);
    Context of = Long(a);
    for (int i = 0; i < 8; ++i) a.Begin(AttendRequest(of, kContext - kQueries, kQueries));
    a.Turn(kForeverMs);
  });
}

void LargestBatch(Offence& offence) {
  constexpr int kEntries = 4096;
  Offender a(offence);
  Context of = Long(a, 1024);
  std::vector<Offender::Made> forks;
  for (int i = 0; i < kEntries && a.Room(64); ++i) {
    a.Begin(of.made.sequence.forkRequest(), [&forks](auto& response) {
      const auto reply = response.getReply();
      if (reply.getStatus().getCode() == 0) forks.push_back({reply.getSequence(), reply.getSequenceId()});
    });
  }
  a.Room(1);
  const std::vector<uint8_t> queries(forks.size() * 4 * 64 * 4, 0);
  while (a.Room(4)) {
    auto request = of.cache.stepRequest();
    auto step = request.initRequest();
    auto entries = step.initEntries(static_cast<uint32_t>(forks.size()));
    for (uint32_t i = 0; i < entries.size(); ++i) {
      entries[i].setSequenceId(forks[i].id);
      entries[i].setPosition(1023);
      entries[i].setTokens(1);
    }
    step.initQ().setInline(kj::arrayPtr(queries.data(), queries.size()));
    a.Begin(kj::mv(request));
  }
}

void MatchOverAndOver(Offence& offence) {
  constexpr int kNames = 10000;  // 0.7 MiB, all of which are found
  Offender a(offence);
  Context of = Published(a);
  while (a.Room(4)) {
    auto request = of.cache.matchRequest();
    auto requests = request.initRequests(kNames / kPublished);
    for (auto each : requests) FillNames(each.initPrefix(kPublished), 0);
    a.Begin(kj::mv(request));
  }
}

void CreateWithPrefixes(Offence& offence) {
  Offender a(offence);
  Context of = Published(a);
  while (a.Room(2)) {
    auto request = of.cache.createSequencesRequest();
    auto requests = request.initRequests(64);
    for (auto each : requests) FillNames(each.initPrefix(kPublished), 0);
    a.Begin(kj::mv(request));  // the sequences are dropped with the answer
  }
}

void LongestPrefix(Offence& offence) {
  constexpr int kNames = 65000;
  Offender a(offence);
  Context of = Published(a);
  for (bool match = false; a.Room(3); match = !match) {
    if (match) {
      auto request = of.cache.matchRequest();
      FillNames(request.initRequests(1)[0].initPrefix(kNames), 0);
      a.Begin(kj::mv(request));
    } else {
      auto request = of.cache.createSequencesRequest();
      FillNames(request.initRequests(1)[0].initPrefix(kNames), 0);
      a.Begin(kj::mv(request));
    }
  }
}

void OpenWithArtifact(Offence& offence) {
  Offender a(offence);
  while (a.Room(2000)) {
    auto request = a.daemon().openCacheRequest();
    FillConfig(OneLayer(absl::StrCat("zack:mode=joint,rate=0.3,calibration=", kArtifact)), request.initConfig());
    request.getConfig().setLayers(2);
    a.Begin(kj::mv(request));
  }
}

void OutputFactors(Offence& offence) {
  Offender a(offence);
  auto cache = a.OpenCache(LargeHeads());
  for (int i = 0; i < 4000; ++i) a.Begin(cache.outputFactorsRequest());  // of half a MiB each
  a.Flush();
  usleep(1500 * 1000);  // takes no answer
}

void PublishStorm(Offence& offence) {
  constexpr int kBlocks = 16;
  Offender a(offence);
  auto cache = a.OpenCache(OneLayer());
  for (uint64_t first = 1 << 20; a.alive(); first += kBlocks) {
    Offender::Made made = a.Create(cache);
    a.Append(cache, made.id, 0, kBlocks * 64);
    auto request = made.sequence.publishRequest();
    FillNames(request.initNames(kBlocks), first);
    a.Call(kj::mv(request));
  }
}

void ReadsTheDisk(Offence& offence) {
  constexpr int kTexts = 60;  // of 3 MiB each: more than the pool
  Offender a(offence);
  auto cache = a.OpenCache(OneLayer());
  const auto first_of = [](int text) { return (uint64_t{2} << 20) + text * kPublished; };
  for (int i = 0; i < kTexts; ++i) {
    Offender::Made made = a.Create(cache);
    a.Append(cache, made.id, 0, kPublished * 64);
    auto request = made.sequence.publishRequest();
    FillNames(request.initNames(kPublished), first_of(i));
    a.Call(kj::mv(request));
  }
  for (int i = 0; a.Room(4); i = (i + 1) % kTexts) {
    auto request = cache.createSequencesRequest();
    FillNames(request.initRequests(1)[0].initPrefix(kPublished), first_of(i));
    a.Begin(kj::mv(request));  // the sequence is dropped with the answer
  }
}

void CropAndAppend(Offence& offence) {
  Offender a(offence);
  Context of = Long(a, 4096);
  while (a.Room(256)) {
    a.Begin(a.AppendRequest(of.cache, of.made.id, 4096, 1));
    auto crop = of.made.sequence.cropRequest();
    crop.setTokens(4096);
    a.Begin(kj::mv(crop));
  }
}

void InvalidValues(Offence& offence) {
  constexpr uint32_t kTokens = 4096;
  std::vector<uint8_t> rows(kTokens * 256, 0);
  rows[rows.size() - 1] = 0x7e;  // the last value is NaN
  Offender a(offence);
  Context of = Long(a, 64);
  while (a.Room(8)) {
    auto request = a.AppendRequest(of.cache, of.made.id, 64, kTokens);
    request.getRequest().initV().setInline(kj::arrayPtr(rows.data(), rows.size()));
    a.Begin(kj::mv(request));
  }
}

void Pings(Offence& offence) {
  Offender a(offence);
  while (a.Room(1000)) a.Begin(a.daemon().pingRequest());
}

void HelloAgain(Offence& offence) {
  Offender a(offence);
  while (a.Room(500)) {
    auto request = a.daemon().helloRequest();
    request.initRequest().setApiMajor(api::API_MAJOR);
    request.getRequest().setClient(std::string(1000, 'x'));
    a.Begin(kj::mv(request));
  }
}

void Cancels(Offence& offence) {
  Offender a(offence);
  Context of = Published(a);
  std::mt19937_64 random(7);
  std::vector<kj::Promise<void>> begun;
  const auto begin = [&](auto&& request) {
    a.Count();
    begun.push_back(request.send().then([](auto&&) {}, [](kj::Exception&&) {}).eagerlyEvaluate(nullptr));
  };
  while (a.alive()) {
    switch (random() % 6) {
      case 0:
        begin(ReadRequest(of, kPublished * 64, 1));
        break;
      case 1:
        begin(AttendRequest(of, kPublished * 64 - 256, 256));
        break;
      case 2:
        begin(of.made.sequence.forkRequest());
        break;
      case 3:
        begin(a.daemon().pingRequest());
        break;
      case 4: {
        auto request = of.cache.createSequencesRequest();
        FillNames(request.initRequests(1)[0].initPrefix(kPublished), 0);
        begin(kj::mv(request));
        break;
      }
      default: {
        auto request = a.daemon().createArenaRequest();
        request.setBytes(1 << 20);
        begin(kj::mv(request));
      }
    }
    if (random() % 4 == 0) a.Call(a.daemon().pingRequest());  // some of them are on their way, or done
    while (begun.size() > random() % 32) {
      std::swap(begun[random() % begun.size()], begun.back());
      begun.pop_back();
    }
  }
}

void Stopped(Offence& offence) {
  InChild(offence, 1200, [](Offence& of_child) {
    Offender a(of_child);
    Context of = Long(a);
    for (int i = 0; i < 100; ++i) a.Begin(ReadRequest(of, kContext, 3));
    for (int i = 0; i < 4; ++i) a.Begin(AttendRequest(of, kContext - kQueries, kQueries));
    a.Flush();
    raise(SIGSTOP);
  });
}

void Administers(Offence& offence) {
  Offender a(offence);
  const auto refused = [&](auto&& request) {
    a.Count();
    try {
      request.send().wait(a.wait());
      ++offence.tally.dishonest;
      Tally::Say(offence.tally.lie, "an engine administered");
    } catch (const kj::Exception& exception) {
      a.Note(exception);
    }
  };
  while (a.alive()) {
    api::Admin::Client admin = a.daemon().adminRequest().send().getAdmin();
    refused(admin.drainRequest());
    auto purge = admin.purgeRequest();
    purge.setAll(true);
    refused(kj::mv(purge));
    refused(admin.sequencesRequest());
    refused(admin.cachesRequest());
  }
}

constexpr Way kWays[] = {
    {"unread_replies", "1,000 reads of 24 MiB inline at once, no answer taken", UnreadReplies},
    {"taken_reads", "64 reads of the most tokens in flight, answers taken", TakenReads},
    {"long_attends", "8 attends of 8,192 queries over 16K tokens, then SIGKILL, again and again", LongAttends},
    {"largest_batch", "attention with 4,096 entries a call", LargestBatch},
    {"match_over_and_over", "match with 0.7 MiB of names that are found, the same again and again", MatchOverAndOver},
    {"create_with_prefixes", "createSequences of 64 sequences that begin with 96 found blocks", CreateWithPrefixes},
    {"longest_prefix", "match and createSequences with a prefix of 65,000 blocks", LongestPrefix},
    {"open_with_artifact", "openCache with an artifact, 2,000 at once", OpenWithArtifact},
    {"output_factors", "outputFactors of half a MiB, 4,000 at once, no answer taken", OutputFactors},
    {"publish_storm", "new blocks published and dropped without end", PublishStorm},
    {"reads_the_disk", "createSequences with 60 prefixes of 3 MiB in turn, more than memory has", ReadsTheDisk},
    {"crop_and_append", "one token appended and cropped without end, 256 calls in flight", CropAndAppend},
    {"invalid_values", "appends of 4,096 tokens of which the last value is NaN", InvalidValues},
    {"pings", "1,000 pings in flight", Pings},
    {"hello_again", "hello again and again", HelloAgain},
    {"cancels", "calls dropped at random points", Cancels},
    {"stopped", "SIGSTOP with 100 reads and 4 long attends outstanding", Stopped},
    {"administers", "drain, purge and listings on the engines' socket", Administers},
};

}  // namespace

absl::Span<const Way> WaysOfCalls() { return kWays; }

}  // namespace kvmanager::testing
