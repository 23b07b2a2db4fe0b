// What holds with a GPU, without one, and without a CUDA Toolkit.
#include "kvmanager/memory/device.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"

namespace kvmanager {
namespace {

TEST(Device, SaysWhatIsThereOrWhatIsMissing) {
  const std::string summary = DeviceSummary();
  const auto device = Device::Open(0);
  if (device.ok()) {
    EXPECT_TRUE(absl::StrContains(summary, (*device)->info().name)) << summary;
    return;
  }
  EXPECT_EQ(device.status().code(), absl::StatusCode::kUnavailable) << device.status();
  EXPECT_FALSE(device.status().message().empty());
  EXPECT_FALSE(summary.empty());
}

TEST(Device, ErrorsNameTheCall) {
  const absl::Status status = CudaStatus(2, "cudaMalloc");  // out of memory
  EXPECT_FALSE(status.ok());
  if (absl::StrContains(status.message(), "built without CUDA")) return;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "cudaMalloc gave cudaErrorMemoryAllocation")) << status;
  EXPECT_EQ(CudaStatus(700, "a kernel").code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(CudaStatus(0, "cudaMalloc").ok());
}

}  // namespace
}  // namespace kvmanager
