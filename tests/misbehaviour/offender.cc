// A process that misbehaves in one way until it is killed; misbehaviour_test starts it.
//
//   offender WAY LISTEN ADMIN PEER METRICS TALLY
//
// It runs under SCHED_IDLE: the test asks what a daemon does for it, not what its own work takes from others' CPUs.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/misbehaviour/ways.h"

namespace kvmanager::testing {

int RunOffender(const std::string& name, Offence& offence) {
  const std::vector<Way> ways = AllWays();
  const auto way = std::find_if(ways.begin(), ways.end(), [&](const Way& each) { return each.name == name; });
  if (way == ways.end()) {
    std::fprintf(stderr, "offender: no way is named %s\n", name.c_str());
    return 2;
  }
  for (;;) {
    try {
      way->act(offence);
    } catch (const kj::Exception& exception) {
      ++(exception.getType() == kj::Exception::Type::DISCONNECTED ? offence.tally.ended : offence.tally.refused);
      Tally::Say(offence.tally.refusal, exception.getDescription().cStr());
    }
    usleep(5000);
  }
}

}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: offender WAY LISTEN ADMIN PEER METRICS TALLY\n");
    return 2;
  }
  const sched_param idle = {};
  if (sched_setscheduler(0, SCHED_IDLE, &idle) != 0) std::perror("offender: sched_setscheduler");
  kvmanager::testing::Offence offence{argv[2], argv[3], argv[4], argv[5], kvmanager::testing::Tally::At(argv[6])};
  return kvmanager::testing::RunOffender(argv[1], offence);
}
