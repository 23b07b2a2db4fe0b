// A slab that a client maps: its descriptor, until it was sent and the capability dropped.
#pragma once

#include <kj/common.h>
#include <kj/io.h>

#include "kvmanager/api/kvmanager.capnp.h"

namespace kvmanager {

class SlabService final : public api::Slab::Server {
 public:
  /// Takes the descriptor.
  explicit SlabService(int fd) : fd_(fd) {}
  kj::Maybe<int> getFd() override { return fd_.get(); }

 private:
  const kj::AutoCloseFd fd_;
};

}  // namespace kvmanager
