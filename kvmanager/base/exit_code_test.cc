// A misuse of the command line stays one on its way to main().
#include "kvmanager/base/exit_code.h"

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::Status Passed(const absl::Status& status) {
  KV_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status FromValue(const absl::StatusOr<int>& value) {
  KV_ASSIGN_OR_RETURN(const int got, value);
  return got == 0 ? absl::OkStatus() : absl::InternalError("");
}

TEST(ExitCode, SaysWhoseFaultItIs) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(Misuse(absl::OkStatus())), 0);
  const absl::Status wrong = InvalidField("--tier", "x", "NAME=BYTES");
  EXPECT_EQ(ExitCodeOf(wrong), 1);
  EXPECT_EQ(ExitCodeOf(Misuse(wrong)), 2);
  EXPECT_EQ(ExitCodeOf(Passed(Misuse(wrong))), 2);
  EXPECT_EQ(ExitCodeOf(FromValue(Misuse(wrong))), 2);
  EXPECT_EQ(Misuse(wrong).message(), wrong.message());
  EXPECT_EQ(DetailOf(Misuse(wrong)).field, "--tier");
}

}  // namespace
}  // namespace kvmanager
