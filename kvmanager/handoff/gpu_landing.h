// Where pages of a peer's GPU can land here. The loop's thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "codecs/codec.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/store/page_store.h"
#include "transport/cuda/peer_copier.h"
#include "transport/transport.h"

namespace kvmanager {

/// A GPU of this daemon, and what a hand-off's codec does on it.
struct GpuLanding {
  Gpu* gpu = nullptr;  // nullptr: the host
  std::shared_ptr<const DeviceCodec> codec;
  uint64_t raw_bytes = 0;  // of a raw page
};

/// The GPU for a hand-off that offers pages of GPU `from`: of those that can copy from it, one on which its cache is
/// open, or else the one with the most room. copier: nullptr: none can copy. Errors: FAILED_PRECONDITION of the field
/// `gpu`, which tells the sender to offer them from host memory.
absl::StatusOr<Gpu*> ChooseGpu(const Gpus& gpus, const PeerCopier* copier, PageStore& store, const GpuName& from,
                               const HandOffHeader& header, const Codec& codec);

/// The error that has the sender offer its pages from host memory, because of `why`; and whether `status` is one.
absl::Status OfferFromHost(const absl::Status& why);
bool WantsHostPages(const absl::Status& status);

}  // namespace kvmanager
