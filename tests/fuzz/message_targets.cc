// Cap'n Proto messages read by pure functions: a client's in the daemon, a daemon's in the client. The last byte of an
// input chooses the struct that its words are read as.
#include <kj/exception.h>

#include <cmath>
#include <functional>
#include <vector>

#include "client/c/describe.h"
#include "client/wire.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/rpc/wire.h"
#include "kvmanager/store/cache_config.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"

namespace kvmanager::fuzz {
namespace {

using Root = std::function<void(capnp::MessageReader&)>;

void RunRoot(absl::Span<const Root> roots, absl::Span<const uint8_t> input) {
  if (input.empty()) return;
  const kj::Array<capnp::word> words = WordsOf(input.first(input.size() - 1));
  (void)kj::runCatchingExceptions([&] {
    capnp::FlatArrayMessageReader reader(words);
    roots[input.back() % roots.size()](reader);
  });
}

/// A message of type T that `fill` fills in, read as root `number`.
template <typename T, typename Fill>
std::string Seed(int number, Fill fill) {
  capnp::MallocMessageBuilder message;
  fill(message.initRoot<T>());
  return Flat(message) + char(number);
}

class ClientMessageTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    seeds.push_back(Seed<api::CacheConfig>(0, [](api::CacheConfig::Builder config) {
      config.setModel("model");
      config.setTenant("tenant");
      config.setLayers(2);
      config.setKvHeads(2);
      config.setQueryHeads(4);
      config.setHeadDim(32);
      config.setPageTokens(64);
      config.setTensorParallelSize(1);
      config.setCodec("hack:k_bits=3,v_bits=2");
    }));
    seeds.push_back(Seed<api::SequenceRequest>(1, [](api::SequenceRequest::Builder request) {
      for (auto name : request.initPrefix(3)) {
        name.initKey(32);
        name.initTokens(32);
      }
    }));
    seeds.push_back(Seed<api::BlockName>(2, [](api::BlockName::Builder name) { name.initKey(32); }));
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    static const Root kRoots[] = {
        [](capnp::MessageReader& reader) {
          const absl::StatusOr<CacheConfig> config = ReadCacheConfig(reader.getRoot<api::CacheConfig>());
          MustExplain(config.status());
          if (!config.ok()) return;
          const absl::Status valid = ValidateCacheConfig(*config);
          MustExplain(valid);
          if (!valid.ok()) return;
          // What is written is read again as it was.
          capnp::MallocMessageBuilder message;
          WriteCacheConfig(*config, message.initRoot<api::CacheConfig>());
          const absl::StatusOr<CacheConfig> again = ReadCacheConfig(message.getRoot<api::CacheConfig>().asReader());
          KV_CHECK(again.ok() && DigestOf(*again, 1) == DigestOf(*config, 1) && again->device == config->device);
        },
        [](capnp::MessageReader& reader) {
          const auto prefix = reader.getRoot<api::SequenceRequest>().getPrefix();
          const absl::StatusOr<std::vector<BlockName>> names = ReadBlockNames("prefix", prefix, kNamesMax);
          MustExplain(names.status());
          if (names.ok()) KV_CHECK(names->size() == prefix.size() && names->size() <= kNamesMax);
        },
        [](capnp::MessageReader& reader) {
          MustExplain(ReadDigest("key", reader.getRoot<api::BlockName>().getKey()).status());
        },
    };
    RunRoot(kRoots, input);
  }

 private:
  static constexpr size_t kNamesMax = 4096;
};

class DaemonMessageTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    seeds.push_back(Seed<api::Status>(0, [](api::Status::Builder status) {
      status.setCode(3);
      status.setMessage("message");
      status.setField("field");
      status.setValue("7");
      status.setBound("less");
    }));
    seeds.push_back(Seed<api::CacheInfo>(1, [](api::CacheInfo::Builder info) {
      info.initDigest(32);
      info.initConfig().setModel("model");
      info.getConfig().setLayers(2);
    }));
    seeds.push_back(Seed<api::SequenceInfo>(2, [](api::SequenceInfo::Builder info) { info.setClient("client"); }));
    seeds.push_back(Seed<api::DaemonStatus>(3, [](api::DaemonStatus::Builder status) {
      status.setVersion("1");
      status.initPools(2)[0].setTier("host");
    }));
    seeds.push_back(Seed<api::PeerStatus>(4, [](api::PeerStatus::Builder status) {
      status.setPeer("127.0.0.1:1");
      status.initLoad().setFreeBytes(1);
    }));
    seeds.push_back(Seed<api::PeerStatus>(4, [](api::PeerStatus::Builder status) {
      status.initLoadError().setCode(14);
      status.getLoadError().setMessage("gone");
    }));
    seeds.push_back(Seed<api::LimitInfo>(5, [](api::LimitInfo::Builder info) {
      info.setName("limit");
      info.setUsedKnown(true);
    }));
    seeds.push_back(Seed<api::RecomputeStatus>(6, [](api::RecomputeStatus::Builder status) {
      status.initSets(1)[0].initDigest(32);
      status.getSets()[0].initFlops().setPerSecond(1e9);
      status.initLinks(1)[0].setPeer("127.0.0.1:1");
      status.initDevices(1);
    }));
    seeds.push_back(Seed<api::MatchResult>(7, [](api::MatchResult::Builder match) { match.setHitBlocks(3); }));
    seeds.push_back(Seed<api::Admin::ExplainResults>(8, [](api::Admin::ExplainResults::Builder explained) {
      auto blocks = explained.initBlocks(2);
      blocks[0].setPlace(api::BlockPlace::MEMORY);
      blocks[1].setLoss(api::BlockLoss::EVICTED);
      blocks[1].setOwner("label");
      blocks[1].setSameTokensCacheId(5);
      auto other = explained.initOthers(1)[0];
      other.setCacheId(5);
      other.initDiffers(1).set(0, "codec");
    }));
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    static const Root kRoots[] = {
        [](capnp::MessageReader& reader) {
          const absl::Status status = client::FromWire(reader.getRoot<api::Status>());
          (void)DetailOf(status);
        },
        [](capnp::MessageReader& reader) { Show(client::FromWire(reader.getRoot<api::CacheInfo>())); },
        [](capnp::MessageReader& reader) { Show(client::FromWire(reader.getRoot<api::SequenceInfo>())); },
        [](capnp::MessageReader& reader) { Show(client::FromWire(reader.getRoot<api::DaemonStatus>())); },
        [](capnp::MessageReader& reader) { Show(client::FromWire(reader.getRoot<api::PeerStatus>())); },
        [](capnp::MessageReader& reader) { Show(client::FromWire(reader.getRoot<api::LimitInfo>())); },
        [](capnp::MessageReader& reader) { Show(client::FromWire(reader.getRoot<api::RecomputeStatus>())); },
        [](capnp::MessageReader& reader) { (void)client::FromWire(reader.getRoot<api::MatchResult>()); },
        [](capnp::MessageReader& reader) { Show(client::FromWire(reader.getRoot<api::Admin::ExplainResults>())); },
    };
    RunRoot(kRoots, input);
  }

 private:
  /// The C client gives every description as a JSON object, whatever texts and numbers the daemon has sent.
  template <typename T>
  static void Show(const T& description) {
    const std::string text = client::c::Text(client::c::Describe(description));
    KV_CHECK(nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false).is_object());
  }
  template <typename T>
  static void Show(const absl::StatusOr<T>& description) {
    MustExplain(description.status());
    if (description.ok()) Show(*description);
  }
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeClientMessageTarget() { return std::make_unique<ClientMessageTarget>(); }
std::unique_ptr<FuzzTarget> MakeDaemonMessageTarget() { return std::make_unique<DaemonMessageTarget>(); }

}  // namespace kvmanager::fuzz
