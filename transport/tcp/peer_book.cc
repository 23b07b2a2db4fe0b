#include "transport/tcp/peer_book.h"

namespace kvmanager::tcp {

PeerInfo& PeerBook::Touch(const std::string& peer, bool incoming) {
  const auto found = index_.find({peer, incoming});
  if (found != index_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second);
    return recent_.front();
  }
  if (recent_.size() == kPeersMax) {
    index_.erase({recent_.back().peer, recent_.back().incoming});
    recent_.pop_back();
  }
  PeerInfo info;
  info.peer = peer;
  info.incoming = incoming;
  recent_.push_front(std::move(info));
  index_[{peer, incoming}] = recent_.begin();
  return recent_.front();
}

void PeerBook::Begin(const std::string& peer, bool incoming) {
  MutexLock lock(mutex_);
  ++Touch(peer, incoming).active;
}

void PeerBook::End(const std::string& peer, bool incoming, const absl::Status& status, uint64_t bytes,
                   uint64_t copied_bytes, double seconds) {
  MutexLock lock(mutex_);
  PeerInfo& info = Touch(peer, incoming);
  if (info.active > 0) --info.active;  // 0 if the entry was dropped since Begin
  ++info.transfers;
  info.bytes += bytes;
  info.copied_bytes += copied_bytes;
  if (status.ok()) {
    if (bytes == 0 || seconds <= 0) return;
    const double rate = static_cast<double>(bytes) / seconds;
    info.bytes_per_s += (info.bytes_per_s == 0 ? 1 : kNewestWeight) * (rate - info.bytes_per_s);
  } else {
    ++info.failures;
    info.last_error = status.ToString(absl::StatusToStringMode::kWithNoExtraData);
  }
}

std::vector<PeerInfo> PeerBook::List() const {
  MutexLock lock(mutex_);
  return {recent_.begin(), recent_.end()};
}

}  // namespace kvmanager::tcp
