// What a client holds, and never gives back.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "kvmanager/base/status.h"
#include "tests/misbehaviour/ways.h"

namespace kvmanager::testing {
namespace {

constexpr int64_t kHoldMs = 2000;  // then it drops everything at once, and begins anew

// Forks of a sequence, until they are refused or so many are there.
std::vector<Offender::Made> Forks(Offender& a, Offender::Made& of, size_t most) {
  std::vector<Offender::Made> forks;
  bool refused = false;
  for (size_t i = 0; i < most && !refused && a.Room(64); ++i) {
    a.Begin(of.sequence.forkRequest(), [&](auto& response) {
      const auto reply = response.getReply();
      refused |= reply.getStatus().getCode() != 0;
      if (!refused) forks.push_back({reply.getSequence(), reply.getSequenceId()});
    });
  }
  a.Room(1);
  return forks;
}

void EmptySequences(Offence& offence) {
  Offender a(offence);
  auto cache = a.OpenCache(OneLayer());
  std::vector<api::Sequence::Client> held;
  for (int i = 0; i < 32 && a.Room(2); ++i) {
    auto request = cache.createSequencesRequest();
    request.initRequests(4096);
    a.Begin(kj::mv(request), [&held](auto& response) {
      for (const auto reply : response.getReplies()) held.push_back(reply.getSequence());
    });
  }
  a.Room(1);
  a.Turn(kHoldMs / 4);
}

void ForksOfLongSequences(Offence& offence) {
  Offender a(offence);
  auto cache = a.OpenCache(OneLayer());
  Offender::Made made = a.Create(cache);
  for (uint64_t at = 0; at < 65536; at += 16384) a.Append(cache, made.id, at, 16384);
  const auto forks = Forks(a, made, 8192);
  a.Turn(kHoldMs / 4);
}

void FullPool(Offence& offence) {
  Offender a(offence);
  auto cache = a.OpenCache(OneLayer());
  Offender::Made made = a.Create(cache);
  a.Append(cache, made.id, 0, 64);
  const auto forks = Forks(a, made, 2000);
  bool full = false;
  for (const auto& fork : forks) {
    if (full || !a.Room(4)) break;
    a.Begin(a.AppendRequest(cache, fork.id, 64, 4096),
            [&full](auto& response) { full = response.getReply().getStatus().getCode() != 0; });
  }
  while (a.Room(8)) a.Begin(a.AppendRequest(cache, forks.back().id, 64, 4096));  // is refused
}

void ManyTenants(Offence& offence) {
  Offender a(offence);
  std::vector<Offender::Made> held;
  for (int i = 0; i < 64; ++i) {
    client::CacheOptions options = OneLayer();
    options.tenant = absl::StrCat("offender-", i);
    auto cache = a.OpenCache(options);
    held.push_back(a.Create(cache));
    a.Call(a.AppendRequest(cache, held.back().id, 0, 1));
  }
  a.Turn(kHoldMs);
}

void Capabilities(Offence& offence) {
  Offender a(offence);
  auto cache = a.OpenCache(OneLayer());
  std::vector<api::Cache::Client> caches;
  std::vector<api::Sequence::Client> sequences;
  std::vector<api::Arena::Client> arenas;
  while (a.Room(512)) {
    auto open = a.daemon().openCacheRequest();
    FillConfig(OneLayer(), open.initConfig());
    a.Begin(kj::mv(open), [&](auto& response) { caches.push_back(response.getCache()); });
    auto create = cache.createSequencesRequest();
    create.initRequests(1);
    a.Begin(kj::mv(create), [&](auto& response) { sequences.push_back(response.getReplies()[0].getSequence()); });
    auto arena = a.daemon().createArenaRequest();
    arena.setBytes(4096);
    a.Begin(kj::mv(arena), [&](auto& response) { arenas.push_back(response.getArena()); });
  }
}

void OtherCaches(Offence& offence) {
  Offender a(offence);
  std::vector<api::Cache::Client> caches;
  for (uint64_t i = 0; a.Room(64); ++i) {
    client::CacheOptions options = OneLayer();
    options.revision = absl::StrCat(getpid(), ".", i);
    auto open = a.daemon().openCacheRequest();
    FillConfig(options, open.initConfig());
    a.Begin(kj::mv(open), [&](auto& response) { caches.push_back(response.getCache()); });
  }
}

void Arenas(Offence& offence) {
  Offender a(offence);
  while (a.Room(4)) {
    auto arena = a.daemon().createArenaRequest();
    arena.setBytes(64 << 20);
    a.Begin(kj::mv(arena));  // dropped with the answer
  }
}

void UnclaimedBlobs(Offence& offence) {
  Offender a(offence);
  auto cache = a.OpenCache(OneLayer());
  Offender::Made made = a.Create(cache);
  a.Append(cache, made.id, 0, 100);
  const std::vector<uint8_t> blob((1 << 20) - 1024, 'b');
  while (a.Room(8)) {
    auto request = made.sequence.handOffRequest();
    request.setPeer(offence.peer);  // of this daemon itself
    request.setBlob(kj::arrayPtr(blob.data(), blob.size()));
    request.setTimeoutMs(3000);
    a.Begin(kj::mv(request));
  }
}

// The slabs that it can have, of which it keeps descriptors; kBlocks published blocks lie there.
struct Slabs {
  static constexpr int kBlocks = 96;

  explicit Slabs(Offender& of) : a(of), cache(a.OpenCache(OneLayer())) {
    std::vector<uint32_t> bound;
    a.Begin(BindRequest(), [&](auto& response) {
      for (const uint32_t slab : response.getSlabs()) bound.push_back(slab);
    });
    a.Room(1);
    for (const uint32_t slab : bound) {
      if (a.Room(16)) Keep(cache, slab);
    }
    Offender::Made made = a.Create(cache);
    a.Append(cache, made.id, 0, kBlocks * 64);
    auto request = made.sequence.publishRequest();
    FillNames(request.initNames(kBlocks), 0);
    a.Call(kj::mv(request));
  }
  capnp::Request<api::Cache::BindSlabsParams, api::Cache::BindSlabsResults> BindRequest() {
    auto request = cache.bindSlabsRequest();
    request.setBytes(kPoolBytes);
    return request;
  }
  /// From a cache or a lease.
  template <typename From>
  void Keep(From& from, uint32_t slab) {
    auto request = from.mapSlabRequest();
    request.setSlab(slab);
    a.Begin(kj::mv(request), [this](auto& response) { kept.push_back(response.getSlab()); });
  }

  Offender& a;
  api::Cache::Client cache;
  std::vector<api::Slab::Client> kept;
};

void LeasesAndSlabs(Offence& offence) {
  Offender a(offence);
  Slabs slabs(a);
  std::vector<api::BlocksLease::Client> leases;
  while (a.Room(64)) {
    auto request = slabs.cache.readBlocksRequest();
    FillNames(request.initRequest().initNames(Slabs::kBlocks), 0);
    request.getRequest().setMapped(true);
    a.Begin(kj::mv(request), [&](auto& response) {
      const auto reply = response.getReply();
      if (!reply.hasLease()) return;
      leases.push_back(reply.getLease());
      slabs.Keep(leases.back(), reply.getPlaces()[0]);  // of a number below 64
    });
  }
}

void SlabBindings(Offence& offence) {
  Offender a(offence);
  Slabs slabs(a);
  while (a.Room(64)) a.Begin(slabs.BindRequest());
}

// What an operator's tool asks for, while an engine, another process, holds as much as it may.
void Listings(Offence& offence) {
  InChild(offence, kHoldMs, [](Offence& of_child) {
    const pid_t engine = fork();
    KV_CHECK(engine >= 0);
    if (engine == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      Offender a(of_child);
      auto cache = a.OpenCache(OneLayer());
      std::vector<api::Sequence::Client> held;
      for (int i = 0; i < 2; ++i) {
        auto request = cache.createSequencesRequest();
        request.initRequests(4096);
        a.Begin(kj::mv(request), [&held](auto& response) {
          for (const auto reply : response.getReplies()) held.push_back(reply.getSequence());
        });
      }
      a.Turn(2 * kHoldMs);
      return;
    }
    Offender operators(of_child, of_child.admin);
    api::Admin::Client admin = operators.daemon().adminRequest().send().getAdmin();
    while (operators.Room(2)) operators.Begin(admin.sequencesRequest());
  });
}

constexpr Way kWays[] = {
    {"empty_sequences", "131,072 empty sequences asked for, then dropped at once", EmptySequences},
    {"forks_of_long_sequences", "forks of a sequence of 65,536 tokens until they are refused", ForksOfLongSequences},
    {"full_pool", "2,000 forks held, the pool filled, and appends that are refused", FullPool},
    {"many_tenants", "64 tenants of a token each", ManyTenants},
    {"capabilities", "caches, sequences and arenas opened and never dropped", Capabilities},
    {"other_caches", "caches of ever other models opened and never dropped", OtherCaches},
    {"arenas", "arenas of 64 MiB opened and dropped", Arenas},
    {"unclaimed_blobs", "hand-offs to the daemon itself with a MiB that nobody claims", UnclaimedBlobs},
    {"leases_and_slabs", "slabs mapped and blocks leased as far as it goes, and never released", LeasesAndSlabs},
    {"slab_bindings", "slabs mapped as far as it goes, and more asked for again and again", SlabBindings},
    {"listings", "an operator lists 8,192 sequences again and again", Listings},
};

}  // namespace

absl::Span<const Way> WaysOfHolding() { return kWays; }

}  // namespace kvmanager::testing
