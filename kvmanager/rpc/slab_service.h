// A slab that a client maps: its descriptor, until it was sent and the capability dropped.
#pragma once

#include <kj/common.h>
#include <kj/io.h>

#include <memory>
#include <utility>

#include "kvmanager/api/kvmanager.capnp.h"

namespace kvmanager {

class SlabService final : public api::Slab::Server {
 public:
  /// Takes the descriptor. place: ReserveSlab's, of host memory.
  explicit SlabService(int fd, std::shared_ptr<const void> place = nullptr) : place_(std::move(place)), fd_(fd) {}
  kj::Maybe<int> getFd() override { return fd_.get(); }

 private:
  const std::shared_ptr<const void> place_;
  const kj::AutoCloseFd fd_;
};

}  // namespace kvmanager
