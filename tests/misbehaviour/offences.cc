#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "tests/misbehaviour/ways.h"

namespace kvmanager::testing {

client::CacheOptions OneLayer(const std::string& codec) {
  client::CacheOptions options = SmallCache(codec);
  options.layers = 1;
  options.tenant = "offender";
  return options;
}

client::CacheOptions LargeHeads() {
  client::CacheOptions options = OneLayer(absl::StrCat("zack:mode=joint,rate=0,fold=1,calibration=", kLargeArtifact));
  options.model = "large-heads";
  options.kv_heads = options.query_heads = 8;
  options.head_dim = 128;
  return options;
}

void FillNames(capnp::List<api::BlockName>::Builder to, uint64_t first) {
  uint8_t bytes[32] = {'n'};
  for (uint32_t i = 0; i < to.size(); ++i) {
    const uint64_t number = first + i;
    std::memcpy(bytes + 8, &number, sizeof number);
    to[i].setKey(kj::arrayPtr(bytes, sizeof bytes));
    to[i].setTokens(kj::arrayPtr(bytes, sizeof bytes));
  }
}

std::vector<Way> AllWays() {
  std::vector<Way> ways;
  for (const auto some : {WaysOfCalls(), WaysOfHolding(), WaysOfSockets()}) {
    ways.insert(ways.end(), some.begin(), some.end());
  }
  return ways;
}

void InChild(Offence& offence, int64_t ms, void (*act)(Offence&)) {
  const pid_t child = fork();
  KV_CHECK(child >= 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      act(offence);
    } catch (const kj::Exception& exception) {
      ++offence.tally.ended;
      Tally::Say(offence.tally.refusal, exception.getDescription().cStr());
    }
    _exit(0);
  }
  usleep(static_cast<useconds_t>(ms * 1000));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace kvmanager::testing
