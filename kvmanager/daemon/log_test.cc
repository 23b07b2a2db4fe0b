#include "kvmanager/daemon/log.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>

#include "gtest/gtest.h"
#include "kvmanager/base/journal.h"

namespace kvmanager {
namespace {

// What a process writes whose stderr is a file; stream: $JOURNAL_STREAM, %f: of that file.
std::string Written(const std::string& stream) {
  const std::string path = ::testing::TempDir() + "/log";
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  EXPECT_GE(file, 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(file, STDERR_FILENO);
    struct stat of;
    fstat(file, &of);
    const std::string ours = std::to_string(of.st_dev) + ":" + std::to_string(of.st_ino);
    setenv("JOURNAL_STREAM", stream == "%f" ? ours.c_str() : stream.c_str(), 1);
    Log log("debug");
    spdlog::debug("one");
    spdlog::info("two");
    spdlog::warn("three");
    spdlog::error("four");
    log.End(0);
    std::fprintf(stderr, "%sfive\n", ErrorPrefix());
    _exit(0);
  }
  close(file);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::ifstream written(path);
  return {std::istreambuf_iterator<char>(written), {}};
}

TEST(Log, TheJournalHasPrioritiesAndNoTime) {
  EXPECT_EQ(Written("%f"), "<7>one\n<6>two\n<4>three\n<3>four\n<3>five\n");
}

TEST(Log, ElsewhereLinesHaveTimeAndLevel) {
  for (const char* const stream : {"", "8:1", "of another"}) {
    const std::string time = R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} )";
    const std::regex lines(time + "debug one\n" + time + "info two\n" + time + "warning three\n" + time +
                           "error four\nfive\n");
    EXPECT_TRUE(std::regex_match(Written(stream), lines)) << Written(stream);
  }
}

}  // namespace
}  // namespace kvmanager
