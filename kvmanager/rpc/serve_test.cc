// An error is written where the method's results have their status.
#include "kvmanager/rpc/serve.h"

#include <capnp/message.h>
#include <gtest/gtest.h>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

template <typename Results>
class FakeContext {
 public:
  typename Results::Builder getResults() { return message_.getRoot<Results>(); }

 private:
  capnp::MallocMessageBuilder message_;
};

const absl::Status kError = InvalidField("layer", 7, "0..3");

void ExpectError(api::Status::Reader status) {
  EXPECT_EQ(status.getCode(), static_cast<uint16_t>(absl::StatusCode::kInvalidArgument));
  EXPECT_STREQ(status.getField().cStr(), "layer");
  EXPECT_STREQ(status.getValue().cStr(), "7");
  EXPECT_STREQ(status.getBound().cStr(), "0..3");
}

TEST(WriteError, IntoTheStatusOfTheReply) {
  FakeContext<api::Cache::StepResults> step;
  WriteError(step, kError);
  ExpectError(step.getResults().asReader().getReply().getStatus());
  FakeContext<api::Sequence::PublishResults> publish;
  WriteError(publish, kError);
  ExpectError(publish.getResults().asReader().getReply().getStatus());
}

TEST(WriteError, IntoTheStatusOfTheResults) {
  FakeContext<api::Cache::MatchResults> match;
  WriteError(match, kError);
  ExpectError(match.getResults().asReader().getStatus());
  FakeContext<api::Sequence::BeginHandOffResults> begin;
  WriteError(begin, kError);
  ExpectError(begin.getResults().asReader().getStatus());
}

// The status of a daemon is no status of a call.
TEST(WriteError, IntoTheErrorOfResultsThatHaveOne) {
  FakeContext<api::Admin::StatusResults> status;
  WriteError(status, kError);
  ExpectError(status.getResults().asReader().getError());
  EXPECT_FALSE(status.getResults().asReader().hasStatus());
  FakeContext<api::Cache::InfoResults> info;
  WriteError(info, kError);
  ExpectError(info.getResults().asReader().getError());
}

}  // namespace
}  // namespace kvmanager
