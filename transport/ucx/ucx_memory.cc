#include "transport/ucx/ucx_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/ucx/ucx_process_client.h"

namespace kvmanager {
namespace {

static_assert(UcxMemory::kMemoriesMax == ucx::kMemoriesMax);

absl::Status CheckRange(absl::string_view field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(field, value, absl::StrCat(low, "..", high));
}

absl::Status CheckOptions(const UcxMemory::Options& o) {
  KV_RETURN_IF_ERROR(CheckRange("UCX program's words", o.program.size(), 1, 64));
  KV_RETURN_IF_ERROR(CheckRange("UCX key bytes", o.key.size(), UcxMemory::kKeyBytesMin, UcxMemory::kKeyBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("UCX memories", o.memory.size(), 0, UcxMemory::kMemoriesMax));
  for (const UcxMemory::Memory& memory : o.memory) {
    KV_RETURN_IF_ERROR(CheckRange("UCX memory bytes", memory.bytes, 1, ucx::kMemoryBytesMax));
  }
  for (const auto& [field, bytes] : {std::pair("staging", o.staging_bytes), std::pair("answer", o.answer_bytes)}) {
    KV_RETURN_IF_ERROR(CheckRange(absl::StrCat("UCX ", field, " bytes"), bytes, UcxMemory::kStagingBytesMin,
                                  UcxMemory::kStagingBytesMax));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<UcxMemory>> UcxMemory::Create(Options options) {
  KV_RETURN_IF_ERROR(CheckOptions(options));
  std::sort(options.memory.begin(), options.memory.end(),
            [](const Memory& a, const Memory& b) { return a.data < b.data; });
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> staging,
                      Region::Create({.bytes = options.staging_bytes, .huge_pages = true}));
  auto client = std::make_shared<UcxProcessClient>(std::move(options), std::move(staging));
  auto memory = std::unique_ptr<UcxMemory>(new UcxMemory(client));
  KV_RETURN_IF_ERROR(client->Start());
  return memory;
}

UcxMemory::UcxMemory(std::shared_ptr<UcxProcessClient> client) : client_(std::move(client)) {}
UcxMemory::~UcxMemory() { client_->Stop(); }
absl::Span<const absl::Span<const uint8_t>> UcxMemory::memory() const { return client_->memory(); }
std::string UcxMemory::Describe(size_t index, Context context) const { return client_->Describe(index, context); }
absl::StatusOr<std::shared_ptr<RemoteMemory::Source>> UcxMemory::Open(absl::Span<const uint8_t> description,
                                                                      Context context) {
  return client_->Open(description, context);
}
void UcxMemory::Read(std::shared_ptr<Source> from, uint64_t offset, uint64_t bytes, Done done) {
  client_->Read(from, offset, bytes, std::move(done));
}
std::string UcxMemory::version() const { return client_->version(); }
pid_t UcxMemory::process() const { return client_->process(); }
bool UcxMemory::idle() const { return client_->idle(); }

}  // namespace kvmanager
